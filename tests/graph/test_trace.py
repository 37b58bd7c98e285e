"""What `peel.trace` finds, and that it leaves the model unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import peel
from helpers.graphs import traced_net, traced_zoo
from helpers.nets import NETS, Chain, Grouped, HardCoded, Net, Residual


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_ties_widths_and_steps_are_as_expected(kind: type[Net]) -> None:
    _, graph = traced_net(kind)
    assert {name: (width, graph.steps[name]) for name, width in graph.widths.items()} == kind.expected


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_verify_passes_on_every_net(kind: type[Net]) -> None:
    net, graph = traced_net(kind)
    verification = peel.verify(net, torch.randn(1, *kind.shape), graph=graph)
    assert verification.passed, str(verification)
    assert kind.exact == (not graph.inexact), graph.inexact


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_outputs_are_fixed(kind: type[Net]) -> None:
    _, graph = traced_net(kind)
    assert "output" in graph.fixed["fc"]


def test_members_have_offset_size_and_multiplicity() -> None:
    _, graph = traced_net(Grouped)
    members = {(m.tensor, m.axis): (m.offset, m.size, m.multiplicity) for m in graph.ties["reduce"].members}
    assert members == {
        ("reduce.weight", 0): (0, 12, "1"),
        ("reduce.bias", 0): (0, 12, "1"),
        ("grouped.weight", 1): (0, 3, "1/4"),
    }


def test_ties_list_their_causes() -> None:
    _, graph = traced_net(Residual)
    assert any(cause.startswith("add") for cause in graph.ties["stem"].causes)


def test_hard_coded_width_is_fixed_with_its_line_of_code() -> None:
    _, graph = traced_net(HardCoded)
    assert "nets.py" in graph.fixed["rigid"]
    assert "x.view(x.shape[0], 8" in graph.fixed["rigid"]


def test_verify_does_not_pass_without_checks() -> None:
    net, graph = traced_net(Chain)
    assert not peel.verify(net, torch.randn(1, 3, 8, 8), graph=graph, seconds=0).passed


def test_tie_names_are_deterministic() -> None:
    first, second = (peel.trace(Residual(), torch.randn(1, 3, 8, 8)) for _ in range(2))
    assert list(first.ties) == list(second.ties)
    assert first.groups == second.groups


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("resnet18", {"56x56": 3, "28x28": 3, "14x14": 3, "7x7": 3}),
        ("resnet50", {"56x56": 8, "28x28": 9, "14x14": 13, "7x7": 7}),
        ("mobilenet_v2", {"112x112": 2, "56x56": 3, "28x28": 4, "14x14": 9, "7x7": 7}),
    ],
)
def test_groups_of_the_papers_networks(name: str, counts: dict[str, int]) -> None:
    _, graph = traced_zoo(name)
    assert {group: len(ties) for group, ties in graph.groups.items()} == counts
    assert [tie for ties in graph.groups.values() for tie in ties] == list(graph.widths)


def test_strided_block_is_grouped_by_its_output_size() -> None:
    _, graph = traced_zoo("resnet50")
    assert "layer2.0.conv1" in graph.groups["28x28"]  # its own maps are still 56x56
    _, graph = traced_zoo("mobilenet_v2")
    assert graph.groups["112x112"] == ("features.0.0", "features.1.conv.1")
    assert graph.groups["7x7"][-1] == "features.18.0"


def test_squeeze_excite_is_grouped_with_its_block() -> None:
    _, graph = traced_zoo("mobilenet_v3_small")
    assert set(graph.groups) == {"56x56", "28x28", "14x14", "7x7"}
    assert "features.1.block.1.fc1" in graph.groups["56x56"]


def test_groups_can_be_replaced() -> None:
    net, graph = traced_net(Residual)
    mine = graph.regroup({"all": ["inner", "stem"]})
    assert mine.groups == {"all": ("stem", "inner")}
    assert sum(mine.macs_by_group().values()) == graph.macs()
    assert peel.trace(net, torch.randn(1, 3, 8, 8), groups={"a": ["stem"], "b": ["inner"]}).groups == {
        "a": ("stem",),
        "b": ("inner",),
    }
    with pytest.raises(peel.WidthsError, match="no group holds inner"):
        graph.regroup({"a": ["stem"]})
    with pytest.raises(peel.WidthsError, match="Did you mean stem"):
        graph.regroup({"a": ["stme", "inner"]})


# The model is not changed


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x))
        if x.sum() > 0:  # data-dependent
            x = x + 1
        return x


@pytest.mark.parametrize("kind", [Chain, Fails])
@pytest.mark.parametrize("training", [True, False])
def test_model_and_random_state_are_unchanged(kind: type[nn.Module], training: bool) -> None:
    model = kind().train(training)
    seen: list[object] = []
    model.conv1.eval() if kind is Chain else model.bn.eval()
    handle = model.register_forward_hook(lambda *args: seen.append(args))
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    try:
        peel.trace(model, torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    except peel.TraceError:
        assert kind is Fails
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not seen, "the user's hook fired"
    assert list(model._forward_hooks.values()) and handle.id in model._forward_hooks
    assert all("forward" not in vars(module) for module in model.modules())


# Errors


def test_failed_capture_names_the_line_of_code(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(peel.TraceError) as error:
        peel.trace(Fails(), torch.randn(1, 3, 8, 8))
    assert capfd.readouterr() == ("", ""), "torch prints the graph so far"
    message = str(error.value)
    assert "Fails cannot be captured" in message
    assert "test_trace.py" in message
    assert "if x.sum() > 0" in message
    assert "torch.where" in message


def test_wrong_example_shape_is_explained() -> None:
    with pytest.raises(peel.TraceError, match=r"\(1, 4, 8, 8\)") as error:
        peel.trace(Chain(), torch.randn(1, 4, 8, 8))
    assert "check that the model expects the example input" in str(error.value).lower()


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (7, "is a int; give a tensor"),
        ([1, 2], "no tensor; give a tensor"),
        (torch.zeros(()), "batch axis"),
        (torch.zeros(0, 3, 8, 8), "no empty axis"),
        ((), "no tensor"),
    ],
)
def test_invalid_example_input_is_refused(example: object, message: str) -> None:
    with pytest.raises(peel.TraceError, match=message):
        peel.trace(Chain(), example)


def test_non_module_is_refused() -> None:
    with pytest.raises(peel.TraceError, match=r"not a torch.nn.Module"):
        peel.trace(F.relu, torch.zeros(1, 3))  # type: ignore[arg-type]


def test_input_may_be_tensor_tuple_or_dict_and_costs_are_per_sample() -> None:
    x = torch.randn(5, 3, 8, 8)
    graphs = [peel.trace(Chain(), given) for given in (x, (x,), {"x": x}, x[:1])]
    assert len({graph.macs() for graph in graphs}) == 1


def test_a_scripted_part_is_named() -> None:
    part = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))  # type: ignore[no-untyped-call]
    with pytest.raises(peel.TraceError, match="\n  0 is a TorchScript module: give the module"):
        peel.trace(nn.Sequential(part, nn.Conv2d(4, 2, 1)), torch.randn(1, 3, 8, 8))
