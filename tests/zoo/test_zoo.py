"""Models by name and by reference."""

from __future__ import annotations

import sys
from pathlib import Path

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
def test_cifar_networks_have_the_sizes_of_the_literature(name: str, macs: int, params: int) -> None:
    model, graph = traced_zoo(name)
    assert (graph.macs(), graph.params()) == (macs, params)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert zoo.create(name, num_classes=100)(torch.randn(2, 3, 32, 32)).shape == (2, 100)


def test_torchvision_comes_first_and_a_prefix_chooses() -> None:
    assert zoo.find("resnet18").reference == "torchvision:resnet18"
    assert zoo.find("timm:resnet18").reference == "timm:resnet18"
    assert zoo.find("mobilenetv4_conv_small").input_size == (3, 224, 224)
    assert zoo.find("inception_v3").input_size == (3, 299, 299)


def test_unknown_name_lists_similar_ones() -> None:
    with pytest.raises(peel.ModelError, match="mobilenet_v2"):
        zoo.find("mobilenetv2")
    with pytest.raises(peel.ModelError, match="no model is called 'timm:cifar_resnet20'"):
        zoo.find("timm:cifar_resnet20")


def test_missing_pretrained_weights_are_refused() -> None:
    with pytest.raises(peel.ModelError, match="no pretrained weights"):
        zoo.create("cifar_resnet20", pretrained=True)


@pytest.mark.parametrize(
    ("name", "classes", "size", "resize", "mean"),
    [
        ("resnet50", 1000, 224, 232, 0.485),
        ("inception_v3", 1000, 299, 342, 0.485),
        ("mobilenetv4_conv_small", 1000, 224, 256, 0.485),
        ("timm:tf_efficientnet_lite0", 1000, 224, 256, 0.5),
    ],
)
def test_pretrained_weights_know_how_they_are_fed(
    name: str, classes: int, size: int, resize: int, mean: float
) -> None:
    found = zoo.pretrained(name)
    assert (found.classes, found.size, found.resize, found.mean[0]) == (classes, size, resize, mean)
    assert len(found.std) == 3


def test_weights_that_cannot_be_downloaded_give_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(peel.ModelError) as caught:
        zoo.create("timm:mobilenetv4_conv_small", num_classes=10, pretrained=True)
    message = str(caught.value)
    assert message.startswith("the pretrained weights of timm:mobilenetv4_conv_small cannot be loaded: ")
    assert message.endswith("--weights FILE.")
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


OWN = """
import torch
built = torch.nn.Linear(2, 3)
def model(width=4):
    return torch.nn.Linear(2, width)
def text():
    return "no model"
"""


def test_model_of_a_file_is_built_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "own_zoo_model.py").write_text(OWN)
    reference = f"{tmp_path}/own_zoo_model.py"
    assert zoo.create(f"{reference}:model", width=6).out_features == 6
    assert zoo.create(f"{reference}:built").out_features == 3
    assert zoo.find(f"{reference}:model").source == "user"


def test_model_of_a_file_imports_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for folder, use in (("plain_folder", "from neighbor_of_zoo"), ("zoo_package/inner", "from .neighbor")):
        place = tmp_path / folder
        place.mkdir(parents=True)
        name = use.removeprefix("from ").removeprefix(".")
        (place / f"{name}.py").write_text("from torch import nn\nWIDTH = 5\nBlock = nn.Linear\n")
        late = f"{use} import WIDTH"
        text = f"{use} import Block\n\ndef model():\n    {late}\n    return Block(2, WIDTH)\n"
        (place / "own_network.py").write_text(text)
    for package in ("zoo_package", "zoo_package/inner"):
        (tmp_path / package / "__init__.py").touch()
    assert zoo.create("plain_folder/own_network.py:model").out_features == 5
    assert zoo.create("zoo_package/inner/own_network.py:model").out_features == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:mdel", "Did you mean model"),
        ("own.py:text", "gave a str, not a torch.nn.Module"),
        ("own.py:model.x", "has no"),
        ("own.py:", "is not a reference"),
        ("none.py:model", "there is no file"),
    ],
)
def test_wrong_reference_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(peel.ModelError, match=message):
        zoo.create(f"{tmp_path}/{name}")


def test_missing_package_is_refused() -> None:
    with pytest.raises(peel.ModelError, match="there is no module 'no_such_package'"):
        zoo.create("no_such_package:model")


def test_error_while_building_names_the_arguments() -> None:
    with pytest.raises(peel.ModelError, match="cannot be built with num_classes=-3"):
        zoo.create("resnet18", num_classes=-3)
