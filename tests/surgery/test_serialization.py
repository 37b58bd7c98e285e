"""Saved models: loaded exactly, refused where they do not fit, never unpickled, readable without peel."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.swa_utils import AveragedModel

import peel
from helpers.folders import save_pair
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, Net, Residual, SplitByAttribute
from helpers.small import same_weights
from peel import zoo
from peel.cli.export import export
from peel.surgery.info import info_of
from peel.surgery.selection import KeptChannels, select_best
from peel.surgery.serialization import read_info


def slimmed(name: str = "cifar_resnet20") -> nn.Module:
    model, graph = traced_zoo(name)
    return peel.slim(model, peel.uniform(graph, "40%"), graph=graph).eval()


@pytest.mark.parametrize("name", ["cifar_resnet20", "cifar_mobilenet_v2", "cifar_vgg16_bn"])
def test_a_zoo_model_loads_from_the_path_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = slimmed(name)
    assert peel.save(small, tmp_path / "slim") == tmp_path / "slim.safetensors"
    monkeypatch.setattr(torch.export, "export", None)  # no tracing
    loaded = peel.load(tmp_path / "slim").eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), small(x))
    assert type(loaded) is type(small)


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_the_users_own_model_loads_with_an_instance(kind: type[Net], tmp_path: Path) -> None:
    net, graph = traced_net(kind)
    widths = {
        name: max(1, width // graph.steps[name] // 2) * graph.steps[name]
        for name, width in graph.widths.items()
    }
    small = peel.slim(net, widths, graph=graph).eval()
    peel.save(small, tmp_path / "own.safetensors")
    with pytest.raises(peel.StoreError, match=f"nets:{kind.__name__}.*model="):
        peel.load(tmp_path / "own")
    given = kind().eval()
    before = [parameter.shape for parameter in given.parameters()]
    loaded = peel.load(tmp_path / "own", model=given)
    x = torch.randn(2, *kind.shape)
    assert torch.equal(loaded(x), small(x))
    assert [parameter.shape for parameter in given.parameters()] == before


def test_a_loaded_model_can_be_saved_and_slimmed_again(tmp_path: Path) -> None:
    small = slimmed()
    peel.save(small, tmp_path / "a")
    loaded = peel.load(tmp_path / "a")
    graph = peel.trace(loaded, torch.randn(1, 3, 32, 32))
    smaller = peel.slim(loaded, peel.uniform(graph, "50%"), graph=graph).eval()
    peel.save(smaller, tmp_path / "b")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(peel.load(tmp_path / "b").eval()(x), smaller(x))
    assert read_info(tmp_path / "b").costs["macs"] == graph.macs(peel.uniform(graph, "50%"))


def test_equal_networks_give_equal_files(tmp_path: Path) -> None:
    small = slimmed()
    contents = {peel.save(small, tmp_path / f"{i}").read_bytes() for i in range(5)}
    peel.save(peel.load(tmp_path / "0"), tmp_path / "again")
    assert contents == {(tmp_path / "again.safetensors").read_bytes()}


def test_the_number_of_classes_is_saved(tmp_path: Path) -> None:
    model = zoo.create("cifar_resnet20", num_classes=7)
    peel.save(model, tmp_path / "m")
    assert peel.load(tmp_path / "m").fc.out_features == 7


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    peel.save(slimmed(), tmp_path / "slim")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight * float("nan"), "fc.weight holds 640 values that are not finite"),
        (lambda weight: weight.int(), "fc.weight is of another kind than in the model: int32 tensor"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(saved: Path, change: Any, message: str) -> None:
    path = saved / "slim.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["fc.weight"] = change(torch.ones(10, 64))
    tensors["fc.weight"] = tensors["fc.weight"][:, : load_file(path)["fc.weight"].shape[1]].contiguous()
    save_file(tensors, path, metadata)
    with pytest.raises(peel.StoreError, match=message.replace("640", str(tensors["fc.weight"].numel()))):
        peel.load(path)


def test_a_truncated_file_is_one_clear_error(saved: Path) -> None:
    path = saved / "slim.safetensors"
    good = path.read_bytes()
    for length in (0, 1, 1000, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(peel.CorruptFileError, match=r"slim.safetensors is corrupt"):
            peel.load(saved / "slim")


class Malicious:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_is_refused_and_its_code_never_runs(saved: Path, writer: str) -> None:
    canary = saved / "canary"
    with (saved / "slim.safetensors").open("wb") as file:
        pickle.dump(Malicious(canary), file) if writer == "pickle" else torch.save(Malicious(canary), file)
    with pytest.raises(peel.CorruptFileError, match="is no safetensors file"):
        peel.load(saved / "slim")
    assert not canary.exists()


def rewrite(path: Path, **changes: object) -> None:
    """Change the description in a file."""
    with safetensors.safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["peel"])
    tensors = load_file(path)
    save_file(tensors, path, {"peel": json.dumps({**description, **changes})})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": {"conv1": {"forward": 3}}}, "conv1.forward = 3 does not fit"),
        ({"modules": {"conv1": {"out_channels": "os.system"}}}, "malformed"),
        ({"modules": {"conv1": {"out_channels": 10**30}}}, "malformed"),
        ({"input": {"mean": [float("nan")]}}, "malformed"),
        ({"input": {"std": [0.0]}}, "malformed"),
        ({"costs": {"macs": "many"}}, "malformed"),
        ({"model": {"zoo": "cifar:cifar_resnet20", "arguments": {"num_classes": 10**9}}}, "does not fit"),
        ({"\ud800": 1}, "malformed"),
        ({"modules": {"nowhere": {"out_channels": 3}}}, "no module nowhere"),
        ({"format": "other"}, "not a model saved by peel"),
        ({"model": {"zoo": "canary.py:run", "arguments": {}}}, "does not run other code"),
        (
            {"model": {"zoo": "timm:resnet18", "arguments": {"checkpoint_path": "x.pt"}}},
            "load no other files",
        ),
        ({"model": {"zoo": "timm:resnet18", "arguments": {"pretrained": True}}}, "load no other files"),
        ({"modules": {"conv1": {"stride": [7, 7]}}}, "does not fit"),
        ({"modules": {"conv1": {"out_channels": -4}}}, "does not fit"),
        ({"modules": []}, "malformed"),
        ({"model": "resnet18"}, "malformed"),
        ({"widths": {"conv1": "wide"}}, "malformed"),
        ({"input": {"shape": [3, -1, 8]}}, "malformed"),
        ({"kept": {"lists": [], "axes": {"conv1.weight": [0, None, None, None]}}}, "malformed"),
        ({"original_shapes": {"conv1.weight": [16]}}, "does not fit this model"),
        ({"version": 99}, "version 99"),
        ({"model": {"zoo": "cifar:cifar_resnet56", "arguments": {}}}, "does not fit this model"),
        ({"model": {"zoo": "cifar:nothing", "arguments": {}}}, "no model is called"),
        ({"model": {"zoo": "cifar:cifar_resnet20", "arguments": {"reference": 1}}}, "cannot be built"),
    ],
)
def test_a_file_can_only_change_widths_of_a_model(
    saved: Path, changes: dict[str, object], message: str
) -> None:
    rewrite(saved / "slim.safetensors", **changes)
    with pytest.raises(peel.PeelError, match=message):
        peel.load(saved / "slim")


def test_code_named_in_a_file_never_runs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "canary.py").write_text("import pathlib; pathlib.Path('ran').touch()\ndef run(): ...")
    monkeypatch.chdir(saved)
    rewrite(saved / "slim.safetensors", model={"zoo": "canary.py:run", "arguments": {}})
    with pytest.raises(peel.StoreError):
        peel.load(saved / "slim")
    assert not (saved / "ran").exists()


def test_code_in_the_name_of_an_argument_never_runs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's MobileNetV3 swallows unknown keywords, and timm drops those that are None."""
    monkeypatch.chdir(saved)
    attack = "p=__import__('pathlib').Path('ran').write_text('') and None, y"
    for name in ("torchvision:mobilenet_v3_small", "timm:mobilenetv3_small_100"):
        for key in (attack, "__class__", "a b", ""):
            rewrite(saved / "slim.safetensors", model={"zoo": name, "arguments": {key: None}})
            with pytest.raises(peel.StoreError, match="is refused"):
                peel.load(saved / "slim")
            with pytest.raises(peel.PeelError):
                export(str(saved / "slim.safetensors"), to=Path("out.py"))
    assert not (saved / "ran").exists()
    assert not (saved / "out.py").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(peel.StoreError, match=r"no file .*nothing.safetensors"):
        peel.load(tmp_path / "nothing")
    with pytest.raises(peel.StoreError, match="cannot write"):
        (tmp_path / "file").write_text("")
        peel.save(slimmed(), tmp_path / "file" / "slim")


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    net, graph = traced_net(Residual)
    peel.save(peel.slim(net, {"stem": 4}, graph=graph), tmp_path / "m")
    with pytest.raises(peel.StoreError, match="does not fit this model"):
        peel.load(tmp_path / "m", model=SplitByAttribute())


def test_a_full_disk_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = slimmed()
    peel.save(small, tmp_path / "slim")
    good = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(peel.StoreError, match="No space left"):
        peel.save(slimmed("cifar_vgg16_bn"), tmp_path / "slim")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == good


# A model that is not the original of the file


def test_other_classes_are_refused(tmp_path: Path) -> None:
    net, graph = traced_net(Residual)
    small = peel.slim(net, {"stem": 4}, graph=graph)
    small.fc = nn.Linear(4, 3)  # a head of the user's own, after slimming
    peel.save(small, tmp_path / "five")
    with pytest.raises(peel.StoreError, match=r"fc.weight has shape \[5, 8\], and \[3, 8\].*change the head"):
        peel.load(tmp_path / "five", model=Residual())
    given = Residual()
    given.fc = nn.Linear(8, 3)
    loaded = peel.load(tmp_path / "five", model=given)
    assert (loaded.fc.in_features, loaded.fc.out_features) == (4, 3)


def test_a_resnet_is_not_loaded_into_a_resnext(tmp_path: Path) -> None:
    with torch.device("meta"):
        resnext = zoo.create("resnext50_32x4d")
    resnet = zoo.create("resnet50")
    peel.save(resnet, tmp_path / "m")
    with pytest.raises(
        peel.StoreError, match=r"layer1.0.conv1.weight has shape \[128, 64, 1, 1\], and \[64, 64, 1, 1\]"
    ):
        peel.load(tmp_path / "m", model=resnext)


def test_a_network_that_was_slimmed_twice_needs_the_first_original(tmp_path: Path) -> None:
    net, graph = traced_net(Residual)
    once = peel.slim(net, {"stem": 5}, graph=graph)
    twice = peel.slim(once, {"stem": 3}, graph=peel.trace(once, torch.randn(1, *Residual.shape)))
    peel.save(twice.eval(), tmp_path / "twice")
    x = torch.randn(2, *Residual.shape)
    assert torch.equal(peel.load(tmp_path / "twice", model=Residual()).eval()(x), twice(x))
    with pytest.raises(peel.StoreError, match="does not fit this model"):
        peel.load(tmp_path / "twice", model=once)
    assert torch.equal(peel.load(tmp_path / "twice", model=twice).eval()(x), twice(x)), "new weights for it"


# Which channels were kept


def test_a_loaded_network_can_be_repaired(tmp_path: Path) -> None:
    net, graph = traced_net(Residual)
    images = torch.randn(16, *Residual.shape)
    small = peel.slim(net, {"stem": 4}, graph=graph, weights="inherit", scores={"stem": torch.arange(8.0)})
    peel.save(small, tmp_path / "cut")
    loaded = peel.load(tmp_path / "cut", model=Residual())
    peel.repair(small, net, images, graph=graph)
    peel.repair(loaded, net, images, graph=graph)
    assert same_weights(small, loaded)


def test_a_head_of_ones_own_is_carried_over(tmp_path: Path) -> None:
    """`kept` says, for each axis of each tensor, which places of the original are there."""
    model, graph = traced_zoo("resnet18", 32)
    small = peel.slim(model, peel.uniform(graph, "30%"), graph=graph, weights="inherit")
    peel.save(small, tmp_path / "slim")
    kept = peel.load(tmp_path / "slim").peel_info["kept"]
    rows, columns = kept["fc.weight"]
    assert rows is None, "all of them"
    assert torch.equal(small.fc.weight, model.fc.weight[:, columns])
    for name, tensor in small.state_dict().items():
        before = model.state_dict()[name]
        for axis, places in enumerate(kept.get(name, ())):
            before = before if places is None else before.index_select(axis, torch.tensor(places))
        assert torch.equal(tensor, before), name


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_what_was_kept_is_read_back(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    widths = {
        name: max(1, width // graph.steps[name] // 2) * graph.steps[name]
        for name, width in graph.widths.items()
    }
    units = graph.units(widths)
    kept = select_best(net, graph, units, None)
    again = KeptChannels.from_axes(graph, units, kept.axes(graph)).channels
    assert again.keys() == kept.channels.keys()
    assert all(torch.equal(again[atom], channels) for atom, channels in kept.channels.items())


def test_what_was_kept_of_another_network_is_refused(saved: Path) -> None:
    model, graph = traced_zoo("cifar_resnet20")
    for places in ([0, 1, 10**9], [0, 1, 2]):
        rewrite(saved / "slim.safetensors", kept={"lists": [places], "axes": {"bn1.weight": [0]}})
        with pytest.raises(peel.WidthsError, match="not cut from this original"):
            peel.repair(peel.load(saved / "slim"), model, torch.randn(2, 3, 32, 32), graph=graph)


# Wrappers


def wrappers(model: nn.Module) -> list[nn.Module]:
    return [nn.DataParallel(model), torch.compile(model), AveragedModel(model), ModelEmaV3(model)]


def test_wrappers_are_removed_before_saving(tmp_path: Path) -> None:
    small = slimmed()
    x = torch.randn(1, 3, 32, 32)
    for wrapped in wrappers(small):
        peel.save(wrapped, tmp_path / "slim")
        assert torch.equal(peel.load(tmp_path / "slim").eval()(x), small(x))


@pytest.mark.parametrize("number", range(4))
def test_a_network_that_was_traced_in_its_wrapper_is_saved_without_it(number: int, tmp_path: Path) -> None:
    model = wrappers(zoo.create("cifar_resnet20").eval())[number].eval()
    x = torch.randn(1, 3, 32, 32)
    graph = peel.trace(model, x)
    small = peel.slim(model, peel.uniform(graph, "40%"), graph=graph, weights="inherit").eval()
    peel.save(small, tmp_path / "slim")
    loaded = peel.load(tmp_path / "slim").eval()
    inner = small._orig_mod if number == 1 else small.module
    assert torch.equal(loaded(x), inner(x))
    assert loaded.conv1.out_channels == len(loaded.conv1.weight)
    assert set(read_info(tmp_path / "slim").widths) == set(traced_zoo("cifar_resnet20")[1].widths)


def test_a_network_whose_widths_are_lost_is_refused(tmp_path: Path) -> None:
    small = slimmed()
    cases = {
        "holds a slim network as 0": nn.Sequential(small, nn.ReLU()),
        "torch.fx.*save the module that it was made from": torch.fx.symbolic_trace(small),
        "TorchScript.*save the module that it was made from": torch.jit.trace(
            small, torch.randn(1, 3, 32, 32)
        ),
    }
    for message, network in cases.items():
        with pytest.raises(peel.StoreError, match=message):
            peel.save(network, tmp_path / "slim")
    assert not list(tmp_path.iterdir())


class Sharded(Tensor):
    """A tensor of another kind, as DTensor and those of torchao are."""

    def __tensor_flatten__(self) -> None: ...


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    small = slimmed()
    small.fc.weight = nn.Parameter(small.fc.weight.detach().as_subclass(Sharded))
    with pytest.raises(peel.StoreError, match=r"fc.weight is a Sharded.*full_tensor.*before quantizing"):
        peel.save(small, tmp_path / "slim")
    with pytest.raises(peel.StoreError, match=r"conv1.weight is a meta tensor"):
        peel.save(slimmed().to("meta"), tmp_path / "slim")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # FSDP has something to say about one process
@pytest.mark.usefixtures("one_process")
def test_a_sharded_network_is_refused(tmp_path: Path) -> None:
    sharded = slimmed()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(peel.StoreError, match=r"is a DTensor.*full_tensor"):
        peel.save(sharded, tmp_path / "slim")
    flat = FullyShardedDataParallel(slimmed(), device_id=torch.device("cpu"))
    with pytest.raises(peel.StoreError, match=r"holds a slim network as _fsdp_wrapped_module"):
        peel.save(flat, tmp_path / "slim")
    with pytest.raises(peel.StoreError, match=r"is a FlatParameter"):
        peel.save(flat.get_submodule("_fsdp_wrapped_module"), tmp_path / "slim")


# Without peel


def test_a_pickled_slim_network_opens_without_peel(tmp_path: Path) -> None:
    model, graph = traced_zoo("resnet18", 32)
    images = torch.randn(4, 3, 32, 32)
    small = peel.slim(model, peel.uniform(graph, "10%"), graph=graph, weights="inherit").eval()
    torch.save(small, tmp_path / "slim.pt")
    with torch.no_grad():
        torch.save({"x": images, "y": small(images)}, tmp_path / "expected.pt")
    script = """
import sys
sys.modules["peel"] = None
import torch
small, expected = torch.load("slim.pt", weights_only=False), torch.load("expected.pt")
assert torch.equal(small(expected["x"]), expected["y"])
assert small.peel_info["widths"]
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    net, graph = traced_net(Residual)
    repaired = peel.slim(net, {"stem": 4}, graph=graph, weights="inherit")
    peel.repair(repaired, net, torch.randn(16, *Residual.shape), graph=graph)
    assert b"peel." not in pickle.dumps(repaired), "nothing is an instance of a class of peel"


def test_the_reader_in_the_docs_needs_no_peel(tmp_path: Path) -> None:
    """The code of docs/format.md runs unchanged in a process without peel."""
    small = slimmed("cifar_mobilenet_v2")
    peel.save(small, tmp_path / "slim")
    x = torch.randn(1, 3, 32, 32)
    torch.save({"x": x, "y": small(x).detach()}, tmp_path / "expected.pt")
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    reader = re.search(r"```python\n(.*?)```", text, re.S)
    assert reader is not None
    assert len(reader[1].splitlines()) <= 26
    script = f"""
import sys
sys.modules["peel"] = None
{reader[1]}
import torch
from torchvision.models import MobileNetV2
settings = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2]]
settings += [[6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
model = MobileNetV2(num_classes=10, inverted_residual_setting=settings)
model.features[0][0].stride = (1, 1)
model = read_slim("slim.safetensors", model).eval()
expected = torch.load("expected.pt")
difference = (model(expected["x"]) - expected["y"]).abs().max()
assert difference <= 1e-4 * expected["y"].abs().max(), difference
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


# Files of version 1


def test_the_pair_of_files_of_version_1_is_read(tmp_path: Path) -> None:
    small = slimmed()
    save_pair(small, tmp_path / "old")
    info = info_of(small)
    x = torch.randn(1, 3, 32, 32)
    for name in ("old", "old.json", "old.safetensors"):
        loaded = peel.load(tmp_path / name).eval()
        assert torch.equal(loaded(x), small(x))
    assert peel.save(loaded, tmp_path / "old.json") == tmp_path / "old.safetensors"
    assert torch.equal(peel.load(tmp_path / "old").eval()(x), small(x)), "what is new comes first"
    assert info_of(peel.load(tmp_path / "old")).original_shapes == info.original_shapes
    with pytest.raises(peel.StoreError, match="does not fit this model"):
        peel.load(tmp_path / "old", model=zoo.create("cifar_resnet56"))


def test_weights_of_another_program_are_not_a_saved_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(peel.StoreError, match="not a model saved by peel"):
        peel.load(tmp_path / "weights")
