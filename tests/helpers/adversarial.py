"""Small networks that try to make the analysis wrong without a word, each with the outcome that it must have.

`free` names the ties whose widths may change, as far as the rules know today; every other tie must be fixed,
with a reason. `inexact` names the free ties for which cutting is not zeroing. From widths in `computed` the
code computes numbers that are no lengths: there only `verify` says so. At the widths in `refused`, `slim`
must refuse with a line of this file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.nn.utils import parametrizations

IMAGE = (3, 8, 8)


@dataclass(frozen=True)
class Case:
    name: str
    parts: Callable[[], dict[str, Any]]
    body: Callable[..., Any]
    free: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)
    nest: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors
    """From the tensors of these shapes to the arguments of the call."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Adversary(self).eval()

    @property
    def example(self) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        return self.nest(*(torch.randn(1, *shape, generator=generator) for shape in self.shapes))


class Adversary(nn.Module):
    """The parts of a case, its code as forward, and a classifier."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.body = case.body
        for name, part in case.parts().items():
            setattr(self, name, part)
        with torch.no_grad():  # on a copy, which may keep something of its first call
            self.fc = nn.Linear(case.body(copy.deepcopy(self).eval(), *case.example).shape[1], 5)

    def forward(self, *inputs: Any) -> Tensor:
        x = self.body(self, *inputs)
        return self.fc(x.flatten(2).mean(2) if x.ndim > 2 else x)


CASES: list[Case] = []


def case(
    parts: Callable[[], dict[str, Any]],
    free: str = "",
    *,
    inexact: str = "",
    computed: str = "",
    refused: Mapping[str, int] | None = None,
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,),
    nest: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        names = (tuple(words.split()) for words in (free, inexact, computed))
        CASES.append(Case(body.__name__, parts, body, *names, refused or {}, shapes, nest))
        return body

    return add


def conv(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=options.pop("padding", size // 2), **options)


# Branches that depend on widths


@case(lambda: {"a": conv(3, 64), "b": conv(64, 64)})
def threshold_between_the_probes(self, x):
    x = self.a(x)
    if x.shape[1] >= 32:
        x = relu(self.b(x)) + x
    return x


@case(lambda: {"a": conv(3, 64), "b": conv(64, 64)}, "a", refused={"a": 7})
def threshold_below_the_probes(self, x):
    x = self.a(x)
    if x.shape[1] >= 8:
        x = relu(self.b(x)) + x
    return x


@case(lambda: {"a": conv(3, 16), "b": conv(16, 32), "down": conv(16, 32), "c": conv(32, 12)}, "c")
def projection_where_shapes_differ(self, x):
    x = self.a(x)
    y = self.b(x)
    if x.shape != y.shape:
        x = self.down(x)
    return self.c(relu(x + y))


@case(lambda: {"a": conv(3, 16), "b": conv(16, 24)})
def sum_where_shapes_are_equal(self, x):
    x = relu(self.a(x))
    y = self.b(x)
    if y.shape == x.shape:
        y = y + x
    return y


@case(lambda: {"a": conv(3, 16), "b": conv(16, 16)}, "a")
def sum_where_shapes_are_always_equal(self, x):
    x = relu(self.a(x))
    y = self.b(x)
    return y + x if y.shape == x.shape else y


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "b")
def flow_of_data_depends_on_width(self, x):
    x = self.a(x)
    y = relu(x)
    return self.b(y if x.shape[1] >= 24 else x)


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "a b", computed="a")
def number_depends_on_width(self, x):
    x = self.a(x)
    return self.b(x * (0.5 if x.shape[1] < 20 else 1.0))


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "a b", refused={"a": 6})
def number_depends_on_a_width_that_no_probe_has(self, x):
    x = self.a(x)
    return self.b(x * (0.5 if x.shape[1] == 6 else 1.0))


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "b")
def even_widths_only(self, x):
    x = self.a(x)
    if x.shape[1] % 2 == 0:
        x = torch.sigmoid(x)
    return self.b(x)


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "b")
def repeats_depend_on_width(self, x):
    x = self.a(x)
    for _ in range(x.shape[1] // 8):
        x = torch.tanh(x)
    return self.b(x)


@case(lambda: {"a": conv(3, 32), "b": conv(1, 12)}, "b")
def clamped_slice_into_a_mean(self, x):
    x = self.a(x)
    return self.b(x[:, : max(10, x.shape[1] // 2)].mean(1, keepdim=True))


@case(lambda: {"a": conv(3, 64), "b": conv(1, 12)}, "a b", inexact="a", refused={"a": 6})
def clamped_slice_below_the_probes(self, x):
    x = self.a(x)
    return self.b(x[:, : max(4, x.shape[1] // 2)].mean(1, keepdim=True))


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12)}, "b")
def width_is_asserted(self, x):
    x = self.a(x)
    assert x.shape[1] == 16, "sixteen channels"
    return self.b(x)


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12)}, "a b")
def branches_on_what_is_no_width(self, x):
    x = self.a(x) if x.ndim == 4 and x.shape[2] >= 8 else x.relu()
    return self.b(x) if len(list(self.children())) > 1 else x


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12)}, "a b")
def compares_with_the_attribute_of_a_layer(self, x):
    x = self.a(x)
    if x.shape[1] != self.b.in_channels:
        raise ValueError("wrong input")
    return self.b(x)


@case(lambda: {"a": conv(3, 12), "b": conv(3, 16), "c": conv(12, 10)}, "a b[12:16] c")
def smaller_of_two_widths(self, x):
    a, b = self.a(x), self.b(x)
    n = min(a.shape[1], b.shape[1])
    return self.c(a[:, :n] * b[:, :n])


@case(lambda: {"a": conv(3, 16), "b": conv(16, 16), "extra": conv(16, 16)}, "b")
def branch_in_training_only(self, x):
    x = self.a(x)
    y = self.b(x)
    if self.training and x.shape[1] >= 12:
        y = y + self.extra(x)
    return y


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12)}, "b")
def error_is_caught(self, x):
    x = self.a(x)
    try:
        x = x.view(x.shape[0], 16, 8, 8).relu()
    except RuntimeError:
        x = x.sigmoid()
    return self.b(x)


@case(lambda: {"a": conv(3, 16), "b": conv(16, 16), "c": conv(16, 16)}, "a b")
def residual_only_where_elements_are_few(self, x):
    x = self.a(x)
    y = self.c(relu(self.b(x)))
    return x + y if y[0].numel() < 10**6 else y


class Cached(nn.Module):
    """Keeps a mask in an attribute, made for the width of the first call."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = x.new_ones(1, x.shape[1], 1, 1)
        return x * self.mask


@case(lambda: {"a": conv(3, 16), "cached": Cached(), "b": conv(16, 12)}, "a b")
def cache_for_the_first_width(self, x):
    return self.b(self.cached(self.a(x)))


@case(lambda: {"a": conv(3, 16), "cached": Cached(torch.ones(1, 16, 1, 1)), "b": conv(16, 12)}, "b")
def cache_of_an_earlier_call(self, x):
    return self.b(self.cached(self.a(x)))


# Numbers that equal widths by chance


@case(lambda: {"a": conv(3, 32), "c": conv(16, 16), "temperature": 16, "channels": 16}, "a c")
def temperature_beside_a_width(self, x):
    u, v = torch.split(self.a(x), self.channels, 1)
    return torch.tanh(torch.cat([self.c(u), v], 1) / self.temperature)


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12), "size": 8, "half": 8}, "a b")
def image_size_beside_a_width(self, x):
    u, v = torch.split(self.a(x), self.half, 1)
    x = torch.cat([relu(u), v], 1)
    return self.b(x.reshape(x.shape[0], x.shape[1], self.size, self.size))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "dim": 8}, "a b")
def stored_width_as_a_scale(self, x):
    x = self.a(x)
    return self.b(x.reshape(x.shape[0], x.shape[1], -1, 8) * self.dim**-0.5)


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12), "dim": 8}, "a b", computed="a")
def stored_width_as_a_length_and_a_scale(self, x):
    x = self.a(x)
    u, v = torch.split(x, self.dim, 1)
    return self.b(torch.cat([relu(u), v], 1) * self.dim**-0.5)


@case(lambda: {"a": conv(3, 32), "b": conv(32, 12)}, "a b", computed="a")
def scale_from_the_shape(self, x):
    x = self.a(x)
    return self.b(x) * x.shape[1] ** -0.5


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "shift": 8, "width": 8}, "a b")
def shift_beside_a_width(self, x):
    x = self.a(x)
    x = x.view(x.shape[0], self.width, 64)
    return self.b(torch.roll(x, self.shift, 2).view(x.shape[0], self.width, 8, 8))


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12), "sizes": (4, 12), "powers": (4, 12)}, "a[0:4] a[4:16] b")
def two_lists_of_the_same_numbers(self, x):
    u, v = torch.split(self.a(x), list(self.sizes), 1)
    return self.b(torch.cat([u / self.powers[0], v / self.powers[1]], 1))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 8), "c": conv(8, 8), "level": 8, "channels": 8}, "a b c")
def attribute_in_a_condition(self, x):
    x = self.a(x)
    x = x.view(x.shape[0], self.channels, 8, 8)
    return self.c(self.b(x)) if self.level > 4 else self.b(x)


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12)}, "b")
def constant_tensor_as_long_as_a_width(self, x):
    return self.b(self.a(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]).view(1, 8, 1, 1))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 8, 3), "d": conv(8, 12)}, "a b d")
def kernel_and_width_are_alike(self, x):
    return self.d(F.avg_pool2d(self.b(relu(self.a(x))), 8))


# Shared and tied modules


@case(lambda: {"a": conv(3, 12), "b": conv(12, 12, 3)}, "a")
def layer_called_three_times(self, x):
    x = self.a(x)
    for _ in range(3):
        x = relu(self.b(x))
    return x


@case(lambda: {"a": conv(3, 12), "b": conv(3, 12), "bn": nn.BatchNorm2d(12), "c": conv(12, 10)}, "a c")
def norm_shared_by_two_branches(self, x):
    return self.c(relu(self.bn(self.a(x))) * torch.sigmoid(self.bn(self.b(x))))


@case(lambda: {"a": conv(3, 12, 3), "b": conv(12, 8)}, "a b", shapes=(IMAGE, IMAGE))
def siamese_inputs(self, x, y):
    return self.b((relu(self.a(x)) - relu(self.a(y))).abs())


def _same_weight() -> dict[str, Any]:
    parts = {"a": conv(3, 12), "b": conv(12, 12, 3), "c": conv(12, 12, 3)}
    parts["c"].weight = parts["b"].weight
    return parts


@case(_same_weight, "a")
def one_weight_in_two_layers(self, x):
    return self.c(relu(self.b(relu(self.a(x)))))


@case(lambda: {"a": conv(3, 12), "b": conv(12, 16, 3)}, "a b")
def decoder_with_the_weight_of_the_encoder(self, x):
    x = self.a(x)
    return x + F.conv_transpose2d(relu(self.b(x)), self.b.weight, padding=1)


@case(lambda: {"a": conv(3, 12), "act": nn.PReLU(12), "b": conv(12, 12), "c": conv(12, 10)}, "a c")
def activation_with_parameters_shared(self, x):
    return self.c(self.act(self.b(self.act(self.a(x)))))


@case(lambda: {"blocks": nn.ModuleList([conv(3, 8), conv(8, 10), conv(10, 8)])}, "blocks.0 blocks.1")
def last_block_back_to_the_first(self, x):
    first = x = self.blocks[0](x)
    for block in self.blocks[1:]:
        x = block(relu(x))
    return x + first


# Groups and shuffles


@case(lambda: {"a": conv(3, 4), "b": conv(3, 8), "g": conv(12, 12, groups=3), "c": conv(12, 10)}, "a g c")
def uneven_parts_in_a_grouped_layer(self, x):
    return self.c(relu(self.g(torch.cat([self.a(x), self.b(x)], 1))))


@case(lambda: {"a": conv(3, 12), "g": conv(12, 8, 3, groups=4), "h": conv(8, 12, groups=2)}, "a g h")
def groups_of_different_number(self, x):
    return self.h(relu(self.g(relu(self.a(x)))))


@case(lambda: {"a": conv(3, 8), "d": conv(8, 24, 3, groups=8), "c": conv(24, 10)}, "a c")
def depthwise_with_three_outputs_each(self, x):
    return self.c(self.d(self.a(x)))


@case(lambda: {"a": conv(3, 8), "kernel": nn.Parameter(torch.randn(8, 1, 3, 3)), "c": conv(8, 10)}, "a c")
def depthwise_by_hand(self, x):
    x = self.a(x)
    return self.c(F.conv2d(x, self.kernel, padding=1, groups=x.shape[1]))


@case(lambda: {"a": conv(3, 12), "g": conv(12, 12, groups=3), "c": conv(12, 10)}, "a c", inexact="a")
def shuffle_between_grouped_layers(self, x):
    return self.c(self.g(F.channel_shuffle(self.g(self.a(x)), 3)))


@case(lambda: {"a": conv(3, 6), "b": conv(3, 6), "c": conv(12, 10)}, "a c", inexact="a")
def shuffle_by_views(self, x):
    x = torch.cat([self.a(x), self.b(x)], 1)
    n, c, h, w = x.shape
    return self.c(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


@case(lambda: {"a": conv(3, 16), "b": conv(4, 12)}, "a b")
def pixels_from_channels(self, x):
    return self.b(F.pixel_shuffle(self.a(x), 2))


@case(lambda: {"a": conv(3, 6), "b": conv(24, 12)}, "a b")
def channels_from_pixels(self, x):
    return self.b(F.pixel_unshuffle(self.a(x), 2))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "order": torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])}, "b")
def channels_in_another_order(self, x):
    return self.b(self.a(x)[:, self.order])


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12)}, "b")
def channels_reversed(self, x):
    return self.b(self.a(x).flip(1))


@case(lambda: {"a": conv(3, 16), "b": conv(8, 12)}, "b")
def maximum_of_pairs(self, x):
    x = self.a(x)
    n, c, h, w = x.shape
    return self.b(x.view(n, c // 2, 2, h, w).amax(2))


@case(lambda: {"a": conv(3, 12), "b": conv(6, 12)}, "b")
def every_second_channel(self, x):
    return self.b(self.a(x)[:, ::2])


@case(lambda: {"a": conv(3, 12), "b": conv(12, 12)}, "b")
def channels_written_in_place(self, x):
    x = self.a(x)
    x[:, :4] = x[:, :4] * 2
    return self.b(x)


# Transposed, dilated, one and three dimensions


@case(
    lambda: {"a": conv(3, 8), "up": nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1), "c": conv(6, 10)},
    "a up c",
)
def transposed_with_output_padding(self, x):
    return self.c(relu(self.up(relu(self.a(x)))))


@case(lambda: {"a": conv(3, 8), "up": nn.ConvTranspose2d(8, 12, 2, 2, groups=4), "c": conv(12, 10)}, "a up c")
def transposed_in_groups(self, x):
    return self.c(relu(self.up(relu(self.a(x)))))


@case(
    lambda: {
        "a": conv(3, 8),
        "b": conv(8, 4, 3, padding=2, dilation=2),
        "c": conv(8, 6, 3, padding=3, dilation=3),
        "pool": conv(8, 5),
        "d": conv(15, 10),
    },
    "a b c pool d",
)
def dilated_branches_and_a_pooled_one(self, x):
    x = relu(self.a(x))
    pooled = F.interpolate(self.pool(F.adaptive_avg_pool2d(x, 1)), x.shape[2:])
    return self.d(torch.cat([self.b(x), self.c(x), pooled], 1))


@case(
    lambda: {"a": conv(3, 8), "b": conv(8, 12, 3, stride=2), "up": conv(12, 8), "c": conv(16, 10)}, "a b up c"
)
def skip_connection_of_a_decoder(self, x):
    x = self.a(x)
    y = F.interpolate(self.up(relu(self.b(x))), scale_factor=2.0)
    return self.c(torch.cat([x, y], 1))


@case(
    lambda: {
        "a": nn.Conv1d(2, 8, 1),
        "f": nn.Conv1d(8, 12, 2, dilation=2),
        "r": nn.Conv1d(6, 8, 1),
        "s": nn.Conv1d(6, 7, 1),
    },
    "a f s",
    shapes=((2, 16),),
)
def gated_and_dilated_over_time(self, x):
    x = self.a(x)
    gate = F.glu(self.f(F.pad(x, (2, 0))), 1)
    return self.s(gate) + self.s(F.glu(self.f(F.pad(x + self.r(gate), (2, 0))), 1))


@case(
    lambda: {"a": nn.Conv3d(2, 8, 3, padding=1), "n": nn.BatchNorm3d(8), "b": nn.Conv3d(8, 6, 1)},
    "a b",
    shapes=((2, 4, 6, 6),),
)
def three_dimensions(self, x):
    return self.b(F.max_pool3d(relu(self.n(self.a(x))), 2))


@case(lambda: {"a": conv(2, 8), "t": nn.Conv1d(8, 6, 3, padding=1)}, "a t", shapes=((4, 2, 6, 6),))
def frames_in_the_batch(self, x):
    n, t = x.shape[:2]
    x = self.a(x.flatten(0, 1)).mean((2, 3))
    return self.t(x.view(n, t, -1).transpose(1, 2))


@case(lambda: {"a": conv(3, 8), "eca": nn.Conv1d(1, 1, 3, padding=1), "b": conv(8, 12)}, "a b", inexact="a")
def convolution_along_the_channels(self, x):
    x = self.a(x)
    gate = self.eca(x.mean((2, 3)).unsqueeze(1)).squeeze(1)
    return self.b(x * torch.sigmoid(gate)[:, :, None, None])


# Computed weights


@case(lambda: {"a": conv(3, 8), "b": parametrizations.spectral_norm(conv(8, 12))})
def spectral_norm_of_a_weight(self, x):
    return self.b(relu(self.a(x)))


@case(
    lambda: {"a": conv(3, 8), "u": nn.Parameter(torch.randn(12, 4)), "v": nn.Parameter(torch.randn(4, 8))},
    "a u",
    inexact="a",
)
def weight_of_low_rank(self, x):
    x = self.a(x).flatten(2).transpose(1, 2)
    return F.linear(x, self.u @ self.v).transpose(1, 2)


@case(
    lambda: {"a": conv(3, 8), "b": conv(8, 12), "mask": nn.Parameter(torch.ones(12, 8, 1, 1))},
    "a b",
    inexact="a",
)
def masked_weight(self, x):
    return F.conv2d(self.a(x), self.b.weight * self.mask, self.b.bias)


@case(
    lambda: {"a": conv(3, 8), "w": nn.Parameter(torch.randn(3, 12, 8, 1, 1)), "route": nn.Linear(8, 3)},
    "a w",
    inexact="a",
)
def weights_of_experts(self, x):
    x = self.a(x)
    gates = self.route(x.mean((0, 2, 3))).softmax(0)
    return F.conv2d(x, (self.w * gates.view(3, 1, 1, 1, 1)).sum(0))


@case(lambda: {"a": conv(3, 8), "make": nn.Linear(8, 96)})
def weight_made_from_the_input(self, x):
    x = self.a(x)
    weight = self.make(x.mean((0, 2, 3))).view(12, 8, 1, 1)
    return F.conv2d(x, weight)


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "c": conv(12, 10)}, "a b c", inexact="a")
def weight_of_unit_length(self, x):
    return self.c(F.conv2d(self.a(x), F.normalize(self.b.weight, dim=1)))


@case(lambda: {"a": conv(3, 8), "b": nn.Linear(8, 12), "c": nn.Linear(8, 12)}, "a b", inexact="a")
def sum_of_two_weights(self, x):
    x = self.a(x).mean((2, 3))
    return F.linear(x, self.b.weight + self.c.weight, self.b.bias)


# Recurrent layers, attention, other operators


@case(lambda: {"a": conv(3, 8), "b": conv(8, 6), "rnn": nn.LSTM(48, 10, batch_first=True)}, "a")
def lstm_over_columns(self, x):
    x = self.b(relu(self.a(x))).permute(0, 3, 1, 2).flatten(2)
    return self.rnn(x)[0].transpose(1, 2)


@case(lambda: {"a": conv(3, 8), "b": conv(8, 6), "cell": nn.GRUCell(6, 6), "c": nn.Linear(6, 9)}, "a c")
def gru_cell_over_positions(self, x):
    x = self.b(relu(self.a(x))).flatten(2)
    state = x[:, :, 0]
    for i in range(1, 4):
        state = self.cell(x[:, :, i], state)
    return self.c(state)


@case(lambda: {"a": conv(3, 8), "att": nn.MultiheadAttention(8, 2, batch_first=True), "c": conv(8, 9)}, "c")
def attention_after_a_convolution(self, x):
    x = self.a(x)
    y = x.flatten(2).transpose(1, 2)
    return self.c(x + self.att(y, y, y)[0].transpose(1, 2).view_as(x))


@case(
    lambda: {"a": conv(3, 8), "n": nn.GroupNorm(4, 8), "b": conv(8, 12), "m": nn.InstanceNorm2d(12)},
    "a b",
    inexact="a",
)
def norms_without_batches(self, x):
    return self.m(self.b(relu(self.n(self.a(x)))))


@case(lambda: {"a": conv(3, 8), "g": nn.Parameter(torch.ones(8, 1, 1)), "b": conv(8, 12)}, "a b", inexact="a")
def layer_norm_by_hand(self, x):
    x = self.a(x)
    mean = x.mean(1, keepdim=True)
    var = ((x - mean) ** 2).mean(1, keepdim=True)
    return self.b((x - mean) / (var + 1e-5).sqrt() * self.g)


@case(lambda: {"a": conv(3, 8), "m": nn.Parameter(torch.randn(8, 12))}, "a m")
def product_with_a_parameter(self, x):
    return torch.einsum("nchw,cd->ndhw", self.a(x), self.m)


@case(lambda: {"a": conv(3, 8), "m": nn.Parameter(torch.randn(3, 12)), "b": conv(12, 7)}, "b")
def three_factors_in_one_equation(self, x):
    x = self.a(x)
    return self.b(torch.einsum("nchw,nkhw,kd->ndhw", x, x[:, :3], self.m))


@case(lambda: {"a": conv(3, 8), "e": nn.Embedding(8, 12), "b": conv(12, 7)}, "e b")
def number_of_the_largest_channel(self, x):
    return self.b(self.e(self.a(x).argmax(1)).permute(0, 3, 1, 2))


@case(lambda: {"a": conv(3, 8), "e": nn.Embedding(8, 12), "b": conv(12, 7)}, "e b")
def number_of_the_smallest_channel_with_its_value(self, x):
    value, index = self.a(x).min(1)
    return self.b(value[:, None] * self.e(index).permute(0, 3, 1, 2))


@case(lambda: {"a": conv(3, 8), "g": conv(3, 16), "b": conv(8, 12)}, "g b")
def scale_and_shift_by_tensor_split(self, x):
    scale, shift = self.g(x).tensor_split(2, 1)
    return self.b(self.a(x) * scale + shift)


@case(lambda: {"a": conv(3, 8), "b": conv(72, 12)}, "a b")
def patches_by_unfold(self, x):
    x = self.a(x)
    return self.b(F.unfold(x, 3, padding=1).view(x.shape[0], -1, *x.shape[2:]))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12)}, "b")
def sum_along_the_channels(self, x):
    return self.b(self.a(x).cumsum(1))


@case(lambda: {"a": conv(3, 8), "b": conv(4, 12)}, "b")
def largest_four_channels(self, x):
    return self.b(self.a(x).topk(4, 1).values)


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "c": conv(2, 1, 3)}, "a b", inexact="a")
def spatial_gate_over_channels(self, x):
    x = self.a(x)
    gate = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return self.b(x * torch.sigmoid(self.c(gate)))


@case(lambda: {"a": conv(3, 8), "b": conv(4, 10), "c": conv(8, 10)}, "b a", shapes=(IMAGE, (4, 8, 8)))
def two_inputs_of_different_widths(self, x, y):
    return self.b(y) + self.c(relu(self.a(x)))


@case(lambda: {"a": conv(3, 8), "s": nn.Embedding(10, 8), "c": conv(8, 10)}, "a c", shapes=(IMAGE, (1,)))
def second_input_is_an_index(self, x, step):
    return self.c(self.a(x) + self.s((step[:, 0].abs() * 0).long())[:, :, None, None])


@case(lambda: {"a": conv(3, 8), "b": conv(3, 8), "c": conv(8, 10)}, "a c")
def mask_chooses_between_branches(self, x):
    a, b = self.a(x), self.b(x)
    return self.c(torch.where(a > b, a, b * 0.1))


@case(lambda: {"a": conv(3, 8), "b": conv(11, 10), "c": conv(21, 9)}, "a b c")
def dense_with_the_image(self, x):
    a = torch.cat([x, relu(self.a(x))], 1)
    return self.c(torch.cat([a, self.b(a)], 1))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12)}, "b")
def spectrum_of_the_channels(self, x):
    return self.b(torch.fft.fft(self.a(x), dim=1).real)


@case(lambda: {"a": conv(3, 8, 3), "h": nn.Linear(512, 14)}, "a h")
def flattened_map(self, x):
    return relu(self.h(self.a(x).flatten(1)))


@case(lambda: {"a": conv(3, 8), "b": conv(8, 8), "gate": nn.Parameter(torch.zeros(()))}, "a b")
def branch_that_is_zero_at_first(self, x):
    x = self.a(x)
    return torch.cat([x, self.gate * self.b(x)], 1)


# Lengths from elsewhere


@case(lambda: {"a": conv(3, 8), "b": conv(8, 16), "c": conv(16, 10)}, "a c")
def zeros_for_the_missing_channels(self, x):
    x = self.a(x)
    y = self.b(x)
    return self.c(y + F.pad(x, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1])))


@case(lambda: {"a": conv(3, 16), "b": conv(3, 8), "c": conv(8, 10)}, "a c")
def as_many_channels_as_the_other(self, x):
    a, b = self.a(x), self.b(x)
    return self.c(a[:, : b.shape[1]] + b)


@case(lambda: {"a": conv(3, 16), "b": conv(3, 16), "c": conv(16, 10)}, "c")
def length_of_another_layer_by_chance(self, x):
    a, b = self.a(x), self.b(x)
    return self.c(b.reshape(b.shape[0], a.shape[1], *b.shape[2:])) + a.mean(1, keepdim=True)


@case(lambda: {"a": conv(3, 4), "b": conv(3, 4), "c": conv(4, 10)}, "c")
def length_of_another_narrow_layer_by_chance(self, x):
    a, b = self.a(x), self.b(x)
    return self.c(b.reshape(b.shape[0], a.shape[1], *b.shape[2:])) + a.mean(1, keepdim=True)


@case(lambda: {"a": conv(3, 8), "w": nn.Parameter(torch.randn(12, 16, 1, 1))}, "a w", inexact="a")
def slice_of_a_longer_weight(self, x):
    x = self.a(x)
    return F.conv2d(x, self.w[:, : x.shape[1]])


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "pos": nn.Parameter(torch.randn(1, 32, 1, 1))}, "a b")
def slice_of_a_longer_embedding(self, x):
    x = self.a(x)
    return self.b(x + self.pos[:, : x.shape[1]])


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12), "g": 8, "k": nn.Parameter(torch.randn(8, 1, 3, 3))}, "b")
def number_of_groups_in_an_attribute(self, x):
    return self.b(F.conv2d(self.a(x), self.k, padding=1, groups=self.g))


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12), "config": {"width": 16}}, "b")
def width_in_a_dictionary(self, x):
    x = self.a(x)
    return self.b(x.view(x.shape[0], self.config["width"], 8, 8))


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12), "expected": 16, "d": conv(16, 16)}, "d b")
def attribute_is_compared_with_the_shape(self, x):
    x = self.a(x)
    if x.shape[1] == self.expected:
        x = self.d(x)
    return self.b(x)


@case(lambda: {"a": conv(3, 16), "b": conv(16, 12)}, "b")
def branch_on_the_shape_of_a_weight(self, x):
    x = self.a(x)
    return self.b(relu(x) if self.a.weight.shape[0] > 12 else x)


@case(lambda: {"a": conv(3, 8), "b": conv(8, 12)}, "a b", computed="a b")
def number_of_parameters_as_a_scale(self, x):
    return self.b(self.a(x)) / sum(p.numel() for p in (*self.a.parameters(), *self.b.parameters()))


@case(lambda: {"a": conv(3, 12), "n": nn.Parameter(torch.ones(12)), "b": conv(12, 10)}, "b")
def groups_computed_from_the_width(self, x):
    x = self.a(x)
    return self.b(F.group_norm(x, x.shape[1] // 4, self.n))


@case(lambda: {"a": conv(3, 8), "b": conv(4, 10)}, "b")
def channels_pooled_to_four(self, x):
    x = self.a(x).permute(0, 2, 3, 1).flatten(1, 2)
    return self.b(F.adaptive_avg_pool1d(x, 4).transpose(1, 2).unflatten(2, (8, 8)))


@case(lambda: {"a": conv(3, 8), "h": nn.Linear(64, 10)}, "h")
def products_of_all_pairs_of_channels(self, x):
    x = self.a(x).flatten(2)
    return relu(self.h((x @ x.transpose(1, 2)).flatten(1)))


@case(
    lambda: {"a": conv(3, 8), "h": nn.Linear(8, 64), "u": nn.Unflatten(1, (16, 2, 2)), "b": conv(16, 10)},
    "a b",
)
def map_from_a_vector(self, x):
    return self.b(self.u(relu(self.h(self.a(x).mean((2, 3))))))


@case(lambda: {"a": conv(3, 8), "b": conv(16, 10)}, "a b")
def channels_repeated(self, x):
    return self.b(self.a(x).repeat(1, 2, 1, 1))


@case(lambda: {"a": conv(3, 8), "q": conv(8, 8), "k": conv(8, 8), "c": conv(8, 9)}, "a q c", inexact="q")
def attention_by_products_of_maps(self, x):
    x = self.a(x)
    q, k = self.q(x).flatten(2), self.k(x).flatten(2)
    weights = (q.transpose(1, 2) @ k * q.shape[1] ** -0.5).softmax(-1)
    return self.c((x.flatten(2) @ weights.transpose(1, 2)).view_as(x))


@case(lambda: {"a": conv(3, 8), "mix": nn.Bilinear(8, 8, 6)})
def bilinear_layer(self, x):
    x = self.a(x).mean((2, 3))
    return self.mix(x, x.flip(0))


@case(lambda: {"a": conv(3, 8), "b": conv(3, 8), "c": conv(8, 9)}, "a c", shapes=(IMAGE, IMAGE))
def which_input_depends_on_the_width(self, x, y):
    a, b = self.a(x), self.b(x if self.a.out_channels > 1 else y)
    return self.c(a * b)


@case(
    lambda: {"a": conv(3, 64), "b": conv(3, 64), "c": conv(64, 9), "d": conv(64, 9)},
    "a b d",
    refused={"a": 6},
    shapes=(IMAGE, IMAGE),
)
def which_input_depends_on_a_small_width(self, x, y):
    a = self.a(x)
    return self.d(a) + self.c(self.b(x if a.shape[1] >= 8 else y))


# Nested inputs

TWO = (IMAGE, (1, 8, 8))


@case(
    lambda: {"a": conv(3, 8), "b": conv(1, 6), "c": conv(14, 9)},
    "a b c",
    shapes=TWO,
    nest=lambda *tensors: (list(tensors),),
)
def inputs_in_a_list(self, inputs):
    return self.c(torch.cat([part(x) for part, x in zip((self.a, self.b), inputs, strict=True)], 1))


@case(
    lambda: {"a": conv(3, 8), "b": conv(1, 8), "c": conv(8, 9)},
    "a c",
    shapes=TWO,
    nest=lambda x, y: (x, (y, None)),
)
def input_in_a_tuple_with_none(self, x, others):
    return self.c(self.a(x) * self.b(others[0]).sigmoid())


@case(
    lambda: {"a": conv(3, 24), "b": conv(1, 9), "c": conv(24, 9)},
    "b",
    shapes=TWO,
    nest=lambda x, y: ({"image": x, "others": [y]},),
)
def branch_on_a_width_with_inputs_in_a_dict(self, inputs):
    x, y = self.a(inputs["image"]), self.b(inputs["others"][0])
    return self.c(x) + y if x.shape[1] >= 20 else y


@case(
    lambda: {"a": conv(3, 64), "b": conv(3, 64), "c": conv(64, 9), "d": conv(64, 9)},
    "a b d",
    refused={"a": 6},
    shapes=(IMAGE, IMAGE),
    nest=lambda *tensors: ({"images": tensors},),
)
def which_input_of_a_dict_depends_on_a_small_width(self, inputs):
    x, y = inputs["images"]
    a = self.a(x)
    return self.d(a) + self.c(self.b(x if a.shape[1] >= 8 else y))
