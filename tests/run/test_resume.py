"""The same call on the folder of a run: nothing is computed twice, and a damaged file is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.folders import content
from helpers.small import Counting, same_weights, small_run
from peel.errors import CorruptFileError, RunError, StoreError
from peel.run.folder import RunFolder
from peel.run.result import Result
from peel.train.history import EpochRecord

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_same_call_again_trains_nothing_and_gives_the_same_result(
    finished: tuple[Path, Result], own: Path
) -> None:
    before, reporter = content(own), Counting()
    again = small_run(output=own, seed=3, callbacks=[reporter])
    assert reporter.steps == {}
    assert list(again.rows) == list(finished[1].rows)
    assert again.history == finished[1].history
    assert again.model is not None
    assert finished[1].model is not None
    assert same_weights(again.model, finished[1].model)
    after = content(own)
    assert set(after) == set(before)
    for name in before:
        if name.startswith("stages/") or name in ("state.json", "plan.json", "metrics.jsonl"):
            assert after[name] == before[name], f"{name} was written again"
        elif name not in (".lock", "report.html"):
            assert after[name][1] == before[name][1], f"{name} changed"


def test_what_does_not_change_the_result_may_change(own: Path) -> None:
    reporter = Counting()
    small_run(output=own, seed=3, device="cpu", workers=1, checkpoint_seconds=5.0, callbacks=[reporter])
    assert reporter.steps == {}


def test_stages_that_finished_are_kept_when_a_later_one_is_lost(own: Path) -> None:
    before = content(own)
    for name in ("stages/peel.record.json", "result.json", "slim.json"):
        (own / name).unlink()
    reporter = Counting()
    small_run(output=own, seed=3, callbacks=[reporter])
    assert reporter.steps == {"peel": 6}
    after = content(own)
    assert all(
        after[name][1] == before[name][1]
        for name in ("stages/peel.safetensors", "slim.json", "slim.safetensors")
    )
    assert all(
        after[name] == before[name]
        for name in before
        if name.startswith(("stages/original", "stages/backbone", "stages/uniform"))
    )


def test_checkpoints_that_a_kill_left_beside_a_finished_stage_are_taken_away(own: Path) -> None:
    RunFolder(own).checkpoints("uniform").save({"epoch": 2}, 2, 0)
    small_run(output=own, seed=3)
    assert not list((own / "checkpoints").iterdir())


def test_strange_lines_among_the_metrics_do_not_stop_a_run(own: Path) -> None:
    before = [json.loads(text) for text in (own / "metrics.jsonl").read_text().splitlines()]
    with (own / "metrics.jsonl").open("ab") as file:
        file.writelines(
            line + b"\n" for line in (b"5", b"{}", b"[", b'{"stage": "peel"', b"\xff\xfe", b"null")
        )
    (own / "stages" / "peel.report.record.json").unlink()
    small_run(output=own, seed=3)
    after = [json.loads(text) for text in (own / "metrics.jsonl").read_text().splitlines()]
    others = [[each for each in lines if each["stage"] != "peel"] for lines in (before, after)]
    assert others[0] == others[1]
    assert len(after) == len(before)


def test_an_error_that_nobody_foresaw_is_kept_until_the_run_goes_on(tmp_path: Path) -> None:
    class Broken(NoCallback):
        def epoch(self, epoch: EpochRecord) -> None:
            raise ValueError("this was not foreseen")

    with pytest.raises(ValueError, match="not foreseen"):
        small_run(output=tmp_path / "run", callbacks=[Broken]())
    assert (
        json.loads((tmp_path / "run" / "error.json").read_text())["error"]
        == "ValueError: this was not foreseen"
    )
    assert "this was not foreseen" in (tmp_path / "run" / "report.html").read_text()
    small_run(output=tmp_path / "run")
    assert not (tmp_path / "run" / "error.json").exists()


@pytest.mark.parametrize("steps", [["original"], ["backbone", "plan"]])
def test_fewer_steps_lose_nothing_of_what_is_done(steps: list[str], own: Path) -> None:
    before = {name: json.loads((own / name).read_text()) for name in ("result.json", "slim.json")}
    reporter = Counting()
    result = small_run(output=own, seed=3, steps=steps, callbacks=[reporter])
    assert reporter.steps == {}
    assert {name: json.loads((own / name).read_text()) for name in before} == before
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]


def test_a_damaged_result_is_made_anew(own: Path) -> None:
    before = json.loads((own / "result.json").read_text())
    (own / "result.json").write_text('{"rows": [5], "notes": []}')
    small_run(output=own, seed=3)
    assert json.loads((own / "result.json").read_text()) == before


def test_stages_that_were_finished_before_are_all_named(own: Path) -> None:
    """Otherwise their time would be counted as still to come."""

    class Naming(NoCallback):
        def __init__(self) -> None:
            self.planned: list[str] = []
            self.named: list[str] = []

        def plan_stages(self, stages: Sequence[tuple[str, float]]) -> None:
            self.planned = [name for name, _ in stages]

        def stage(self, name: str, what: str) -> None:
            self.named.append(name)

    reporter = Naming()
    small_run(output=own, seed=3, callbacks=[reporter])
    assert reporter.named == reporter.planned == ["original", "backbone", "uniform", "peel"]


# Damaged files


def test_a_stage_of_another_network_is_said_to_be_damaged(own: Path) -> None:
    for suffix in ("json", "safetensors"):
        (own / "stages" / f"peel.{suffix}").write_bytes((own / "stages" / f"original.{suffix}").read_bytes())
    with pytest.raises(
        CorruptFileError,
        match=r"stages/peel.json is of another network: \w+ has \d+ channels there, not \d+\. Restore",
    ):
        small_run(output=own, seed=3)


def test_a_damaged_stage_is_said_to_be_damaged(own: Path) -> None:
    (own / "result.json").unlink()
    weights = own / "stages" / "uniform.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StoreError, match=r"uniform.safetensors is damaged"):
        small_run(output=own, seed=3)
    (own / "stages" / "original.record.json").write_text("{")
    with pytest.raises(RunError, match=r"original.record.json is damaged"):
        small_run(output=own, seed=3)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("stages/original.record.json", "{}", "it has no 'history'"),
        ("plan.json", "{}", "it has no 'widths'"),
        ("plan.json", '{"widths": {}, "rounds": 5}', "its 'rounds' is of the kind int, not list"),
        ("plan.json", '{"widths": {}, "rounds": [5]}', "its 'rounds' are not those of a plan"),
        (
            "plan.json",
            '{"widths": {}, "rounds": [{"distinct": false, "note": []}]}',
            "its 'rounds' are not those of a plan",
        ),
        ("plan.json", '{"widths": {"other": 3}, "rounds": []}', ".*other.*"),
        ("state.json", "[]", "expected an object, found list"),
    ],
)
def test_a_file_with_something_else_in_it_is_said_to_be_damaged(
    name: str, content: str, reason: str, own: Path
) -> None:
    (own / name).write_text(content)
    with pytest.raises(
        CorruptFileError,
        match=rf"{name} is damaged: {reason}\. Restore it from a copy, or .* another --output",
    ):
        small_run(output=own, seed=3)


TEST = '{"loss": 1.0, "top1": 0.5, "top5": 1.0}'
EPOCH = f'{{"epoch": 1, "of": 1, "lr": 0.1, "train": {{}}, "test": {TEST}, "seconds": 1.0, "images_per_second": 1.0}}'
RECORD = f'{{"history": [{EPOCH}], "image_passes": 1, "notes": NOTES}}'
GOOD = RECORD.replace("NOTES", "[]")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("peel.report.record.json", '{"history": []}', "it has no 'image_passes'"),
        (
            "peel.report.record.json",
            '{"history": {}, "image_passes": 1}',
            "its 'history' is of the kind dict, not list",
        ),
        (
            "peel.report.record.json",
            '{"history": [], "image_passes": 1}',
            "its 'history' is not that of a training",
        ),
        (
            "peel.report.record.json",
            '{"history": [{"epoch": 1}], "image_passes": 1}',
            "its 'history' is not that of a training",
        ),
        ("peel.report.record.json", GOOD.replace(TEST, "null"), "its 'history' is not that of a training"),
        ("peel.report.record.json", GOOD.replace(TEST, "{}"), "its 'history' is not that of a training"),
        ("peel.report.record.json", GOOD.replace("0.5", '"half"'), "its 'history' is not that of a training"),
        (
            "peel.report.record.json",
            GOOD.replace('"train": {}', '"train": 5'),
            "its 'history' is not that of a training",
        ),
        (
            "peel.report.record.json",
            GOOD.replace('"seconds": 1.0', '"seconds": "long"'),
            "its 'history' is not that of a training",
        ),
        ("peel.report.record.json", RECORD.replace("NOTES", "5"), "its 'notes' are no sentences"),
        ("peel.report.record.json", RECORD.replace("NOTES", "[5]"), "its 'notes' are no sentences"),
        (
            "peel.report.record.json",
            RECORD.replace("NOTES", '[], "input": 5'),
            "its 'input' does not say how to feed the network",
        ),
        ("state.json", '{"resolved": 1}', "its 'resolved' is of the kind int, not dict"),
        ("state.json", "[" * 100_000, "it is nested too deeply"),
        ("environment.json", "3", "expected an object, found int"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CorruptFileError, match=rf"{name} is damaged: {reason}\."):
        RunFolder(tmp_path).read_json(name)
