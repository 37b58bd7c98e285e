"""Networks of many widths are timed, and a run compares its budget with what it measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.latency import planted_model
from helpers.nets import Grouped
from helpers.small import Small, few_digits, fresh, small_run
from peel.cli.main import main
from peel.deploy.bench import processor_name
from peel.deploy.latency import LatencyTimer, design, measure_latency

pytestmark = pytest.mark.usefixtures("one_thread", "hasty")


def test_the_design_has_the_original_uniform_networks_and_widths_that_kernels_like() -> None:
    _, graph = traced_zoo("resnet18")
    networks = design(graph, 40)
    assert len(networks) == 40
    assert networks[0] == graph.widths
    assert len(set(networks)) == 40
    assert all(width % 8 == 0 or width < 64 for widths in networks for width in widths.values())
    ratios = [widths["layer4.0.conv1"] / 512 for widths in networks]
    assert min(ratios) < 0.25
    assert max(ratios) > 0.9
    assert design(graph, 40) == networks != design(graph, 40, seed=1)
    assert all(width % 5 == 0 for width in design(graph, 20, divisor=5)[-1].values())


def test_the_design_keeps_the_steps_of_ties() -> None:
    _, graph = traced_net(Grouped)
    for widths in design(graph, 30):
        assert graph.check(widths) == widths


@pytest.mark.parametrize("networks", [0, 15, "many"])
def test_too_few_networks_are_refused(networks: object) -> None:
    with pytest.raises(peel.ConfigError, match="networks"):
        measure_latency(fresh(), torch.zeros(1, 3, 8, 8), networks=networks)  # type: ignore[arg-type]


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan")])
def test_an_impossible_time_is_refused(time: float) -> None:
    def measure(several: Sequence[peel.Widths]) -> list[float]:
        return [time, *[1e6] * (len(several) - 1)]

    with pytest.raises(peel.ConfigError, match="zero or not finite"):
        measure_latency(fresh(), torch.zeros(1, 3, 8, 8), networks=16, measure=measure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tensorrt"}, "backend is one of eager"),
        ({"backend": "onnx"}, r"not 'onnx'\. Did you mean onnxruntime\?"),
        ({"batch": 0}, "must be positive"),
        ({"threads": "two"}, "threads"),
    ],
)
def test_wrong_conditions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(peel.ConfigError, match=message):
        measure_latency(fresh(), torch.zeros(1, 3, 8, 8), networks=16, **options)


def test_a_command_measures_and_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text("from helpers.small import Small\n")
    reference, file = f"{tmp_path}/net.py:Small", tmp_path / "latency.json"
    arguments = [
        "--output",
        str(file),
        "--networks",
        "16",
        "--seconds",
        "0.01",
        "--threads",
        "1",
        "--batch",
        "2",
    ]
    assert main(["latency", reference, *arguments]) == 2
    assert "give --input channels,height,width" in " ".join(capsys.readouterr().err.split())
    assert not file.exists()
    assert main(["latency", reference, "--input", "3,8,8", *arguments]) == 0
    printed = capsys.readouterr()
    assert "input 3x8x8, batch 2" in printed.out and "input 3x8x8, batch 2" in printed.err
    assert main(["latency", reference, "--input", "3,8,8", *arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["input_shapes"] == [[3, 8, 8]]
    model = peel.LatencyModel.load(file)
    assert shown["conditions"]["batch"] == model.conditions["batch"] == 2
    assert model.conditions["device"] == processor_name()
    assert shown["judged_on"] == 4
    graph = peel.trace(Small(), torch.zeros(1, 3, 8, 8)).with_latency(model)
    assert 0 < graph.latency() == pytest.approx(shown["original_nanoseconds"] / 1e9)
    timer = LatencyTimer.like(Small(), graph, model.conditions, seconds=0.01)
    assert (timer.batch, timer.threads, timer.backend) == (2, 1, "eager")


def latency_file(folder: Path, **conditions: object) -> Path:
    """A planted latency that was measured on this machine, unless the conditions say otherwise."""
    model = planted_model(peel.trace(Small(), few_digits().example()), 24, step=1, fixed=0.0)
    here = {"backend": "eager", "batch": 4, "threads": 1, "device": processor_name(), "device_type": "cpu"}
    return replace(model, conditions={**here, **conditions}).save(folder / "latency.json")


def test_a_run_meets_its_latency_budget_and_says_what_it_measured(tmp_path: Path) -> None:
    file, folder = latency_file(tmp_path), tmp_path / "run"
    result = small_run(budget="85%", resource="latency", latency=str(file), output=folder, bench_seconds=0.1)
    assert result.plan is not None
    assert result.plan.slim.cost <= result.plan.budget
    for row in result.rows:
        assert row.latency is not None
        assert row.latency > 0
    assert result.rows[-1].predicted_latency == result.plan.slim.latency
    notes = " ".join(result.notes)
    assert "networks that the model had not seen, its error was" in notes
    assert "Latency of peel: predicted" in notes
    assert "the budget of" in notes
    rows = json.loads((folder / "result.json").read_text())["rows"]
    assert rows[-1]["latency"] == result.rows[-1].latency
    assert "latency (measured)" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "conditions", [{"device": "A phone"}, {"device_type": "cuda"}, {"measured_by": "your own function"}]
)
def test_a_file_of_another_machine_is_used_and_noted(tmp_path: Path, conditions: dict[str, str]) -> None:
    file = latency_file(tmp_path, **conditions)
    stages = ("plan", "uniform")
    limits = "macs<=50%, latency<=99.9%"
    result = small_run(budget=limits, latency=str(file), method="uniform", stages=stages, distill="none")
    notes = " ".join(result.notes)
    assert "not from this machine" in notes
    assert all(value in notes for name, value in conditions.items() if name != "device_type")
    assert "that of macs binds" in notes
    assert result.rows[0].predicted_latency is not None
    assert result.rows[0].latency is None


def test_a_plan_above_a_limit_is_refused() -> None:
    with pytest.raises(peel.BudgetError, match=r"the given plan uses \d+\.\d% of the limit of macs"):
        small_run(budget="macs<=99%, params<=60%", plan={"conv1": 12, "conv2": 12, "conv3": 4, "conv4": 4})
