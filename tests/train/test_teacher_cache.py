"""What a teacher says is remembered: the same answers, asked for once."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.small import CPU, SHORT, Small, few_digits
from peel.data.augmentation import View
from peel.data.datasets import Split
from peel.run.prune import prune
from peel.steps.distillation import Distillation
from peel.train import teacher_cache as answers_module
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache

RECIPE = Recipe(epochs=3, batch_size=50, lr=0.05, augment="crop")


class Counting(nn.Module):
    """A teacher that counts the images it was shown."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = Small().eval().requires_grad_(False)
        self.shown = 0

    def forward(self, images: Tensor) -> Tensor:
        self.shown += len(images)
        return self.net(images)  # type: ignore[no-any-return]


def taught(teacher: nn.Module, augment: str = "crop") -> CachedTeacher:
    split: Split = few_digits().train
    remembered = make_logit_cache(teacher, split, augment, 10, CPU)
    assert remembered is not None
    return CachedTeacher(split, remembered)


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_the_answers_are_those_of_the_teacher_for_just_these_views(augment: str) -> None:
    teacher = Counting().eval()
    images = taught(teacher, augment)
    for epoch in range(4):
        for batch in images.batches(torch.randperm(200), 30, View.of_epoch(augment, 0, epoch), CPU.device):
            assert batch.teacher_logits is not None
            assert torch.allclose(batch.teacher_logits, teacher.net(batch.images), atol=1e-5)


def test_where_nothing_is_left_of_an_epoch_there_is_nothing_to_see() -> None:
    """As when a training goes on that was stopped during an evaluation."""
    assert (
        list(taught(Counting().eval()).batches(torch.arange(0), 30, View.of_epoch("crop", 0, 0), CPU.device))
        == []
    )


def test_nothing_is_asked_twice() -> None:
    teacher = Counting().eval()
    images = taught(teacher)
    for _ in range(3):
        list(images.batches(torch.arange(200), 30, View.of_epoch("crop", 0, 0), CPU.device))
        assert teacher.shown == 200
    for epoch in range(200):
        list(images.batches(torch.arange(200), 100, View.of_epoch("crop", 0, epoch), CPU.device))
    assert teacher.shown == 9 * 200, "there are nine windows of each image"


def test_where_memory_is_short_fewer_images_are_asked_about_at_a_time() -> None:
    class Narrow(Counting):
        def forward(self, images: Tensor) -> Tensor:
            if len(images) > 30:
                raise torch.OutOfMemoryError("so many do not fit")
            return super().forward(images)

    teacher = Narrow().eval()
    (batch,) = taught(teacher).batches(torch.arange(200), 200, View.of_epoch("crop", 0, 0), CPU.device)
    assert batch.teacher_logits is not None
    assert torch.allclose(batch.teacher_logits, teacher.net(batch.images), atol=1e-5)
    assert teacher.shown == 200


def test_a_table_that_does_not_fit_into_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr(answers_module, "LogitCache", short)
    assert make_logit_cache(Counting(), few_digits().train, "crop", 10, CPU) is None


def test_students_learn_the_same_from_remembered_answers() -> None:
    teacher = Counting().eval()
    torch.manual_seed(0)
    first = Small()
    second = copy.deepcopy(first)
    objective = Distillation(CrossEntropy(0.1), teacher, 0.5)
    online = fit(first, objective, few_digits().train, RECIPE, engine=CPU, seed=0)
    shown = teacher.shown
    remembered = fit(second, objective, taught(teacher), RECIPE, engine=CPU, seed=0)
    assert teacher.shown - shown <= shown
    for mine, theirs in zip(remembered, online, strict=True):
        assert mine.train == pytest.approx(theirs.train, rel=1e-4)


def test_answers_are_kept_for_other_runs_and_joined_with_theirs(tmp_path: Path) -> None:
    teacher = Counting().eval()
    first, second = taught(teacher), taught(teacher)
    list(first.batches(torch.arange(100), 50, View.of_epoch("crop", 0, 0), CPU.device))
    list(second.batches(torch.arange(100, 200), 50, View.of_epoch("crop", 0, 0), CPU.device))
    for images in (first, second):
        images.answers.keep_in(tmp_path / "kept")
        images.answers.save()
    third = taught(teacher)
    third.answers.keep_in(tmp_path / "kept")
    shown = teacher.shown
    for batch in third.batches(torch.arange(200), 50, View.of_epoch("crop", 0, 0), CPU.device):
        assert batch.teacher_logits is not None
        assert torch.allclose(batch.teacher_logits, teacher.net(batch.images), atol=1e-5)
    assert teacher.shown == shown


@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_a_damaged_file_of_answers_is_said_and_not_used(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_bytes(content)
    images = taught(Counting().eval())
    with caplog.at_level(logging.WARNING, "peel"):
        images.answers.keep_in(tmp_path / "kept")
    assert "asked again" in caplog.text
    assert not images.answers.known.any()


def test_answers_of_another_size_are_not_used(tmp_path: Path) -> None:
    teacher = Counting().eval()
    other = LogitCache(teacher, 30, 9, 10, CPU)
    other.known[:] = True
    other.keep_in(tmp_path / "kept")
    other.save()
    images = taught(teacher)
    images.answers.keep_in(tmp_path / "kept")
    assert not images.answers.known.any()


def test_teachers_images_and_views_are_told_apart() -> None:
    split = few_digits().train
    teachers = [Small(), Small()]
    names = {
        LogitCache.name_of(teachers[0], split, "crop", CPU),
        LogitCache.name_of(teachers[1], split, "crop", CPU),
        LogitCache.name_of(teachers[0], split, "none", CPU),
        LogitCache.name_of(teachers[0], split.subset(torch.arange(199)), "crop", CPU),
        LogitCache.name_of(teachers[0], split, "crop", replace(CPU, bf16=True)),
    }
    assert len(names) == 5
    assert LogitCache.name_of(copy.deepcopy(teachers[0]), split, "crop", CPU) in names


def test_views_that_cannot_be_counted_and_tables_too_large_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = few_digits().train
    assert make_logit_cache(Small(), split, "imagenet", 10, CPU) is None
    monkeypatch.setattr(answers_module, "TABLE_BYTES", 200 * 18 * 10 * 4)
    assert make_logit_cache(Small(), split, "crop", 10, CPU) is not None
    monkeypatch.setattr(answers_module, "TABLE_BYTES", 200 * 18 * 10 * 4 - 1)
    assert make_logit_cache(Small(), split, "crop", 10, CPU) is None


def test_a_run_keeps_the_answers_beside_a_teacher_that_it_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peel.run import prune as run_module

    engines = run_module.make_engine
    monkeypatch.setattr(
        run_module, "make_engine", lambda *a, **k: replace(engines(*a, **k), cache_teacher=True)
    )
    asked: list[int] = []
    ask = LogitCache.ask

    def noting(self: LogitCache, *arguments: object) -> None:
        before = self.asked
        ask(self, *arguments)  # type: ignore[arg-type]
        asked.append(self.asked - before)

    monkeypatch.setattr(LogitCache, "ask", noting)
    for number in range(2):
        prune(
            Small(),
            few_digits(),
            teacher=tmp_path / "teacher",
            device="cpu",
            output=tmp_path / str(number),
            **SHORT,
        )
    # Two epochs of 192 images for uniform; what it asked serves the slim network, and the whole second run.
    assert asked[0] == 192
    assert sum(asked[:2]) == sum(asked)
    assert len(list((tmp_path / "teacher").glob("answers-*.safetensors"))) == 1
