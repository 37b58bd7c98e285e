"""The networks that the literature trains on 32x32 images."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet of He et al. for CIFAR: three stages of 16, 32 and 64 channels.

    Shortcuts are projections where the size changes. The original pads them with zero channels, which would
    tie the widths of all three stages.
    """

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        inputs = 16
        stages = []
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            layers = []
            for block in range(blocks):
                layers.append(_BasicBlock(inputs, outputs, stride if block == 0 else 1))
                inputs = outputs
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(64, num_classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))  # type: ignore[no-any-return]


class CifarVGG(nn.Module):
    """VGG-16 with batch norm and one linear layer, as used on CIFAR."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            if outputs == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, num_classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))  # type: ignore[no-any-return]


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _resnet_32(name: str, num_classes: int = 10) -> nn.Module:
    """A torchvision ResNet whose stem keeps the resolution: a 3x3 convolution without stride, no pooling."""
    from torchvision.models import get_model

    model: nn.Module = get_model(name, num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    _initialize(model)
    return model


def _mobilenet_v2_32(num_classes: int = 10) -> nn.Module:
    """MobileNetV2 without the stride of its stem and of its first strided block."""
    from torchvision.models import mobilenet_v2

    model: nn.Module = mobilenet_v2(num_classes=num_classes)
    for name in ("features.0.0", "features.2.conv.1.0"):
        model.get_submodule(name).stride = (1, 1)  # type: ignore[assignment]
    return model


CIFAR_MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet20": partial(CifarResNet, 20),
    "cifar_resnet56": partial(CifarResNet, 56),
    "cifar_resnet110": partial(CifarResNet, 110),
    "cifar_resnet18": partial(_resnet_32, "resnet18"),
    "cifar_resnet50": partial(_resnet_32, "resnet50"),
    "cifar_mobilenet_v2": _mobilenet_v2_32,
    "cifar_vgg16_bn": CifarVGG,
}
"""Name -> function of the number of classes."""
