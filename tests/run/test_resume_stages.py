"""A run that is killed at any moment, any number of times, ends bit-identical to an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.killing import KILLED, exit_code, run_until, start, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of three steps in every stage.
BASE: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64},
    "method": "peel",
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}
STAGES = ("original", "backbone", "uniform", "peel")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything in a run folder that does not depend on time."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors" or path.stem in ("plan", "slim", "state", "environment"):
            found[str(path.relative_to(folder))] = path.read_bytes()
    found["metrics"] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    found["rows"], found["notes"] = result["rows"], result["notes"]
    for item in (*found["metrics"], *found["rows"]):
        assert item.pop("seconds") >= 0
        item.pop("images_per_second", None)
    found["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return found


def straight(folder: Path, settings: dict[str, Any], model: str = "Small") -> dict[str, Any]:
    assert exit_code(start(run_until, folder, settings, ("", 0), None, model)) == 0
    return outcome(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of an uninterrupted run."""
    return straight(tmp_path_factory.mktemp("uninterrupted") / "run", BASE)


#: Twelve steps in every stage.
LONGER: dict[str, Any] = {
    "train": {"epochs": 4, "batch_size": 64},
    "method": "peel",
    "backbone": {"epochs": 4},
}

VARIANTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "ten kills in every stage, a checkpoint after every step": (LONGER, "Small", STAGES),
    "all kinds of random numbers, a checkpoint after every epoch": (
        {"checkpoint_seconds": 600.0},
        "Restless",
        STAGES,
    ),
    "two rounds, criterion gradient": (
        {"rounds": 2, "criterion": "gradient"},
        "Dropping",
        ("original", "backbone", "backbone-2", "peel"),
    ),
    "in-place distillation, criterion legr": (
        {"distill": "in-place", "criterion": "legr", "evaluations": 3},
        "Small",
        ("backbone", "uniform", "peel"),
    ),
}


#: Ten to forty kills each: one variant is not slow.
QUICK = "all kinds of random numbers, a checkpoint after every epoch"


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in VARIANTS]
)
def test_a_run_killed_at_random_steps_ends_bit_identical(variant: str, tmp_path: Path) -> None:
    changes, model, stages = VARIANTS[variant]
    settings = {**BASE, **changes}
    rng = random.Random(variant)
    for stage in stages:
        steps, kills = (12, 10) if settings["train"]["epochs"] == 4 else (6, 2)
        if stage == "backbone-2" or "legr" in variant:
            steps = 3  # fewer epochs; fewer images
        for step in sorted(rng.sample(range(1, steps + 1), kills)):
            code = exit_code(start(run_until, tmp_path / "killed", settings, (stage, step), None, model))
            assert code == KILLED, f"step {step} of {stage} was not reached: {code}"
    assert straight(tmp_path / "killed", settings, model) == straight(tmp_path / "straight", settings, model)


@pytest.mark.slow
def test_a_run_killed_around_its_writes_ends_bit_identical(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    rng = random.Random(7)
    # The first writes one by one, then random ones.
    writes = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    code = KILLED
    for attempt in range(60):
        write = writes[attempt] if attempt < len(writes) else (rng.randint(3, 14), rng.random() < 0.5)
        code = exit_code(start(run_until, tmp_path / "killed", BASE, ("", 0), write))
        if code == 0:
            break
        assert code == KILLED
    assert code == 0, "the run did not end"
    assert attempt > 8
    assert outcome(tmp_path / "killed") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [False, True])
def test_a_run_killed_at_any_single_write_ends_bit_identical(
    after: bool, first: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    for number in range(first, 200, 4):
        folder = tmp_path / str(number)
        code = exit_code(start(run_until, folder, BASE, ("", 0), (number, after)))
        if code == 0:
            break
        assert code == KILLED
        assert straight(folder, BASE) == uninterrupted, f"killed at write {number}"
    assert 40 < number < 190


@pytest.mark.slow
def test_a_run_killed_at_random_times_ends_bit_identical(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    rng = random.Random(3)
    kills = 0
    while True:
        process = start(run_until, tmp_path / "killed", BASE)
        if kills < 6:
            # The start takes about half a second, all stages about one.
            process.join(0.4 + rng.random())
            process.kill()
        code = exit_code(process)
        if code == 0:
            break
        assert code == KILLED
        kills += 1
    assert kills >= 1
    assert outcome(tmp_path / "killed") == uninterrupted


def test_after_damage_to_the_newest_checkpoint_the_one_before_is_used(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    assert exit_code(start(run_until, tmp_path / "killed", BASE, ("uniform", 5))) == KILLED
    newest = max((tmp_path / "killed" / "checkpoints").glob("uniform-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    assert straight(tmp_path / "killed", BASE) == uninterrupted


def test_metrics_ahead_of_the_checkpoint_and_half_lines_are_corrected(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    settings = {**BASE, "checkpoint_seconds": 600.0}
    assert exit_code(start(run_until, tmp_path / "killed", settings, ("uniform", 5))) == KILLED
    path = tmp_path / "killed" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["original"] * 2 + ["backbone"] * 2 + ["uniform"]
    path.write_text("\n".join([*lines, lines[-1].replace('"epoch": 1', '"epoch": 2'), lines[-1][:40]]))
    assert straight(tmp_path / "killed", settings) == uninterrupted


@pytest.mark.slow
def test_the_command_killed_at_random_times_ends_bit_identical(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "peel", "run", "cifar_resnet20", "--train.epochs", "1", "--train.batch-size",
        "128", "--method", "peel", "--backbone.epochs", "1", "--checkpoint-seconds", "0",
        "--bench-seconds", "0", "--quiet",
        "--output",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    rng = random.Random(11)
    for _ in range(4):
        process = subprocess.Popen([*command, tmp_path / "killed"], env=environment)
        wait_for(tmp_path / "killed" / ".lock")
        time.sleep(3 + 3 * rng.random())
        process.kill()
        process.wait()
    for folder in ("killed", "straight"):
        subprocess.run([*command, tmp_path / folder], env=environment, check=True, capture_output=True)
    killed, whole = outcome(tmp_path / "killed"), outcome(tmp_path / "straight")
    for found in (killed, whole):
        # It names the folder in the command.
        del found["state.json"]
    assert killed == whole
