"""The teacher cache: the same logits, computed once."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers.small import CPU, SHORT, Small, few_digits
from peel.data.augmentation import View
from peel.data.datasets import Split
from peel.run.prune import prune
from peel.steps.distillation import Distillation
from peel.train import teacher_cache as cache_module
from peel.train.loop import fit
from peel.train.objective import CrossEntropy
from peel.train.recipe import Recipe
from peel.train.teacher_cache import CachedTeacher, LogitCache, make_logit_cache

RECIPE = Recipe(epochs=3, batch_size=50, lr=0.05, augment="crop")


class Counting(nn.Module):
    """A teacher that counts the images it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = Small().eval().requires_grad_(False)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return self.net(images)  # type: ignore[no-any-return]


def cached(teacher: nn.Module, augment: str = "crop") -> CachedTeacher:
    split: Split = few_digits().train
    cache = make_logit_cache(teacher, split, augment, 10, CPU)
    assert cache is not None
    return CachedTeacher(split, cache)


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_cached_logits_are_those_of_the_teacher_for_the_augmented_images(augment: str) -> None:
    teacher = Counting().eval()
    images = cached(teacher, augment)
    for epoch in range(4):
        for batch in images.batches(torch.randperm(200), 30, View.of_epoch(augment, 0, epoch), CPU.device):
            assert batch.teacher_logits is not None
            assert torch.allclose(batch.teacher_logits, teacher.net(batch.inputs), atol=1e-5)


def test_an_epoch_without_images_has_no_batches() -> None:
    """As after a resume of a training that was interrupted during an evaluation."""
    assert (
        list(cached(Counting().eval()).batches(torch.arange(0), 30, View.of_epoch("crop", 0, 0), CPU.device))
        == []
    )


def test_no_logits_are_computed_twice() -> None:
    teacher = Counting().eval()
    images = cached(teacher)
    for _ in range(3):
        list(images.batches(torch.arange(200), 30, View.of_epoch("crop", 0, 0), CPU.device))
        assert teacher.seen == 200
    for epoch in range(200):
        list(images.batches(torch.arange(200), 100, View.of_epoch("crop", 0, epoch), CPU.device))
    assert teacher.seen == 9 * 200, "there are nine crops of each image"


def test_out_of_memory_the_teacher_runs_with_smaller_batches() -> None:
    class Narrow(Counting):
        def forward(self, images: Tensor) -> Tensor:
            if len(images) > 30:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(images)

    teacher = Narrow().eval()
    (batch,) = cached(teacher).batches(torch.arange(200), 200, View.of_epoch("crop", 0, 0), CPU.device)
    assert batch.teacher_logits is not None
    assert torch.allclose(batch.teacher_logits, teacher.net(batch.inputs), atol=1e-5)
    assert teacher.seen == 200


def test_a_table_above_the_limit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_BYTES", 1000)
    assert make_logit_cache(Counting(), few_digits().train, "crop", 10, CPU) is None


def test_students_learn_the_same_from_cached_logits() -> None:
    teacher = Counting().eval()
    torch.manual_seed(0)
    first = Small()
    second = copy.deepcopy(first)
    objective = Distillation(CrossEntropy(0.1), teacher, 0.5)
    online = fit(first, objective, few_digits().train, RECIPE, engine=CPU, seed=0)
    shown = teacher.seen
    remembered = fit(second, objective, cached(teacher), RECIPE, engine=CPU, seed=0)
    assert teacher.seen - shown <= shown
    for mine, theirs in zip(remembered, online, strict=True):
        assert mine.train == pytest.approx(theirs.train, rel=1e-4)


def test_there_is_no_cache_for_too_many_variants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = few_digits().train
    assert make_logit_cache(Small(), split, "imagenet", 10, CPU) is None
    monkeypatch.setattr(cache_module, "MAX_BYTES", 200 * 18 * 10 * 4)
    assert make_logit_cache(Small(), split, "crop", 10, CPU) is not None
    monkeypatch.setattr(cache_module, "MAX_BYTES", 200 * 18 * 10 * 4 - 1)
    assert make_logit_cache(Small(), split, "crop", 10, CPU) is None


def test_the_students_of_a_run_share_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from peel.run import loading as run_module

    make_engine = run_module.make_engine
    monkeypatch.setattr(
        run_module, "make_engine", lambda *a, **k: replace(make_engine(*a, **k), cache_teacher=True)
    )
    computed: list[int] = []
    fill = LogitCache.fill

    def counting(self: LogitCache, *arguments: object) -> None:
        before = self.computed
        fill(self, *arguments)  # type: ignore[arg-type]
        computed.append(self.computed - before)

    monkeypatch.setattr(LogitCache, "fill", counting)
    prune(Small(), few_digits(), device="cpu", weights="train", **SHORT)
    # Two epochs of 192 images for the uniform network, and the same for the slim network.
    assert computed[0] == 192
    assert 0 < computed[1] <= 192
    assert computed[2:] == [0, 0]
