"""Faults as they happen to people, through the command line: real processes, signals and disks. docs/faults.md lists the promises."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import peel
from disks import small_disk_at
from killing import command, exit_code, start, wait_for
from peel.train.checkpoint import Checkpoints
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.stop import Stopped, listening
from peel.workspace import Workspace
from small import CPU, Small, few_digits, small_run

pytestmark = pytest.mark.usefixtures("one_thread")

KILLED = -signal.SIGKILL

#: The original alone: two epochs of eleven steps, with a checkpoint after each epoch.
ORIGINAL = {"--steps": "original", "--train.epochs": "2", "--train.batch-size": "128", "--device": "cpu"}


def line(output: Path | str, *options: str, model: str = "small:Small") -> list[str]:
    """The command, with options that come in pairs."""
    chosen = {**ORIGINAL, "--output": str(output), **dict(zip(options[::2], options[1::2]))}
    return ["run", model, *(part for pair in chosen.items() for part in pair)]


def run(output: Path, *options: str, model: str = "small:Small", **environment: str) -> tuple[int, str]:
    """Exit code of the command and what it said."""
    said = output.with_name(f"{output.name}.said")
    said.write_text("")
    code = exit_code(command(line(output, *options, model=model), said, **environment))
    return code, said.read_text()


def kept(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("*.pt"))


def weights(folder: Path) -> bytes:
    return (folder / "stages" / "original.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that a run ends with to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder)[0] == 0
    return weights(folder)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of a run that was killed in its second epoch, with a checkpoint after each step."""
    folder = tmp_path / "killed"
    assert run(folder, "--checkpoint-seconds", "0", PEEL_FAULT="15:kill")[0] == KILLED
    assert len(kept(folder)) == 2
    return folder


# Checkpoints (F2, F3)


def write_some_bytes_and_die(folder: Path, count: int) -> None:
    """The system itself kills a process that writes beyond the limit, in the middle of its write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
    Checkpoints(folder, "peel").save({"number": 2, "weight": torch.ones(5000)}, 2, 0)


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_killed_after_some_bytes_of_a_checkpoint_the_one_before_is_used(count: int, tmp_path: Path) -> None:
    with Workspace(tmp_path / "run"):
        pass
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", "peel")
    first = checkpoints.save({"number": 1}, 1, 0)
    assert exit_code(start(write_some_bytes_and_die, checkpoints.folder, count)) == -signal.SIGXFSZ
    half = [path for path in checkpoints.folder.iterdir() if path != first]
    assert [path.stat().st_size for path in half] == [count], "it was killed in the middle of its write"
    assert checkpoints.newest() == {"number": 1}
    with Workspace(tmp_path / "run"):
        assert list(checkpoints.folder.iterdir()) == [first], "the next start sweeps what was left behind"


def flip(data: bytes) -> bytes:
    return data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 1]) + data[len(data) // 3 + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one bit flipped": flip,
    "half cut off": lambda data: data[: len(data) // 2],
    "99 % cut off": lambda data: data[: len(data) // 100],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_where_every_checkpoint_is_damaged_the_command_stops_with_3_and_says_what_to_do(damage: str, killed: Path, whole: bytes) -> None:
    metrics = (killed / "metrics.jsonl").read_text()
    for path in kept(killed):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    code, said = run(killed)
    assert code == 3
    assert str(killed / "checkpoints") in said
    assert all(path.name[:30] in said for path in kept(killed))
    assert "Restore one of them from a copy, or delete them" in said
    assert "Traceback" not in said
    assert (killed / "metrics.jsonl").read_text() == metrics, "it did not train from the beginning"
    for path in kept(killed):
        path.unlink()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


def test_a_checkpoint_of_another_run_is_named_and_not_taken(killed: Path, tmp_path: Path, whole: bytes) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", "--checkpoint-seconds", "0", PEEL_FAULT="18:kill")[0] == KILLED
    for path in kept(other):
        shutil.copy(path, killed / "checkpoints")
    code, said = run(killed, "--checkpoint-seconds", "0", PEEL_FAULT="16:kill")
    assert code == KILLED
    assert said.count("belongs to a run with other settings") == 2
    assert all(path.name in said for path in kept(other))
    assert run(killed)[0] == 0, "its own are still there, although the others call themselves newer"
    assert weights(killed) == whole


def test_a_file_of_the_run_with_something_else_in_it_stops_the_command_with_3(killed: Path) -> None:
    (killed / "settings.json").write_text("[]")
    code, said = run(killed)
    assert code == 3
    assert f"{killed / 'settings.json'} is damaged" in said
    assert "another --output" in said
    assert "Traceback" not in said


def test_checkpoints_of_another_run_alone_are_refused(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run(other, "--seed", "1", PEEL_FAULT="18:kill")[0] == KILLED
    for path in kept(killed):
        path.unlink()
    shutil.copy(kept(other)[0], killed / "checkpoints")
    code, said = run(killed)
    assert code == 3
    assert kept(other)[0].name[:30] in said


# Being told to stop (F4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_from_outside_stops_soon_and_the_line_that_is_printed_goes_on(
    number: signal.Signals, tmp_path: Path, whole: bytes
) -> None:
    folder, said = tmp_path / "a run", tmp_path / "said"
    process = command(line(folder, model="small:Slow"), said, PAUSE="0.2")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(process.pid, number)
    assert exit_code(process) == 128 + number
    assert time.monotonic() - began < 10
    assert len(kept(folder)) == 1
    name, *arguments = shlex.split(said.read_text().splitlines()[-1])
    assert name == "peel"
    assert exit_code(command(arguments, said)) == 0
    assert weights(folder) == whole


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", tmp_path / "said"
    process = command(line(folder, model="small:Slow"), said, PAUSE="60")
    wait_for(folder / "metrics.jsonl")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.is_alive(), "the first one waits for the step"
    os.kill(process.pid, signal.SIGINT)
    assert exit_code(process, seconds=5) == 130
    assert "Traceback" not in said.read_text()


# Disks (F5)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", "1m") as place:
        yield place


def fill(disk: Path, room: int) -> Path:
    """A file that leaves so many bytes free."""
    path = disk / "filler"
    path.write_bytes(bytes(shutil.disk_usage(disk).free - room))
    assert shutil.disk_usage(disk).free == room
    return path


def test_a_disk_that_is_full_on_the_way_keeps_the_last_checkpoint_and_says_what_is_missing(disk: Path, whole: bytes) -> None:
    folder = disk / "run"
    assert run(folder, PEEL_FAULT="15:kill")[0] == KILLED
    before = kept(folder)
    filler = fill(disk, 12 * 1024)
    code, said = run(folder)
    assert code == 2
    found = re.search(r"cannot write the checkpoint .* No space left on device \(([\d,]+) bytes are needed, ([\d,]+) are free\)", said)
    assert found is not None, said
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert needed == pytest.approx(before[0].stat().st_size, rel=0.2)
    assert free < needed
    assert "The checkpoints before it are kept" in said
    assert "Traceback" not in said
    assert kept(folder) == before
    assert not list(folder.rglob(".writing-*"))
    filler.unlink()
    code, said = run(folder)
    assert code == 0
    assert "going on after epoch 1 of 2" in said
    assert "stopped by an error" not in (folder / "report.html").read_text()
    assert weights(folder) == whole


def test_a_disk_that_is_full_is_noticed_before_the_first_step(disk: Path) -> None:
    fill(disk, 0)
    said = disk.parent / "said"
    assert exit_code(command(line(disk / "run", model="small:Slow"), said, PAUSE="60")) == 2
    assert "No space left on device (20 bytes are needed, 0 are free)" in said.read_text()


# Numbers that are none (F6)


def test_a_loss_that_is_no_number_is_noticed_within_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_FAULT", "5:nan")
    recipe = Recipe(epochs=1, batch_size=4, lr=0.01, augment="none")
    with pytest.raises(peel.DivergedError, match=r"epoch 1, step 100\)"):
        fit(Small(), CrossEntropy(), peel.load_data("digits").train, recipe, engine=CPU, seed=0)


def test_a_rate_far_too_high_exits_with_4_and_the_good_checkpoint_stays(tmp_path: Path) -> None:
    options = ["--train.lr", "0.1", "--train.schedule", "steps", "--train.gamma", "1e12", "--train.milestones", "0.5"]
    code, said = run(tmp_path / "run", *options)
    assert code == 4, said
    assert "epoch 2" in said
    assert "lower lr" in said
    assert "The run was stopped by an error: the loss is no finite number any more" in (tmp_path / "run" / "report.html").read_text()
    [path] = kept(tmp_path / "run")
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["model"].values())


# Several processes (F8)


@pytest.mark.slow
def test_a_process_killed_once_is_started_again_by_torchrun_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    def torchrun(output: str, **environment: str) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path]), **environment}
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "peel", *line(tmp_path / output)],
            env=variables, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    began = time.monotonic()
    said = torchrun("killed", PEEL_FAULT="15:kill:1")
    assert time.monotonic() - began < 60
    assert "exitcode: -9) local_rank: 1" in said, "who died first is said"
    assert "going on after epoch 1 of 2" in said
    torchrun("whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "pause"), [(signal.SIGTERM, 0.1), (signal.SIGINT, 0.1), (signal.SIGUSR1, 0.1), (signal.SIGTERM, 4.0), (signal.SIGKILL, 0.1)]
)
def test_several_processes_that_are_told_to_stop_keep_their_state(number: signal.Signals, pause: float, tmp_path: Path) -> None:
    """Soon, however long their steps are; and when the one that started them is killed, nobody is left behind."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    folder = tmp_path / "stopped"

    def started(output: Path) -> list[str]:
        return [sys.executable, "-m", "peel", *line(output, "--gpus", "2", model="small:Slow")]

    process = subprocess.Popen(
        started(folder), env={**variables, "PAUSE": str(pause)}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(folder / ("settings.json" if pause > 1 else "metrics.jsonl"))
    time.sleep(0.5)
    began = time.monotonic()
    # A scheduler tells the command alone; a terminal tells everyone.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert said.count("Go on with the same command") == 1
    assert "--gpus 2" in said.partition("Go on with the same command")[2], "the command as it was given"
    assert len(kept(folder)) >= 1
    for output in (folder, tmp_path / "whole"):
        subprocess.run(started(output), env=variables, check=True, capture_output=True, timeout=120)
    stopped, straight = (peel.load(place / "stages" / "original", model=Small()) for place in (folder, tmp_path / "whole"))
    for name, value in stopped.state_dict().items():
        assert torch.equal(value, straight.state_dict()[name]), name


@pytest.mark.slow
def test_ctrl_c_twice_stops_several_processes_at_once(tmp_path: Path) -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path]), "PAUSE": "20"}
    command = [sys.executable, "-m", "peel", *line(tmp_path / "run", "--gpus", "2", model="small:Slow")]
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(tmp_path / "run" / "settings.json")
    time.sleep(2)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert said.count("interrupted") == 1


# Going on with something else (F9, F10)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--train.batch-size", "64"], "train.batch_size: 128 -> 64"),
        (["--train.lr", "0.3"], "train.lr: 0.1 -> 0.3"),
    ],
)
def test_a_run_does_not_go_on_with_another_batch_or_rate(options: list[str], difference: str, killed: Path, whole: bytes) -> None:
    before = [path.name for path in kept(killed)]
    code, said = run(killed, *options)
    assert code == 2
    assert difference in said
    assert [path.name for path in kept(killed)] == before
    assert run(killed)[0] == 0
    assert weights(killed) == whole


@pytest.mark.parametrize("options", [["--parts", "2"], ["--train.retries", "1"]])
def test_a_run_goes_on_with_what_its_errors_advise(options: list[str], killed: Path) -> None:
    """More parts where memory was short, retries where it diverged."""
    before = kept(killed)
    assert before
    code, said = run(killed, *options)
    assert code == 0
    assert "of another run" not in said, "its checkpoints are still its own"
    assert ("parts 2 instead of 1" in said) == (options[0] == "--parts")


OWN = """
from torch import nn

def model(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, num_classes),
    )
"""


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [("12", "16", "original.params: "), ("ReLU()", "SiLU()", "original.layers: "), ("padding=1", "stride=2, padding=1", "original.macs: ")],
)
def test_a_run_does_not_go_on_with_a_model_whose_code_changed(old: str, new: str, difference: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    assert run(tmp_path / "run", model=f"{path}:model", PEEL_FAULT="15:kill")[0] == KILLED
    path.write_text(OWN.replace(old, new))
    code, said = run(tmp_path / "run", model=f"{path}:model")
    assert code == 2, said
    assert difference in said
    assert " -> " in said
    path.write_text(OWN + "\n# a remark changes nothing\n")
    assert run(tmp_path / "run", model=f"{path}:model")[0] == 0


FUNCTIONAL = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.fc = nn.Conv2d(8, 12, 3, padding=1), nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x))
        return self.fc(x.mean((2, 3)))
"""


def test_a_run_does_not_go_on_with_a_model_that_computes_something_else(tmp_path: Path) -> None:
    """The layers are the same; the change is in the forward pass alone."""
    path, model = tmp_path / "fn.py", f"{tmp_path / 'fn.py'}:Net"
    path.write_text(FUNCTIONAL)
    assert run(tmp_path / "run", model=model, PEEL_FAULT="15:kill")[0] == KILLED
    for old, new, difference in (
        ("F.relu(self.second", "F.silu(self.second", "relu 2 -> 1, silu 0 -> 1"),
        ("F.relu(self.norm(self.first(x)))", "self.norm(F.relu(self.first(x)))", "the same ones in another order, from number 2 on"),
    ):
        path.write_text(FUNCTIONAL.replace(old, new))
        code, said = run(tmp_path / "run", model=model)
        assert code == 2, said
        assert f"original.operators: {difference}" in said
        assert "What the network computes has changed" in said
        assert f"the code of {model}" in said
    path.write_text(FUNCTIONAL.replace("F.relu(self.second(x))", "F.relu(self.second(x), inplace=True)  # the same"))
    assert run(tmp_path / "run", model=model)[0] == 0


def write_images(root: Path, side: int, kind: str, count: int = 6) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.{kind}")


@pytest.mark.parametrize(("side", "kind"), [(12, "png"), (100, "bmp")], ids=["in memory", "read from disk, of the same size"])
def test_a_run_does_not_go_on_with_images_that_changed(side: int, kind: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", side, kind)
    options = ["--data", str(tmp_path / "data"), "--train.batch-size", "6", "--image-size", str(side), "--workers", "0"]
    assert run(tmp_path / "run", *options, PEEL_FAULT="3:kill")[0] == KILLED
    path = tmp_path / "data" / "train" / "cat" / f"0.{kind}"
    good = path.read_bytes()
    pixels = np.array(Image.open(path))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    assert kind == "png" or path.stat().st_size == len(good)
    code, said = run(tmp_path / "run", *options)
    assert code == 2
    assert "fingerprint: " in said
    path.write_bytes(good)
    assert run(tmp_path / "run", *options)[0] == 0


def test_going_on_with_another_torch_is_said(killed: Path, whole: bytes) -> None:
    path = killed / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "2.0.1"}))
    code, said = run(killed)
    assert code == 0
    assert f"was begun with torch 2.0.1 and goes on with {torch.__version__}" in said
    assert weights(killed) == whole


def test_a_torch_that_calls_its_operators_otherwise_is_no_model_whose_code_changed(killed: Path, whole: bytes) -> None:
    for name, change in (("environment", {"torch": "2.0.1"}), ("settings", {})):
        path = killed / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text().replace("conv2d", "convolution")), **change}))
    code, said = run(killed)
    assert code == 0
    assert "other operators" in said
    assert "convolution 4 -> 0, conv2d 0 -> 4" in said
    assert weights(killed) == whole, "its checkpoints are still its own"


# Images (F12)


def test_one_image_of_each_class_and_class_names_with_gaps_are_enough_to_train(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("0", "2", "7", "19"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.fromarray(np.full((12, 12, 3), int(label) * 10, dtype=np.uint8)).save(tmp_path / "data" / split / label / "only.png")
    code, said = run(tmp_path / "run", "--data", str(tmp_path / "data"), "--train.batch-size", "4")
    assert code == 0, said
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["resolved"]
    assert settings["images"] == [4, 4]
    assert sorted(settings["input"]["classes"]) == ["0", "19", "2", "7"]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_beyond_the_classes_is_named_before_anything_is_trained(label: int, split: str, tmp_path: Path) -> None:
    data = few_digits()
    images: Any = getattr(data, split)
    labels = images.labels.clone()
    labels[3] = label
    wrong: Any = {split: replace(images, labels=labels)}
    kind = "training" if split == "train" else "test"
    with pytest.raises(peel.DataError, match=rf"the {kind} labels of digits go from {min(label, 0)} to {max(label, 9)}; with 10 classes"):
        small_run(data=replace(data, **wrong), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Two at once (F17)


def test_of_two_commands_at_the_same_time_one_runs_and_the_other_is_told_who(tmp_path: Path, whole: bytes) -> None:
    folder = tmp_path / "run"
    processes = {command(line(folder, model="small:Slow"), tmp_path / str(i), PAUSE="0.1"): tmp_path / str(i) for i in range(2)}
    codes = {exit_code(process): said for process, said in processes.items()}
    assert set(codes) == {0, 2}
    winner = next(process for process in processes if process.exitcode == 0)
    assert f"{folder} is in use by process {winner.pid} on {os.uname().nodename}" in codes[2].read_text()
    assert weights(folder) == whole


def test_a_lock_that_a_dead_process_left_is_no_obstacle(killed: Path, whole: bytes) -> None:
    assert "process " in (killed / ".lock").read_text()
    assert run(killed)[0] == 0
    assert weights(killed) == whole


# What is not installed (F19)


@pytest.mark.parametrize(
    ("absent", "arguments", "code", "hint"),
    [
        ("timm", line("run"), 0, ""),
        ("timm", ["inspect", "resnet26d"], 2, "pip install timm"),
        ("matplotlib", line("run"), 0, "pip install matplotlib"),
        ("jinja2", line("run"), 0, "pip install jinja2"),
    ],
)
def test_without_a_package_the_rest_works_and_one_line_says_what_to_install(
    absent: str, arguments: list[str], code: int, hint: str, tmp_path: Path
) -> None:
    (tmp_path / f"{absent}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{absent}'\", name={absent!r})")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *map(os.path.abspath, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", "peel", *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("pip install") == bool(hint)
    assert hint in done.stderr
    if code == 0:
        assert (tmp_path / "run" / "result.json").exists()
        assert (tmp_path / "run" / "report.html").exists() is (not hint)


# For long (F21)


class Stopping:
    """Asks the own process to stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def begin(self, history: Any) -> None:
        pass

    def step(self, done: int, total: int, images: int) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGTERM)

    def epoch(self, epoch: Any) -> None:
        pass


def soak(folder: Path, said: Path) -> None:
    """Five hundred steps, stopped and taken up again twenty times in one process; what it holds after each time."""
    torch.set_num_threads(1)
    recipe = Recipe(epochs=10, batch_size=4, lr=0.01, augment="crop")
    checkpoints = Checkpoints(folder / "checkpoints", "peel")
    found, history = [], None
    while history is None:
        try:
            with listening():
                history = fit(
                    Small(), CrossEntropy(), few_digits().train, recipe, engine=CPU, seed=0, test=few_digits().test,
                    checkpoints=checkpoints, watcher=Stopping(24),
                )  # fmt: skip
        except Stopped:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            files = sum(path.stat().st_size for path in (folder / "checkpoints").iterdir())
            found.append([pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), len(children), files])
    assert len(history) == recipe.epochs
    said.write_text(json.dumps(found))


def test_resumed_twenty_times_a_process_holds_no_more_than_before(tmp_path: Path) -> None:
    assert exit_code(start(soak, tmp_path, tmp_path / "said")) == 0
    found = json.loads((tmp_path / "said").read_text())
    memory, files, children, kept_bytes = zip(*found)
    assert len(found) == 20, "500 steps, stopped after every 24"
    assert memory[-1] - memory[2] < 2**21
    assert len(set(files)) == 1
    assert set(children) == {0}
    assert kept_bytes[-1] < 1.5 * kept_bytes[2]


def test_killed_twenty_times_a_run_leaves_no_process_and_no_more_than_two_checkpoints(tmp_path: Path, whole: bytes) -> None:
    folder = tmp_path / "run"
    for step in range(1, 21):
        assert run(folder, "--checkpoint-seconds", "0", PEEL_FAULT=f"{step}:kill")[0] == KILLED
        assert len(kept(folder)) <= 2
        assert len(list((folder / "checkpoints").iterdir())) <= 3, "at most one half-written file"
    assert run(folder)[0] == 0
    assert weights(folder) == whole
    assert not kept(folder)
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder) not in status.read_bytes().decode(errors="replace")
        except OSError:
            continue
