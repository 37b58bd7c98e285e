"""The windows that a layer reads: with its weights, they give its output."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peel.repair.layer_calls import parse_call, places_shape, rows_at

CALLS: list[tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    (F.linear, (5, 4), (3, 4), {}),
    (torch.conv1d, (2, 4, 9), (6, 4, 3), {"padding": 1, "stride": 2}),
    (torch.conv2d, (2, 4, 7, 5), (6, 4, 1, 1), {}),
    (torch.conv2d, (2, 4, 7, 5), (6, 4, 1, 1), {"stride": 2}),
    (torch.conv2d, (2, 4, 2, 2), (6, 4, 1, 1), {"stride": 2, "padding": 1}),
    (torch.conv2d, (2, 4, 7, 5), (6, 4, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    (torch.conv2d, (2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2, "dilation": 2, "padding": 2}),
    (torch.conv2d, (2, 4, 7, 5), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    (torch.conv2d, (2, 4, 7, 5), (6, 4, 4, 4), {"padding": "same"}),
    (torch.conv3d, (2, 2, 4, 5, 3), (3, 2, 3, 2, 1), {"padding": (1, 0, 0)}),
    (torch.conv_transpose2d, (2, 4, 3, 4), (4, 3, 2, 3), {"stride": (2, 3), "padding": (0, 1)}),
    (torch.conv_transpose2d, (2, 4, 3, 4), (4, 3, 3, 3), {"groups": 2, "stride": 2, "output_padding": 1}),
    (torch.conv_transpose2d, (2, 4, 3, 3), (4, 3, 1, 1), {"dilation": 2, "output_padding": 1}),
]


@pytest.mark.filterwarnings("ignore:Using padding=.same")
@pytest.mark.parametrize(("function", "inputs", "weight", "options"), CALLS)
def test_rows_times_weights_are_the_output(
    function: Any, inputs: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    given = torch.randn(inputs, dtype=torch.float64), torch.randn(weight, dtype=torch.float64)
    output, call = function(*given, **options), parse_call(function, given, options)
    assert call is not None
    shape = places_shape(output, call.axes)
    places = torch.randint(prod(shape), (40,))
    rows = call.input_rows(shape, places)
    found = (rows @ call.matrix().mT).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, rows_at(output, call.axes, places))
