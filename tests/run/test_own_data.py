"""`prune` with data, loss, metric, optimizer and training function of the user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import peel
from helpers.detectors import IMAGES, TARGETS, DetectionNet
from helpers.own_data import PAIR, Restless, TwoInputs, bce, hits, numbered, stream, vectors
from helpers.small import Small, few_digits, same_weights, with_methods
from peel.errors import ConfigError, DataError, DivergedError, PeelError
from peel.methods.peel import rounds_of
from peel.run.result import Result
from peel.steps.criteria.legr import Legr
from peel.train.callbacks import Callback

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT: dict[str, Any] = {
    "method": "peel",
    "train": {"epochs": 2},
    "backbone": {"epochs": 1},
    "bench_seconds": 0,
}


def run(data: Any = PAIR, model: nn.Module | None = None, **settings: Any) -> Result:
    given = {"loss": bce, "metric": hits, "weights": "train", **SHORT, **settings}
    return peel.prune(model if model is not None else Small(3), data, **with_methods(given))


def test_a_dataset_with_an_own_loss_metric_and_optimizer(tmp_path: Path) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.02)

    longer = {"train": {"epochs": 6}, "optimizer": adam}
    result = run((vectors(192), vectors(48, seed=5)), output=tmp_path / "run", **longer)
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    assert all(row.metric is not None and row.metric > 0.7 for row in result.rows)
    assert all(row.top1 is None for row in result.rows)
    assert any("mean squared error" in note for note in result.notes)
    assert "distillation" in result.history["peel"][-1].train
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (stored["metric"], stored["rows"][2]["metric"]) == ("hits", result.rows[2].metric)
    assert "test hits" in (tmp_path / "run" / "report.html").read_text()
    loaded = peel.load(tmp_path / "run" / "slim", Small(3)).eval()
    images, targets = vectors(48, seed=5).tensors
    assert float(hits(loaded(images), targets)) == pytest.approx(result.rows[2].metric, abs=1e-6)


def test_class_numbers_need_neither_loss_nor_metric() -> None:
    result = peel.prune(Small(3), (numbered(96), numbered(48, seed=5)), weights="train", **SHORT)
    assert all(row.top1 is not None for row in result.rows)
    assert not any("mean squared" in note for note in result.notes)


def test_images_by_name_with_an_own_loss() -> None:
    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, label_smoothing=0.3)

    settings = {"train": {"epochs": 2, "batch_size": 64}, "weights": "train", "stages": ["original"]}
    plain = peel.prune(Small(), few_digits(), **settings).rows[0]
    own = peel.prune(Small(), few_digits(), loss=smooth, **settings).rows[0]
    assert own.top1 is not None
    assert own.loss != plain.loss


class StopAt(Callback):
    """Stops a run in the second epoch of the last stage."""

    def __init__(self) -> None:
        self.stage = ""

    def on_stage_begin(self, name: str, description: str) -> None:
        self.stage = name

    def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
        if self.stage == "peel" and step == total_steps - 1:
            raise KeyboardInterrupt


class Drawing(Restless):
    """Random crops, and dropout in the model."""

    def __len__(self) -> int:
        return len(PAIR[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = PAIR[0][index]
        shift = int(torch.randint(3, ()))
        return image.roll(shift, 2), target


def test_a_run_on_a_dataset_resumes_bit_identically_within_an_epoch(tmp_path: Path) -> None:
    data, settings = (Drawing(), PAIR[1]), {"checkpoint_seconds": 0}
    whole = run(data, Small(3, dropout=0.2), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(data, Small(3, dropout=0.2), output=tmp_path, callbacks=[StopAt()], **settings)
    resumed = run(data, Small(3, dropout=0.2), output=tmp_path, **settings)
    assert whole.model is not None
    assert resumed.model is not None
    assert same_weights(whole.model, resumed.model)


def test_a_loader_with_samples_of_its_own_choice_trains_and_resumes(tmp_path: Path) -> None:
    data = stream(PAIR[0]), stream(PAIR[1])
    with pytest.raises(KeyboardInterrupt):
        run(data, output=tmp_path, callbacks=[StopAt()], checkpoint_seconds=0)
    result = run(data, output=tmp_path, checkpoint_seconds=0)
    assert len(result.history["peel"]) == 2
    assert any("chooses its samples itself" in note for note in result.notes)
    with pytest.raises(DataError, match="no samples can be held out"):
        run(data, criterion="legr", evaluations=2)


@pytest.mark.parametrize("criterion", ["gradient", "taylor", "legr", "reconstruction", "weight"])
def test_every_criterion_measures_with_own_data(criterion: str) -> None:
    result = run(criterion=criterion, evaluations=2, stages=["plan"])
    assert result.plan is not None
    assert rounds_of(result.plan)[0].importance is not None
    assert (criterion == "legr") == any("random held-out samples" in note for note in result.notes)


def test_a_metric_that_fails_late_loses_no_training(tmp_path: Path) -> None:
    calls = []

    def fickle(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == fails_at:
            raise ValueError("one empty batch")
        return hits(output, target)

    fails_at = 4  # the trial calls it once, the first evaluation three times
    settings = {"metric": fickle, "stages": ["original"], "train": {"epochs": 3, "batch_size": 24}}
    with pytest.raises(ConfigError, match=r"the metric .*fickle failed: ValueError: one empty batch"):
        run(output=tmp_path, **settings)
    fails_at, steps = 0, []

    class Steps(Callback):
        def on_step_end(self, step: int, total_steps: int, batch_size: int) -> None:
            steps.append(step)

    result = run(output=tmp_path, callbacks=[Steps()], **settings)
    assert steps[0] > 4  # the first epoch is not repeated
    assert len(result.history["original"]) == 3


def test_an_own_training_function(tmp_path: Path) -> None:
    calls: list[tuple[int, bool]] = []

    def train_fn(model: nn.Module, epochs: int, teacher: nn.Module | None) -> None:
        calls.append((epochs, teacher is not None))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(epochs):
            for images, targets in DataLoader(PAIR[0], 32):
                output = model(images)
                loss = bce(output, targets)
                if teacher is not None:
                    loss = loss + peel.distillation_loss(output, teacher(images), logits=False)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    result = run(train_fn=train_fn, output=tmp_path, criterion="gradient")
    assert calls == [(2, False), (1, False), (2, True), (2, True)]
    assert all(row.metric is not None and row.loss is not None for row in result.rows)
    assert any("train_fn trains every network" in note for note in result.notes)
    assert any("without an L1 term" in note for note in result.notes)
    again = run(train_fn=train_fn, output=tmp_path, criterion="gradient")
    assert len(calls) == 4
    assert result.model is not None
    assert again.model is not None
    assert same_weights(result.model, again.model)
    assert not any("L1" in note for note in run(train_fn=train_fn, method="uniform").notes)


def test_a_training_function_that_fails_or_returns_another_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train_fn .* failed: ZeroDivisionError"):
        run(train_fn=lambda model, epochs, teacher: epochs / 0)
    with pytest.raises(ConfigError, match="must train the given model in place"):
        run(train_fn=lambda model, epochs, teacher: Small(3))
    with pytest.raises(ConfigError, match=r"called as train_fn.*: got an unexpected"):
        run(train_fn=lambda model, epochs: None)

    def diverge(model: nn.Module, epochs: int, teacher: nn.Module | None) -> None:
        next(model.parameters()).data.fill_(torch.nan)

    with pytest.raises(DivergedError, match=r"train_fn .*diverge.* not finite .* Lower its learning rate"):
        run(train_fn=diverge)


def test_a_detector_is_pruned_by_its_own_losses() -> None:
    def boxes(found: list[Any], targets: list[Any]) -> float:
        assert len(found) == len(targets)
        return sum(len(item["boxes"]) for item in found) / len(found)

    samples = list(zip(IMAGES * 6, TARGETS * 6))
    loader = DataLoader(samples, 4, shuffle=True, collate_fn=lambda items: tuple(map(list, zip(*items))))
    model = DetectionNet()
    graph = peel.trace(model, IMAGES[:1], modules=["backbone", "head"])
    settings = {"loss": "model", "metric": boxes, "criterion": "gradient", "graph": graph}
    result = run((loader, loader), model, **settings)
    assert any("Distillation is off" in note for note in result.notes)
    assert {"scores", "boxes", "loss"} <= result.history["peel"][-1].train.keys()
    assert result.model is not None
    assert "boxes" in result.model.eval()(IMAGES)[0]
    assert result.rows[2].macs <= result.rows[0].macs / 2
    inherited = run((loader, loader), result.model, weights="pretrained", **{**settings, "graph": None})
    assert inherited.rows[2].before_training


@pytest.mark.parametrize("method", ["peel", "uniform", "magnitude", "taylor"])
def test_a_trained_network_is_cut_repaired_and_fine_tuned(method: str) -> None:
    data = vectors(192), vectors(48, seed=5)
    torch.manual_seed(0)
    trained = Small(3)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.02)
    for _ in range(6):
        for images, targets in DataLoader(data[0], 32):
            optimizer.zero_grad()
            bce(trained(images), targets).backward()
            optimizer.step()
    result = run(data, trained, weights="pretrained", method=method, budget="60%", train={"epochs": 1})
    original, slim = result.rows[0], result.rows[-1]
    assert slim.before_training.keys() == {"cut", "recalibrated", "repaired"}
    assert original.metric is not None
    assert slim.metric is not None
    assert slim.before_training["repaired"] >= slim.before_training["cut"] - 0.02
    assert slim.metric > 0.75


def test_a_given_network_that_guesses_is_noted() -> None:
    data = numbered(192), numbered(96, seed=5)
    torch.manual_seed(0)
    model, short = Small(3), {**SHORT, "train": {"epochs": 1}, "method": "uniform"}

    def asks(result: Result) -> bool:
        return any("are its weights trained?" in note for note in result.notes)

    assert asks(peel.prune(model, data, **short))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(6):
        for images, labels in DataLoader(data[0], 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert not asks(peel.prune(model, data, **short))


@pytest.mark.usefixtures("hasty")
def test_two_inputs_in_a_dict() -> None:
    images, targets = PAIR[0].tensors
    samples = [{"first": x, "second": x, "target": y} for x, y in zip(images, targets)]

    def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return bce(output["out"], batch["target"])

    result = run((samples, samples), TwoInputs(), loss=loss, metric=None, bench_seconds=0.05)
    assert all(row.loss is not None and row.metric is None and row.top1 is None for row in result.rows)
    assert result.rows[-1].speedup is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": torch.optim.Adam, "train": {"lr": 0.1}}, r"train\.lr has no effect with optimizer="),
        ({"data": (PAIR[0],)}, r"a pair \(train, val\), not a tuple of 1"),
        (
            {"data": PAIR[0]},
            r"a pair \(train, val\), not one TensorDataset: peel.prune\(model, \(train, val\)\)",
        ),
        ({"model": "resnet18"}, r"give the model itself instead of 'resnet18'"),
        ({"mean": 0.5}, r"the given data normalize themselves"),
        ({"train": {"batch_size": 200}}, r"a batch of 200 .* exceeds the training set of 96"),
        ({"data": (PAIR[0], stream(PAIR[1], 5))}, r"validation data ended after 1 of 3 batches"),
        ({"train_fn": print, "distill": "in-place"}, r'with train_fn, distill is "teacher"'),
        (
            {"train_fn": lambda model, epochs, teacher: None, "dry_run": True},
            r"cannot time those of train_fn",
        ),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PeelError, match=message):
        run(**change)


def test_importance_and_distillation_in_a_loop_of_ones_own() -> None:
    model: Callable[..., nn.Module] = Small
    graph = peel.trace(model(3), torch.zeros(1, 3, 8, 8))
    widths = peel.backbone(graph, "50%")
    backbone = peel.slim(model(3), widths, graph=graph)
    importance = peel.measure_importance(backbone, graph.at(widths), PAIR[0], loss=bce)
    assert importance.groups.keys() == graph.groups.keys()
    assert min(importance.groups.values()) > 0
    plan = peel.reallocate(graph, widths, importance.groups, "50%")
    assert graph.macs(plan) <= graph.macs() / 2
    by_class = peel.measure_importance(
        backbone, graph.at(widths), numbered(32), criterion=Legr(evaluations=2)
    )
    assert by_class.groups.keys() == graph.groups.keys()
    logits = torch.randn(4, 3, 6, 6)
    assert float(peel.distillation_loss(logits, logits)) == pytest.approx(0, abs=1e-6)
    assert float(peel.distillation_loss(torch.zeros(50, 9), torch.randn(50, 9), logits=False)) == (
        pytest.approx(1, rel=0.1)
    )
    with pytest.raises(PeelError, match="outputs of one shape"):
        peel.distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))


BAD_SAMPLE = """
import torch
from torch.utils.data import DataLoader, Dataset
import peel
from helpers.small import Small


class Bad(Dataset):
    last = 40

    def __len__(self):
        return 64

    def __getitem__(self, number):
        if number == self.last:
            raise ValueError("no such sample")
        return torch.randn(3, 8, 8), number % 2


class Good(Bad):
    last = -1


if __name__ == "__main__":
    try:
        data = DataLoader(Bad(), 16, num_workers=2), DataLoader(Good(), 16)
        peel.prune(Small(2), data, weights="train", train={"epochs": 1}, method="uniform", bench_seconds=0)
    except peel.DataError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_process_whose_workers_fail_comes_to_its_end(tmp_path: Path) -> None:
    """Its workers ignore SIGTERM: nobody else would end them."""
    (tmp_path / "program.py").write_text(BAD_SAMPLE)
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(peel.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "sample 40 of the training data cannot be read: ValueError: no such sample" in done.stdout
