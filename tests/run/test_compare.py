"""Methods side by side, as jobs in one folder."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import peel
from peel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

NET = "helpers.small:Small"
SHORT = ["--train.epochs", "1", "--train.batch-size", "256", "--backbone.epochs", "1"]
GRID = ["--methods", "sensitivity", "magnitude", "--budgets", "60%", "40%", "--seeds", "2"]


def command(output: Path, *more: str) -> list[str]:
    return ["compare", NET, "--data", "digits", *SHORT, "--output", str(output), *more]


def start(output: Path, *more: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(peel.__file__).parents[1])])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = [sys.executable, "-m", "peel", *command(output, *more)]
    return subprocess.Popen(arguments, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)


def rows(output: Path) -> list[dict[str, str]]:
    with (output / "compare.csv").open() as file:
        return list(csv.DictReader(file))


def digests(output: Path) -> dict[str, str]:
    """Stage -> hash of its network. The header of a file names the class, which is the same here."""
    found = sorted((output / "stages").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def times(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (output / "stages").glob("*.record.json")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of twelve cells, done by one worker."""
    output = tmp_path_factory.mktemp("compare") / "alone"
    assert start(output, *GRID).wait() == 0
    return output


def test_every_cell_has_a_row_and_what_cells_share_is_made_once(alone: Path) -> None:
    found = rows(alone)
    assert [row["status"] for row in found] == ["done"] * 12
    assert {row["method"] for row in found} == {"uniform", "sensitivity", "magnitude"}
    budgets = {
        row["budget"]: [int(r["macs"]) for r in found if r["budget"] == row["budget"]] for row in found
    }
    assert max(budgets["40%"]) < min(budgets["60%"])
    names = [path.name for path in (alone / "stages").glob("*.safetensors")]
    assert sum(name.startswith("original-") for name in names) == 2, "one for each seed"
    assert sum(name.startswith("uniform-") and "plan" not in name for name in names) == 4
    assert all(row["original_top1"] for row in found), "the original is in each row"


def test_the_same_command_again_does_nothing_and_another_method_is_added(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = times(alone)
    assert main([*command(alone, *GRID), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 12
    assert times(alone) == before
    more = ["--methods", "taylor", "--budgets", "60%", "--seeds", "0,1"]
    assert main(command(alone, *more)) == 0
    after = times(alone)
    assert {name: after[name] for name in before} == before
    new = after.keys() - before.keys()
    assert len(new) == 4, "two plans and two networks"
    assert all(name.startswith("taylor") for name in new)
    assert [row["method"] for row in rows(alone)] == ["uniform", "taylor"] * 2


@pytest.mark.slow
def test_two_workers_give_the_same_bits_also_after_one_was_killed(alone: Path, tmp_path: Path) -> None:
    assert start(tmp_path / "two", *GRID, "--jobs", "2").wait() == 0
    assert len(rows(tmp_path / "two")) == 12
    own = {name: value for name, value in digests(alone).items() if "taylor" not in name}
    assert digests(tmp_path / "two") == own
    process = start(tmp_path / "killed", *GRID, "--jobs", "2")
    while len(times(tmp_path / "killed")) < 4 if (tmp_path / "killed" / "stages").exists() else True:
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
    done = times(tmp_path / "killed")
    assert process.wait() == 0
    after = times(tmp_path / "killed")
    assert {name: after[name] for name in done} == done, "nothing is done again"
    assert digests(tmp_path / "killed") == own


METHOD = """
import peel

class Fails(peel.Method):
    def solve(self, problem, work):
        if work.is_rehearsal:
            return peel.Answer(problem.constraint.uniform)
        raise RuntimeError("not today")
"""


def test_a_cell_that_fails_is_named_and_the_others_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(METHOD)
    grid = ["--methods", f"{tmp_path / 'own.py'}:Fails", "--budgets", "50%", "--seeds", "1"]
    assert main(command(tmp_path / "out", *grid)) == 1
    uniform, own = rows(tmp_path / "out")
    assert (uniform["status"], own["status"]) == ("done", "failed")
    error = own["error"]
    assert error.startswith("the method Fails raised RuntimeError: not today (")
    assert own["error"] == error
    assert "1 failed: the method Fails raised RuntimeError" in capsys.readouterr().out
    (tmp_path / "own.py").write_text(METHOD.replace("if work.is_rehearsal", "if True"))
    assert main(command(tmp_path / "out", *grid)) == 0, "failed cells are tried again"


def test_settings_of_methods_may_differ_under_names_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        'train.epochs = 1\n[methods.random]\nmethod = "peel"\npolicy = "random"\n'
        '[methods.equal]\nmethod = "peel"\npolicy = "equal"\n'
    )
    grid = ["--methods", "random", "equal", "--budgets", "50%", "--seeds", "1", "--distill", "none"]
    arguments = ["compare", NET, "--data", "digits", "--train.batch-size", "256", *grid]
    assert main([*arguments, "--config", str(tmp_path / "grid.toml"), "--output", str(tmp_path / "out")]) == 0
    found = rows(tmp_path / "out")
    assert [row["method"] for row in found] == ["uniform", "random", "equal"]
    assert found[1]["macs"] != found[2]["macs"] or found[1]["params"] != found[2]["params"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "sensitiv"], "Did you mean sensitivity"),
        (["--seeds", "0"], "at least 1"),
        (["--seeds", "one"], "--seeds is a number"),
        (["--budget", "30%"], "a comparison takes --budgets"),
        (["--method", "peel"], "a comparison takes --methods"),
        (["--jobs", "0"], "--jobs is at least 1"),
        (["--budgets", "half"], "'half'"),
        (["--methods", "uniform", "--peel.rounds", "2"], "not among --methods"),
        (["--methods", "peel", "--peel.rounds", "x"], "peel.rounds: expected int"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "out", *options)) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_model_is_refused(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["compare", "cifar_resnet20", "--data", "digits", *SHORT, "--output", str(alone), *GRID]
    assert main(other) == 2
    error: Any = capsys.readouterr().err
    assert "was started with other settings" in error
    assert "model.macs" in error
