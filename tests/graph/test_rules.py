"""Channel rules: the built-in table, rules of the user, and what happens when a rule fails."""

from __future__ import annotations

import functools
import inspect
from io import StringIO
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision  # noqa: F401 (defines operators)
from rich.console import Console
from torch import nn
from torch.utils import flop_counter

import peel
from helpers.graphs import by_layer, traced_net
from helpers.nets import NETS, Net, UnknownOperator
from peel.cli.inspect import draw, inspection
from peel.cost.count import count_macs
from peel.graph import Call, register_rule, rules

X = torch.randn(1, 3, 8, 8)


@pytest.fixture(autouse=True)
def _no_registered_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_registered", {})


def cumsum(call: Call, value: Any, dim: int) -> Any:
    call.mark_inexact(value[dim], f"{call} sums over the channels")
    return value


def test_every_rule_is_for_an_operator_that_exists() -> None:
    names = [name.split("::") for name in rules.RULES]
    assert [name for library, name in names if not hasattr(getattr(torch.ops, library), name)] == []


def test_operator_without_a_rule_fixes_what_reaches_it() -> None:
    _, graph = traced_net(UnknownOperator)
    assert graph.fixed["rigid"] == "cumsum has no channel rule"
    assert list(graph.unknown_operators) == ["aten::cumsum"]
    assert "cumsum" in graph.operators


def test_rule_given_to_trace_frees_the_channels() -> None:
    net = UnknownOperator()
    graph = peel.trace(net, X, rules={"aten::cumsum": cumsum})
    assert graph.widths["rigid"] == 8
    assert graph.inexact["rigid"] == "cumsum sums over the channels"
    assert peel.verify(net, X, graph=graph).passed
    assert "rigid" in peel.trace(net, X).fixed


def test_verify_finds_a_wrong_rule() -> None:
    net = UnknownOperator()
    graph = peel.trace(net, X, rules={"aten::cumsum": lambda call, value, dim: value})
    verification = peel.verify(net, X, graph=graph)
    assert not verification.passed
    assert "wrong by themselves: rigid" in str(verification)


def test_registered_rule_is_used_by_every_trace() -> None:
    assert register_rule("aten::cumsum", cumsum) is cumsum
    assert peel.trace(UnknownOperator(), X).widths["rigid"] == 8


def test_register_rule_is_a_decorator_and_trace_overrides_it() -> None:
    @register_rule("aten::cumsum")
    def fixed(call: Call, value: Any, dim: int) -> Any:
        return call.refuse("not today")

    assert callable(fixed)
    assert peel.trace(UnknownOperator(), X).fixed["rigid"] == "not today"
    assert peel.trace(UnknownOperator(), X, rules={"aten::cumsum": cumsum}).widths["rigid"] == 8


def test_registered_rule_replaces_a_built_in_one() -> None:
    register_rule("aten::relu", lambda call, value: call.refuse("no more relu"))
    assert "no more relu" in peel.trace(UnknownOperator(), X).fixed["free"]


@torch.library.custom_op("peel_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class CustomOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(double(self.conv(x)).mean((2, 3)))


def test_rule_for_a_custom_operator() -> None:
    assert peel.trace(CustomOperator(), X).unknown_operators == {"peel_tests::double": "the model"}
    register_rule("peel_tests::double", lambda call, value: value)
    graph = peel.trace(CustomOperator(), X)
    assert graph.widths == {"conv": 8}
    assert peel.verify(CustomOperator(), X, graph=graph).passed


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("aten::cumsun", "Did you mean .*aten::cumsum"),
        ("aten.cumsum", "Did you mean .*aten::cumsum"),
        ("aten::cumsum.default", "no overload"),
        ("mylib::scan", "import the library"),
        ("", "torch knows no operator"),
    ],
)
def test_misspelt_operator_is_refused(name: str, hint: str) -> None:
    with pytest.raises(peel.TraceError, match=hint):
        register_rule(name, cumsum)
    with pytest.raises(peel.TraceError, match=hint):
        peel.trace(UnknownOperator(), X, rules={name: cumsum})


def test_rule_must_be_callable() -> None:
    with pytest.raises(peel.TraceError, match="must be a function, not 5"):
        peel.trace(UnknownOperator(), X, rules={"aten::cumsum": 5})  # type: ignore[dict-item]


def broken(call: Call, value: Any, dim: int, scale: int = 1) -> Any:
    return {}["no such key"]


@pytest.mark.parametrize("rule", [broken, functools.partial(broken, scale=2)])
def test_error_in_a_users_rule_is_shown_with_operator_place_and_cause(rule: Any) -> None:
    line = inspect.getsourcelines(broken)[1]
    with pytest.raises(peel.TraceError, match="no such key") as error:
        peel.trace(UnknownOperator(), X, rules={"aten::cumsum": rule})
    assert "your rule for aten::cumsum" in str(error.value)
    assert f"{__file__}:{line}" in str(error.value)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda call, value, dim: value[:2], r"axes of lengths \[\(1, 8\)\] .* shape \[\(1, 8, 8, 8\)\]"),
        (lambda call, value, dim: None, "returned None, not a tuple of axes"),
        (lambda call, value: value, "positional argument"),
    ],
)
def test_users_rule_with_a_wrong_result_or_signature_is_reported(rule: Any, message: str) -> None:
    with pytest.raises(peel.TraceError, match=message):
        peel.trace(UnknownOperator(), X, rules={"aten::cumsum": rule})


class ThreeFactors(nn.Module):
    """An equation that the built-in rule of einsum does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.fc(torch.einsum("nchw,nchw,nchw->nc", x, x, x))


def test_a_call_that_a_rule_does_not_cover_fixes_the_channels_and_says_so() -> None:
    graph = peel.trace(ThreeFactors(), X)
    assert not graph.widths
    assert "einsum: the rule does not cover the equation nchw,nchw,nchw->nc" in graph.fixed["conv"]
    assert not graph.failed_rules


def test_failed_built_in_rule_fixes_the_channels_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Call, *arguments: Any, **options: Any) -> Any:
        raise IndexError("a mistake in the rule")

    monkeypatch.setitem(rules.RULES, "aten::einsum", fails)
    graph = peel.trace(ThreeFactors(), X)
    assert not graph.widths
    line = inspect.getsourcelines(fails)[1] + 1
    failure = f"graph/test_rules.py:{line} in fails: IndexError: a mistake in the rule"
    assert graph.fixed["conv"] == f"the channel rule of einsum failed ({failure})"
    assert graph.failed_rules == {"aten::einsum": failure}
    assert "aten::einsum" in graph.unknown_operators
    shown = StringIO()
    draw(inspection("net", graph), Console(file=shown, width=300))
    assert f"the channel rule for aten::einsum failed ({failure})" in shown.getvalue()
    assert "no channel rule" not in shown.getvalue()


class LengthOfTheCode(nn.Module):
    """A width that the code adds a constant of that length to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).unfold(1, 2, 1).mean(-1)
        return self.fc(F.pad(x.mean((2, 3)), (0, 1)))


@pytest.mark.parametrize("kind", [*NETS, LengthOfTheCode], ids=lambda kind: kind.__name__)
def test_every_fixed_tie_has_a_reason(kind: type[nn.Module]) -> None:
    graph = traced_net(kind)[1] if issubclass(kind, Net) else peel.trace(kind(), X)
    assert all(graph.fixed.values()), graph.fixed
    assert not graph.failed_rules


@torch.library.custom_op("peel_tests::pointwise", mutates_args=())
def pointwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, weight)


@pointwise.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], *x.shape[2:])


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 8, 1), nn.Parameter(torch.randn(12, 8, 1, 1))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(pointwise(self.conv(x), self.weight).mean((2, 3)))


def pointwise_rule(call: Call, value: Any, weight: Any) -> Any:
    call.unify(value[1], weight[1])
    call.sums_over(weight, 1)
    call.produces(weight[0], 1)
    call.costs((*weight, value[0], *value[2:]), weight[0])
    return (value[0], weight[0], *value[2:])


def test_costs_of_an_own_operator_are_compared_with_the_count_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = {"peel_tests::pointwise": pointwise_rule}
    graph = peel.trace(Pointwise(), X, rules=rule)
    assert "register_flop_formula" in graph.fixed["conv"]

    def flops(x: torch.Tensor, weight: torch.Tensor, out_val: torch.Tensor) -> int:
        return 2 * out_val.numel() * x.shape[1]

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.peel_tests.pointwise, flops)
    graph = peel.trace(Pointwise(), X, rules=rule)
    assert graph.widths == {"conv": 8, "weight": 12}
    assert peel.verify(Pointwise(), X, graph=graph).passed


class OneEquation(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.conv, self.weight, self.fc = (
            nn.Conv2d(3, 8, 1),
            nn.Parameter(torch.randn(8, 12)),
            nn.Linear(12, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum(self.equation, self.conv(x).permute(0, 2, 3, 1), self.weight)
        return self.fc(x.mean((1, 2)))


@pytest.mark.parametrize("equation", ["nhwc,cd->nhwd", "...c,cd->...d", "abce, ef"])
def test_equation_over_a_single_channel_is_a_product(equation: str) -> None:
    model = OneEquation(equation)
    graph = peel.trace(model, X)
    small = peel.slim(model, {"conv": 1}, graph=graph)
    positions = X.shape[2] * X.shape[3]
    assert graph.macs({"conv": 1}) == count_macs(small, (X,), {}) == positions * (3 + 12) + 12 * 5


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.gru, self.fc = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu()).mean(2).transpose(1, 2)
        return self.fc(self.gru(x)[0][:, -1])


def test_operators_without_a_rule_are_counted() -> None:
    """All their channels are fixed, so their MACs are the same at all widths."""
    model = Recurrent()
    graph = peel.trace(model, X)
    assert graph.widths == {"first": 8}
    steps = X.shape[3]
    gru = steps * 3 * 4 * (6 + 4)
    assert by_layer(graph.mac_cost, graph.units())["(operators without a rule)"] == gru
    small = peel.slim(model, {"first": 3}, graph=graph)
    assert graph.macs({"first": 3}) == count_macs(small, (X,), {})
