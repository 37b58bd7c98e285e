"""The search: the group that carries the information gets more; what cannot be told apart stays uniform."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peel
from helpers.graphs import traced_zoo
from helpers.killing import KILLED, exit_code, run_until, start
from helpers.nets import Chain, Residual
from helpers.small import CPU, Counting, Small, few_digits, small_run, taught
from peel.cost.rounding import cost_of, fractional_units
from peel.data.augmentation import EVAL
from peel.graph.parameters import hidden_ties
from peel.methods.allocation import ALLOCATIONS, Space
from peel.methods.config import DIVISIONS, MethodConfig
from peel.methods.plan import Plan
from peel.methods.problem import Problem
from peel.methods.repaired_losses import Images, Judge
from peel.methods.search import LEAST_EXPLAINED, Search
from peel.surgery.sensitivity import Sensitivity
from peel.train.recipe import Recipe
from peel.train.task import Task

pytestmark = pytest.mark.usefixtures("one_thread")


class Blocks(nn.Module):
    """A stem and two residual blocks with hidden channels, at two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner1, self.outer1 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.down = nn.Conv2d(8, 12, 1, stride=2)
        self.inner2, self.outer2 = nn.Conv2d(12, 16, 3, padding=1), nn.Conv2d(16, 12, 1)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.down(x + self.outer1(self.inner1(x).relu()))
        x = x + self.outer2(self.inner2(x).relu())
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def fit_classifier(model: nn.Module) -> nn.Module:
    """The classifier of least squares for the features of the network."""
    train = few_digits(400).train
    images, labels, _ = next(iter(train.batches(torch.arange(400), 400, EVAL, CPU.device)))
    classifier, model.fc = model.fc, nn.Identity()
    features = torch.cat([model.eval()(images), torch.ones(400, 1)], 1)
    model.fc = classifier
    solution = torch.linalg.lstsq(features, 10 * F.one_hot(labels, 10).float() - 1).solution
    classifier.weight.copy_(solution[:-1].T)
    classifier.bias.copy_(solution[-1])
    return model


@torch.no_grad()
def redundant(layer: Any, distinct: int) -> None:
    """Let all channels of a layer repeat a few: the others carry nothing."""
    repeats = -(-layer.out_channels // distinct)
    layer.weight.copy_(layer.weight[:distinct].repeat(repeats, 1, 1, 1)[: layer.out_channels])
    if layer.bias is not None:
        layer.bias.copy_(layer.bias[:distinct].repeat(repeats)[: layer.out_channels])


def planted(*repeating: str, distinct: int) -> nn.Module:
    """`Small` in which these layers are redundant, so that the others carry the information."""
    torch.manual_seed(0)
    model = Small()
    for name in repeating:
        redundant(model.get_submodule(name), distinct)
    return fit_classifier(model)


def problem_of(model: nn.Module, budget: float | str = 0.5, **changes: Any) -> Problem:
    data = changes.pop("data", few_digits(400))
    graph = peel.trace(model, torch.zeros(1, *getattr(model, "shape", data.shape)))
    resource = changes.get("resource", "macs")
    target = peel.parse_budget(budget, math.ceil(graph.cost(resource)(graph.units())), resource)
    problem = Problem(model, graph, target, "macs", 1, (), data, Recipe(), CPU, 0, trained=model)
    return replace(problem, **changes)


def search(problem: Problem, **changes: Any) -> Plan:
    config = MethodConfig(method="search", **changes)
    Search().check(problem, config)
    return Search().plan(problem, config, lambda *_: None)  # type: ignore[arg-type]


GROUPS = {"8x8 hidden": ("conv1", "conv2"), "4x4 hidden": ("conv3", "conv4")}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Problem, Plan]]:
    """Group -> a problem in which it is the bottleneck, and the plan of the search, one factor a group."""
    problems = {
        "8x8 hidden": problem_of(planted(*GROUPS["4x4 hidden"], distinct=3), 0.45),
        "4x4 hidden": problem_of(planted(*GROUPS["8x8 hidden"], distinct=2), 0.45),
    }
    return {group: (problem, search(problem, division="uniform")) for group, problem in problems.items()}


@pytest.mark.parametrize("wide", GROUPS)
def test_the_group_that_carries_the_information_gets_more(
    wide: str, found: dict[str, tuple[Problem, Plan]]
) -> None:
    problem, plan = found[wide]
    [narrow] = set(GROUPS) - {wide}
    [last], uniform = plan.rounds, problem.uniform()
    assert sum(plan.widths[tie] for tie in GROUPS[wide]) > sum(uniform[tie] for tie in GROUPS[wide])
    assert sum(plan.widths[tie] for tie in GROUPS[narrow]) < sum(uniform[tie] for tie in GROUPS[narrow])
    assert last.importance is not None
    assert last.importance[wide] > 1 > last.importance[narrow]
    assert last.factors[wide] > 1 > last.factors[narrow]
    assert 0.9 * problem.budget < plan.slim.cost <= problem.budget
    # The plan says what the fit knows, also after it was stored.
    fit = Plan.from_json(plan.to_json()).fit
    assert fit is not None
    assert fit.explained > LEAST_EXPLAINED
    assert f"{fit.explained:.0%}" in last.note
    assert f"{fit.loss:.4f}, and {fit.uniform_loss:.4f} for the uniform" in last.note
    assert f"{wide} {last.factors[wide]:.2f}" in last.note
    # The gain is real: so it is when both networks are cut and repaired.
    slim_loss, uniform_loss = Judge(problem, Images.of(problem)).losses([plan.widths, uniform])
    assert slim_loss < uniform_loss


def blocks() -> nn.Module:
    """`Blocks` in which the second block carries the information."""
    torch.manual_seed(0)
    model = Blocks()
    with torch.no_grad():
        for layer in (model.inner1, model.outer1, model.inner2, model.outer2):
            layer.weight.mul_(4)  # the blocks carry more than the shortcuts
    redundant(model.inner1, 2)
    return fit_classifier(model)


@pytest.mark.parametrize("division", DIVISIONS)
def test_residual_streams_stay_uniform(division: str) -> None:
    problem = problem_of(blocks(), 0.4, data=few_digits(160))
    plan, uniform = search(problem, division=division), problem.uniform()
    assert plan.widths["inner2"] > uniform["inner2"]
    assert plan.widths["inner1"] < uniform["inner1"]
    assert (plan.widths["stem"], plan.widths["down"]) == (uniform["stem"], uniform["down"])
    assert plan.slim.cost <= problem.budget
    assert list(plan.groups) == ["8x8 stream", "8x8 hidden", "4x4 stream", "4x4 hidden"]


def test_inside_a_group_the_layer_that_the_output_needs_gets_more() -> None:
    """Of the group that gets more, one layer is redundant."""
    problem = problem_of(planted("conv2", "conv3", "conv4", distinct=3))
    uniform, divided = (search(problem, division=division) for division in DIVISIONS)
    assert divided.widths["conv1"] > uniform.widths["conv1"]
    assert divided.widths["conv2"] < uniform.widths["conv2"]
    assert divided.rounds[0].factors == uniform.rounds[0].factors
    assert divided.fit is not None
    assert uniform.fit is not None
    assert replace(divided.fit, measured=0.0) == replace(uniform.fit, measured=0.0)
    assert "layers share this by sensitivity" in divided.rounds[0].note
    assert 0.9 * problem.budget < divided.slim.cost <= problem.budget
    # The gain is real: so it is when both networks are cut and repaired.
    losses = Judge(problem, Images.of(problem)).losses([divided.widths, uniform.widths])
    assert losses[0] < losses[1]


def test_a_division_that_raises_the_loss_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all channels go to the layer that is redundant."""
    problem = problem_of(planted("conv2", "conv3", "conv4", distinct=3))
    monkeypatch.setattr(
        Sensitivity, "widths", lambda *_, **__: {"conv1": 1, "conv2": 8, "conv3": 16, "conv4": 16}
    )
    uniform, divided = (search(problem, division=division) for division in DIVISIONS)
    assert divided.widths == uniform.widths
    assert "Sharing by sensitivity inside groups is left out" in divided.rounds[0].note


@pytest.mark.parametrize("resource", ["macs", "params", "memory"])
@pytest.mark.parametrize("grow", [False, True])
def test_a_divided_group_keeps_its_macs(resource: str, grow: bool) -> None:
    problem = problem_of(Small(), 0.5, resource=resource, grow=grow)
    space = Space(problem)
    full, uniform = problem.graph.widths, {tie: float(width) for tie, width in space.uniform.items()}
    shape = {tie: max(1, width // (1 + place % 3)) for place, (tie, width) in enumerate(full.items())}
    divided = space.divided(uniform, shape)
    assert divided != uniform
    assert problem.cost(space.rounded(divided)) <= problem.budget
    macs = cost_of(problem.graph, "macs")
    for ties in space.groups.values():
        # What the budget leaves is spent on all hidden channels alike.
        ratios = {divided[tie] / shape[tie] for tie in ties if 1 < divided[tie] < full[tie]}
        assert max(ratios) == pytest.approx(min(ratios))
        if resource == "macs":
            other = {**uniform, **{tie: divided[tie] for tie in ties}}
            units = [fractional_units(problem.graph, widths) for widths in (uniform, other)]
            assert macs(units[1]) == pytest.approx(macs(units[0]), rel=0.05)
    assert grow or all(divided[tie] <= full[tie] for tie in full)


def test_a_network_that_grows_is_divided_uniformly() -> None:
    problem = problem_of(planted("conv3", "conv4", distinct=3), "120%", grow=True)
    uniform, divided = (search(problem, division=division) for division in DIVISIONS)
    assert divided.widths == uniform.widths


def test_the_same_seed_gives_the_same_plan(found: dict[str, tuple[Problem, Plan]]) -> None:
    problem, plan = found["8x8 hidden"]
    assert search(problem, division="uniform").to_json() == plan.to_json()
    divided = [search(problem).to_json() for _ in range(2)]
    assert divided[0] == divided[1]
    one, other = (list(Space(replace(problem, seed=seed)).draw()) for seed in (0, 1))
    assert one != other


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resource": "params"},
        {"resource": "memory"},
        {"limits": {"params": 1500}},
        {"divisor": "auto"},
        {"divisor": 4},
        {"freeze": ("inner2",)},
        {"grow": True},
    ],
    ids=str,
)
def test_every_network_that_is_compared_meets_the_budget(changes: dict[str, Any]) -> None:
    problem = problem_of(Blocks(), 0.6, **changes)
    space = Space(problem)
    several = list(space.draw())
    assert 5 < len(several) <= ALLOCATIONS + 1
    assert several[0] == problem.uniform()
    for widths in several:
        assert problem.cost(widths) <= problem.budget
        assert problem.allows(widths)
        assert all(widths[tie] == problem.graph.widths[tie] for tie in problem.freeze)
    if not problem.grow:
        full = problem.graph.widths
        assert all(widths[tie] <= full[tie] for widths in several for tie in full)
    assert {tie for ties in space.groups.values() for tie in ties} == set(several[0]) - set(problem.freeze)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("cifar_resnet18", r"layer\d\.\d\.conv1"),
        # Not the stem, and not the narrow ends of blocks that have no shortcut.
        ("cifar_mobilenet_v2", r"features\.\d+\.conv\.0\.0"),
        ("cifar_vgg16_bn", ".*"),
    ],
)
def test_hidden_ties_are_those_inside_of_blocks(name: str, hidden: str) -> None:
    _, graph = traced_zoo(name)
    assert set(hidden_ties(graph)) == {tie for tie in graph.widths if re.fullmatch(hidden, tie)}


@pytest.mark.parametrize(
    ("model", "budget", "reason"),
    [
        (Residual(), 0.9, "fewer than two groups of hidden channels (6x6 hidden)"),
        (Chain(), 0.9, "fewer than two groups of hidden channels (3x3 hidden)"),
        (Small(), 0.65, "different networks have this budget, 8 are needed to compare groups"),
    ],
    ids=["one hidden group", "no stream", "few networks"],
)
def test_where_nothing_can_be_compared_the_plan_is_uniform_and_says_so(
    model: nn.Module, budget: float, reason: str
) -> None:
    problem = problem_of(model, budget)
    [note] = Search().notes(problem)  # known before training
    assert "The plan will be uniform" in note
    plan = search(problem)
    assert plan.widths == problem.uniform()
    assert not plan.rounds[0].distinct
    assert "The plan is uniform" in plan.rounds[0].note
    for text in (note, plan.rounds[0].note):
        assert reason in text
        assert "method sensitivity" in text
    assert plan.fit is None


class Rising:
    """A loss that is higher from some call on."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls -= 1
        return F.cross_entropy(output, target) + (0.0 if self.calls >= 0 else 10.0)


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_plan_that_is_worse_than_uniform_after_the_repair_is_not_taken(
    division: str, found: dict[str, tuple[Problem, Plan]]
) -> None:
    problem, _ = found["8x8 hidden"]
    compared = len(list(Space(problem).draw()))  # with one batch each
    plan = search(replace(problem, task=Task(loss=Rising(compared))), division=division)
    assert plan.fit is not None
    assert plan.fit.gain > 2 * plan.fit.gain_error
    assert plan.fit.measured is not None
    assert plan.fit.uniform_measured is not None
    assert plan.fit.measured > plan.fit.uniform_measured
    assert plan.widths == problem.uniform()
    assert f"the uniform network has a loss of {plan.fit.uniform_measured:.4f}" in plan.rounds[0].note


@pytest.mark.parametrize("divisor", [1, 4, "auto"])
def test_rounding_leaves_the_residual_streams_at_their_uniform_widths(divisor: Any) -> None:
    problem = problem_of(Blocks(), 0.4, divisor=divisor, freeze=("inner1",))
    space = Space(problem)
    logs = [0.3 if group == "4x4 hidden" else 0.0 for group in space.groups]
    widths = space.rounded(space.ideal_at(torch.tensor(logs).numpy()), changed=space.hidden)
    uniform = problem.uniform()
    assert {tie for tie in widths if widths[tie] != uniform[tie]} <= {"inner2"}
    assert problem.cost(widths) <= problem.budget


class Odd:
    """A loss that is not finite, or means nothing, in every `period`-th call."""

    def __init__(self, period: int, value: float) -> None:
        self.period, self.value, self.calls = period, value, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % self.period:
            return F.cross_entropy(output, target)
        return torch.tensor(self.value + (self.calls * 7919 % 13 if math.isfinite(self.value) else 0))


def test_networks_are_repaired_in_one_pass() -> None:
    """With more images than fit into memory, each layer would cost a pass of its own."""
    model = Small()
    model.shape = (3, 1024, 1024)  # the graph is that of large images
    problem = problem_of(model)
    judge = Judge(problem, Images.of(problem))
    assert 16 < judge.images.per_repair < judge.images.repair.size
    assert len(judge.repairer.whole.batches) == 1


def test_losses_that_are_not_finite_are_dropped_and_counted(found: dict[str, tuple[Problem, Plan]]) -> None:
    problem, _ = found["4x4 hidden"]
    plan = search(replace(problem, task=Task(loss=Odd(4, math.nan))))
    assert plan.fit is not None
    assert plan.fit.dropped == (plan.fit.networks + plan.fit.dropped) // 4
    assert f"{plan.fit.dropped} more had no finite loss" in plan.rounds[0].note
    assert plan.rounds[0].factors["4x4 hidden"] > 1
    broken = search(replace(problem, task=Task(loss=Odd(1, math.inf))))
    assert broken.widths == problem.uniform()
    assert "repaired networks are not finite" in broken.rounds[0].note


def test_a_fit_that_explains_little_leaves_the_plan_uniform(
    found: dict[str, tuple[Problem, Plan]],
) -> None:
    problem = replace(found["4x4 hidden"][0], task=Task(loss=Odd(1, 0.0)))
    plan = search(problem)
    assert plan.fit is not None
    assert plan.fit.explained < LEAST_EXPLAINED
    assert plan.widths == problem.uniform()
    assert not plan.rounds[0].distinct
    assert "cannot be told apart" in plan.rounds[0].note
    assert set(plan.rounds[0].factors.values()) == {1.0}


def test_bad_input_is_refused_before_training() -> None:
    model = Small()
    with pytest.raises(peel.PeelError, match=r"at least 160 training images, and here are 100:.*another"):
        Search().check(problem_of(model, data=few_digits(100)), MethodConfig())
    layers = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 4, 4, 1) for i in range(20)))
    deep = nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    problem = problem_of(deep)
    alone = problem.graph.regroup({tie: [tie] for tie in problem.graph.widths})
    with pytest.raises(peel.PeelError, match=r"at most 16 groups apart.*here are 20.*--groups"):
        Search().check(replace(problem, graph=alone), MethodConfig())
    with pytest.raises(peel.PeelError, match="compares losses"):
        Search().check(problem_of(model, task=Task(is_classification=False)), MethodConfig())
    with pytest.raises(peel.PeelError, match="search needs the trained original"):
        small_run(method="search", stages=("backbone", "plan"))


SHORT: dict[str, Any] = {"method": "search", "train": {"epochs": 1, "batch_size": 64}}


def test_a_run_killed_in_the_search_resumes_to_the_same_plan(tmp_path: Path) -> None:
    straight, killed, counting = tmp_path / "straight", tmp_path / "killed", Counting()
    result = small_run(output=straight, callbacks=[counting], **SHORT)
    assert [row.name for row in result.rows] == ["original", "uniform", "search"]
    assert result.plan is not None
    assert result.plan.fit is not None
    assert counting.steps["plan"] == result.plan.fit.networks
    assert result.plan.rounds[0].note in result.notes
    page = (straight / "report.html").read_text()
    assert "worth over cost" in page
    assert "Worth and resources per group" in page
    assert "hidden channels apart from residual streams" in page
    assert "cut and repaired networks were compared" in page
    for text in (page, str(result)):
        assert "Finding the plan took" in text
    cost = json.loads((straight / "result.json").read_text())["search"]
    assert cost["seconds"] > 0
    assert cost["image_passes"] == result.plan.fit.image_passes

    assert exit_code(start(run_until, killed, SHORT, ("plan", 5))) == KILLED
    assert not (killed / "plan.json").exists()
    with (killed / "stages" / "plan.progress.jsonl").open("a") as file:
        file.write("[[8, 8, 1")  # as if it was killed while it wrote
    resumed = Counting()
    small_run(output=killed, callbacks=[resumed], **SHORT)
    assert resumed.steps["plan"] == counting.steps["plan"] - 5
    for name in ("plan.json", "slim.safetensors"):
        assert (killed / name).read_bytes() == (straight / name).read_bytes()
    # Once it is finished, the search is not repeated, and its cost is still known.
    again = Counting()
    assert small_run(output=straight, callbacks=[again], **SHORT).plan == result.plan
    assert not again.steps
    assert json.loads((straight / "result.json").read_text())["search"] == cost


def test_an_original_that_the_run_trains_does_not_see_the_images_that_judge(tmp_path: Path) -> None:
    """Another run of a search, with its own seed, judges by the same images."""
    data = few_digits()
    problem = replace(problem_of(Small()), data=data)
    images = Images.of(problem)
    other = Images.of(replace(problem, seed=1))
    assert images.held_out.labels is not None
    assert torch.equal(images.held_out.labels, other.held_out.labels)
    short = {"epochs": 1, "batch_size": 20}
    for method, stages in itertools.product(("uniform", "search"), (("original",), ("original", "plan"))):
        result = small_run(data=data, method=method, train=short, stages=stages)
        left_out = images.held_out.size if method == "search" else 0
        assert result.rows[0].image_passes == data.train.size - left_out
        is_said = any(f"without the {left_out} training images" in note for note in result.notes)
        assert is_said == (method == "search")
    given = small_run(taught(), data, method="search", weights="pretrained", stages=("plan",), train=short)
    assert any("may have seen the 20 training images" in note for note in given.notes)
    # What was left out is said too where an earlier start has trained the original and planned.
    for stages in (("original", "plan"), ("original", "plan", "uniform", "final")):
        again = small_run(data=data, method="search", train=short, stages=stages, output=tmp_path)
        assert any("without the 20 training images" in note for note in again.notes)
    counting = Counting()
    without_plan = ("original", "backbone")  # a search has no backbone
    small_run(data=data, method="search", train=short, stages=without_plan, callbacks=[counting])
    assert list(counting.steps) == ["original"]
    planned = small_run(data=data, method="search", train=short, dry_run=True)
    assert any("without the 20 training images" in note for note in planned.notes)
    too_large = {"epochs": 1, "batch_size": images.repair.size + 1}
    with pytest.raises(peel.PeelError, match="at most 180"):
        small_run(data=data, method="search", train=too_large)


def test_a_trained_network_is_searched_and_fine_tuned(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SHORT, "weights": "pretrained", "init": "inherit"}
    result = small_run(taught(), output=tmp_path / "run", **settings)
    assert result.rows[-1].name == "search"
    assert set(result.rows[-1].before_training) == {"cut", "recalibrated", "repaired"}
    expected = small_run(taught(), dry_run=True, **settings).estimate
    assert expected is not None
    assert expected["plan"] > 0
