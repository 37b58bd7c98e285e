"""Worker processes: they stay, ignore signals, end with the program, and their failure is a clear error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.images import CPU_DEVICE, images_of, noise
from peel.data import image_folder as folder_module
from peel.data.augmentation import EVAL, View
from peel.data.image_folder import ImageFolder
from peel.errors import DataError

ORDER, VIEW = torch.arange(48), View("imagenet", 3)


@pytest.fixture
def split(tmp_path: Path) -> ImageFolder:
    paths = [str(tmp_path / f"{number}.png") for number in range(48)]
    for number, path in enumerate(paths):
        Image.fromarray(noise(40, 50, number)).save(path)
    return ImageFolder(paths, torch.arange(48), (3, 32, 32), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


_before: set[int] = set()


@pytest.fixture(autouse=True)
def children_of_other_tests() -> None:
    """Processes that tests in other files have left: not those of the loader."""
    _before.clear()
    _before.update(children())


def children() -> set[int]:
    found = {process.pid for process in multiprocessing.active_children() if process.pid is not None}
    return found - _before


def replace_decode(monkeypatch: pytest.MonkeyPatch, name: str, action: object) -> None:
    """Call `action` in the process that decodes the file called `name`."""
    decode = folder_module.decode

    def decode_or_act(path: Path, channels: int) -> Tensor:
        if path.name == name:
            action()  # type: ignore[operator]
        return decode(path, channels)

    monkeypatch.setattr(folder_module, "decode", decode_or_act)


def test_workers_stay_and_give_the_images_of_the_main_process(split: ImageFolder) -> None:
    seen = []
    for epoch in range(2):
        view = View.of_epoch("imagenet", 0, epoch)
        images = images_of(split, ORDER, 20, view, 2)
        assert torch.equal(images, images_of(split, ORDER, 20, view, 0))
        seen.append((children(), images))
    assert len(seen[0][0]) == 2
    assert seen[0][0] == seen[1][0]
    assert not torch.equal(seen[0][1], seen[1][1])


def test_results_are_not_overwritten_by_later_ones(split: ImageFolder) -> None:
    """More requests than the workers have slots, of different sizes."""
    order = torch.arange(48).repeat(20)[:-5]
    assert torch.equal(images_of(split, order, 7, EVAL, 1), images_of(split, order, 48, EVAL, 0))


def test_two_iterations_at_the_same_time_do_not_mix(split: ImageFolder) -> None:
    first, second = (split.batches(ORDER, 8, View("imagenet", seed), CPU_DEVICE, 1) for seed in (3, 4))
    pairs = [(one.inputs, other.inputs) for one, other in zip(first, second)]
    for seed, images in zip((3, 4), zip(*pairs)):
        assert torch.equal(torch.cat(images), images_of(split, ORDER, 8, View("imagenet", seed)))


def test_signals_to_the_process_group_do_not_end_the_workers(split: ImageFolder) -> None:
    batches = split.batches(ORDER, 4, VIEW, CPU_DEVICE, 2)
    for _ in range(2):
        next(batches)  # one of each worker: both are initialized
    before = children()
    for pid in before:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert sum(len(batch.targets) for batch in batches) == 40
    assert children() == before


def test_a_worker_that_dies_is_an_error_that_names_its_files(
    split: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        replace_decode(patch, "21.png", lambda: os.kill(os.getpid(), signal.SIGKILL))
        batches = split.batches(ORDER, 8, VIEW, CPU_DEVICE, 1)
        got = [next(batches), next(batches)]
        message = rf"died while reading {split.paths[16]} and 7 other files\. .*resumed.*--workers"
        with pytest.raises(DataError, match=message):
            list(batches)
    assert not children()
    again = images_of(split, ORDER, 8, VIEW, 1)
    assert torch.equal(again[:16], torch.cat([batch.inputs for batch in got]))
    assert len(again) == 48


def test_a_worker_that_hangs_is_an_error(split: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEEL_TIMEOUT", "1")
    replace_decode(monkeypatch, "21.png", lambda: time.sleep(60))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"did not answer for 1 s while reading .*16\.png.*resumed"):
        images_of(split, ORDER, 8, VIEW, 2)
    assert not children()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_worker_that_dies_or_hangs_between_epochs_is_an_error_at_the_next_batch(
    number: signal.Signals, split: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEEL_TIMEOUT", "2")
    whole = images_of(split, ORDER, 8, VIEW, 2)
    os.kill(min(children()), number)
    time.sleep(0.2)
    with pytest.raises(DataError, match="a worker process"):
        images_of(split, ORDER, 8, VIEW, 2)
    assert not children()
    assert torch.equal(images_of(split, ORDER, 8, VIEW, 2), whole)


def test_an_epoch_that_is_abandoned_leaves_no_process(split: ImageFolder) -> None:
    batches = split.batches(ORDER, 8, VIEW, CPU_DEVICE, 2)
    next(batches)
    assert len(children()) == 2
    batches.close()
    assert not children()
    assert len(images_of(split, ORDER, 8, EVAL, 2)) == 48


def test_workers_end_with_their_split(split: ImageFolder) -> None:
    part = split.subset(torch.arange(16))
    images_of(part, torch.arange(16), 8, EVAL, 2)
    assert len(children()) == 2
    del part
    gc.collect()
    assert not children()


PROGRAM = """
import multiprocessing, os, signal, sys, time, torch
from pathlib import Path
from peel.data.augmentation import EVAL
from peel.data.image_folder import ImageFolder
paths = sorted(map(str, Path(sys.argv[1]).glob("*.png")))
split = ImageFolder(paths, torch.arange(48), (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
seen = list(split.batches(torch.arange(48), 8, EVAL, torch.device("cpu"), 2))
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
raise KeyError("unexpected")
"""


@pytest.mark.parametrize("end", ["error", "kill"])
def test_no_process_is_left_behind_when_the_program_ends(end: str, split: ImageFolder) -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(split.paths[0]).parent), end]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == (1 if end == "error" else -signal.SIGKILL)
    assert ("unexpected" in result.stderr) == (end == "error")
    workers = [Path("/proc") / pid for pid in result.stdout.split()]
    assert len(workers) == 2
    until = time.monotonic() + 10
    while any(is_running(worker) for worker in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(worker) for worker in workers)


def is_running(process: Path) -> bool:
    """An orphan may stay as a zombie where no init process collects it."""
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
