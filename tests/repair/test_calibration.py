"""Batch-norm statistics measured on calibration images: what may go wrong loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import peel
from helpers.own_data import TwoInputs
from helpers.small import Small, fresh, same_weights
from peel.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(4, 5, 8, 8), "the model cannot take these images: .* 3 channels"),
        ([torch.randn(4, 3, 8, 8), torch.randn(4, 5, 8, 8)], "the model cannot take these images"),
        (torch.randint(9, (4, 3, 8, 8)), "the model cannot take these images"),
        (torch.full((4, 3, 8, 8), float("nan")), "images holds 768 values that are not finite"),
        ([torch.randn(4, 3, 8, 8), [torch.full((1, 3, 9, 8), float("inf"))]], "not finite .* in batch 1"),
        ([], "images is empty"),
        (3, "images is a int; give a tensor"),
    ],
)
def test_images_of_another_shape_are_refused_and_change_nothing(images: Any, message: str) -> None:
    model, before = fresh(), fresh()
    with pytest.raises(DataError, match=message):
        peel.recalibrate(model, images)
    assert same_weights(model, before)
    assert model.norm1.momentum == Small().norm1.momentum


def test_several_inputs() -> None:
    first, second = torch.randn(2, 40, 3, 8, 8)
    by_place, by_name = TwoInputs(), TwoInputs()
    by_name.load_state_dict(by_place.state_dict())
    peel.recalibrate(by_place, [((first, second), "target")])
    peel.recalibrate(by_name, [{"first": first, "second": second}])
    assert same_weights(by_place, by_name)
    assert float(by_place.norm1.running_mean.abs().max()) > 0  # type: ignore[union-attr]
