"""Given plans and teachers: used as they are, or refused before anything is written."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import peel
from helpers.folders import content, read
from helpers.killing import KILLED, exit_code, run_until, start
from helpers.small import CPU, WIDTHS, Counting, Small, few_digits, same_weights, small_run, taught
from peel import zoo
from peel.errors import ConfigError, CorruptFileError, DataError, RunError, StoreError
from peel.run.original import why_it_fails
from peel.run.result import Result
from peel.run.weights import load_weights, saved_file
from peel.train.loop import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage, with a checkpoint after each step.
SHORT: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64},
    "method": "peel",
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}


# Plans


@pytest.mark.parametrize("form", ["mapping", "widths", "file"])
def test_given_widths_are_trained_as_they_are(form: str, tmp_path: Path) -> None:
    path = tmp_path / "widths.json"
    path.write_text(json.dumps(WIDTHS))
    plan: Any = {"mapping": WIDTHS, "widths": peel.Widths(WIDTHS), "file": str(path)}[form]
    result = small_run(plan=plan, stages=["final"], distill="none")
    assert isinstance(result.model, nn.Module)
    assert [result.model.get_submodule(name).out_channels for name in WIDTHS] == list(WIDTHS.values())
    assert list(result.history) == ["given"]


def test_a_run_with_given_widths_stores_them_and_resumes(tmp_path: Path) -> None:
    result = small_run(plan=WIDTHS, output=tmp_path / "run")
    assert [row.name for row in result.rows] == ["original", "uniform", "given"]
    assert "given plan" in str(result)
    assert "backbone" not in result.history
    assert read(tmp_path / "run" / "plan.json")["slim"]["widths"] == WIDTHS
    assert "PEEL" not in (tmp_path / "run" / "report.html").read_text()
    counting = Counting()
    small_run(plan=WIDTHS, output=tmp_path / "run", callbacks=[counting])
    assert counting.steps == {}


def test_ties_that_a_plan_does_not_name_keep_their_width() -> None:
    plan = small_run(plan={"conv3": 5}, dry_run=True, budget="100%").plan
    assert plan is not None
    assert plan.widths == {"conv1": 8, "conv2": 8, "conv3": 5, "conv4": 16}


def test_the_plan_of_one_run_can_be_trained_by_another(finished: tuple[Path, Result]) -> None:
    result = small_run(plan=finished[0] / "plan.json", seed=3)
    assert result.model is not None
    assert finished[1].model is not None
    assert same_weights(result.model, finished[1].model), "the same widths, seed and recipe"


# Teachers


def test_a_teacher_is_trained_once_and_shared_by_runs(tmp_path: Path) -> None:
    small_run(stages=["original"], output=tmp_path / "teacher")
    stored, counting = content(tmp_path / "teacher"), Counting()
    one = small_run(weights=tmp_path / "teacher", output=tmp_path / "one", callbacks=[counting])
    two = small_run(weights=str(tmp_path / "teacher"), seed=9, budget="40%", callbacks=[counting])
    assert "original" not in counting.steps
    assert content(tmp_path / "teacher") == stored
    assert two.rows[0].top1 == one.rows[0].top1
    straight = small_run()
    assert one.model is not None
    assert straight.model is not None
    assert same_weights(one.model, straight.model), "the place of the teacher does not matter"


def test_the_folder_of_a_run_can_be_given_as_teacher(finished: tuple[Path, Result]) -> None:
    counting = Counting()
    result = small_run(weights=finished[0], stages=["original"], callbacks=[counting])
    assert counting.steps == {}
    assert result.rows[0].top1 == finished[1].rows[0].top1


@pytest.mark.parametrize(
    "form",
    ["plain", "state_dict", "model", "net", "module.", "_orig_mod.", "model.", "lightning", "peel", "module"],
)
def test_a_teacher_is_loaded_from_a_state_dict_a_saved_model_or_a_module(form: str, tmp_path: Path) -> None:
    trained = taught()
    weights = trained.state_dict()
    path = tmp_path / "teacher.pt"
    teacher: Any = path
    if form == "peel":
        teacher = peel.save(trained, tmp_path / "teacher")
    elif form == "module":
        teacher = trained
    elif form == "lightning":
        prefixed = {f"model.net.{name}": tensor for name, tensor in weights.items()}
        torch.save({"state_dict": {**prefixed, "loss.weight": torch.ones(10)}, "epoch": 3}, path)
    elif form.endswith("."):
        torch.save({f"{form}{name}": tensor for name, tensor in weights.items()}, path)
    else:
        torch.save(weights if form == "plain" else {form: weights, "epoch": 3}, path)
    counting = Counting()
    result = small_run(weights=teacher, stages=["original"], callbacks=[counting])
    assert counting.steps == {}
    expected = evaluate(trained, few_digits().test, CPU)
    assert (result.rows[0].top1, result.rows[0].loss) == (expected.top1, expected.loss)


# Unusable teachers


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code ran")


def write_teacher(kind: str, path: Path) -> None:
    weights: Any = Small(num_classes=7 if kind == "other classes" else 10).state_dict()
    if kind == "code":
        weights = {**weights, "fc.bias": Canary(path.with_name("canary"))}
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Canary(path.with_name("canary")), protocol=2))
        return
    elif kind == "other network":
        weights = nn.Conv2d(3, 8, 3).state_dict()
    elif kind == "numbers":
        weights = {"epoch": 3}
    elif kind == "text":
        path.write_text("not a checkpoint")
        return
    elif kind == "missing":
        return
    elif kind == "diverged":
        weights["conv3.weight"][2, 1, 0, 0] = float("nan")
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "other classes",
            r"teacher.pt does not fit the model: fc.weight has shape \(7, 16\), not \(10, 16\)",
        ),
        ("code", "teacher.pt cannot be loaded without running code"),
        ("pickle", "teacher.pt cannot be loaded without running code"),
        ("other network", "teacher.pt does not fit the model"),
        ("numbers", r"teacher.pt holds no state dict .* Its keys: epoch\."),
        ("text", "teacher.pt cannot be loaded"),
        ("missing", "there are no weights at .*teacher.pt"),
        ("diverged", r"teacher.pt: conv3.weight holds 1 values that are not finite"),
    ],
)
def test_an_unusable_teacher_is_refused_before_anything_is_written(
    kind: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "teacher.pt"
    write_teacher(kind, path)
    with pytest.raises((StoreError, DataError), match=message):
        small_run(weights=path, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "canary").exists()


def odd_tensor(kind: str, tensor: Tensor) -> Tensor:
    if kind == "quantized":
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    if kind == "beyond float32":
        return tensor.double() * 1e300
    return (
        tensor.to_sparse()
        if kind == "sparse"
        else tensor.to(kind if kind == "meta" else getattr(torch, kind))
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "sparse_coo tensor, not float32 tensor"),
        ("meta", "meta tensor, not float32 tensor"),
        ("quantized", "quantized tensor, not float32 tensor"),
        ("bool", "bool tensor, not float32 tensor"),
        ("int32", "int32 tensor, not float32 tensor"),
        ("complex64", "complex64 tensor, not float32 tensor"),
        ("beyond float32", "holds 160 values that are not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_of_another_kind_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    state = Small().state_dict()
    torch.save({**state, "fc.weight": odd_tensor(kind, state["fc.weight"])}, tmp_path / "odd.pt")
    with pytest.raises(StoreError, match=rf"odd.pt: fc.weight .*{message}"):
        load_weights(tmp_path / "odd.pt", Small())


def test_weights_of_other_precision_are_taken(tmp_path: Path) -> None:
    model = Small().half()
    torch.save(model.state_dict(), tmp_path / "half.pt")
    assert same_weights(load_weights(tmp_path / "half.pt", Small()), model.float())


def test_a_checkpoint_that_holds_itself_is_searched_once(tmp_path: Path) -> None:
    """Its state dict is found; without one, the error comes at once."""
    model, checkpoint = Small(), dict[str, Any](epoch=3)
    checkpoint |= {"state_dict": checkpoint, "self": checkpoint}
    torch.save(checkpoint, tmp_path / "empty.pt")
    with pytest.raises(StoreError, match=r"holds no state dict .* Its keys: epoch, state_dict, self\."):
        load_weights(tmp_path / "empty.pt", model)
    torch.save({**checkpoint, "ema": {"weights": model.state_dict()}}, tmp_path / "full.pt")
    assert same_weights(load_weights(tmp_path / "full.pt", Small()), model)


def test_weights_with_an_impossible_name_are_refused() -> None:
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(StoreError, match="there are no weights at"):
            saved_file(Path(name))


def test_a_message_quotes_a_long_name_in_part(tmp_path: Path) -> None:
    torch.save({"one\ntwo\n" + "x" * 10_000: 3}, tmp_path / "odd.pt")
    with pytest.raises(StoreError, match="holds no state dict") as caught:
        load_weights(tmp_path / "odd.pt", Small())
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_teacher_module_with_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the network has 7 classes, the data has 10"):
        small_run(weights=Small(num_classes=7), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["{}", "{"])
def test_a_corrupt_record_of_a_teacher_is_named(content: str, own: Path, tmp_path: Path) -> None:
    (own / "stages" / "original.record.json").write_text(content)
    with pytest.raises(CorruptFileError, match=r"original.record.json is corrupt: .* Restore it from a copy"):
        small_run(weights=own, output=tmp_path / "other")


@pytest.mark.parametrize("name", ["slim.safetensors", "stages/uniform"])
def test_a_slim_network_is_refused_as_teacher(
    name: str, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"is not the original: .* channels there and \d+ in the original"):
        small_run(weights=finished[0] / name, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_resume_with_another_teacher(tmp_path: Path) -> None:
    weights, run = tmp_path / "weights.pt", tmp_path / "run"
    torch.save(taught().state_dict(), weights)
    small_run(weights=weights, output=run, stages=["original", "plan", "uniform"])
    moved = weights.rename(tmp_path / "moved.pt")
    torch.save({name: tensor * 1.001 for name, tensor in taught().state_dict().items()}, weights)
    before = content(run / "stages")
    with pytest.raises(RunError, match=r"hash of the weights: '\w+' -> '\w+'"):
        small_run(weights=weights, output=run)
    with pytest.raises(StoreError, match=r"there are no weights at .*nothing.*--stages original --output"):
        small_run(weights=tmp_path / "nothing", output=run)
    assert not (tmp_path / "nothing").exists()
    assert content(run / "stages") == before
    assert small_run(weights=moved, output=run).model is not None, "the same teacher at another place"


def test_another_run_can_use_the_teacher_and_the_plan_of_a_killed_one(tmp_path: Path) -> None:
    killed, counting = tmp_path / "killed", Counting()
    assert exit_code(start(run_until, killed, SHORT, ("uniform", 4))) == KILLED
    plan = killed / "plan.json"
    other = {**SHORT, "backbone_ratio": 0.5, "weights": killed, "plan": plan}
    result = small_run(output=tmp_path / "other", callbacks=[counting], **other)
    assert counting.steps == {"uniform": 6, "given": 6}
    assert result.plan is not None
    assert result.plan.widths == read(plan)["slim"]["widths"]


def test_a_run_that_was_given_its_original_is_refused_as_teacher_and_names_it(tmp_path: Path) -> None:
    torch.save(taught().state_dict(), tmp_path / "trained.pt")
    small_run(weights=tmp_path / "trained.pt", output=tmp_path / "file", stages=["original"])
    small_run(weights=taught(), output=tmp_path / "module", stages=["original"])
    for run, hint in (("file", r"--weights \S*/trained\.pt"), ("module", r"torch\.save")):
        with pytest.raises(StoreError, match=rf"{run} holds no original: .* given a trained one.*{hint}"):
            small_run(weights=tmp_path / run, output=tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_folder_without_weights_is_refused_as_teacher(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there are no weights at .* --stages original --output"):
        small_run(weights=tmp_path)


def test_a_state_dict_under_any_key_is_found(tmp_path: Path) -> None:
    trained, path = taught(), tmp_path / "trained.pt"
    weights = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
    moments = {name: {"exp_avg": tensor} for name, tensor in weights.items()}
    checkpoint = {"epoch": torch.tensor(3), "optimizer": {"state": {0: moments}}, "job": {"student": weights}}
    torch.save(checkpoint, path)
    assert same_weights(load_weights(path, Small()), trained)
    torch.save({**checkpoint, "ema": trained.state_dict()}, path)
    with pytest.raises(StoreError, match=r"several state dicts that fit, job\.student, ema\. Save the one"):
        load_weights(path, Small())
    torch.save({"job": {"student": nn.Linear(2, 2).state_dict()}}, path)
    with pytest.raises(StoreError, match=r"no state dict .* Its keys: job\. Save the one .* torch\.save"):
        load_weights(path, Small())


# Teachers that fail on the data


def digits(**changes: Any) -> peel.Data:
    """More digits, normalized otherwise."""
    whole = few_digits(600, 300)
    return whole.normalized(changes.get("mean"), changes.get("std"))


def test_an_untrained_teacher_stops_the_run_before_anything_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for stages in (["original", "plan", "final"], ["plan", "final"]):
        with pytest.raises(DataError, match=r"the network is right for only .*%") as caught:
            small_run(data=digits(), weights=Small(), stages=stages, output=tmp_path / "run")
    for part in ("--mean", "weights are not trained", "another order", "--weights train"):
        assert part in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("classes", [2, 10])
def test_no_cause_is_named_for_untrained_networks(classes: int) -> None:
    """The best of several renamings and normalizations is always a few points better."""
    labels = digits().test.labels
    assert labels is not None
    split = replace(digits().test, labels=labels % classes)  # type: ignore[type-var]
    data = replace(digits(), test=split, classes=tuple(map(str, range(classes))))
    for seed in range(12):
        torch.manual_seed(seed)
        reason = why_it_fails(Small(num_classes=classes), data, CPU, is_chosen=False)
        assert "renamed" not in reason and "it is right for" not in reason, reason


def test_infinite_values_of_an_untrained_model_may_be_in_its_file(tmp_path: Path) -> None:
    """A mask of -inf that is stored with the weights is no diverged training."""
    model, trained = Small(), Small()
    for network in (model, trained):
        network.register_buffer("mask", torch.full((2,), float("-inf")))
    peel.save(trained, tmp_path / "own")
    torch.save(trained.state_dict(), tmp_path / "plain.pt")
    for name in ("own.safetensors", "plain.pt"):
        assert same_weights(load_weights(tmp_path / name, model), trained)
    with torch.no_grad():
        trained.fc.bias[3] = float("inf")
    peel.save(trained, tmp_path / "own")
    with pytest.raises(StoreError, match=r"own.safetensors: fc.bias holds 1 values that are not finite"):
        load_weights(tmp_path / "own.safetensors", model)


def test_a_teacher_of_rare_classes_need_not_beat_the_most_frequent_class() -> None:
    """It finds 16 of 24 among 600, with 8 false alarms: hardly better than no alarm, but no guess."""
    labels = torch.zeros(600, dtype=torch.long)
    labels[::25] = 1
    bright = labels.clone()
    bright[::75], bright[1::75] = 0, 1
    pixels = (255 * bright)[:, None, None, None].expand(600, 8, 8, 3).to(torch.uint8)
    data = peel.Data.from_tensors("rare", ("no", "yes"), (pixels, labels), (pixels, labels))
    teacher = taught(data=data)
    result = small_run(Small(num_classes=2), data, weights=teacher, stages=["original"])
    assert result.rows[0].top1 == pytest.approx(1 - 16 / 600)


@pytest.mark.parametrize(("mean", "std"), [((0.0,), (1.0,)), ((0.5,), (0.5,))])
def test_a_teacher_that_was_fed_otherwise_stops_the_run_and_the_flags_are_named(
    mean: tuple[float], std: tuple[float]
) -> None:
    teacher = taught(data=digits(mean=mean, std=std))
    flags = f"--mean {mean[0]:g} --std {std[0]:g}"
    with pytest.raises(DataError, match=rf"right for only .* With pixels from .*: give {flags}\."):
        small_run(data=digits(mean=(0.3,), std=(0.05,)), weights=teacher, stages=["original"])
    result = small_run(data=digits(), weights=teacher, stages=["original"], mean=mean, std=std)
    assert result.rows[0].top1 > 0.4


def test_a_teacher_with_its_classes_in_another_order_stops_the_run(tmp_path: Path) -> None:
    teacher = taught(data=digits())
    with torch.no_grad():
        teacher.fc.weight.copy_(teacher.fc.weight.roll(3, 0))
        teacher.fc.bias.copy_(teacher.fc.bias.roll(3, 0))
    with pytest.raises(DataError, match=r"With its classes renamed it is right for .* in another order"):
        small_run(data=digits(), weights=teacher, stages=["original"])
    small_run(data=digits(), stages=["original"], output=tmp_path / "teacher")
    reversed_names = replace(digits(), classes=tuple("9876543210"))
    with pytest.raises(DataError, match=r"the network's classes are in another order: 0, 1, 2"):
        small_run(data=reversed_names, weights=tmp_path / "teacher", stages=["original"])


def test_a_teacher_that_a_run_trained_is_compared_with_its_record(tmp_path: Path) -> None:
    """A short training is no reason to refuse it; an accuracy far below the recorded one is."""
    weak = small_run(data=digits(), stages=["original"], output=tmp_path / "weak").rows[0].top1
    again = small_run(data=digits(), weights=tmp_path / "weak", stages=["original"])
    assert again.rows[0].top1 == weak
    good = {"train": {"epochs": 12, "batch_size": 30}, "stages": ["original"]}
    assert small_run(data=digits(), output=tmp_path / "good", **good).rows[0].top1 > 0.8
    shuffled = replace(digits().test, labels=digits().test.labels.roll(1))  # type: ignore[type-var]
    with pytest.raises(DataError, match=r"is right for .*; its record says [89]\d\.\d%"):
        small_run(data=replace(digits(), test=shuffled), weights=tmp_path / "good", stages=["original"])


def test_a_teacher_brings_its_mean_and_std_and_the_slim_network_keeps_them(tmp_path: Path) -> None:
    data = digits(mean=(0.25,), std=(0.75,))
    small_run(data=data, stages=["original"], output=tmp_path / "teacher")
    run = tmp_path / "run"
    result = small_run(data=digits(), weights=tmp_path / "teacher", output=run)
    told = "Images are normalized by mean 0.25 0.25 0.25 and std 0.75 0.75 0.75 (of the weights)."
    assert told in result.notes
    assert told in read(run / "result.json")["notes"]
    for name in ("slim", "stages/uniform"):
        told = peel.load(run / name, model=Small()).peel_info["input"]
        assert (told["mean"], told["std"]) == ([0.25] * 3, [0.75] * 3)
    assert read(run / "state.json")["subject"]["data"]["mean"] == [0.25] * 3
    with pytest.raises(RunError, match=r"data.mean: \[0.25, 0.25, 0.25\] -> \[0.3"):
        small_run(data=digits(), weights=tmp_path / "teacher", output=run, mean=(0.3,))


@pytest.mark.parametrize("change", [{"mean": (0.1, 0.2)}, {"std": (0.0,)}, {"std": (1, -1, 1)}])
def test_a_wrong_mean_or_std_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(mean|std) must be 1 or 3 (positive )?numbers"):
        small_run(stages=["original"], **change)


# Pretrained weights


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """torchvision's cache with weights for its resnet18; returns the network that they are of."""
    torch.manual_seed(1)
    model = zoo.create("resnet18")
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    file = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(model.state_dict(), tmp_path / "hub" / "checkpoints" / file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return model


def test_pretrained_weights_of_other_classes_get_a_new_classifier_and_are_trained(
    hub: nn.Module, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"weights": "pretrained", "stages": ["original"], "output": tmp_path / "run"}
    short = {"epochs": 1, "batch_size": 64, "lr": 1e-6}
    result = small_run("resnet18", few_digits(64), train=short, **settings)
    assert any("resnet18 know other classes" in note for note in result.notes)
    trained = peel.load(tmp_path / "run" / "stages" / "original")
    assert torch.allclose(trained.conv1.weight, hub.conv1.weight, atol=1e-4), "it started from them"
    assert trained.fc.weight.shape == (10, 512)
    assert trained.peel_info["input"]["mean"] == [0.485, 0.456, 0.406]
    counting = Counting()
    small_run("resnet18", few_digits(64), train=short, callbacks=[counting], **settings)
    assert counting.steps == {}, "it resumes"
