"""The criterion that learns to rank filters over layers."""

from __future__ import annotations

import pytest
import torch

from helpers.subjects import Rivals, images, importance, per_tie, seen, subject
from peel.data.in_memory import InMemoryImages
from peel.steps.criteria.legr import Legr
from peel.steps.importance import CriterionInput

pytestmark = pytest.mark.usefixtures("one_thread")


def rivals(branch: str, seed: int = 0, train_seed: int = 7) -> CriterionInput:
    """Held-out images whose labels only one branch knows."""
    net = Rivals().eval()
    split = images(64, seed=1)
    held_out = InMemoryImages(split.pixels, net.answers(seen(split)[0], branch), split.mean, split.std)
    return subject(net, {"loud": ["loud"], "quiet": ["quiet"]}, images(8, seed=train_seed), held_out, seed)


LEGR = Legr(evaluations=30, population=12, tournament=4)


def test_legr_starts_from_the_plain_norm_of_filters() -> None:
    of = rivals("quiet")
    assert isinstance(of.model, Rivals)
    norms = {
        name: getattr(of.model, name).weight.detach().square().sum((1, 2, 3)) for name in ("loud", "quiet")
    }
    lowest = min(float(values.min()) for values in norms.values())
    for item in Legr(evaluations=1).measure(of):
        assert torch.allclose(item.values, norms[item.tie] - lowest)


def test_legr_finds_small_filters_that_matter() -> None:
    plain = importance(Legr(evaluations=1), rivals("quiet")).groups
    found = importance(LEGR, rivals("quiet")).groups
    assert plain["quiet"] < 0.05 * plain["loud"]
    assert found["quiet"] > found["loud"]


def test_legr_asks_held_out_images_and_no_others() -> None:
    quiet, loud = (importance(LEGR, rivals(branch)).groups for branch in ("quiet", "loud"))
    assert quiet["quiet"] / sum(quiet.values()) > 2 * loud["quiet"] / sum(loud.values())
    assert importance(LEGR, rivals("quiet", train_seed=8)).groups == quiet


def test_legr_gives_the_same_for_the_same_seed_and_never_less_than_zero() -> None:
    found = [LEGR.measure(rivals("quiet", seed)) for seed in (0, 0, 1)]
    assert per_tie(found[0]) == per_tie(found[1])
    assert per_tie(found[0]) != per_tie(found[2])
    for measured in found:
        assert min(float(item.values.min()) for item in measured) == 0
