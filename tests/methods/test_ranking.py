"""Global ranking: channels that do nothing are cut first, wherever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import peel
from helpers.nets import Dense, Depthwise, Flattened, Gated, Grouped, Net, Residual, Shuffled
from helpers.small import CPU, Small, few_digits
from peel.cost.constraint import Constraint
from peel.methods import Answer, Method, Problem, Recipes, Work
from peel.methods.calibration import Calibration
from peel.methods.ranking import Magnitude, Taylor, widths_by_rank
from peel.methods.sensitivity import LeastSensitive
from peel.surgery.info import info_of
from peel.train.recipe import Recipe

METHODS: list[type[Method]] = [Magnitude, Taylor, LeastSensitive]


def problem_of(model: nn.Module, budget: float | str = 0.5, freeze: tuple[str, ...] = ()) -> Problem:
    data = few_digits(256)
    graph = peel.trace(model, torch.zeros(1, *data.shape))
    target = peel.parse_budget(budget, graph.macs(), "macs")
    constraint = Constraint.of(graph, target, divisor=1, freeze=freeze)
    recipes = Recipes(Recipe(), Recipe())
    return Problem(model, graph, constraint, data.train, recipes, 0, original=model, inherits=True)


def work_on(problem: Problem) -> Work:
    return Work(problem, CPU, calibration=Calibration(problem, CPU), trainer=lambda *_: nn.Identity())


def solve(method: Method, problem: Problem) -> Answer:
    return method.solve(problem, work_on(problem))


def with_dead_channels(dead: dict[str, list[int]]) -> nn.Module:
    """`Small`, in which some channels are zero and read by nothing."""
    torch.manual_seed(0)
    model = Small()
    layers = [f"conv{number}" for number in (1, 2, 3, 4)]
    with torch.no_grad():
        for name, channels in dead.items():
            number = layers.index(name) + 1
            model.get_submodule(name).weight[channels] = 0
            model.get_submodule(f"norm{number}").weight[channels] = 0
            reader = "fc" if number == 4 else f"conv{number + 1}"
            model.get_submodule(reader).weight[:, channels] = 0
    return model.eval()


@pytest.mark.parametrize("kind", METHODS)
def test_dead_channels_are_cut_and_living_ones_kept(kind: type[Method]) -> None:
    method = kind()
    dead = {"conv1": [0, 3], "conv2": [1, 5, 6], "conv3": [], "conv4": [2, 4, 6, 8, 10, 12]}
    model = with_dead_channels(dead)
    problem = problem_of(model)
    living = {tie: width - len(dead[tie]) for tie, width in problem.graph.widths.items()}
    # Exactly what the living channels cost.
    problem = replace(problem, constraint=problem.constraint.at(problem.graph.macs(living)))
    answer = solve(method, problem)
    assert dict(answer.widths) == living
    small = peel.slim(model, answer.widths, graph=problem.graph, weights="inherit", scores=answer.scores)
    images = torch.randn(4, *problem.train.shape)
    torch.testing.assert_close(small.eval()(images), model(images))
    assert info_of(small).widths == living


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("budget", ["70%", "50%", "20%", "5%"])
def test_the_budget_is_met_and_every_layer_keeps_its_floor(kind: type[Method], budget: str) -> None:
    method = kind()
    torch.manual_seed(1)
    model = Small()
    with torch.no_grad():  # one layer would lose everything
        model.norm2.weight.mul_(1e-3)
    problem = problem_of(model, budget)
    widths = solve(method, problem).widths
    macs = problem.graph.macs(widths)
    assert 0.6 * problem.constraint.budget < macs <= problem.constraint.budget, "whole channels, and few"
    for tie, width in problem.graph.widths.items():
        least = max(1, min(0.1 * width, problem.constraint.uniform[tie] / 2))
        assert widths[tie] >= least - 1


@pytest.mark.parametrize("kind", [Residual, Depthwise, Grouped, Dense, Flattened, Shuffled, Gated])
def test_every_kind_of_network_is_cut_to_the_budget(kind: type[Net]) -> None:
    """Ties with several slices, with steps, without a score."""
    torch.manual_seed(0)
    model = kind().eval()
    images = torch.randn(2, *model.shape)
    graph = peel.trace(model, images[:1])
    half = Constraint.of(graph, graph.macs() // 2, divisor=1)
    problem = replace(problem_of(Small()), model=model, original=model, graph=graph, constraint=half)
    scores = Magnitude().scores(problem, work_on(problem))
    widths = widths_by_rank(problem, scores)
    assert graph.macs() / 4 < graph.macs(widths) <= problem.constraint.budget
    small = peel.slim(model, widths, graph=graph, weights="inherit", scores=scores)
    assert small(images).shape == model(images).shape


def test_frozen_ties_keep_their_width() -> None:
    problem = problem_of(Small(), "60%", freeze=("conv3",))
    widths = solve(Magnitude(), problem).widths
    assert widths["conv3"] == problem.graph.widths["conv3"]
    assert problem.graph.macs(widths) <= problem.constraint.budget


def test_scaling_a_layer_that_a_norm_follows_changes_nothing() -> None:
    torch.manual_seed(2)
    model = Small()
    before = solve(Magnitude(), problem_of(model))
    with torch.no_grad():
        model.conv2.weight.mul_(100)
    after = solve(Magnitude(), problem_of(model))
    assert before.widths == after.widths
