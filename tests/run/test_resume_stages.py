"""A run that is killed, at any moment and as often as you like, ends as if nothing had happened: to the bit."""

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
    "backbone": {"epochs": 2},
    "checkpoint_seconds": 0.0,
}
STAGES = ("original", "backbone", "uniform", "peel")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves and that does not depend on how long it took."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors" or path.name in (
            "plan.json",
            "slim.json",
            "state.json",
            "environment.json",
        ):
            found[str(path.relative_to(folder))] = path.read_bytes()
    found["metrics"] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["rows"] = json.loads((folder / "result.json").read_text())["rows"]
    for item in (*found["metrics"], *found["rows"]):
        assert item.pop("seconds") >= 0
        item.pop("images_per_second", None)
    found["notes"] = json.loads((folder / "result.json").read_text())["notes"]
    found["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return found


def straight(folder: Path, settings: dict[str, Any], model: str = "Small") -> dict[str, Any]:
    assert exit_code(start(run_until, folder, settings, ("", 0), None, model)) == 0
    return outcome(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a plain run."""
    return straight(tmp_path_factory.mktemp("uninterrupted") / "run", BASE)


#: Twelve steps in every stage.
LONGER: dict[str, Any] = {"train": {"epochs": 4, "batch_size": 64}, "backbone": {"epochs": 4}}

VARIANTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "a checkpoint after every step, ten times in every stage": (LONGER, "Small", STAGES),
    "a checkpoint after every epoch, everything that is random": (
        {"checkpoint_seconds": 600.0},
        "Restless",
        STAGES,
    ),
    "two rounds, by gradient": (
        {"rounds": 2, "criterion": "gradient"},
        "Dropping",
        ("original", "backbone", "backbone-2", "peel"),
    ),
    "in-place distillation, learned ranking": (
        {"distill": "in-place", "criterion": "legr", "evaluations": 3},
        "Small",
        ("backbone", "uniform", "peel"),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_random_steps_of_every_stage_a_run_ends_bit_identical(variant: str, tmp_path: Path) -> None:
    changes, model, stages = VARIANTS[variant]
    settings = {**BASE, **changes}
    chance = random.Random(variant)
    for stage in stages:
        steps, kills = (
            (12, 10) if settings["train"]["epochs"] == 4 else (3, 2) if stage == "backbone-2" else (6, 2)
        )
        for step in sorted(chance.sample(range(1, steps + 1), kills)):
            code = exit_code(start(run_until, tmp_path / "killed", settings, (stage, step), None, model))
            assert code == KILLED, f"step {step} of {stage} was never reached: {code}"
    assert straight(tmp_path / "killed", settings, model) == straight(tmp_path / "straight", settings, model)


def test_killed_around_its_writes_a_run_ends_bit_identical(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    chance = random.Random(7)
    # From the very first writes on, each of which may leave the folder in a state of its own.
    writes = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    code = KILLED
    for attempt in range(60):
        write = writes[attempt] if attempt < len(writes) else (chance.randint(3, 14), chance.random() < 0.5)
        code = exit_code(start(run_until, tmp_path / "killed", BASE, ("", 0), write))
        if code == 0:
            break
        assert code == KILLED
    assert code == 0, "it never came to its end"
    assert attempt > 8
    assert outcome(tmp_path / "killed") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_single_write_a_run_ends_bit_identical(
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


def test_killed_from_outside_at_random_times_a_run_ends_bit_identical(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    chance = random.Random(3)
    kills = 0
    while True:
        process = start(run_until, tmp_path / "killed", BASE)
        if kills < 6:
            # Starting takes about half a second, the training of all stages about one.
            process.join(0.4 + chance.random())
            process.kill()
        code = exit_code(process)
        if code == 0:
            break
        assert code == KILLED
        kills += 1
    assert kills >= 1
    assert outcome(tmp_path / "killed") == uninterrupted


def test_a_damaged_newest_checkpoint_costs_a_step_and_nothing_else(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    assert exit_code(start(run_until, tmp_path / "killed", BASE, ("uniform", 5))) == KILLED
    newest = max((tmp_path / "killed" / "checkpoints").glob("uniform-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    assert straight(tmp_path / "killed", BASE) == uninterrupted


def test_half_a_line_of_metrics_and_lines_ahead_of_the_checkpoint_are_put_right(
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
def test_the_command_line_killed_at_random_times_ends_bit_identical(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "peel", "run", "cifar_resnet20", "--train.epochs", "1", "--train.batch-size", "128", "--backbone.epochs", "1",
        "--checkpoint-seconds", "0", "--quiet", "--output",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    chance = random.Random(11)
    for _ in range(4):
        process = subprocess.Popen([*command, tmp_path / "killed"], env=environment)
        wait_for(tmp_path / "killed" / ".lock")
        time.sleep(3 + 3 * chance.random())
        process.kill()
        process.wait()
    for folder in ("killed", "straight"):
        subprocess.run([*command, tmp_path / folder], env=environment, check=True, capture_output=True)
    killed, whole = outcome(tmp_path / "killed"), outcome(tmp_path / "straight")
    for found in (killed, whole):
        # The command names the folder.
        del found["state.json"]
    assert killed == whole
