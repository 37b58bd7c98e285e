"""Problems that users of `peel run` and `peel.prune` had."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import peel
from helpers.small import Small, few_digits, small_run, taught
from peel.cli.main import main
from peel.data.in_memory import InMemoryImages

OWN = """
from torch import nn
from helpers.small import Small

def gray():
    model = Small()
    model.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
    return model
"""

SHORT = ["--method", "peel", "--train.epochs", "1", "--backbone.epochs", "1", "--quiet", "--device", "cpu"]


@pytest.mark.parametrize("resource", ["macs", "params", "memory"])
def test_every_resource_goes_through_to_the_page(resource: str, tmp_path: Path) -> None:
    result = small_run(resource=resource, output=tmp_path / "run", budget="60%")
    assert result.plan is not None
    assert result.plan.slim.cost <= result.plan.budget
    assert (tmp_path / "run" / "report.html").exists()


def test_a_plan_that_costs_more_than_the_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(peel.BudgetError, match=r"the given plan uses 200\.0% of the limit of macs"):
        small_run(
            plan=dict(peel.trace(Small(), torch.zeros(1, 3, 8, 8)).widths),
            budget="50%",
            output=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_finished_teacher_keeps_its_time_and_place_in_the_table(tmp_path: Path) -> None:
    trained = small_run(stages=["original"], output=tmp_path / "teacher").rows[0]
    first = small_run(weights=tmp_path / "teacher", output=tmp_path / "a")
    second = small_run(weights=tmp_path / "teacher", output=tmp_path / "b")
    assert first.rows[0] == second.rows[0]
    assert (first.rows[0].top1, first.rows[0].seconds) == (trained.top1, trained.seconds)
    assert Path(first.rows[0].file).exists()


def test_stages_can_be_added_later(tmp_path: Path) -> None:
    assert small_run(stages=["plan"], output=tmp_path / "run").model is None
    assert small_run(output=tmp_path / "run").model is not None


def test_a_given_teacher_needs_no_stage(tmp_path: Path) -> None:
    result = small_run(stages=["plan", "final"], weights=taught())
    assert [row.name for row in result.rows] == ["peel"]
    assert "distillation" in result.history["peel"][-1].train


def test_a_backbone_of_given_widths(tmp_path: Path) -> None:
    widths = {"conv1": 3, "conv2": 4, "conv3": 5, "conv4": 6}
    result = small_run(backbone_init=widths, stages=["plan"], distill="none")
    assert result.plan is not None
    assert result.plan.others["backbone"] is not None
    assert result.plan.others["backbone"].widths == widths
    (tmp_path / "widths.json").write_text(json.dumps(widths))
    again = small_run(backbone_init=str(tmp_path / "widths.json"), stages=["plan"], distill="none")
    assert again.plan is not None
    assert again.plan.widths == result.plan.widths


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "random", "max_width": 1.0}, "does not use max_width"),
        ({"policy": "equal", "rounds": 2}, "does not use rounds"),
        ({"distill": "none", "kd_weight": 0.5}, "kd_weight needs a teacher"),
        ({"distill": "none", "hard_weight": 0.5}, "hard_weight needs a teacher"),
        ({"criterion": ["bn"]}, "has no method `measure"),
        ({"ignore": "nrm*"}, "no measured layer matches 'nrm\\*'"),
        ({"ignore": "*"}, "matches every layer"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(peel.ConfigError, match=message):
        small_run(**settings)


def test_frozen_weights_are_trained_where_a_network_starts_from_scratch() -> None:
    model = Small().requires_grad_(False)
    result = small_run(model, stages=["original", "plan", "final"])
    assert result.model is not None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert result.history["peel"][-1].train["loss"] < result.history["peel"][0].train["loss"]


def test_a_finished_network_is_not_frozen_after_a_resume(tmp_path: Path) -> None:
    model = Small().requires_grad_(False)
    for _ in range(2):
        result = small_run(model, output=tmp_path / "run", stages=["plan", "final"], distill="none")
        assert result.model is not None
        assert all(parameter.requires_grad for parameter in result.model.parameters())


def test_uniform_and_peel_start_from_the_same_seed() -> None:
    """Networks of the same widths, trained as both, have the same losses."""
    widths = peel.uniform(peel.trace(Small(), torch.zeros(1, 3, 8, 8)), "50%")
    result = small_run(plan=dict(widths), stages=["uniform", "final"], distill="none")
    uniform, slim = result.rows
    assert (uniform.loss, uniform.top1) == (slim.loss, slim.top1)


def test_the_state_file_says_how_to_feed_the_network(tmp_path: Path) -> None:
    small_run(output=tmp_path / "run", stages=["original"])
    told = json.loads((tmp_path / "run" / "state.json").read_text())["subject"]["data"]
    assert told["classes"] == list(few_digits().classes)
    assert (told["mean"], told["std"]) == (list(few_digits().train.mean), list(few_digits().train.std))


def test_the_saved_input_spec_gives_the_reported_accuracy(tmp_path: Path) -> None:
    result = small_run(output=tmp_path / "run")
    network = peel.load(tmp_path / "run" / "slim", model=Small()).eval()
    told = network.peel_info["input"]
    assert told["classes"] == list(few_digits().classes)
    test = few_digits().test
    assert isinstance(test, InMemoryImages)
    pixels = test.pixels.permute(0, 3, 1, 2) / 255
    assert list(pixels.shape[1:]) == told["shape"]
    scale = [torch.tensor(told[name])[:, None, None] for name in ("mean", "std")]
    with torch.no_grad():
        right = network((pixels - scale[0]) / scale[1]).argmax(1) == test.labels
    assert right.float().mean().item() == pytest.approx(result.rows[-1].top1)


def test_train_and_eval_modes_of_the_given_model_stay() -> None:
    model = Small().train()
    model.norm2.eval()
    small_run(model, stages=["plan"], distill="none")
    assert model.training
    assert not model.norm2.training


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Odd(Small):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"scores": super().forward(x)}

    with pytest.raises(peel.PeelError):
        small_run(Odd())


def test_own_models_may_take_gray_images_and_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_gray.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "run",
                "own_gray.py:gray",
                "--data",
                "digits",
                "--output",
                "run",
                "--stages",
                "original",
                "--distill",
                "none",
                *SHORT,
            ]
        )
        == 0
    )
    assert json.loads(Path("run/state.json").read_text())["subject"]["data"]["shape"] == [1, 8, 8]


@pytest.mark.slow
def test_a_signal_outside_training_stops_at_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "peel",
        "run",
        "--peel.criterion",
        "legr",
        "--peel.evaluations",
        "100000",
        "--stages",
        "plan",
        *SHORT,
    ]
    process = subprocess.Popen(
        [*command, "--distill", "none", "--output", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "run" / "stages" / "backbone.record.json").exists():
        time.sleep(0.2)
        assert process.poll() is None
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"Resume with the same command" in error


def test_l1_strength_covers_all_rounds(tmp_path: Path) -> None:
    small_run(
        l1_strength=2.0,
        rounds=2,
        backbone={"epochs": 2},
        output=tmp_path / "run",
        stages=["plan"],
        distill="none",
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    recipe = json.loads((tmp_path / "run" / "state.json").read_text())["jobs"]["plan"]["backbone"]
    from peel.train.recipe import Recipe

    steps = 200 // recipe["batch_size"]
    rates = sum(Recipe(**{**recipe, "milestones": (), "epochs": epochs}).lr_sum(steps) for epochs in (2, 1))
    assert {line["stage"] for line in lines} == {"backbone", "backbone-2"}
    assert plan["values"]["l1_coefficient"] * rates / (1 - recipe["momentum"]) == pytest.approx(2.0)
