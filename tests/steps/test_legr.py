"""The criterion legr, which learns to rank filters across layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.criteria import TwoBranches, by_tie, images, importance, make_inputs, normalized
from peel.data.datasets import Split
from peel.data.in_memory import InMemoryImages
from peel.steps.criteria import legr
from peel.steps.criteria.legr import Legr
from peel.steps.importance import CriterionInput
from peel.train.engine import Engine
from peel.train.history import Metrics
from peel.train.loop import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


def two_branches(branch: str, seed: int = 0, train_seed: int = 7) -> CriterionInput:
    """Held-out images whose labels are the predictions of one branch."""
    net = TwoBranches().eval()
    split = images(64, seed=1)
    held_out = InMemoryImages(
        split.pixels, net.predictions(normalized(split)[0], branch), split.mean, split.std
    )
    return make_inputs(
        net, {"large": ["large"], "small": ["small"]}, images(8, seed=train_seed), held_out, seed
    )


LEGR = Legr(evaluations=30, population=12, tournament=4)
#: A few mutations.
SHORT = Legr(evaluations=15, population=12, tournament=4)


def test_legr_starts_from_the_plain_filter_norms() -> None:
    inputs = two_branches("small")
    assert isinstance(inputs.model, TwoBranches)
    norms = {
        name: getattr(inputs.model, name).weight.detach().square().sum((1, 2, 3))
        for name in ("large", "small")
    }
    lowest = min(float(values.min()) for values in norms.values())
    for item in Legr(evaluations=1).measure(inputs):
        assert torch.allclose(item.values, norms[item.tie] - lowest)


def test_legr_finds_small_filters_that_matter() -> None:
    plain = importance(Legr(evaluations=1), two_branches("small")).groups
    found = importance(LEGR, two_branches("small")).groups
    assert plain["small"] < 0.05 * plain["large"]
    assert found["small"] > found["large"]


def test_legr_uses_held_out_images_only() -> None:
    small, large = (importance(LEGR, two_branches(branch)).groups for branch in ("small", "large"))
    assert small["small"] / sum(small.values()) > 2 * large["small"] / sum(large.values())
    assert importance(LEGR, two_branches("small", train_seed=8)).groups == small


def test_legr_is_reproducible_and_never_negative() -> None:
    found = [SHORT.measure(two_branches("small", seed)) for seed in (0, 0, 1)]
    assert by_tie(found[0]) == by_tie(found[1])
    assert by_tie(found[0]) != by_tie(found[2])
    for measured in found:
        assert min(float(item.values.min()) for item in measured) == 0


def test_legr_judges_candidates_on_random_images_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are sorted by class, as those of a folder are."""
    split = images(300, classes=5)
    held_out = replace(split, labels=split.labels.sort().values)
    judged = []

    def recorded(model: nn.Module, split: Split, engine: Engine, **options: Any) -> Metrics:
        judged.append(split)
        return evaluate(model, split, engine, **options)

    monkeypatch.setattr(legr, "evaluate", recorded)
    for seed in (0, 0, 1):
        inputs = make_inputs(TwoBranches().eval(), held_out=held_out, seed=seed)
        Legr(evaluations=1, images=43).measure(inputs)
    assert [sorted(split.labels.bincount().tolist()) for split in judged] == [[8, 8, 9, 9, 9]] * 3
    first, again, other = ({tuple(image.flatten().tolist()) for image in split.pixels} for split in judged)
    assert first == again != other
