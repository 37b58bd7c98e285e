"""The result of a run on terminals of several widths."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from peel.report.summary import draw_rows

NAMES = ("original", "uniform, same budget", "sensitivity")


def row(name: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": name,
        "macs": 20_318_688,
        "params": 134_500,
        "memory": 345_600,
        "seconds": 75.0,
        "predicted_latency": None,
        "latency": None,
        "top1": 0.9143,
        "top5": 0.9987,
        "metric": None,
        "before_training": {"cut": 0.1321, "recalibrated": 0.6543, "repaired": 0.8412},
    }
    return {**values, **changes}


def rows(**changes: Any) -> list[dict[str, Any]]:
    original = row("original", macs=40_813_184, before_training={}, **changes)
    return [original, row("uniform", **changes), row("sensitivity", **changes)]


def bench() -> dict[str, Any]:
    speedup = {"median": 1.52, "low": 1.45, "high": 1.6, "verdict": "faster"}
    entries = [
        {"network": name, "backend": "eager", "speedup": speedup if number else None, "efficiency": 0.76}
        for number, name in enumerate(("original", "uniform", "sensitivity"))
    ]
    given = {"device": "A CPU", "cores": 4, "threads": 2, "batch": 1, "precision": "float32"}
    return {"entries": entries, "conditions": given, "notes": []}


def drawn(width: int, of: list[dict[str, Any]] | None = None) -> str:
    buffer = io.StringIO()
    draw_rows(of or rows(), bench(), Console(file=buffer, width=width))
    return buffer.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_name_title_or_number_is_shortened(width: int) -> None:
    text = drawn(width)
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= width
    for name in NAMES:
        assert any(line.startswith(f"{name} ") for line in lines)
    for shown in ("repaired", "top-1", "91.43%", "MACs", "20.3M (50%)", "speed-up", "1.52"):
        assert shown in text


def test_a_wide_console_has_one_table_a_narrow_one_two() -> None:
    assert drawn(160).count("sensitivity") == 1
    assert drawn(100).count("sensitivity") == 2
    for title in ("recalibrated", "top-5", "memory, 1 image", "over MACs", "time"):
        assert title in drawn(100)
    assert "left out" not in drawn(100)


def test_what_is_left_out_is_said() -> None:
    text = drawn(80)
    assert "left out, too narrow: memory, 1 image" in text
    assert text.count("memory") == 1
    assert "recalibrated" in text


def test_latencies_and_a_metric_of_the_users_own_are_shown() -> None:
    text = drawn(100, rows(metric=0.4321, top1=None, top5=None, predicted_latency=8e6, latency=9e6))
    for shown in ("metric", "0.4321", "latency, predicted", "8 ms", "9 ms"):
        assert shown in text
    assert "top-1" not in text
    assert "…" not in text
