"""A run times its networks at the end, once, and says how fast they are in its table, files and page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from helpers.small import Small, small_run
from peel.cli.main import main
from peel.cli.summary import draw_result
from peel.errors import ConfigError
from peel.report import RunRecord
from peel.run.result import Result

pytestmark = pytest.mark.usefixtures("one_thread", "hasty")

SENTENCE = "Speed-up over the original in torch eager, batch 1, 1 thread of"


def table(result: Result) -> str:
    shown = io.StringIO()
    draw_result(result, Console(width=200, file=shown))
    return shown.getvalue()


def test_table_files_and_page_have_the_speed_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"output": tmp_path / "run", "threads": 1, "distill": "none"}
    result = small_run(bench_seconds=0.05, **settings)
    original, *slims = result.rows
    assert original.speedup is None
    assert [row.name for row in slims] == ["uniform", "peel"]
    for row in slims:
        assert row.speedup is not None
        assert row.speedup > 0
        assert row.efficiency == pytest.approx(row.speedup / (original.macs / row.macs))
        assert f"{row.speedup:.2f}" in table(result)
    assert SENTENCE in table(result)
    page = (folder / "report.html").read_text()
    assert SENTENCE in page
    assert "<th>speed-up</th><th>over MACs</th>" in page

    record = RunRecord.read(folder).result
    assert record is not None
    assert record["rows"][2]["speedup"] == slims[1].speedup
    assert record["bench"] == result.bench
    assert [entry["network"] for entry in record["bench"]["entries"]] == ["original", "uniform", "peel"]

    # Two measurements never agree to the last digit.
    assert small_run(bench_seconds=0.05, **settings).rows == result.rows


def test_a_missing_measurement_is_made_by_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "run" / "result.json"
    settings = {"output": tmp_path / "run", "stages": ["plan", "final"], "distill": "none"}
    off = small_run(**settings)
    assert (off.bench, off.rows[0].speedup) == (None, None)
    assert "speed-up" not in table(off) + (tmp_path / "run" / "report.html").read_text().lower()
    old = json.loads(file.read_text())  # as it was before runs were timed
    del old["bench"], old["rows"][0]["speedup"], old["rows"][0]["efficiency"]
    file.write_text(json.dumps(old))
    (row,) = small_run(bench_seconds=0.05, **settings).rows
    assert row.name == "peel"
    assert row.speedup is not None, "against the original, which has no row"


def test_networks_that_cannot_be_timed_fail_nothing(tmp_path: Path) -> None:
    class NeedsTwo(Small):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_inference_mode_enabled() and len(x) == 1 and x.any():
                raise RuntimeError("one image\nis too few")
            return super().forward(x)

    result = small_run(NeedsTwo(), output=tmp_path / "run", bench_seconds=0.05, distill="none")
    assert result.bench == {"error": "RuntimeError: one image"}
    assert [row.speedup for row in result.rows] == [None] * 3
    for shown in (table(result), (tmp_path / "run" / "report.html").read_text()):
        assert shown.count("not timed") == 3
        assert "The networks were not timed: RuntimeError: one image" in shown


@pytest.mark.parametrize(("value", "words"), [(-1, ">= 0"), ("long", "expected float"), (1e9, "<= 3600")])
def test_wrong_seconds_are_refused(value: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=rf"bench_seconds: .*{words}.*, not {value!r}"):
        small_run(bench_seconds=value)
    assert main(["run", "--bench-seconds", str(value), "--dry-run"]) == 2
    assert "bench" in capsys.readouterr().err
