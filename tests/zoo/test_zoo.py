"""Names of models."""

from __future__ import annotations

import pytest
import torch

import peel
from helpers.graphs import traced_zoo
from peel import zoo


@pytest.mark.parametrize(
    ("name", "macs", "params"),
    [
        ("cifar_resnet20", 40_813_184, 272_474),
        ("cifar_resnet56", 125_747_840, 855_770),
        ("cifar_resnet110", 253_149_824, 1_730_714),
        ("cifar_resnet18", 555_422_720, 11_173_962),
        ("cifar_resnet50", 1_297_829_888, 23_520_842),
        ("cifar_mobilenet_v2", 87_976_448, 2_236_682),
        ("cifar_vgg16_bn", 313_201_664, 14_724_042),
    ],
)
def test_the_cifar_networks_have_the_sizes_the_literature_gives(name: str, macs: int, params: int) -> None:
    model, graph = traced_zoo(name)
    assert (graph.macs(), graph.params()) == (macs, params)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert zoo.create(name, num_classes=100)(torch.randn(2, 3, 32, 32)).shape == (2, 100)


def test_torchvision_goes_first_and_a_prefix_asks_for_the_other() -> None:
    assert zoo.find("resnet18").reference == "torchvision:resnet18"
    assert zoo.find("timm:resnet18").reference == "timm:resnet18"
    assert zoo.find("mobilenetv4_conv_small").input_size == (3, 224, 224)
    assert zoo.find("inception_v3").input_size == (3, 299, 299)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(peel.ModelError, match="mobilenet_v2"):
        zoo.find("mobilenetv2")
    with pytest.raises(peel.ModelError, match="no model is called 'timm:cifar_resnet20'"):
        zoo.find("timm:cifar_resnet20")


def test_weights_that_do_not_exist_are_refused() -> None:
    with pytest.raises(peel.ModelError, match="no pretrained weights"):
        zoo.create("cifar_resnet20", pretrained=True)
