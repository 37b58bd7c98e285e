"""Tiny networks, each with one difficult construction and what the analysis must find in it.

`expected` is {tie: (width, step)} for the free ties; `shape` is the shape of one input.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    shape: tuple[int, ...] = (3, 8, 8)
    expected: dict[str, tuple[int, int]] = {}
    exact = True
    """Whether slicing is the same as masking for every tie."""

    def head(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Chain(Net):
    expected = {"conv1": (8, 1), "conv2": (12, 1)}

    def __init__(self):
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.act = nn.Conv2d(8, 12, 3, stride=2), nn.PReLU(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.act(self.conv2(F.relu(self.bn(self.conv1(x))))))


class Residual(Net):
    expected = {"stem": (8, 1), "inner": (6, 1)}

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.scale * self.outer(F.relu(self.inner(x)))
        y += x
        return self.head(y)


class Depthwise(Net):
    """A depthwise convolution with two outputs per channel, and a squeeze-excite gate."""

    expected = {"expand": (8, 1), "squeeze": (4, 1)}

    def __init__(self):
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=8)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu6(self.depthwise(self.expand(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x * gate)


class Grouped(Net):
    expected = {"reduce": (12, 4), "grouped": (16, 4)}

    def __init__(self):
        super().__init__()
        self.reduce, self.grouped = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 16, 3, groups=4)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(F.relu(self.grouped(F.relu(self.reduce(x)))))


class Dense(Net):
    """Concatenation, and a layer that reads only the middle of it."""

    expected = {"a": (4, 1), "b": (6, 1), "c": (8, 1)}

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(13)
        self.c = nn.Conv2d(13, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.relu(a))
        return self.head(self.c(F.relu(self.bn(torch.cat([x, a, b], 1)))))


class Flattened(Net):
    """A classifier on a flattened map: every channel counts sixteen times."""

    shape = (3, 4, 4)
    expected = {"conv": (6, 1), "hidden": (7, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.hidden, self.fc = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(96, 7), nn.Linear(7, 5)

    def forward(self, x):
        return self.fc(F.relu(self.hidden(self.conv(x).flatten(1))))


class Split(Net):
    """Two halves by chunk: they stay equal."""

    expected = {"conv": (12, 2), "left": (6, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.left, self.fc = nn.Conv2d(3, 12, 1), nn.Conv2d(6, 6, 1), nn.Linear(12, 5)

    def forward(self, x):
        left, right = self.conv(x).chunk(2, 1)
        return self.head(torch.cat([self.left(F.relu(left)), torch.sigmoid(right)], 1))


class SplitByAttribute(Net):
    """Pieces whose sizes are attributes of the block: the attributes must follow the widths."""

    expected = {"conv[0:4]": (4, 1), "conv[4:12]": (8, 1)}

    def __init__(self):
        super().__init__()
        self.sizes, self.first = [4, 8], 4
        self.conv, self.fc = nn.Conv2d(3, 12, 1), nn.Linear(12, 5)
        self.dw = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        x = F.relu(self.conv(x))
        a, b = torch.split(x, self.sizes, 1)
        x = torch.cat([self.dw(a), b], 1)
        return self.head(torch.cat([x[:, : self.first] * 2, x[:, self.first :]], 1))


class Shuffled(Net):
    """Channel shuffle of two branches, twice, with halves in between, as ShuffleNetV2 does it."""

    expected = {"a": (6, 1), "inner": (6, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.a, self.b, self.inner, self.outer = (
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 6, 1),
            nn.Conv2d(6, 6, 1),
        )
        self.fc = nn.Linear(12, 5)

    def shuffle(self, x):
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    def forward(self, x):
        x = self.shuffle(torch.cat([self.a(x), self.b(x)], 1))
        left, right = x.chunk(2, 1)
        return self.head(self.shuffle(torch.cat([left, self.outer(F.relu(self.inner(right)))], 1)))


class ChannelsLast(Net):
    """A ConvNeXt block: permuted, layer norm, linear layers, layer scale."""

    expected = {"stem": (8, 1), "up": (16, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.stem, self.dw, self.norm = (
            nn.Conv2d(3, 8, 2, 2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.LayerNorm(8),
        )
        self.up, self.down, self.gamma = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return self.head(x + y.permute(0, 3, 1, 2))


class GroupNormed(Net):
    expected = {"conv": (12, 3)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


class Shared(Net):
    """One convolution used twice ties its inputs to its outputs; a norm follows each."""

    expected = {"stem": (8, 1)}

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.conv(F.relu(self.conv(F.relu(self.stem(x))))))


class Standardized(Net):
    """A weight that is computed from its parameter before it is used."""

    expected = {"conv1": (6, 1), "conv2": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        w = self.conv2.weight
        w = F.batch_norm(w.reshape(1, w.shape[0], -1), None, None, training=True).reshape_as(w)
        return self.head(F.conv2d(x, w, self.conv2.bias))


class PaddedShortcut(Net):
    """Option A of ResNets: zero channels around the shortcut."""

    expected = {"stem": (4, 1)}

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head(F.pad(x, (0, 0, 0, 0, 2, 2)) + self.conv(x))


class Decoder(Net):
    """Transposed convolutions, grouped and depthwise among them, interpolation and a skip connection."""

    expected = {"down": (8, 2), "up": (8, 2), "dw": (6, 1)}

    def __init__(self):
        super().__init__()
        self.down, self.dw = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(3, 6, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2, groups=2)
        self.spread = nn.ConvTranspose2d(6, 6, 3, 1, 1, groups=6)
        self.fc = nn.Linear(14, 5)

    def forward(self, x):
        up = F.interpolate(self.up(F.relu(self.down(x))), scale_factor=1.0)
        return self.head(torch.cat([up, self.spread(F.relu(self.dw(x)))], 1))


class Volume(Net):
    shape = (2, 4, 6, 6)
    expected = {"conv1": (6, 1), "conv2": (4, 1)}

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            nn.Conv3d(2, 6, 3, padding=1),
            nn.InstanceNorm3d(6, affine=True),
            nn.Conv3d(6, 4, 1),
        )
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.conv2(F.relu(self.norm(self.conv1(x)))).mean((2, 3, 4)))


class Signal(Net):
    shape = (2, 16)
    expected = {"conv1": (6, 1), "conv2": (4, 1)}

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv1d(2, 6, 3), nn.Conv1d(6, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(F.max_pool1d(self.conv2(F.relu(self.conv1(x))), 2).amax(-1))


class SelectiveKernel(Net):
    """Branches weighted by a softmax over stacked features."""

    expected = {"a": (6, 1), "squeeze": (4, 1)}

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.squeeze, self.excite, self.fc = nn.Conv2d(6, 4, 1), nn.Conv2d(4, 12, 1), nn.Linear(6, 5)

    def forward(self, x):
        x = torch.stack([self.a(x), self.b(x)], 1)
        gate = self.excite(F.relu(self.squeeze(x.sum(1).mean((2, 3), keepdim=True))))
        gate = gate.view(x.shape[0], 2, -1, 1, 1).softmax(1)
        return self.head((x * gate).sum(1))


class Gated(Net):
    """A gated linear unit: two halves of one layer, tied channel by channel."""

    expected = {"conv": (12, 2)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 12, 1), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.glu(self.conv(x), 1))


class PixelShuffled(Net):
    expected = {"conv": (12, 4)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 12, 1), nn.Linear(3, 5)

    def forward(self, x):
        return self.head(F.pixel_shuffle(self.conv(x), 2))


class Efficient(Net):
    """ECA: a convolution that slides over the channels."""

    expected = {"conv": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.eca, self.fc = nn.Conv2d(3, 8, 1), nn.Conv1d(1, 1, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv(x)
        gate = self.eca(x.mean((2, 3)).view(x.shape[0], 1, -1)).view(x.shape[0], -1, 1, 1)
        return self.head(x * gate.sigmoid().expand_as(x))


class HardCoded(Net):
    """A width hard-coded in forward: it is fixed, everything else is free."""

    expected = {"free": (6, 1)}

    def __init__(self):
        super().__init__()
        self.free, self.rigid, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.rigid(F.relu(self.free(x)))
        return self.head(x.view(x.shape[0], 8, x.shape[2], x.shape[3]))


class UnknownOperator(Net):
    expected = {"free": (6, 1)}

    def __init__(self):
        super().__init__()
        self.free, self.rigid, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.rigid(F.relu(self.free(x)))
        return self.head(torch.cumsum(x, 1))


class Attention(Net):
    """The size of the heads follows the stream in code: both are fixed. The MLP's hidden layer is free."""

    shape = (3, 4, 4)
    expected = {"up": (12, 1)}

    def __init__(self):
        super().__init__()
        self.stem, self.qkv, self.proj = nn.Conv2d(3, 8, 1), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.fc = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))
        x = x + self.down(F.gelu(self.up(x)))
        return self.fc(x.mean(1))


class HeadSize(Net):
    """Attention by hand and as one operator. The number of heads is constant, their size is free."""

    shape = (3, 4, 4)
    expected = {"stem": (8, 1), "qk": (12, 4), "v": (10, 2), "proj": (6, 1), "qkv": (18, 6)}
    exact = False

    def __init__(self):
        super().__init__()
        self.heads, self.head_dim = 2, 3
        self.stem, self.qk, self.v = nn.Conv2d(3, 8, 1), nn.Linear(8, 12), nn.Linear(8, 10)
        self.proj, self.qkv, self.last = nn.Linear(10, 6), nn.Linear(6, 18), nn.Linear(6, 6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        n, t, _ = x.shape
        q, k = self.qk(x).reshape(n, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).view(n, t, self.heads, -1).transpose(1, 2)
        x = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.proj(x)
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.fc((x + self.last(y)).mean(1))


class NeedsData(Net):
    """Code that does not run on the meta device. Its hard-coded width is still found."""

    expected = {"free": (6, 1)}

    def __init__(self):
        super().__init__()
        self.free, self.rigid, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        if x.is_meta:
            raise RuntimeError("no data")
        x = self.rigid(F.relu(self.free(x)))
        return self.head(x.reshape(x.shape[0], 8, -1, 1))


class AuxiliaryHead(Net):
    """A head that exists only in training is tied to the rest, too."""

    expected = {"conv": (8, 1), "aux": (6, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.aux, self.aux_fc = nn.Conv2d(8, 6, 1), nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.conv(x))
        if self.training:
            return self.head(x), self.aux_fc(self.aux(x).mean((2, 3)))
        return self.head(x)


class SlicesThatFit(Net):
    """Two hard-coded slices that always fit together: the code runs at any width, the first stays at 4."""

    expected = {"free": (6, 1), "rigid[4:16]": (12, 1)}

    def __init__(self):
        super().__init__()
        self.free, self.rigid, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 16, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.rigid(F.relu(self.free(x)))
        return self.head(torch.cat([F.relu(x[:, :4]), x[:, 4:]], 1))


class SliceIntoMean(Net):
    """A hard-coded slice that ends in a reduction: no length downstream depends on it."""

    expected = {"rigid[6:16]": (10, 1), "conv": (4, 1)}

    def __init__(self):
        super().__init__()
        self.rigid, self.conv, self.fc = nn.Conv2d(3, 16, 1), nn.Conv2d(1, 4, 1), nn.Linear(4, 5)

    def forward(self, x):
        x = self.rigid(x)[:, :6].mean(1, keepdim=True)
        return self.head(self.conv(x))


class InnerAxis(Net):
    """A view whose second part is the constant one, and as long as the other."""

    expected = {}

    def __init__(self):
        super().__init__()
        self.rigid, self.fc = nn.Conv2d(3, 16, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.rigid(x)
        n, c, h, w = x.shape
        return self.head(x.view(n, -1, 4, h, w).softmax(1).reshape(n, c, h, w))


class UnevenChunks(Net):
    expected = {}

    def __init__(self):
        super().__init__()
        self.rigid, self.fc = nn.Conv2d(3, 16, 1), nn.Linear(16, 5)

    def forward(self, x):
        a, b, c = self.rigid(x).chunk(3, 1)
        return self.head(torch.cat([F.relu(a), b, torch.sigmoid(c)], 1))


class NumbersThatAreNoWidths(Net):
    """Attributes that happen to equal a width: a temperature, a size."""

    expected = {"conv": (16, 1), "features": (8, 1)}

    def __init__(self):
        super().__init__()
        self.temperature, self.image_size, self.out_dim = 16, 8, 16
        self.conv, self.features, self.fc = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 8, 1),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        return self.head(self.features(torch.tanh(self.conv(x) / self.temperature))) * self.image_size


class GainConv(nn.Conv2d):
    """A layer of torch with a parameter of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1))

    def forward(self, x):
        return super().forward(x) * self.gain


class Subclassed(Net):
    expected = {"conv": (8, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = GainConv(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)))


class Parametrized(Net):
    """Weight norm in both of its forms: the weight is computed from parameters."""

    expected = {"new": (8, 1), "old": (6, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.old = nn.utils.weight_norm(nn.Conv2d(8, 6, 3))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.old(F.relu(self.new(x))))


class MapNorm(Net):
    """A layer norm over whole maps."""

    expected = {"conv": (6, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.LayerNorm([6, 8, 8]),
            nn.Linear(6, 5),
        )

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


class CrossStage(Net):
    """A C2f block as YOLO has it: split into equal parts, each further part from the last."""

    expected = {"cv1": (12, 2), "m1": (6, 1), "cv2": (8, 1)}

    def __init__(self):
        super().__init__()
        self.c = 6
        self.cv1, self.m1, self.m2, self.cv2 = (
            nn.Conv2d(3, 12, 1),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Conv2d(6, 6, 1),
            nn.Conv2d(18, 8, 1),
        )
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        parts = list(self.cv1(x).split((self.c, self.c), 1))
        parts.append(parts[-1] + self.m2(F.relu(self.m1(parts[-1]))))
        return self.head(self.cv2(torch.cat(parts, 1)))


class Positions(Net):
    """Channels weighted by their position: their number is free, but slicing is not masking."""

    expected = {"conv": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv(x)
        return self.head(x * torch.arange(x.shape[1], device=x.device, dtype=x.dtype).view(1, -1, 1, 1))


class HandLayerNorm(Net):
    """A layer norm by hand: `unbiased` is a positional argument of `var`."""

    expected = {"conv": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.scale, self.shift = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.zeros(8, 1, 1))

    def forward(self, x):
        x = self.conv(x)
        mean, var = x.mean(1, keepdim=True), torch.var(x, 1, False, True)
        return self.head((x - mean) / (var + 1e-5).sqrt() * self.scale + self.shift)


class StandardizedByHand(Net):
    """Weight standardization with the deviation over three axes."""

    expected = {"conv1": (6, 1), "conv2": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        w = self.conv2.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.head(F.conv2d(x, w, self.conv2.bias))


class Products(Net):
    """Linear layers by hand: `@` with a parameter on either side, and with a transposed one."""

    expected = {"conv": (8, 1), "right": (6, 1), "left": (7, 1), "turned": (9, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(9, 5)
        self.right, self.left = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(7, 6))
        self.turned, self.bias = nn.Parameter(torch.randn(9, 7)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2) @ self.right + self.bias
        x = self.left @ F.relu(x).transpose(1, 2)
        return self.fc((x.transpose(1, 2) @ self.turned.t()).mean(1))


class Equations(Net):
    """Linear layers as einsum: with an ellipsis, without an arrow, per channel, in groups."""

    expected = {"conv": (8, 1), "mix": (12, 1), "last": (8, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.scale, self.mix = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(12, 8))
        self.last = nn.Parameter(torch.randn(12, 8))

    def forward(self, x):
        x = torch.einsum("bchw,c->bchw", self.conv(x), self.scale)
        x = F.relu(torch.einsum("oc,bchw->bohw", self.mix, x)).mean((2, 3))
        return self.fc(torch.einsum("...i,io->...o", x, self.last))


class Maxout(Net):
    """Pairs of neighboring channels: the second axis of the view is constant. Near it, a constant width."""

    expected = {"near": (6, 1), "last": (4, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.near, self.rigid = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 7, 1)
        self.last, self.fc = nn.Conv2d(7, 4, 1), nn.Linear(4, 5)

    def forward(self, x):
        x = self.conv(x)
        b, c, h, w = x.shape
        x = x.view(b, c // 2, 2, h, w).amax(2)
        x = self.rigid(F.relu(self.near(x))).view(b, 7, h, w)
        return self.head(self.last(x))


class LocalResponse(Net):
    expected = {"conv": (8, 1)}
    exact = False

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(4), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


class Unfolded(Net):
    """A convolution by hand: patches, a product with the weight, and patches folded back."""

    expected = {"conv": (6, 1), "weight": (8, 1), "spread": (20, 4)}

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 1), nn.Linear(5, 5)
        self.weight, self.spread = nn.Parameter(torch.randn(8, 54)), nn.Linear(8, 20)

    def forward(self, x):
        x = F.unfold(self.conv(x), 3, padding=1)
        x = F.relu(self.weight @ x).transpose(1, 2)
        return self.head(F.fold(self.spread(x[:, :16]).transpose(1, 2), (8, 8), 2, stride=2))


class QuarterOfShape(Net):
    """A quarter of the channels by a number that the code computes from the shape."""

    expected = {"left": (4, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.left, self.fc = nn.Conv2d(3, 16, 1), nn.Conv2d(4, 4, 1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.conv(x)
        quarter = x.shape[1] // 4
        return self.head(torch.cat([self.left(x[:, :quarter]), F.relu(x[:, quarter:])], 1))


class SplitByShape(Net):
    """Lengths of a split computed from the shape, and zero channels put in by hand."""

    expected = {"last": (6, 1)}

    def __init__(self):
        super().__init__()
        self.conv, self.last, self.fc = nn.Conv2d(3, 12, 1), nn.Conv2d(10, 6, 1), nn.Linear(6, 5)

    def forward(self, x):
        x = self.conv(x)
        third = x.shape[1] // 3
        _, x = torch.split(x, [third, x.shape[1] - third], 1)
        x = torch.ops.aten.constant_pad_nd(x, [0, 0, 0, 0, 1, 1])
        return self.head(self.last(x))


NETS: list[type[Net]] = [
    Chain, Residual, Depthwise, Grouped, Dense, Flattened, Split, SplitByAttribute, Shuffled,
    ChannelsLast, GroupNormed, Shared, Standardized, PaddedShortcut, Decoder, Volume, Signal,
    SelectiveKernel, Gated, PixelShuffled, Efficient, HardCoded, UnknownOperator, Attention, HeadSize,
    NeedsData, AuxiliaryHead, SlicesThatFit, SliceIntoMean, InnerAxis, UnevenChunks, NumbersThatAreNoWidths,
    Subclassed, Parametrized, MapNorm, CrossStage, Positions, HandLayerNorm, StandardizedByHand,
    Products, Equations, Maxout, LocalResponse, Unfolded, QuarterOfShape, SplitByShape,
]  # fmt: skip
