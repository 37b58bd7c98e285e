"""Any path, no home, no network, no terminal, a missing package, a clock that jumps: `peel run` works."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.commands import line
from helpers.killing import KILLED, command, exit_code, run_until, start
from helpers.small import small_run
from peel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ["run", "helpers.small:Small", "--stages", "original", "--train.epochs", "1", "--device", "cpu"]
DIGITS = ["--data", "digits"]


def joined(place: Path, name: bytes) -> Path:
    """A path whose last part need not be text."""
    return Path(os.fsdecode(os.fsencode(place) + b"/" + name))


def run(log: Path, *options: str, **environment: str) -> str:
    """The output of the command."""
    log.write_text("")
    data = [] if "--data" in options else DIGITS
    code = exit_code(command([*RUN, *data, *options], log, **environment))
    text = log.read_text(errors="replace")
    assert code == 0, text
    assert "Traceback" not in text
    return text


def assert_no_escapes(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert b"\x1b" not in path.read_bytes(), path


# Paths


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        pytest.param(b"a b  c", "utf-8:strict", id="spaces", marks=pytest.mark.slow),
        pytest.param(b"a b  c", "ascii:strict", id="spaces, ascii", marks=pytest.mark.slow),
        pytest.param(b"caf\xe9 \xff", "utf-8:strict", id="no UTF-8"),
        pytest.param(b"caf\xe9 \xff", "ascii:strict", id="no UTF-8, ascii", marks=pytest.mark.slow),
        pytest.param("größe ✓".encode(), "utf-8:strict", id="letters", marks=pytest.mark.slow),
        pytest.param("größe ✓".encode(), "ascii:strict", id="letters, ascii"),
    ],
)
def test_the_output_may_have_any_path_in_any_encoding(name: bytes, encoding: str, tmp_path: Path) -> None:
    folder, log = joined(tmp_path, name), tmp_path / "log"
    assert "original" in run(log, "--output", str(folder), PYTHONIOENCODING=encoding)
    assert (folder / "result.json").exists()
    assert "original" in (folder / "report.html").read_text(encoding="utf-8")
    again = run(log, "--output", str(folder), "--json", "--quiet", PYTHONIOENCODING=encoding)
    assert json.loads(again)["folder"] == str(folder)


def test_folders_of_images_and_classes_may_have_any_name(tmp_path: Path) -> None:
    root = joined(tmp_path, b"the im\xe4ges")
    for split in ("train", "val"):
        for label in (b"c\xe4t", "große Hunde".encode()):
            folder = joined(root / split, label)
            folder.mkdir(parents=True)
            for i in range(3):
                pixels = np.random.default_rng(i).integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i} .png")
    options = ["--data", str(root), "--output", str(tmp_path / "run"), "--train.batch-size", "6"]
    run(tmp_path / "log", *options, PYTHONIOENCODING="utf-8:strict")
    assert (tmp_path / "run" / "report.html").exists()
    identity = json.loads((tmp_path / "run" / "state.json").read_text())["subject"]
    assert len(identity["data"]["classes"]) == 2


# What is missing


@pytest.mark.parametrize("home", [None, pytest.param("/proc/nowhere", marks=pytest.mark.slow)])
def test_without_a_home_and_without_a_network(home: str | None, tmp_path: Path) -> None:
    offline = ["unshare", "-n"] if shutil.which("unshare") else []
    if offline and subprocess.run([*offline, "true"], capture_output=True, check=False).returncode:
        offline = []  # this user may not cut off a process
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    variables = {name: value for name, value in os.environ.items() if name not in homes}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | ({"HOME": home} if home else {})
    done = subprocess.run(
        [*offline, sys.executable, "-m", "peel", *RUN, *DIGITS],
        cwd=tmp_path,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


@pytest.mark.parametrize(
    ("absent", "arguments", "code", "hint"),
    [
        pytest.param("timm", line("run"), 0, "", marks=pytest.mark.slow),
        ("timm", ["inspect", "resnet26d"], 2, "timm"),
        pytest.param("matplotlib", line("run"), 0, "peel-pruning[report]", marks=pytest.mark.slow),
        pytest.param("jinja2", line("run"), 0, "peel-pruning[report]", marks=pytest.mark.slow),
    ],
)
def test_without_a_package_the_rest_works_and_one_line_says_what_to_install(
    absent: str, arguments: list[str], code: int, hint: str, tmp_path: Path
) -> None:
    error = f"ModuleNotFoundError(\"No module named '{absent}'\", name={absent!r})"
    (tmp_path / f"{absent}.py").write_text(f"raise {error}")
    path = os.pathsep.join([str(tmp_path), *map(os.path.abspath, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "peel", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("pip install") == bool(hint)
    assert hint in done.stderr
    if code == 0:
        assert (tmp_path / "run" / "result.json").exists()
        assert (tmp_path / "run" / "report.html").exists() is (not hint)


# Terminals


@pytest.mark.parametrize(
    "environment",
    [
        {},
        pytest.param({"TERM": "dumb"}, marks=pytest.mark.slow),
        pytest.param({"NO_COLOR": "1"}, marks=pytest.mark.slow),
        {"TERM": "xterm-256color", "COLUMNS": "20"},
    ],
)
def test_output_to_a_file_has_no_escape_codes(environment: dict[str, str], tmp_path: Path) -> None:
    output = run(tmp_path / "log", "--output", str(tmp_path / "run"), **environment)
    assert "\x1b" not in output
    assert "epoch 1/1: loss" in output
    assert "files in " in output
    assert_no_escapes(tmp_path / "run")


def on_a_terminal(output: Path, **environment: str) -> str:
    """What a terminal would receive."""
    mine, theirs = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        try:
            while part := os.read(mine, 65536):
                seen.append(part)
        except OSError:  # the other end is closed
            pass

    watching = threading.Thread(target=watch)
    watching.start()
    code = exit_code(
        command([*RUN, *DIGITS, "--output", str(output)], Path(os.ttyname(theirs)), **environment)
    )
    os.close(theirs)
    watching.join(10)
    os.close(mine)
    assert code == 0
    return b"".join(seen).decode()


def test_a_dumb_terminal_gets_no_escape_codes(tmp_path: Path) -> None:
    seen = on_a_terminal(tmp_path / "run", TERM="dumb")
    assert "\x1b" not in seen
    assert "epoch 1/1: loss" in seen
    assert_no_escapes(tmp_path / "run")


def test_a_terminal_gets_progress_bars_and_colors_unless_they_are_unwanted(tmp_path: Path) -> None:
    colored = on_a_terminal(tmp_path / "run", TERM="xterm-256color")
    plain = on_a_terminal(tmp_path / "plain", TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[38;5;" in colored
    assert "\x1b[3" not in plain
    assert "━" in plain
    for name in ("run", "plain"):
        assert_no_escapes(tmp_path / name)


def test_a_run_whose_output_pipe_is_closed_stops_and_resumes(tmp_path: Path) -> None:
    pipe, arguments = tmp_path / "pipe", line(tmp_path / "run", model="helpers.small:Slow")
    os.mkfifo(pipe)
    process = command(arguments, pipe, PAUSE="0.05")
    with pipe.open("rb", buffering=0) as reader:
        assert reader.read(1)
    assert exit_code(process) == 1
    assert exit_code(command(arguments, tmp_path / "log", PAUSE="0")) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    for options in ([], ["--json"]):
        peel = [sys.executable, "-m", "peel", "inspect", "cifar_resnet20", *options]
        with subprocess.Popen(peel, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert "Traceback" not in process.stderr.read()
        assert process.returncode == 1


# Clocks


def test_a_clock_that_jumps_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, jumped = tmp_path / "straight", tmp_path / "jumped"
    small_run(output=straight)
    now = time.time()

    def jumping() -> float:
        nonlocal now
        now -= 3600
        return now

    monkeypatch.setattr(time, "time", jumping)
    small_run(output=jumped)
    for text in (jumped / "metrics.jsonl").read_text().splitlines():
        assert json.loads(text)["seconds"] >= 0
        assert json.loads(text)["images_per_second"] > 0
    assert (jumped / "slim.safetensors").read_bytes() == (straight / "slim.safetensors").read_bytes()


def test_the_newest_checkpoint_does_not_depend_on_the_clock(tmp_path: Path) -> None:
    train = {"epochs": 2, "batch_size": 64}
    settings = {"train": train, "stages": ["original"], "checkpoint_seconds": 0.0}
    folder = tmp_path / "run"
    assert exit_code(start(run_until, folder, settings, ("original", 5))) == KILLED
    older, newer = sorted((folder / "checkpoints").glob("*.pt"))
    os.utime(older, (2**33, 2**33))
    os.utime(newer, (0, 0))
    # Step 4, which follows the older checkpoint, is not repeated.
    assert exit_code(start(run_until, folder, settings, ("original", 4))) == 0


# Variables


@pytest.mark.parametrize("variable", ["PEEL_TIMEOUT", "WORLD_SIZE"])
def test_a_variable_that_is_not_a_number_is_named(variable: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    variables = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": "1", variable: "many"}
    assert exit_code(command(line(tmp_path / "run"), log, **variables)) == 2
    assert variable in log.read_text()
    assert "'many'" in log.read_text()


def test_the_variable_rank_alone_does_not_silence_a_run(tmp_path: Path) -> None:
    assert "original" in run(tmp_path / "log", "--output", str(tmp_path / "run"), RANK="1")


# Threads


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_leave_the_cores_to_others(given: str | None, found: str) -> None:
    code = "import os, sys; from peel.cli.main import main; main(['--version']); "
    code += "print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    variables |= {} if given is None else {"OMP_WAIT_POLICY": given}
    shown = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == f"{found} False", "torch reads it when it is loaded"


def test_a_process_that_has_loaded_torch_keeps_its_variables() -> None:
    before = dict(os.environ)
    assert main(["--version"]) == 0
    assert dict(os.environ) == before
