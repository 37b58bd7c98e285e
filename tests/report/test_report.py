"""The record of a run and its page."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from peel.errors import RunError
from peel.report import render
from peel.report.record import RunRecord

GROUPS = {"32x32": ["conv1", "layer1.conv"], "16x16": ["layer2.conv"]}
TIES = [tie for ties in GROUPS.values() for tie in ties]


def network(widths: list[int], macs: int) -> dict[str, Any]:
    return {"widths": dict(zip(TIES, widths)), "macs": macs, "params": macs // 100}


def epoch(stage: str, number: int, of: int = 2) -> dict[str, Any]:
    line = {
        "stage": stage,
        "epoch": number,
        "of": of,
        "lr": 0.1,
        "train": {"loss": 1.5 / number, "top1": 0.6},
        "seconds": 9.7,
    }
    line |= {"test": {"loss": 1.25, "top1": 0.5 + number / 10, "top5": 0.9}, "images_per_second": 5000.0}
    return line | (
        {"importance": {"32x32": 0.3, "16x16": 0.7 + number / 100}} if stage.startswith("backbone") else {}
    )


def files() -> dict[str, Any]:
    """A finished run as its files, by name."""
    peel, seconds = network([9, 10, 29], 20_318_688), 61.0
    first = {
        "importance": {"groups": {"32x32": 0.3, "16x16": 0.7}, "ties": dict.fromkeys(TIES, 0.5)},
        "distinct": True,
        "note": "They differ.",
    }
    first |= {"shares": {"32x32": 0.3, "16x16": 0.7}, "factors": {"32x32": 1.05, "16x16": 1.18}}
    first |= {**peel, "rounding": {"ideal": 4e6, "spent": 3_994_438, "unused": 5_562}}
    nets = {"original": network([16, 16, 32], 40_813_184), "uniform": network([11, 11, 24], 20_387_010)}
    rows = [
        {
            "name": name,
            "top1": top1,
            "top5": 0.99,
            "loss": 0.3,
            "seconds": seconds,
            "image_passes": 10**6,
            "file": f"{name}.json",
        }
        | {key: net[key] for key in ("macs", "params")}
        for name, top1, net in (
            ("original", 0.9213, nets["original"]),
            ("uniform", 0.9101, nets["uniform"]),
            ("peel", 0.9143, peel),
        )
    ]
    resolved = {
        "model": "cifar_resnet20",
        "data": "cifar10",
        "seed": 3,
        "method": {"budget": "50%", "resource": "macs", "backbone_ratio": 0.8},
    }
    return {
        "settings": {
            "format": "peel-run",
            "version": 1,
            "command": "peel run --budget 50%",
            "given": {"budget": "50%"},
            "resolved": resolved,
        },
        "environment": {"peel": "0.2.0", "torch": "2.11.0"},
        "plan": {
            "format": "peel-plan",
            "version": 1,
            "resource": "macs",
            "budget": 20_406_592,
            "pool": 4_000_000,
            "policy": "importance",
        }
        | {
            **nets,
            **peel,
            "backbone": {"backbone_ratio": 0.8, "start": "uniform", **network([9, 9, 20], 16_000_000)},
        }
        | {
            "groups": GROUPS,
            "rounds": [first],
            "macs_by_group": {name: {"32x32": 1000, "16x16": 3000} for name in (*nets, "backbone", "peel")},
        },
        "metrics": [
            epoch(stage, number) for stage in ("original", "backbone", "uniform", "peel") for number in (1, 2)
        ],
        "result": {
            "format": "peel-result",
            "version": 1,
            "rows": rows,
            "budget": 20_406_592,
            "resource": "macs",
            "seed": 3,
        }
        | {"wall_seconds": 250.0, "notes": ["A short schedule."]},
    }


def record(**changes: Any) -> RunRecord:
    return RunRecord(**{**files(), **changes})


def write(folder: Path, *names: str) -> Path:
    for name, content in files().items():
        if name in names and name == "metrics":
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
        elif name in names:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class Elements(HTMLParser):
    """Every element of a page as its name and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_quotes_the_result() -> None:
    page = render(record())
    for figure in (
        "cifar_resnet20 on cifar10, budget 20.4M MACs",
        "92.13 %",
        "91.01 %",
        "91.43 %",
        "20,318,688 (49.8 %)",
        "40,813,184",
    ):
        assert figure in page
    assert (
        "+0.42 points top-1" in page and "seed 3: a difference from one seed is no evidence by itself" in page
    )
    assert "A short schedule." in page and "They differ." in page and "peel run --budget 50%" in page
    assert "70.00 %" in page and "1.180" in page and "3,994,438 of 4,000,000 spent" in page
    assert page.count("<svg") == 4 and "not complete" not in page


def test_a_loss_against_uniform_is_shown_as_one() -> None:
    result = files()["result"]
    result["rows"][2]["top1"] = 0.9001
    assert "−1.00 points top-1" in render(record(result=result))


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = render(record())
    assert "http" not in page and "@import" not in page
    for tag, attributes in Elements(page).found:
        assert tag not in ("script", "img", "iframe", "object")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_every_id_is_there_once_and_every_reference_finds_its_own() -> None:
    page = render(record())
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    references = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert len(ids) == len(set(ids)) and references and references <= set(ids)


def test_text_of_users_is_text() -> None:
    bad = "<script>alert('$x$')</script>&\""
    plan, metrics = json.loads(
        json.dumps([files()["plan"], files()["metrics"]])
        .replace("layer2.conv", "<u>$x$")
        .replace("16x16", "<i>8&")
    )
    settings = files()["settings"] | {"command": bad, "given": {bad: bad}}
    settings["resolved"] |= {"model": bad, "data": bad}
    page = render(
        record(
            settings=settings,
            plan=plan,
            metrics=metrics,
            result=files()["result"] | {"notes": [bad]},
            environment={bad: bad},
        )
    )
    assert {tag for tag, _ in Elements(page).found} <= {tag for tag, _ in Elements(render(record())).found}
    assert page.count("&lt;script&gt;") >= 8
    charts = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert (
        ">&lt;u&gt;$x$</text>" in charts
        and ">&lt;i&gt;8&amp;</text>" in charts
        and "<title>&lt;u&gt;$x$ (&lt;i&gt;8&amp;)" in charts
    )


@pytest.mark.parametrize(
    "names, charts, said, unsaid",
    [
        (
            (),
            0,
            ["The plan is not made yet", "No epoch is finished yet", "The result is not written yet"],
            [],
        ),
        (("metrics",), 2, ["The plan is not made yet", "The result is not written yet"], ["No epoch"]),
        (
            ("plan", "metrics"),
            4,
            ["The result is not written yet", "20,318,688 (49.8 %)"],
            ["The plan is not made", "points top-1"],
        ),
        (("plan", "result"), 2, ["No epoch is finished yet", "+0.42 points"], ["The result is not written"]),
    ],
)
def test_a_page_of_an_unfinished_run_says_what_is_missing(
    tmp_path: Path, names: tuple[str, ...], charts: int, said: list[str], unsaid: list[str]
) -> None:
    page = render(RunRecord.read(write(tmp_path, "settings", *names)))
    assert page.count("<svg") == charts
    assert (
        "not complete" in page
        and all(words in page for words in said)
        and not any(words in page for words in unsaid)
    )


def test_a_stage_under_way_and_a_stage_that_was_not_run_are_named() -> None:
    result = files()["result"]
    del result["rows"][1]["top1"], result["rows"][1]["top5"]
    page = render(record(metrics=[epoch("original", 1, of=40)], result=result))
    assert (
        "original stands at epoch 1 of 40" in page
        and "No accuracy of uniform" in page
        and "can be compared once both are trained" in page
    )


def test_widths_from_elsewhere_need_no_backbone() -> None:
    plan = files()["plan"] | {"rounds": []}
    for key in ("backbone", "pool", "policy"):
        del plan[key]
    page = render(record(plan=plan, metrics=[epoch("peel", 1), epoch("peel", 2)]))
    assert "no backbone and no importance" in page and page.count("<svg") == 3 and "not complete" not in page


def test_later_rounds_have_their_tables_and_curves() -> None:
    plan = files()["plan"]
    plan["rounds"].append(
        {**copy.deepcopy(plan["rounds"][0]), "distinct": False, "note": "They hardly differ."}
    )
    page = render(record(plan=plan, metrics=[*files()["metrics"], epoch("backbone-2", 1)]))
    assert (
        "Round 1 of 2" in page
        and "Round 2 of 2" in page
        and '<p class="box">They hardly differ.' in page
        and ">backbone-2</text>" in page
    )


@pytest.mark.parametrize("count", [12, 120])
def test_every_tie_is_named_in_chart_and_table(count: int) -> None:
    plan = files()["plan"] | {
        "groups": {
            "8x8": [f"t{i}" for i in range(count // 3)],
            "4x4": [f"t{i}" for i in range(count // 3, count)],
        }
    }
    for holder in (plan, plan["original"], plan["backbone"], plan["uniform"]):
        holder["widths"] = {f"t{i}": 8 + i for i in range(count)}
    page = render(record(plan=plan))
    assert page.count(">% of the channels</text>") == -(-count // 40)  # rows, so that names stay readable
    for i in range(count):
        assert f">t{i}</text>" in page and f'<td class="words">t{i}</td>' in page and f"<title>t{i} (" in page


def test_numbers_that_are_not_finite_leave_a_gap() -> None:
    metrics = files()["metrics"]
    metrics[0]["train"]["loss"], metrics[1]["test"]["loss"], metrics[3]["test"] = (
        float("inf"),
        float("nan"),
        {},
    )
    assert render(record(metrics=metrics)).count("<svg") == 4


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path, *files())
    code = "import sys, pathlib, peel.record as r, peel.report as p; print(p.render(r.RunRecord.read(pathlib.Path(sys.argv[1]))))"
    pages = {
        subprocess.run(
            [sys.executable, "-c", code, folder],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(pages) == 1


def test_a_line_cut_short_at_the_end_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, *files()) / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in (whole + b'{"stage": "peel", "epo', whole + '{"stage": "é'.encode()[:-1], whole + b"1"):
        path.write_bytes(cut)
        assert RunRecord.read(tmp_path) == record()


def test_other_damage_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no settings\.json"):
        RunRecord.read(tmp_path)
    write(tmp_path, *files())
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in line 2"):
        RunRecord.read(tmp_path)
    write(tmp_path, *files())
    for name in ("settings", "environment", "plan", "result"):
        (tmp_path / f"{name}.json").write_text('{"format": ')
        with pytest.raises(RunError, match=rf"{name}\.json is damaged"):
            RunRecord.read(tmp_path)
        write(tmp_path, name)
    for change, words in (({"format": "other"}, "the format 'other'"), ({"version": 2}, "version 2")):
        (tmp_path / "plan.json").write_text(json.dumps(files()["plan"] | change))
        with pytest.raises(RunError, match=words):
            RunRecord.read(tmp_path)
