"""The conformance suite: all methods of the package pass it, and methods that break a promise do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import peel
from peel.methods import Given, Method, Problem, Work
from peel.methods.registry import METHODS
from peel.testing import BUDGETS, NETWORKS, check_method

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_rehearses_everywhere(name: str, network: str) -> None:
    check_method(METHODS[name](), networks=[network])


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_answers_everywhere(name: str, network: str) -> None:
    check_method(METHODS[name](), networks=[network], budgets=["macs", "latency"], solve=True)


def test_a_method_answers_with_every_budget() -> None:
    check_method(METHODS["magnitude"](), networks=["residual"], budgets=BUDGETS, solve=True)


@dataclass(frozen=True)
class Answers(Method):
    """Answers with widths that are made by a function of the uniform ones."""

    kind: str

    def solve(self, problem: Problem, work: Work) -> Any:
        uniform = dict(problem.constraint.uniform)
        if self.kind == "none":
            return None
        if self.kind == "too many":
            return peel.Answer(problem.graph.widths)
        if self.kind == "missing":
            return peel.Answer({tie: uniform[tie] for tie in list(uniform)[1:]})
        return peel.Answer({**uniform, next(iter(uniform)): 0})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", "must return a peel.Answer, not NoneType"),
        ("too many", r"uses .*% of the limit of macs.*problem.constraint.round"),
        ("missing", "has no width for first"),
        ("zero", "at least 1"),
    ],
)
def test_a_wrong_answer_is_named_with_network_and_budget(kind: str, words: str) -> None:
    with pytest.raises(AssertionError, match=f"plain network, budget of macs: .*{words}"):
        check_method(Answers(kind), networks=["plain"], budgets=["macs"])


def test_widths_of_another_network_are_refused() -> None:
    with pytest.raises(AssertionError, match="no tie"):
        check_method(Given({"nothing": 3}), networks=["plain"], budgets=["macs"])
