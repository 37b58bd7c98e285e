"""The files of a run read back, and the page made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from peel.errors import CorruptFileError, RunError
from peel.methods.peel import table_of
from peel.methods.plan import Architecture, Plan
from peel.report import RunRecord, render
from peel.steps.reallocation import Round
from peel.utils.tables import Table

GROUPS = {"32x32": ("conv1", "layer1.conv"), "16x16": ("layer2.conv",)}


def architecture(widths: list[int], macs: int, groups: dict[str, tuple[str, ...]] = GROUPS) -> Architecture:
    ties = [tie for members in groups.values() for tie in members]
    return Architecture(
        dict(zip(ties, widths)), macs, macs // 100, macs // 10, macs, dict.fromkeys(groups, macs // 2)
    )


ROUND = Round(
    {"conv1": 9, "layer1.conv": 10, "layer2.conv": 29},
    {"32x32": 1.05, "16x16": 1.18},
    {"conv1": 9.4, "layer1.conv": 10.4, "layer2.conv": 29.2},
    ideal_cost=4e6,
    cost=3_994_438,
    unspent=5_562,
    shares={"32x32": 0.3, "16x16": 0.7},
    importance={"32x32": 0.3, "16x16": 0.7},
    tie_importance={"conv1": 0.5, "layer1.conv": 0.5, "layer2.conv": 0.5},
    note="They differ.",
)

PLAN = Plan(
    "macs",
    20_406_592,
    GROUPS,
    original=architecture([16, 16, 32], 40_813_184),
    uniform=architecture([11, 11, 24], 20_387_010),
    slim=architecture([9, 10, 29], 20_318_688),
    name="peel",
    others={"backbone": architecture([9, 9, 20], 16_406_592)},
    values={"pool": 4_000_000},
    tables=(table_of(0, [ROUND], GROUPS),),
)


def epoch(stage: str, number: int, epochs: int = 2) -> dict[str, Any]:
    line: dict[str, Any] = {
        "stage": stage,
        "epoch": number,
        "epochs": epochs,
        "lr": 0.1,
        "train": {"loss": 1.5 / number, "top1": 0.6},
        "test": {"loss": 1.25, "top1": 0.5 + number / 10, "top5": 0.9},
        "seconds": 9.7,
        "images_per_second": 5000.0,
    }
    if stage.startswith("backbone"):
        line["importance"] = {"32x32": 0.3, "16x16": 0.7 + number / 100}
    return line


def result(**top1: float) -> dict[str, Any]:
    networks = {"original": PLAN.original, "uniform": PLAN.uniform, "peel": PLAN.slim}
    scores = {"original": 0.9213, "uniform": 0.9101, "peel": 0.9143, **top1}
    rows = [
        {
            "name": name,
            "loss": 0.3,
            "top1": scores[name],
            "top5": 0.99,
            "macs": network.macs,
            "params": network.params,
            "seconds": 61.0,
            "image_passes": 10**6,
            "file": f"{name}.safetensors",
        }
        for name, network in networks.items()
    ]
    common = {"format": "peel-result", "version": 2, "seed": 3, "wall_seconds": 250.0}
    return {**common, "rows": rows, "notes": ["A short schedule."]}


def record(**changes: Any) -> RunRecord:
    """A finished run."""
    stages = ("original", "backbone", "uniform", "peel")
    values: dict[str, Any] = {
        "config": {"model": "cifar_resnet20", "data": "cifar10", "budget": "50%", "seed": 3},
        "state": {
            "format": "peel-run",
            "version": 3,
            "command": "peel run --budget 50%",
            "subject": {"data": {"shape": [3, 32, 32]}},
            "settings": {"method": "peel"},
        },
        "environment": {"peel": "0.2.0", "torch": "2.11.0"},
        "plan": PLAN,
        "metrics": [epoch(stage, number) for stage in stages for number in (1, 2)],
        "result": result(),
    }
    return RunRecord(**{**values, **changes})


def write(folder: Path, *names: str) -> Path:
    """Write these files of the run, or all of them."""
    whole = record()
    files = {
        "state.json": json.dumps(whole.state),
        "config.toml": tomli_w.dumps(whole.config),
        "environment.json": json.dumps(whole.environment),
        "plan.json": PLAN.to_json().decode(),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in whole.metrics),
        "result.json": json.dumps(whole.result),
    }
    for name in names or files:
        (folder / name).write_text(files[name])
    return folder


class Elements(HTMLParser):
    """Every element of a page as its name and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def assert_all_in(texts: list[str], page: str) -> None:
    for text in texts:
        assert text in page


# The page


def test_the_page_has_the_figures_of_the_result() -> None:
    page = render(record())
    title = "cifar_resnet20 on cifar10, budget 20.4M MACs"
    assert_all_in([title, "92.13 %", "91.01 %", "91.43 %", "20,318,688 (49.8 %)", "40,813,184"], page)
    assert_all_in(["+0.42 points top-1", "seed 3", "no evidence", "images of 3 x 32 x 32"], page)
    assert_all_in(["A short schedule.", "They differ.", "peel run --budget 50%", "1.18"], page)
    assert_all_in(["70.00 %", "the plan costs 4,000,000; after it, 3,994,438", "a pool of 4,000,000"], page)
    assert page.count("<svg") == 5
    assert "not complete" not in page


def test_a_loss_against_uniform_is_shown_as_one() -> None:
    assert "−1.00 points top-1" in render(record(result=result(peel=0.9001)))


def bench(low: float, high: float) -> dict[str, Any]:
    """What a run stores of the speed of its networks."""
    verdict = "faster" if low > 1.02 else "no measurable gain"
    conditions = {"device": "A CPU", "cores": 4, "threads": 2, "batch": 1, "precision": "float32"}
    speedup = {"median": (low + high) / 2, "low": low, "high": high, "verdict": verdict}
    slim = {"network": "peel", "backend": "eager", "speedup": speedup, "efficiency": 0.71}
    entries = [{"network": "original", "backend": "eager", "speedup": None, "efficiency": None}, slim]
    return {"conditions": conditions, "entries": entries, "notes": ["the machine was busy."]}


def test_the_page_has_the_speed_its_conditions_and_the_verdict() -> None:
    page = render(record(result={**result(), "bench": bench(1.4, 1.44)}))
    assert_all_in(["in torch eager, batch 1, 2 threads of 4 cores, float32, A CPU.", "<td>0.71</td>"], page)
    assert_all_in(["<td>1.42</td>", "0.71 of the reduction of MACs", "Note: the machine was busy."], page)
    assert_all_in(["<td>not timed</td>"], page)  # the uniform network has no entry
    assert "no measurable gain" not in page
    page = render(record(result={**result(), "bench": bench(0.98, 1.04)}))
    assert "PEEL: no measurable gain against the original (95 %: 0.98 to 1.04)." in page
    assert "latency" not in page


def test_the_page_tells_the_speed_from_the_latency_of_a_model() -> None:
    timed = {**result(), "bench": bench(1.4, 1.44)}
    for row in timed["rows"]:
        row |= {"predicted_latency": 5e6, "latency": 5.5e6}
    assert_all_in(["latency (predicted)", "Latencies have the conditions of"], render(record(result=timed)))


def test_the_page_needs_no_other_file() -> None:
    page = render(record())
    assert "http" not in page
    assert "@import" not in page
    for tag, attributes in Elements(page).found:
        assert tag not in ("script", "img", "iframe", "object")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_ids_are_unique_and_references_lead_to_one() -> None:
    page = render(record())
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    references = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert len(ids) == len(set(ids))
    assert references
    assert references <= set(ids)


def test_text_of_users_is_escaped() -> None:
    bad = "<script>alert('$x$')</script>&\""
    renamed = json.dumps([PLAN.to_json().decode(), record().metrics])
    plan, metrics = json.loads(renamed.replace("layer2.conv", "<u>$x$").replace("16x16", "<i>8&"))
    page = render(
        record(
            config={"model": bad, "data": bad, bad: bad},
            state={"command": bad, "subject": {bad: bad}},
            environment={bad: bad},
            plan=Plan.from_json(plan.encode()),
            metrics=metrics,
            result={**result(), "notes": [bad]},
        )
    )
    assert {tag for tag, _ in Elements(page).found} <= {tag for tag, _ in Elements(render(record())).found}
    assert page.count("&lt;script&gt;") >= 8
    charts = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert_all_in([">&lt;u&gt;$x$</text>", ">&lt;i&gt;8&amp;</text>"], charts)


@pytest.mark.parametrize(
    ("names", "charts", "shown", "hidden"),
    [
        ([], 0, ["There is no plan yet", "No epoch is finished yet", "There is no result yet"], []),
        (["metrics.jsonl"], 2, ["There is no plan yet", "There is no result yet"], ["No epoch"]),
        (
            ["plan.json", "metrics.jsonl"],
            5,
            ["There is no result yet", "20,318,688 (49.8 %)"],
            ["no plan", "points top-1"],
        ),
        (["plan.json", "result.json"], 3, ["No epoch is finished yet", "+0.42 points"], ["no result"]),
    ],
)
def test_the_page_of_an_unfinished_run_names_what_is_missing(
    tmp_path: Path, names: list[str], charts: int, shown: list[str], hidden: list[str]
) -> None:
    page = render(RunRecord.read(write(tmp_path, "state.json", "config.toml", *names)))
    assert page.count("<svg") == charts
    assert_all_in(["not complete", *shown], page)
    assert not any(words in page for words in hidden)


def test_the_page_has_the_error_that_ended_the_run(tmp_path: Path) -> None:
    error = {"format": "peel-error", "version": 2, "error": "the disk is full"}
    (write(tmp_path) / "error.json").write_text(json.dumps(error))
    assert "An error ended the run: the disk is full" in render(RunRecord.read(tmp_path))


def test_a_running_stage_and_a_stage_without_a_row_are_named() -> None:
    part = result()
    del part["rows"][1]
    page = render(record(metrics=[epoch("original", 1, epochs=40)], result=part))
    assert_all_in(["original is at epoch 1 of 40", "can be compared once both are trained"], page)


def test_the_page_has_the_score_after_each_epoch() -> None:
    cells = '<td class="words">{}</td><td>60.00 %</td><td>60.00 %</td><td>60.00 %</td><td>60.00 %</td>'
    page = render(record())
    assert cells.format(1) in page
    assert '<td class="words">2</td><td>70.00 %</td>' in page
    assert '<td class="words">0</td>' not in page
    repaired = result()
    for row in repaired["rows"][1:]:
        row["before_training"] = {"cut": 0.1, "repaired": 0.4567}
    page = render(record(result=repaired))
    assert_all_in(['<td class="words">0</td><td>–</td><td>–</td><td>45.67 %</td><td>45.67 %</td>'], page)
    assert "Epoch 0 is the network after repair" in page


def test_a_curve_begins_at_the_repaired_network(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("peel.report.page.curves_chart", lambda panels: drawn.append(panels) or "")
    repaired = result()
    repaired["rows"][1]["before_training"] = {"cut": 0.1, "repaired": 0.4}
    render(record(result=repaired))
    curves = drawn[0]["test top-1 (%)"]
    assert curves["uniform"] == [(0, 40.0), (1, 60.0), (2, 70.0)]
    assert curves["original"] == [(1, 60.0), (2, 70.0)]


def test_a_plan_that_is_the_uniform_network_is_not_compared_with_it() -> None:
    shared = result()
    shared["rows"][-1]["seconds"] = 0
    same = replace(PLAN, slim=replace(PLAN.slim, widths=PLAN.uniform.widths))
    told = "The plan is the uniform network, which was trained once."
    assert told in render(record(plan=same, result=shared))
    assert told not in render(record(plan=PLAN, result=shared))
    assert told not in render(record(plan=same))


@pytest.mark.parametrize("method", ["sensitivity", "uniform"])
def test_the_page_of_a_method_without_backbone_does_not_speak_of_one(method: str) -> None:
    plan = replace(PLAN, others={}, tables=(), values={}, name=method)
    metrics = [line for line in record().metrics if line["stage"] in ("original", "uniform")]
    state = {**record().state, "settings": {"method": method}}
    for known in (plan, None):
        page = render(record(plan=known, metrics=metrics, state=state, result=None))
        assert "backbone" not in page
        assert "mportance" not in page
        assert ("lines show the uniform network" in page) == (method != "uniform")
    assert_all_in(["lines show the backbone and the uniform network", "Importance over"], render(record()))


@pytest.mark.parametrize("chart", ["", "bars", "lines"])
def test_a_table_of_any_method_is_drawn(chart: Any) -> None:
    rows = ((1, 0.5, None), (2, 0.25, 12_345))
    table = Table("What it tried", ("step", "loss", "images"), rows, note="The best one wins.", chart=chart)
    plan = replace(PLAN, tables=(table,), name="Mine")
    page = render(record(plan=plan))
    assert_all_in(["How Mine came to the widths", "What it tried", "The best one wins.", "12,345", "–"], page)
    assert page.count("<svg") == render(record(plan=replace(plan, tables=()))).count("<svg") + bool(chart)


def test_every_round_has_a_table_and_curves() -> None:
    rounds = [ROUND, replace(ROUND, distinct=False, note="They hardly differ.")]
    metrics = [*record().metrics, epoch("backbone-2", 1)]
    tables = tuple(table_of(number, rounds, GROUPS) for number in range(2))
    page = render(record(plan=replace(PLAN, tables=tables), metrics=metrics))
    assert_all_in(["Round 1 of 2", "Round 2 of 2", "They hardly differ.", ">backbone-2</text>"], page)


@pytest.mark.parametrize("count", [12, 120])
def test_every_tie_is_named_in_chart_and_table(count: int) -> None:
    ties = tuple(f"t{i}" for i in range(count))
    groups = {"8x8": ties[: count // 3], "4x4": ties[count // 3 :]}
    network = architecture(list(range(8, 8 + count)), 10**6, groups)
    plan = replace(
        PLAN,
        groups=groups,
        original=network,
        uniform=network,
        slim=network,
        others={"backbone": network},
        tables=(),
    )
    page = render(record(plan=plan))
    for tie in ties:
        assert_all_in([f">{tie}</text>", f'<td class="words">{tie}</td>'], page)


def test_numbers_that_are_not_finite_leave_a_gap() -> None:
    metrics = record().metrics
    metrics[0]["train"]["loss"], metrics[1]["test"]["loss"] = float("inf"), float("nan")
    metrics[3]["test"] = {}
    assert render(record(metrics=metrics)).count("<svg") == 5


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    code = "import sys; from peel.report import *; print(render(RunRecord.read(sys.argv[1])))"
    pages = {
        subprocess.run(
            [sys.executable, "-c", code, write(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(pages) == 1


# The files


def test_the_files_are_read_back(tmp_path: Path) -> None:
    assert RunRecord.read(write(tmp_path)) == record()


def test_an_incomplete_last_line_of_metrics_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path) / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in (whole + b'{"stage": "peel", "epo', whole + '{"stage": "é'.encode()[:-1], whole + b"1"):
        path.write_bytes(cut)
        assert RunRecord.read(tmp_path) == record()


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"it has no state\.json"):
        RunRecord.read(tmp_path)
    write(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(RunError, match=r"metrics\.jsonl is corrupt in line 2"):
        RunRecord.read(tmp_path)
    for name in ("state.json", "environment.json", "plan.json", "result.json", "config.toml"):
        write(tmp_path)
        (tmp_path / name).write_text('{"format": ')
        with pytest.raises(RunError, match=rf"{name}.* is corrupt"):
            RunRecord.read(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "plan.json", "result.json"])
@pytest.mark.parametrize("change", [{"format": "other"}, {"version": 1}])
def test_a_file_of_another_format_or_version_is_named(
    name: str, change: dict[str, object], tmp_path: Path
) -> None:
    path = write(tmp_path) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunError, match=f"{name}.*({'other' if 'format' in change else 'version 1'})"):
        RunRecord.read(tmp_path)


#: A file, where in it, and a value that it cannot have.
WRONG: list[tuple[str, str, Any]] = [
    ("state.json", "subject", 3),
    ("state.json", "subject.data", {"shape": "abc"}),
    ("environment.json", "device", 7),
    ("result.json", "rows", 3),
    ("result.json", "rows.0.macs", "many"),
    ("result.json", "rows.0.macs", 10**400),
    ("result.json", "rows.0.seconds", float("nan")),
    ("result.json", "rows.0.seconds", 1e308),
    ("result.json", "wall_seconds", 1e308),
    ("result.json", "notes", 3),
    ("result.json", "bench", [1]),
    ("result.json", "bench", {"notes": []}),
    ("plan.json", "budget", 0),
    ("plan.json", "budget", 10**400),
    ("plan.json", "slim.widths", {"conv1": 8}),
    ("plan.json", "groups", {}),
    ("plan.json", "original.widths.conv1", 0),
]


@pytest.mark.parametrize(("name", "place", "value"), WRONG)
def test_a_value_that_a_file_cannot_have_is_named(name: str, place: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path) / name
    document = json.loads(path.read_text())
    *parents, last = place.split(".")
    holder = document
    for key in parents:
        holder = holder[int(key)] if isinstance(holder, list) else holder.setdefault(key, {})
    holder[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptFileError, match=f"{name} is corrupt: "):
        render(RunRecord.read(tmp_path))


@pytest.mark.parametrize("line", [{"stage": "peel"}, {"stage": "a", "epoch": "1", "epochs": 2}, 3])
def test_a_complete_line_of_metrics_that_does_not_fit_is_named(line: Any, tmp_path: Path) -> None:
    with (write(tmp_path) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(CorruptFileError, match=r"metrics.jsonl is corrupt in line \d+"):
        RunRecord.read(tmp_path)


def test_odd_values_that_a_run_may_write_are_shown(tmp_path: Path) -> None:
    """A metric of the user's own may be infinite or huge; a setting in TOML may be a date."""
    for name, text in (
        (
            "metrics.jsonl",
            '{"stage": "a", "epoch": 1, "epochs": 2, "train": {"loss": 1e308}, "test": null}\n',
        ),
        ("metrics.jsonl", '{"stage": "a", "epoch": 2, "epochs": 2, "test": {"top1": -Infinity}}\n'),
        ("config.toml", "since = 1979-05-27\n"),
    ):
        with (write(tmp_path) / name).open("a") as file:
            file.write(text)
        assert "</html>" in render(RunRecord.read(tmp_path))
