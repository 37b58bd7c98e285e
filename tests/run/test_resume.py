"""The same call on an existing folder: nothing is computed twice, and corrupt files are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.folders import content, read
from helpers.small import Counting, same_weights, small_run
from peel.errors import CorruptFileError
from peel.run.result import Record, Result
from peel.run.store import RunFolder
from peel.run.subject import State
from peel.train.callbacks import Callback, EpochRecord
from peel.train.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_same_call_again_trains_nothing_and_gives_the_same_result(
    finished: tuple[Path, Result], own: Path
) -> None:
    before, counting = content(own), Counting()
    again = small_run(output=own, seed=3, callbacks=[counting])
    assert counting.steps == {}
    assert list(again.rows) == list(finished[1].rows)
    assert again.history == finished[1].history
    assert again.plan == finished[1].plan
    assert again.model is not None
    assert finished[1].model is not None
    assert same_weights(again.model, finished[1].model)
    after = content(own)
    assert set(after) == set(before)
    for name in before:
        if name.startswith("stages/") or name in ("plan.json", "metrics.jsonl"):
            assert after[name] == before[name], f"{name} was written again"
        elif name not in (".lock", "report.html"):
            assert after[name][1] == before[name][1], f"{name} changed"


def test_settings_that_do_not_change_the_result_may_change(own: Path) -> None:
    counting = Counting()
    small_run(output=own, seed=3, device="cpu", workers=1, checkpoint_seconds=5.0, callbacks=[counting])
    assert counting.steps == {}


def test_finished_stages_are_kept_when_a_later_one_is_lost(own: Path) -> None:
    before = content(own)
    for name in ("stages/peel.record.json", "result.json", "slim.safetensors"):
        (own / name).unlink()
    counting = Counting()
    small_run(output=own, seed=3, callbacks=[counting])
    assert counting.steps == {"peel": 6}
    after = content(own)
    for name in ("stages/peel.safetensors", "slim.safetensors"):
        assert after[name][1] == before[name][1]
    for name in before:
        if name.startswith(("stages/original", "stages/backbone", "stages/uniform")):
            assert after[name] == before[name]


def test_checkpoints_of_a_finished_stage_are_removed(own: Path) -> None:
    key = read(own / "stages" / "uniform.record.json")["key"]
    Checkpoints(own / "checkpoints", "uniform", run=key).save({"epoch": 2}, 2, 0)
    small_run(output=own, seed=3)
    assert not list((own / "checkpoints").iterdir())


def test_unreadable_lines_of_metrics_do_not_stop_a_run(own: Path) -> None:
    before = [json.loads(text) for text in (own / "metrics.jsonl").read_text().splitlines()]
    with (own / "metrics.jsonl").open("ab") as file:
        file.write(b'5\n{}\n[\n{"stage": "peel"\n\xff\xfe\nnull\n')
    (own / "stages" / "peel.record.json").unlink()
    small_run(output=own, seed=3)
    after = [json.loads(text) for text in (own / "metrics.jsonl").read_text().splitlines()]
    others = [[each for each in lines if each["stage"] != "peel"] for lines in (before, after)]
    assert others[0] == others[1]
    assert len(after) == len(before)


def test_an_unexpected_error_is_stored_until_the_run_resumes(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_epoch_end(self, record: EpochRecord) -> None:
            raise ValueError("unexpected")

    with pytest.raises(ValueError, match="unexpected"):
        small_run(output=tmp_path / "run", callbacks=[Broken()])
    assert read(tmp_path / "run" / "error.json")["error"] == "ValueError: unexpected"
    assert "ValueError: unexpected" in (tmp_path / "run" / "report.html").read_text()
    small_run(output=tmp_path / "run")
    assert not (tmp_path / "run" / "error.json").exists()


@pytest.mark.parametrize("stages", [["original"], ["plan"]])
def test_a_start_with_fewer_stages_loses_nothing(stages: list[str], own: Path) -> None:
    before = {name: (own / name).read_bytes() for name in ("result.json", "slim.safetensors")}
    counting = Counting()
    result = small_run(output=own, seed=3, stages=stages, callbacks=[counting])
    assert counting.steps == {}
    assert {name: (own / name).read_bytes() for name in before} == before
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]


def test_a_corrupt_result_is_written_again(own: Path) -> None:
    before = read(own / "result.json")
    (own / "result.json").write_text('{"rows": [5], "notes": []}')
    small_run(output=own, seed=3)
    assert read(own / "result.json") == before


def test_callbacks_hear_of_finished_stages_too(own: Path) -> None:
    """Otherwise their time would count as remaining."""

    class Naming(Callback):
        planned: Sequence[str] = ()

        def __init__(self) -> None:
            self.begun: list[str] = []

        def on_run_begin(self, stages: Sequence[tuple[str, float]]) -> None:
            self.planned = [name for name, _ in stages]

        def on_stage_begin(self, name: str, description: str) -> None:
            self.begun.append(name)

    naming = Naming()
    small_run(output=own, seed=3, callbacks=[naming])
    assert naming.begun == naming.planned == ["original", "backbone", "uniform", "peel"]


# Corrupt files


def test_a_stage_with_the_network_of_another_is_named(own: Path) -> None:
    shutil.copy(own / "stages" / "original.safetensors", own / "stages" / "peel.safetensors")
    message = r"stages/peel.safetensors has other widths than the plan. Restore"
    with pytest.raises(CorruptFileError, match=message):
        small_run(output=own, seed=3)


def test_corrupt_weights_and_records_are_named(own: Path) -> None:
    (own / "result.json").unlink()
    weights = own / "stages" / "uniform.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"uniform.safetensors is corrupt"):
        small_run(output=own, seed=3)
    (own / "stages" / "original.record.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"original.record.json is corrupt"):
        small_run(output=own, seed=3)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("stages/original.record.json", "{}", "`history`"),
        ("plan.json", "{}", "not a plan"),
        ("plan.json", '{"format": "peel-plan", "widths": 5}', "not a plan"),
        ("state.json", "[]", "expected an object, found list"),
        ("state.json", "{}", "`command`"),
        ("environment.json", "3", "expected an object, found int"),
    ],
)
def test_a_file_with_other_content_is_named_once_with_the_way_out(
    name: str, text: str, reason: str, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / name).write_text(text)
    way_out = r"Restore it from a copy, or start a new run with another --output\."
    with pytest.raises(CorruptFileError, match=rf"{name} is corrupt: .*{reason}.* {way_out}"):
        small_run(output=own, seed=3)
    assert name not in caplog.text


def test_a_plan_of_another_network_is_named(own: Path) -> None:
    plan = read(own / "plan.json")
    plan["slim"]["widths"]["other"] = 3
    (own / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(CorruptFileError, match=r"plan.json is corrupt: .*other.* Restore it from a copy"):
        small_run(output=own, seed=3)


TEST = '{"loss": 1.0, "top1": 0.5, "top5": 1.0}'
EPOCH = (
    f'{{"epoch": 1, "epochs": 1, "lr": 0.1, "train": {{}}, "test": {TEST}, "seconds": 1.0, '
    '"images_per_second": 1.0, "extra": {}}'
)
RECORD = f'{{"history": [{EPOCH}], "image_passes": 1, "notes": []}}'


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Record, '{"history": []}', "image_passes"),
        (Record, '{"history": {}, "image_passes": 1}', "history"),
        (Record, '{"history": [{"epoch": 1}], "image_passes": 1}', "epochs"),
        (Record, RECORD.replace("0.5", '"half"'), "top1|test"),
        (Record, RECORD.replace('"train": {}', '"train": 5'), "train"),
        (Record, RECORD.replace('"seconds": 1.0', '"seconds": "long"'), "seconds"),
        (Record, RECORD.replace('"notes": []', '"notes": [5]'), "notes"),
        (State, '{"command": "peel", "subject": 1, "settings": {}, "jobs": {}, "keys": {}}', "subject"),
        (State, "[" * 100_000, "nested too deeply"),
        (State, "\0", "."),
    ],
)
def test_the_wrong_part_of_a_file_is_named(kind: type[Any], text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(CorruptFileError, match=rf"file.json is corrupt: .*({reason})"):
        RunFolder(tmp_path).read_json("file.json", kind)
    path.write_text(RECORD)
    assert RunFolder(tmp_path).read_json("file.json", Record).image_passes == 1
