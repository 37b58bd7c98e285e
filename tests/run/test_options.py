"""Every setting of the method, end to end on digits. Each test fails if its setting is ignored."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peel
from helpers.small import CPU, SHORT, Counting, Small, few_digits, same_weights, small_run, taught
from peel.data.augmentation import EVAL
from peel.errors import ConfigError
from peel.methods.peel import rounds_of
from peel.methods.plan import Architecture, Plan
from peel.run.prune import prune
from peel.run.result import Result
from peel.train.callbacks import Callback
from peel.train.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

CRITERIA = ("bn", "weight", "legr", "reconstruction", "gradient", "taylor")
TIES = {"8x8": ("conv1", "conv2"), "4x4": ("conv3", "conv4")}
NORM = {"conv1": "norm1", "conv2": "norm2", "conv3": "norm3", "conv4": "norm4"}


@functools.cache
def run(**settings: Any) -> Result:
    """A run, shared by the tests that use the same settings. Dictionaries are given as frozensets."""
    settings = {
        name: dict(value) if isinstance(value, frozenset) else value for name, value in settings.items()
    }
    return small_run(**settings)


def planned(**settings: Any) -> Plan:
    """The plan of a run that ends with it."""
    plan = run(stages=("plan",), **settings).plan
    assert plan is not None
    return plan


def backbone_of(plan: Plan) -> Architecture:
    assert plan.others["backbone"] is not None
    return plan.others["backbone"]


def importance(plan: Plan | None, number: int = 0) -> dict[str, float]:
    assert plan is not None
    found = rounds_of(plan)[number].importance
    assert found is not None
    return found


def shares(plan: Plan) -> dict[str, float]:
    found = rounds_of(plan)[0].shares
    assert found is not None
    return found


# Criteria: the importance in the plan is recomputed from the weights of the trained backbone


@functools.cache
def searched(folder: Path, **settings: Any) -> tuple[Plan, Any]:
    result = small_run(stages=("plan",), output=folder, **settings)
    assert result.plan is not None
    return result.plan, peel.load(folder / "stages" / "backbone", model=Small()).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_bn_is_the_mean_absolute_scale_of_the_groups_norm_layers(folder: Path) -> None:
    plan, backbone = searched(folder)
    for group, ties in TIES.items():
        scales = torch.cat([backbone.get_submodule(NORM[tie]).weight.detach().abs() for tie in ties])
        assert importance(plan)[group] == pytest.approx(scales.mean().item(), rel=1e-6)


def test_weight_is_the_mean_absolute_weight_of_the_groups_filters(folder: Path) -> None:
    plan, backbone = searched(folder, criterion="weight")
    for group, ties in TIES.items():
        filters = torch.cat(
            [backbone.get_submodule(tie).weight.detach().abs().mean((1, 2, 3)) for tie in ties]
        )
        assert importance(plan)[group] == pytest.approx(filters.mean().item(), rel=1e-5)


def test_gradient_is_the_first_order_effect_of_each_scale_on_the_loss(folder: Path) -> None:
    # One batch with all images, so that their order does not matter.
    data = few_digits(100)
    plan, backbone = searched(folder, criterion="gradient", data=data)
    images, labels, _ = next(iter(data.train.batches(torch.arange(100), 100, EVAL, CPU.device)))
    # Finite differences in double precision.
    backbone, images = backbone.double(), images.double()

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(backbone(images), labels, label_smoothing=0.1).item()

    for group, ties in TIES.items():
        effects = []
        for tie in ties:
            scale = backbone.get_submodule(NORM[tie]).weight.data
            for channel in range(len(scale)):
                before, step = scale[channel].item(), 1e-4 * scale[channel].item()
                scale[channel] = before + step
                above = loss()
                scale[channel] = before - step
                below = loss()
                scale[channel] = before
                effects.append(abs((above - below) / (2 * step) * before))
        assert importance(plan)[group] == pytest.approx(sum(effects) / len(effects), rel=1e-2)


def test_legr_without_evolution_is_the_squared_norm_of_filters_above_the_least(folder: Path) -> None:
    plan, backbone = searched(folder, criterion="legr", evaluations=1)
    norms = {tie: backbone.get_submodule(tie).weight.detach().square().sum((1, 2, 3)) for tie in NORM}
    least = min(float(values.min()) for values in norms.values())
    for group, ties in TIES.items():
        assert importance(plan)[group] == pytest.approx(
            torch.cat([norms[tie] for tie in ties]).mean().item() - least, rel=1e-5
        )


def test_legr_evaluates_as_many_candidates_as_asked_and_finds_better_ones() -> None:
    found = [importance(planned(criterion="legr", evaluations=count)) for count in (1, 12)]
    ratios = [values["8x8"] / values["4x4"] for values in found]
    assert abs(ratios[0] / ratios[1] - 1) > 0.01


def test_legr_holds_out_a_tenth_of_the_training_images() -> None:
    assert backbone_steps(criterion="bn") == 3
    assert backbone_steps(criterion="legr", evaluations=1) == 2, "180 of 200 images make two batches of 64"
    with pytest.raises(peel.DataError, match="batch of 181 images exceeds the training set of 180"):
        small_run(stages=("plan",), criterion="legr", train={"batch_size": 181})


def test_reconstruction_is_a_relative_error_of_each_tie() -> None:
    plan = planned(criterion="reconstruction")
    ties = rounds_of(plan)[0].tie_importance
    assert set(ties) == set(NORM)
    # Half of the channels are a part of the output of the next layer.
    assert all(0 < value < 1.5 for value in ties.values())
    for group, members in TIES.items():
        assert (
            min(ties[tie] for tie in members) <= importance(plan)[group] <= max(ties[tie] for tie in members)
        )


def test_every_criterion_gives_other_shares() -> None:
    plans = {
        name: planned(criterion=name, **({"evaluations": 12} if name == "legr" else {})) for name in CRITERIA
    }
    for one, other in itertools.combinations(plans, 2):
        assert abs(shares(plans[one])["8x8"] - shares(plans[other])["8x8"]) > 1e-4, (one, other)
    for plan in plans.values():
        assert sum(shares(plan).values()) == pytest.approx(1)
        assert 0.9 * plan.budget < plan.slim.macs <= plan.budget


@pytest.mark.parametrize(
    ("criterion", "is_logged"),
    [("bn", True), ("weight", True), ("gradient", True), ("reconstruction", False)],
)
def test_the_importance_is_logged_after_each_epoch(criterion: str, is_logged: bool) -> None:
    length = frozenset({"epochs": 3}.items())
    history = run(stages=("plan",), criterion=criterion, backbone=length).history["backbone"]
    logged = [epoch.extra.get("importance") for epoch in history]
    if is_logged:
        assert all(set(values) == {"8x8", "4x4"} for values in logged if values)
        assert len({values["8x8"] for values in logged if values}) == 3
    else:
        assert logged == [None] * 3


def test_the_sum_of_a_group_is_its_mean_times_its_channels() -> None:
    mean, total = planned(), planned(reduce="sum")
    widths = backbone_of(mean).widths
    for group, ties in TIES.items():
        assert importance(total)[group] == pytest.approx(
            importance(mean)[group] * sum(widths[tie] for tie in ties)
        )
    assert shares(total) != shares(mean)


def test_ignored_layers_are_not_counted() -> None:
    everything, without = planned(), planned(ignore=("norm1", "*4"))
    ties = rounds_of(everything)[0].tie_importance
    assert rounds_of(without)[0].tie_importance == {tie: ties[tie] for tie in ("conv2", "conv3")}
    assert importance(without) == {"8x8": pytest.approx(ties["conv2"]), "4x4": pytest.approx(ties["conv3"])}


# The L1 term


def test_the_l1_coefficient_is_that_of_the_paper_for_bn_and_zero_for_others() -> None:
    assert planned().values["l1_coefficient"] == 1e-4
    assert planned(criterion="weight").values["l1_coefficient"] == 0
    assert "l1" in run(stages=("plan",)).history["backbone"][0].train
    assert "l1" not in run(stages=("plan",), criterion="weight").history["backbone"][0].train
    given = run(stages=("plan",), criterion="weight", l1_coefficient=0.01)
    # All scales start at 1, so the term starts at the coefficient times their number.
    assert given.plan is not None
    channels = sum(backbone_of(given.plan).widths.values())
    assert given.history["backbone"][0].train["l1"] == pytest.approx(0.01 * channels, rel=0.1)


def test_the_l1_strength_becomes_the_coefficient_that_has_it_over_the_schedule() -> None:
    plan = planned(l1_strength=0.5)
    recipe = Recipe(epochs=1, batch_size=64, lr=0.1, weight_decay=5e-4)
    assert plan.values["l1_coefficient"] == pytest.approx(
        0.5 * 0.1 / sum(recipe.lr_at(step, 3) for step in range(3))
    )


def test_a_larger_l1_coefficient_leaves_smaller_scales() -> None:
    length = frozenset({"epochs": 6}.items())
    found = [importance(planned(l1_coefficient=value, backbone=length)) for value in (0.0, 0.01, 0.05)]
    for group in TIES:
        assert found[0][group] > found[1][group] + 0.02 > found[2][group] + 0.04


def test_scales_start_from_gamma_init() -> None:
    found = importance(planned(gamma_init=0.5))
    assert all(0.4 < value < 0.6 for value in found.values())


def test_channels_of_later_rounds_start_from_gamma_init(folder: Path) -> None:
    """With a learning rate of nearly zero, the scales stay what they started as."""
    still = {"epochs": 2, "lr": 1e-9}
    settings = {"rounds": 2, "backbone_ratio": 0.3, "gamma_init": 0.25, "backbone": still}
    small_run(stages=("plan",), output=folder, **settings)
    for stage in ("backbone", "backbone-2"):
        network = peel.load(folder / "stages" / stage, model=Small())
        for norm in NORM.values():
            scale = network.get_submodule(norm).weight
            assert torch.allclose(scale, torch.full_like(scale, 0.25), atol=1e-5), (stage, norm)


def test_a_note_says_that_groups_cannot_be_told_apart() -> None:
    result = run()
    assert result.plan is not None
    assert not rounds_of(result.plan)[0].distinct
    assert any("cannot be told apart" in note for note in result.notes)


# The backbone


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0])
def test_the_backbone_costs_lambda_times_the_budget_and_the_rest_is_the_pool(ratio: float) -> None:
    plan = planned(backbone_ratio=ratio)
    backbone = backbone_of(plan)
    assert 0.85 * ratio * plan.budget < backbone.macs <= ratio * plan.budget
    assert plan.values["pool"] == plan.budget - backbone.macs
    assert all(plan.widths[tie] >= width for tie, width in backbone.widths.items())


def test_an_equal_backbone_has_the_same_number_of_channels_everywhere() -> None:
    equal, uniform = (backbone_of(planned(backbone_init=init)).widths for init in ("equal", "uniform"))
    assert max(equal.values()) - min(equal.values()) <= 1
    assert max(uniform.values()) - min(uniform.values()) > 3


@pytest.mark.parametrize("resource", ["params", "memory"])
def test_the_budget_may_count_another_resource(resource: str) -> None:
    plan = planned(resource=resource, budget="60%")
    graph = peel.trace(Small(), torch.zeros(1, 3, 8, 8))

    def cost(widths: peel.Widths) -> int:
        return graph.params(widths) if resource == "params" else graph.activation_bytes(widths)

    assert plan.budget == int(0.6 * cost(graph.widths))
    assert 0.9 * plan.budget < cost(plan.widths) == plan.slim.cost <= plan.budget
    assert plan.slim.params == graph.params(plan.widths)
    assert plan.widths != planned(budget="60%").widths


@pytest.mark.parametrize("budget", ["60%", 0.6, 40_000, "40k"])
def test_every_form_of_a_budget_is_respected(budget: Any) -> None:
    plan = planned(budget=budget)
    assert plan.budget == (40_000 if budget in (40_000, "40k") else int(0.6 * plan.original.macs))
    assert plan.slim.macs <= plan.budget
    assert plan.uniform.macs <= plan.budget


def test_a_budget_above_the_original_gives_a_wider_network() -> None:
    with pytest.raises(peel.BudgetError, match=r"above the original network.*--grow"):
        planned(budget="150%")
    plan = planned(budget="150%", grow=True)
    assert plan.original.macs < plan.slim.macs <= plan.budget


@pytest.mark.parametrize("resource", ["macs", "params", "memory"])
def test_no_plan_is_larger_than_the_original(resource: str) -> None:
    plan = planned(budget="60%", backbone_ratio=0.5, resource=resource, policy="winner-take-all")
    for network in plan.networks.values():
        assert network.macs <= plan.original.macs
        assert network.params <= plan.original.params
        assert network.memory <= plan.original.memory


def test_a_frozen_group_gets_no_share() -> None:
    plan = planned(freeze=TIES["4x4"])
    assert rounds_of(plan)[0].shares == {"8x8": 1.0, "4x4": 0.0}
    assert importance(plan)["4x4"] > 0


def test_the_estimated_time_follows_the_macs_of_the_plan() -> None:
    def work(**settings: Any) -> tuple[Plan, dict[str, float]]:
        seen: list[dict[str, float]] = []

        class Watch(Callback):
            def on_run_begin(self, stages: Sequence[tuple[str, float]]) -> None:
                seen.append(dict(stages))

        small_run(stages=("plan",), callbacks=[Watch()], **settings)
        plan = small_run(dry_run=True, **settings).plan
        assert plan is not None
        return plan, seen[0]

    macs, by_macs = work(budget="50%")
    params, by_params = work(budget="50%", resource="params")
    assert by_params["backbone"] / by_macs["backbone"] == pytest.approx(
        backbone_of(params).macs / backbone_of(macs).macs
    )


# Reallocation


def test_by_importance_every_group_grows() -> None:
    assert all(factor > 1 for factor in rounds_of(planned())[0].factors.values())


def test_winner_take_all_gives_everything_to_the_most_important_group() -> None:
    plan = planned(policy="winner-take-all")
    found = rounds_of(plan)[0]
    loser, winner = sorted(TIES, key=importance(plan).__getitem__)
    assert found.shares == {winner: 1.0, loser: 0.0}
    assert found.factors[loser] == 1.0
    assert found.factors[winner] > rounds_of(planned())[0].factors[winner]


def test_the_equal_policy_adds_the_same_number_of_channels_and_trains_no_backbone() -> None:
    result = run(stages=("plan",), policy="equal")
    assert result.history == {}
    assert result.plan is not None
    backbone = backbone_of(result.plan).widths
    added = [width - backbone[tie] for tie, width in rounds_of(result.plan)[0].ideal_widths.items()]
    assert min(added) > 0
    assert max(added) == pytest.approx(min(added))


def test_the_random_policy_grows_half_of_the_ties_drawn_by_the_seed() -> None:
    grown = set()
    for seed in range(4):
        plan = planned(policy="random", seed=seed)
        backbone, wide = backbone_of(plan).widths, rounds_of(plan)[0].ideal_widths
        factors = {tie: width / backbone[tie] for tie, width in wide.items()}
        drawn = {tie: factor for tie, factor in factors.items() if factor > 1 + 1e-9}
        assert len(drawn) == 2
        assert max(drawn.values()) == pytest.approx(min(drawn.values()))
        grown.add(frozenset(drawn))
    assert len(grown) > 1


def test_the_triangular_solver_charges_layers_to_the_group_that_they_write() -> None:
    telescoped, triangular = planned(backbone_ratio=0.6), planned(backbone_ratio=0.6, solver="triangular")
    factors = [rounds_of(plan)[0].factors for plan in (telescoped, triangular)]
    assert max(abs(factors[0][group] - factors[1][group]) for group in TIES) > 1e-3
    backbone, wide = backbone_of(triangular).widths, rounds_of(triangular)[0].ideal_widths

    def own_cost(widths: Mapping[str, float], group: str) -> float:
        w = {"image": 3.0, **widths}
        if group == "8x8":
            return 64 * 9 * (w["image"] * w["conv1"] + w["conv1"] * w["conv2"])
        return 16 * 9 * (w["conv2"] * w["conv3"] + w["conv3"] * w["conv4"])

    grown = {group: own_cost(wide, group) - own_cost(backbone, group) for group in TIES}
    # The classifier, which no group writes, pays for the wider last layer.
    assert triangular.values["pool"] is not None
    assert grown["8x8"] == pytest.approx(triangular.values["pool"] * shares(triangular)["8x8"], rel=1e-3)
    assert grown["4x4"] == pytest.approx(triangular.values["pool"] * shares(triangular)["4x4"], rel=1e-2)


def test_two_rounds_split_the_pool_and_keep_the_weights_of_the_backbone() -> None:
    length = frozenset({"epochs": 10, "batch_size": 20}.items())
    result = run(stages=("plan",), rounds=2, backbone_ratio=0.5, backbone=length)
    once = run(stages=("plan",), backbone_ratio=0.5, backbone=length)
    assert list(result.history) == ["backbone", "backbone-2"]
    assert list(once.history) == ["backbone"]
    assert [len(result.history[stage]) for stage in ("backbone", "backbone-2")] == [10, 5]
    plan = result.plan
    assert plan is not None
    assert plan.values["pool"] is not None
    first, second = rounds_of(plan)
    middle = plan.budget - plan.values["pool"] / 2
    assert backbone_of(plan).macs < first.cost <= middle + 1 < second.cost <= plan.budget
    assert first.importance == importance(once.plan)
    assert second.importance != first.importance
    losses = [result.history[stage][0].train["loss"] for stage in ("backbone", "backbone-2")]
    assert losses[1] < 0.9 * losses[0]


def test_no_layer_grows_beyond_max_width() -> None:
    free = planned(budget="90%", backbone_ratio=0.5, policy="winner-take-all", grow=True)
    limited = planned(budget="70%", backbone_ratio=0.8, policy="winner-take-all", max_width=1.0)
    original = limited.original.widths
    assert any(free.widths[tie] > width for tie, width in original.items())
    assert all(limited.widths[tie] <= width for tie, width in original.items())


def test_widths_are_multiples_of_the_divisor() -> None:
    plan = planned(divisor=4, budget="70%")
    networks = [network for name, network in plan.networks.items() if name != "backbone"]
    assert all(width % 4 == 0 for network in networks for width in network.widths.values())


def test_frozen_ties_keep_their_width() -> None:
    plan = planned(freeze=("conv3",))
    assert {network.widths["conv3"] for network in plan.networks.values()} == {16}
    assert planned().widths["conv3"] < 16


# Distillation


def slim_model(**settings: Any) -> nn.Module:
    model = run(**settings).model
    assert model is not None
    return model


def test_without_distillation_no_teacher_is_used() -> None:
    result = run(distill="none")
    assert set(result.history["peel"][0].train) == {"loss", "cross_entropy", "top1"}
    assert same_weights(slim_model(distill="none"), slim_model(kd_weight=0.0))
    assert not same_weights(slim_model(distill="none"), slim_model())


def test_the_student_learns_from_the_teacher() -> None:
    length = frozenset({"epochs": 8, "batch_size": 50}.items())
    result = run(train=length, kd_weight=1.0)
    terms = [epoch.train["distillation"] for epoch in result.history["peel"]]
    assert terms[-1] < 0.6 * max(terms)
    assert result.history["peel"][0].train["loss"] == pytest.approx(
        sum(result.history["peel"][0].train[name] for name in ("cross_entropy", "distillation"))
    )
    alone = run(train=length, distill="none")
    teacher = run(train=length, stages=("original",))
    assert teacher.rows[0].top1 == result.rows[0].top1 == alone.rows[0].top1


def test_the_weight_of_the_teacher_is_a_tenth_unless_given() -> None:
    for weight, settings in ((0.1, {}), (0.7, {"kd_weight": 0.7})):
        record = run(**settings).history["uniform"][0].train
        assert record["loss"] == pytest.approx(
            record["cross_entropy"] + weight * record["distillation"], rel=1e-5
        )


def test_a_teacher_with_a_larger_weight_is_followed_more_closely() -> None:
    length = frozenset({"epochs": 6, "batch_size": 50}.items())
    teacher = taught()
    with torch.no_grad():  # far less certain than the labels
        teacher.fc.weight.mul_(0.1)
        teacher.fc.bias.mul_(0.1)
    images, *_ = next(iter(few_digits().test.batches(torch.arange(90), 90, EVAL, CPU.device)))

    def distance(weight: float) -> float:
        student = small_run(
            train=dict(length),
            weights=teacher,
            kd_weight=weight,
            stages=["original", "final"],
            plan=dict.fromkeys(NORM, 8),
            budget="100%",
        )
        assert student.model is not None
        with torch.no_grad():
            outputs = [network.eval()(images).log_softmax(1) for network in (student.model, teacher)]
        return nn.functional.kl_div(*outputs, reduction="batchmean", log_target=True).item()

    assert distance(20.0) < 0.5 * distance(0.0)


def test_the_temperature_changes_the_weights() -> None:
    assert not same_weights(slim_model(temperature=4.0), slim_model())


def test_in_place_distillation_trains_a_wider_network_beside_the_student() -> None:
    result = run(distill="in-place", stages=("plan", "final"))
    records = [epoch.train for epoch in result.history["peel"]]
    assert all({"wide", "distillation", "cross_entropy"} <= set(record) for record in records)
    assert records[0]["loss"] == pytest.approx(records[0]["wide"] + records[0]["distillation"], rel=1e-5)
    assert result.model is not None
    assert result.plan is not None
    widths = [result.model.get_submodule(tie).out_channels for tie in NORM]
    assert widths == list(result.plan.widths.values())
    assert result.rows[-1].params == sum(parameter.numel() for parameter in result.model.parameters())


def test_hard_weight_adds_the_labels_to_the_loss_of_the_student() -> None:
    soft, hard = (
        run(distill="in-place", stages=("plan", "final"), hard_weight=weight) for weight in (0.0, 1.0)
    )
    first = hard.history["peel"][0].train
    assert first["loss"] == pytest.approx(
        first["wide"] + first["distillation"] + first["cross_entropy"], rel=1e-5
    )
    assert soft.model is not None
    assert hard.model is not None
    assert not same_weights(soft.model, hard.model)


# Recipes, data and seeds


def backbone_steps(**settings: Any) -> int:
    counting = Counting()
    small_run(stages=("plan",), callbacks=[counting], **settings)
    return counting.steps["backbone"]


def test_recipe_changes_hold_for_the_backbone_too_unless_it_has_its_own() -> None:
    train = {"epochs": 3, "batch_size": 40}
    assert backbone_steps(train=train, backbone={"epochs": 2}) == 2 * 5
    assert backbone_steps(train=train, backbone={"epochs": 2, "batch_size": 100}) == 2 * 2
    result = run(
        train=frozenset({"epochs": 3, "batch_size": 100}.items()),
        backbone=frozenset({"epochs": 2, "batch_size": 40}.items()),
    )
    assert {stage: len(history) for stage, history in result.history.items()} == {
        "original": 3,
        "backbone": 2,
        "uniform": 3,
        "peel": 3,
    }
    # Only whole batches count.
    assert [row.image_passes for row in result.rows] == [600] * 3


def test_the_seed_changes_every_network() -> None:
    one, other = run(), run(seed=1)
    for row, second in zip(one.rows, other.rows):
        assert row.loss != second.loss
    assert importance(one.plan) != importance(other.plan)


def test_a_network_of_the_zoo_goes_through_all_stages() -> None:
    result = prune("cifar_resnet20", few_digits(), **{**SHORT, "train": {"epochs": 1, "batch_size": 100}})
    assert [row.name for row in result.rows] == ["original", "uniform", "peel"]
    assert result.plan is not None
    assert set(result.plan.groups) == {"8x8", "4x4", "2x2"}


# Before training


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_criterion_that_cannot_measure_is_refused_before_training(criterion: str) -> None:
    class Never(Callback):
        def on_stage_begin(self, name: str, description: str) -> None:
            raise AssertionError(f"{name} began")

    with pytest.raises(ConfigError, match="no measured layer matches 'nope'"):
        small_run(criterion=criterion, ignore=("nope",), callbacks=[Never()])
