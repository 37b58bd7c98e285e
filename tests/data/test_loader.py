"""Processes that decode images: they stay, they are replaced when they die, and what cannot be read is named."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from peel.data import image_folder as folder_module
from peel.data import loader as loader_module
from peel.data.image_folder import ImageFolder, Paths
from peel.data.loader import Loader
from peel.data.view import EVAL, View
from peel.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead processes are looked for every second instead of every fifth; none is done with all its work before it dies."""
    monkeypatch.setattr(loader_module, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(loader_module, "PIECES_AHEAD", 1)


@pytest.fixture
def split(tmp_path: Path) -> ImageFolder:
    chance = torch.Generator().manual_seed(0)
    paths = []
    for number in range(48):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=chance).numpy()).save(
            paths[-1]
        )
    return ImageFolder(Paths(paths), torch.arange(48), (3, 32, 32), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def test_the_processes_stay_from_one_epoch_to_the_next(split: ImageFolder) -> None:
    seen = []
    for epoch in range(2):
        images = [
            batch.images
            for batch in split.batches(torch.arange(48), 8, View.of_epoch("imagenet", 0, epoch), CPU, 2)
        ]
        seen.append((children(), torch.cat(images)))
    assert len(seen[0][0]) == 2
    assert seen[0][0] == seen[1][0]
    assert not torch.equal(seen[0][1], seen[1][1]), "each epoch has views of its own"


def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost(
    split: ImageFolder, caplog: pytest.LogCaptureFixture
) -> None:
    view = View("imagenet", 3)
    whole = list(split.batches(torch.arange(48), 4, view, CPU, 0))
    got = []
    with caplog.at_level(logging.WARNING, "peel"):
        for number, batch in enumerate(split.batches(torch.arange(48), 4, view, CPU, 2)):
            got.append(batch)
            if number == 1:
                os.kill(min(children()), signal.SIGKILL)
    assert "it is replaced" in caplog.text
    assert len(got) == len(whole)
    for mine, theirs in zip(got, whole, strict=True):
        assert torch.equal(mine.images, theirs.images)
        assert torch.equal(mine.labels, theirs.labels)


def test_ending_our_processes_does_not_disturb_whoever_uses_loaders_of_torch() -> None:
    """Theirs makes the death of a process an error in the main thread, wherever that is."""
    before = signal.getsignal(signal.SIGCHLD)
    theirs: Any = iter(DataLoader(torch.arange(4), num_workers=1))  # type: ignore[arg-type]
    try:
        ours = Loader(float_of, 1, pin=False)
        assert [batch.item() for batch in ours.batches([[1], [2]])] == [1.0, 2.0]
        ours._end()
        assert [batch.item() for batch in theirs] == [0, 1, 2, 3]
    finally:
        theirs._shutdown_workers()
        signal.signal(signal.SIGCHLD, before)


def test_a_process_that_dies_while_something_is_computed_does_not_disturb_it(split: ImageFolder) -> None:
    """Torch would raise an error in the middle of it, with the weights half updated; at the latest where a loader of torch's is in use."""
    before = signal.getsignal(signal.SIGCHLD)
    theirs: Any = iter(DataLoader(torch.arange(4), num_workers=1))  # type: ignore[arg-type]
    try:
        others, got = children(), 0
        for number, batch in enumerate(split.batches(torch.arange(48), 4, View("imagenet", 3), CPU, 2)):
            got += len(batch.labels)
            if number == 1:
                os.kill(min(children() - others), signal.SIGKILL)
                until = time.monotonic() + 1
                while time.monotonic() < until:
                    torch.randn(100, 100).square().sum().item()
        assert got == 48
        assert [batch.item() for batch in theirs] == [0, 1, 2, 3]
    finally:
        theirs._shutdown_workers()
        signal.signal(signal.SIGCHLD, before)


def test_whoever_listens_to_their_own_processes_hears_of_them() -> None:
    heard = []
    before = signal.signal(signal.SIGCHLD, lambda *_: heard.append(True))
    try:
        ours = Loader(float_of, 1, pin=False)
        assert [batch.item() for batch in ours.batches([[1], [2]])] == [1.0, 2.0]
        heard.clear()
        subprocess.run(["true"], check=True)
        assert heard
    finally:
        ours._end()
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("between", [False, True], ids=["at work", "between two epochs"])
def test_a_process_that_hangs_is_replaced_and_nothing_is_lost(
    between: bool, split: ImageFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PEEL_PATIENCE", "2")
    view = View("imagenet", 3)
    whole = torch.cat([batch.images for batch in split.batches(torch.arange(48), 4, view, CPU, 0)])
    others = children()
    if between:
        assert len(list(split.batches(torch.arange(48), 4, view, CPU, 2))) == 12
        os.kill(min(children() - others), signal.SIGSTOP)
    got = []
    for number, batch in enumerate(split.batches(torch.arange(48), 4, view, CPU, 2)):
        got.append(batch.images)
        if number == 1 and not between:
            os.kill(min(children() - others), signal.SIGSTOP)
    assert torch.equal(torch.cat(got), whole)
    assert "it is replaced" in caplog.text


def float_of(key: int) -> Tensor:
    return torch.tensor(float(key))


def test_signals_to_the_whole_group_do_not_end_the_processes(split: ImageFolder) -> None:
    batches = split.batches(torch.arange(48), 4, View("imagenet", 3), CPU, 2)
    for _ in range(2):
        next(batches)  # one of each process: both listen
    before = children()
    for pid in before:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert sum(len(batch.labels) for batch in batches) == 40
    assert children() == before


def test_a_process_that_dies_between_two_epochs_is_replaced(split: ImageFolder) -> None:
    view = View("imagenet", 3)
    first = [batch.images for batch in split.batches(torch.arange(48), 8, view, CPU, 2)]
    os.kill(min(children()), signal.SIGKILL)
    time.sleep(0.2)
    second = [batch.images for batch in split.batches(torch.arange(48), 8, view, CPU, 2)]
    assert torch.equal(torch.cat(first), torch.cat(second))


def test_an_epoch_that_is_given_up_leaves_no_process_at_work(split: ImageFolder) -> None:
    batches = split.batches(torch.arange(48), 8, View("imagenet", 3), CPU, 2)
    next(batches)
    assert len(children()) == 2
    batches.close()
    assert not children()
    assert sum(len(batch.labels) for batch in split.batches(torch.arange(48), 8, EVAL, CPU, 2)) == 48


def test_processes_end_with_the_images_they_are_for(split: ImageFolder) -> None:
    some = split.subset(torch.arange(16))
    list(some.batches(torch.arange(16), 8, EVAL, CPU, 2))
    assert len(children()) == 2
    del some
    gc.collect()
    assert not children()


def test_a_forked_copy_of_the_program_leaves_the_processes_alone(split: ImageFolder) -> None:
    list(split.batches(torch.arange(48), 8, EVAL, CPU, 2))
    before = children()
    copy = os.fork()
    if copy == 0:
        for loader in split._loaders.values():
            loader._end()
        os._exit(0)
    os.waitpid(copy, 0)
    assert sum(len(batch.labels) for batch in split.batches(torch.arange(48), 8, EVAL, CPU, 2)) == 48
    assert children() == before


AN_ERROR = """
import sys, torch
from pathlib import Path
from peel.train.folder import Folder, Paths
from peel.train.view import AS_IT_IS
split = Folder(Paths(sorted(Path(sys.argv[1]).glob("*.png"))), torch.arange(48), (3, 32, 32), (0.5,) * 3, (0.2,) * 3)
seen = list(split.batches(torch.arange(48), 8, AS_IT_IS, torch.device("cpu"), 2))
raise KeyError("what nobody expected")
"""


def test_an_error_that_nobody_expected_ends_the_program(split: ImageFolder) -> None:
    """The processes are deaf to the request to end that Python sends, and it would wait for them for ever."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AN_ERROR, str(split.paths[0].parent)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "what nobody expected" in result.stderr


class Dying:
    def __call__(self, key: int) -> Tensor:
        if key == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(key)


class Hanging:
    def __call__(self, key: int) -> Tensor:
        if key == 5:
            time.sleep(60)
        return torch.tensor(key)


@pytest.mark.parametrize("make", [Dying(), Hanging()])
def test_processes_that_die_or_hang_every_time_are_an_error_not_a_wait(
    make: Dying | Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEEL_PATIENCE", "1")
    monkeypatch.setattr(loader_module, "TRIES", 2)
    got = []
    began = time.monotonic()
    with pytest.raises(DataError, match=r"at the batch of 4.*2 times.*--workers"):
        for batch in Loader(make, 2, pin=False).batches([[0, 1], [2, 3], [4, 5], [6, 7]]):
            got.append(batch.tolist())  # noqa: PERF401 -- what came before the error is looked at
    assert got == [[0, 1], [2, 3]]
    assert not children(), "none that would be waited for when the program ends"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("size", "more"), [(8, " and 5 more"), (2, "")])
def test_the_files_that_processes_die_at_are_named(
    size: int, more: str, split: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folder_module.decode

    def deadly(path: Path, channels: int) -> Tensor:
        if path.name == "21.png":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path, channels)

    monkeypatch.setattr(folder_module, "decode", deadly)
    monkeypatch.setattr(loader_module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(loader_module, "TRIES", 2)
    order = torch.arange(48).flip(0)
    first = order[order.tolist().index(21) // size * size :][: min(size, 3)].tolist()
    names = ", ".join(str(split.paths[number]) for number in first)
    with pytest.raises(
        DataError, match=rf"at the batch of image {first[0]} \({names}{more}\), 2 times\. Fewer --workers"
    ):
        list(split.batches(order, size, EVAL, CPU, 1))


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_numbers_of_channels_are_grey(split: ImageFolder, channels: int) -> None:
    other = ImageFolder(split.paths, split.labels, (channels, 32, 32), (0.5,) * channels, (0.2,) * channels)
    (batch,) = other.batches(torch.arange(48), 48, EVAL, CPU)
    assert batch.images.shape == (48, channels, 32, 32)
    assert (batch.images == batch.images[:, :1]).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_gone_is_named(
    split: ImageFolder, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "READ_PAUSE", 0.01)
    split.paths[17].unlink()
    with pytest.raises(
        DataError, match=r"17\.png could be read before training, but not any more: FileNotFoundError"
    ):
        list(split.batches(torch.arange(48), 8, EVAL, CPU, workers))


@pytest.fixture
def away(split: ImageFolder) -> Iterator[None]:
    """The folder disappears for a moment, as when a network disk is disconnected."""
    home = split.paths[0].parent
    home.rename(home.with_name("away"))
    timer = threading.Timer(0.7, lambda: home.with_name("away").rename(home))
    timer.start()
    yield
    timer.join()
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.usefixtures("away")
def test_files_that_come_back_after_a_moment_are_read(split: ImageFolder) -> None:
    assert sum(len(batch.labels) for batch in split.batches(torch.arange(48), 48, EVAL, CPU, 0)) == 48


def test_many_paths_take_little_memory_and_come_back_as_they_were(tmp_path: Path) -> None:
    odd = [tmp_path / "a b" / "ä.png", tmp_path / os.fsdecode(b"\xff\xfe.png"), tmp_path / "plain.png"]
    paths = Paths(odd)
    assert list(paths) == odd
    assert list(paths[1:]) == odd[1:]
    assert list(paths.chosen(torch.tensor([2, 0]))) == [odd[2], odd[0]]
