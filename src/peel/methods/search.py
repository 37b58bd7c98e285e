"""A search that trains nothing: networks cut from the trained original and repaired are compared.

The uniform network and random allocations of the budget are judged by their losses on held-out training
images. The plan is the lowest point of a smooth fit of these losses on the budget. Only hidden channels are
reallocated. Residual streams stay uniform, because repaired networks overrate them: a network that is trained
adapts to a narrow stream. The layers of a group share what it gets by sensitivity, or by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ..cost.rounding import cost_of, fractional_units
from ..cost.widths import Widths
from ..data.datasets import Split
from ..errors import ConfigError, DataError
from ..steps.reallocation import Round
from ..surgery.sensitivity import measure_sensitivity, sensitivity_passes
from .allocation import ALLOCATIONS, Space
from .config import MethodConfig
from .loss_fit import Array, Fit, FitSummary, LeftOut, best_point, fit_losses
from .method import Method, TrainBackbone
from .plan import Plan, assemble_plan
from .problem import Problem
from .repaired_losses import Images, Judge
from .sensitivity import widths_by
from .start import calibration_images

#: The fit has a weight per group, and needs this many networks for each.
NETWORKS_PER_GROUP = 4

#: A repair takes about as long as this many passes of its images through both networks.
REPAIR_WORK = 5

#: No group becomes wider or narrower than uniform by more than this (a logarithm): trained networks gain less
#: from large changes than repaired ones.
MOST_CHANGE = math.log(2) / 2

#: The groups cannot be told apart where the fit explains less of the variance of left-out networks than this,
#: or where its gain is below this many standard errors.
LEAST_EXPLAINED, STANDARD_ERRORS = 0.5, 2.0


class Search(Method):
    """Compares cut and repaired networks, and takes the best point of a fit of their losses."""

    needs_trained = True

    def check(self, problem: Problem, config: MethodConfig) -> None:
        super().check(problem, config)
        space = Space(problem)
        if _too_few_groups(space):
            return
        if len(space.groups) * NETWORKS_PER_GROUP > ALLOCATIONS:
            raise ConfigError(
                f"the method search tells at most {ALLOCATIONS // NETWORKS_PER_GROUP} groups apart by "
                f"{ALLOCATIONS} networks, and here are {len(space.groups)}. Give fewer and larger groups "
                "(--groups)."
            )
        if problem.task.loss is None and not problem.task.is_classification:
            raise ConfigError("the method search compares losses, and this task has none: give loss=.")
        Images.of(problem)

    def obstacle(self, problem: Problem, config: MethodConfig) -> str:
        """Why a search is refused, or can only end at the uniform network; empty where it is possible."""
        try:
            self.check(problem, config)
        except (ConfigError, DataError) as error:
            return str(error).rstrip(".")
        space = Space(problem)
        return _too_few_groups(space) or _too_few_networks(space, space.draw())

    def original_images(self, problem: Problem) -> Split:
        """All but those that networks are judged by: on images that it has memorized, an original needs its
        widest layers more than on others.
        """
        return problem.data.train if _too_few_groups(Space(problem)) else Images.of(problem).repair

    def search_macs(self, problem: Problem) -> float:
        if _too_few_groups(Space(problem)):
            return 0.0
        graph, images = problem.graph, Images.of(problem)
        slim_macs = graph.macs(problem.uniform())
        # The regressions of a repair, in float64, take longer than its passes through both networks.
        for_repair = REPAIR_WORK * images.per_repair * (graph.macs() + slim_macs)
        compared = ALLOCATIONS * (for_repair + images.held_out.size * slim_macs)
        return float(compared + sensitivity_passes(graph) * graph.macs())

    def notes(self, problem: Problem) -> list[str]:
        space = Space(problem)
        if reason := _too_few_groups(space) or _too_few_networks(space, space.draw()):
            return [f"The plan will be uniform: {reason}."]
        judges = f"the {Images.of(problem).held_out.size} training images that the search judges networks by"
        if problem.trained is not None:
            return [f"The given network may have seen {judges}, unless a run of the search trained it."]
        if problem.task.train_fn is not None:
            return [f"train_fn may train the original with {judges}: it chooses the images itself."]
        return []

    def plan(self, problem: Problem, config: MethodConfig, train_backbone: TrainBackbone) -> Plan:
        space = Space(problem)
        outcome, fit = _find(space, divides=config.division == "sensitivity")
        regrouped = replace(problem, graph=problem.graph.regroup({**space.groups, **space.frozen}))
        return assemble_plan(regrouped, outcome.widths, rounds=(outcome,), config=config, fit=fit)


def _too_few_groups(space: Space) -> str:
    """Why groups cannot be compared; empty where they can."""
    if len(space.hidden) > 1:
        return ""
    names = f" ({space.hidden[0]})" if space.hidden else ""
    return (
        f"the network has fewer than two groups of hidden channels{names}. Give it more (--method search "
        "with --groups), or take the method sensitivity"
    )


def _too_few_networks(space: Space, drawn: Iterable[Widths]) -> str:
    needed = NETWORKS_PER_GROUP * len(space.groups)
    found = len(list(islice(drawn, needed)))
    if found == needed:
        return ""
    finer = "" if space.problem.divisor == 1 else "a smaller --divisor, "
    return (
        f"only {found} different networks have this budget, {needed} are needed to compare groups. Take "
        f"{finer}fewer groups (--method search with --groups), or the method sensitivity"
    )


def _find(space: Space, divides: bool) -> tuple[Round, FitSummary | None]:
    """The best point of the fit, and its summary; the uniform network where nothing better is found."""
    if reason := _too_few_groups(space):
        return _uniform(space, reason), None
    drawn = list(space.draw())
    if reason := _too_few_networks(space, drawn):
        return _uniform(space, reason), None
    judge = Judge(space.problem, Images.of(space.problem))
    losses = judge.losses(drawn, space.problem.callbacks)
    outcome, summary = _lowest(space, drawn, losses, judge.images)
    if outcome.distinct and summary is not None:
        return _best_measured(space, outcome, summary, losses[0], judge, divides)
    return outcome, summary


def _lowest(
    space: Space, drawn: Sequence[Widths], losses: Sequence[float], images: Images
) -> tuple[Round, FitSummary | None]:
    """The lowest point of a fit of these losses; uniform where the groups cannot be told apart."""
    finite = [(widths, loss) for widths, loss in zip(drawn, losses, strict=True) if math.isfinite(loss)]
    dropped = len(drawn) - len(finite)
    if len(finite) < NETWORKS_PER_GROUP * len(space.groups):
        lost = f"the losses of {dropped} of {len(drawn)} repaired networks are not finite"
        return _uniform(space, lost), None
    logs = np.array([space.log(widths) for widths, _ in finite])
    fit, left_out = fit_losses(logs, np.array([loss for _, loss in finite]))
    is_hidden = np.array([group in space.hidden for group in space.groups])
    bounds = np.maximum(-MOST_CHANGE, logs.min(0)), np.minimum(MOST_CHANGE, logs.max(0))
    low, high = (np.where(is_hidden, bound, 0.0) for bound in bounds)
    point = best_point(fit, space.load, low, high)
    found = _round(space, point, space.ideal_at(point))
    counts = len(finite), dropped, len(drawn) * images.per_network
    summary = _summarize(space, fit, left_out, np.array(space.log(found.widths)), counts)
    importance = _worth_over_cost(space, fit)
    if doubt := _doubt(summary):
        found = _uniform(space, doubt)
        return replace(found, importance=importance, note=f"{found.note} {_describe(summary)}"), summary
    factors = ", ".join(f"{group} {found.factors[group]:.2f}" for group in space.hidden)
    note = f"{_describe(summary)} Widths over uniform, before rounding: {factors}."
    return replace(found, importance=importance, note=note), summary


def _best_measured(
    space: Space, found: Round, summary: FitSummary, uniform_loss: float, judge: Judge, divides: bool
) -> tuple[Round, FitSummary]:
    """The best of three networks, by the loss after the repair: the one that was found; with `divides`, the
    same with what a group gets shared among its layers by sensitivity; and the uniform one.
    """
    candidates = [found]
    if divides:
        ideal = space.divided(found.ideal_widths, by_sensitivity(space.problem, judge.images))
        divided = _round(space, np.log(list(found.factors.values())), ideal)
        candidates += [divided] if divided.widths != found.widths else []
    judged = judge.losses([Widths(one.widths) for one in candidates])
    uniform_loss, *losses = (loss if math.isfinite(loss) else math.inf for loss in (uniform_loss, *judged))
    loss, note = min(losses), found.note
    if len(candidates) > 1:
        change = f"after the repair, the loss is {losses[1]:.4f} with it and {losses[0]:.4f} without."
        is_better = losses[1] < losses[0]
        shared = "Inside a group, layers share this by sensitivity"
        note += f" {shared if is_better else 'Sharing by sensitivity inside groups is left out'}: {change}"
    summary = replace(summary, measured=loss, uniform_measured=uniform_loss)
    if loss >= uniform_loss:
        reason = (
            f"after the repair, the uniform network has a loss of {uniform_loss:.4f}, and the best point one "
            f"of {loss:.4f}"
        )
        uniform = _uniform(space, reason)
        return replace(uniform, importance=found.importance, note=f"{uniform.note} {note}"), summary
    chosen = candidates[losses.index(loss)]
    note += (
        f" After the repair, the uniform network has a loss of {uniform_loss:.4f}, and the plan {loss:.4f}."
    )
    return replace(chosen, importance=found.importance, note=note), summary


def by_sensitivity(problem: Problem, images: Images) -> Widths:
    """The widths by sensitivity, of the images that networks are repaired with."""
    assert problem.trained is not None
    if problem.cost(problem.graph.widths) <= problem.budget:
        return problem.graph.widths  # it grows: nothing is cut
    batches = calibration_images(images.for_repair(problem))
    measured = measure_sensitivity(problem.trained, problem.graph, batches)
    return widths_by(measured, replace(problem, divisor=1))


def _summarize(
    space: Space, fit: Fit, left_out: LeftOut, point: Array, counts: tuple[int, int, int]
) -> FitSummary:
    """`counts`: networks that were compared, networks that were dropped, and image passes."""
    networks, dropped, image_passes = counts
    loss, uniform_loss = fit.predict(np.stack([point, np.zeros_like(point)])).tolist()
    return FitSummary(
        power=fit.power,
        constant=fit.constant,
        weights=dict(zip(space.groups, fit.weights.tolist(), strict=True)),
        explained=left_out.explained,
        loss=loss,
        uniform_loss=uniform_loss,
        gain_error=left_out.gain_error(point),
        networks=networks,
        dropped=dropped,
        image_passes=image_passes,
    )


def _doubt(summary: FitSummary) -> str:
    """Why the groups cannot be told apart; empty where they can."""
    if summary.explained < LEAST_EXPLAINED:
        return f"the fit explains less than {LEAST_EXPLAINED:.0%}, so the groups cannot be told apart"
    if summary.gain <= 0:
        return "in whole channels, the best point of the fit is no better; a smaller --divisor may help"
    if summary.gain <= STANDARD_ERRORS * summary.gain_error:
        return "the predicted gain is within the error of the fit, so the groups cannot be told apart"
    return ""


def _describe(summary: FitSummary) -> str:
    dropped = f" ({summary.dropped} more had no finite loss)" if summary.dropped else ""
    return (
        f"{summary.networks} cut and repaired networks were compared{dropped}. The fit of their losses "
        f"explains {max(0.0, summary.explained):.0%} of the variance of left-out networks. It predicts a "
        f"loss of {summary.loss:.4f}, and {summary.uniform_loss:.4f} for the uniform network: a gain of "
        f"{summary.gain:.4f}, with a standard error of {summary.gain_error:.4f}."
    )


def _worth_over_cost(space: Space, fit: Fit) -> dict[str, float]:
    """For each group, its part of what all widths are worth over its part of what they cost.

    Above 1, it deserves more than in the uniform network. Groups without a cost are left out.
    """
    worths, costs = fit.weights / max(fit.weights.sum(), 1e-300), space.costs()
    parts = zip(space.groups, worths.tolist(), (costs / max(costs.sum(), 1e-300)).tolist(), strict=True)
    return {group: worth / cost for group, worth, cost in parts if cost > 0}


def _uniform(space: Space, reason: str) -> Round:
    point = np.zeros(len(space.groups))
    found = _round(space, point, space.ideal_at(point), space.uniform)
    return replace(found, distinct=False, note=f"The plan is uniform: {reason}.")


def _round(space: Space, point: Array, ideal: dict[str, float], widths: Widths | None = None) -> Round:
    """A point, and its whole widths: by default those near the ideal that leave the streams uniform."""
    problem = space.problem
    widths = space.rounded(ideal, changed=space.hidden) if widths is None else widths
    ideal_cost = float(cost_of(problem.graph, problem.resource)(fractional_units(problem.graph, ideal)))
    factors = dict(zip(space.groups, np.exp(point).tolist(), strict=True))
    cost = problem.cost(widths)
    return Round(dict(widths), factors, ideal, ideal_cost, cost, problem.budget - cost)
