"""Latency in a run: the model from a file, and how long the networks of the table take when measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cost.budget import format_cost, format_latency
from ..cost.constraint import binding_limit
from ..cost.latency import LatencyModel
from ..cost.widths import Widths
from ..deploy.bench import device_name
from ..deploy.latency import LatencyTimer
from ..errors import ConfigError, PeelError
from ..graph import ChannelGraph
from ..methods.problem import Problem
from ..train.engine import find_device
from .result import Row

#: Seconds of measuring for each network of the table.
SECONDS = 2.0


def attach_latency(graph: ChannelGraph, file: str | None) -> ChannelGraph:
    return graph if file is None else graph.with_latency(LatencyModel.load(file))


def latency_notes(graph: ChannelGraph) -> list[str]:
    """How good the latency model is, and where it was measured."""
    model = graph.latency_model
    if model is None:
        return []
    found, error = model.conditions, model.accuracy
    text = f"Latency was measured by {found.get('measured_by')}."
    if "measured_by" not in found:
        text = (
            f"Latency is that of a batch of {found.get('batch')} in {found.get('backend')} with "
            f"{found.get('threads')} threads on {found.get('device')}."
        )
    notes = [
        f"{text} On {error.networks} networks that the model had not seen, its error was {error.median:.1%} "
        f"(median), {error.p95:.1%} (95th percentile)."
    ]
    if found.get("note"):
        notes.append(f"While latency was measured, {found['note']}")
    if not _is_measured_here(model):
        notes.append(
            "The latency model is not from this machine, so the final network is not measured here. Measure "
            "it there with peel bench."
        )
    return notes


def _is_measured_here(model: LatencyModel) -> bool:
    """Whether this machine has the device that the model was measured on."""
    if "measured_by" in model.conditions or not {"backend", "batch", "threads"} <= model.conditions.keys():
        return False
    try:
        here = device_name(find_device(str(model.conditions.get("device_type"))))
    except ConfigError:
        return False
    return here == model.conditions.get("device")


def budget_notes(problem: Problem, widths: Mapping[str, int]) -> list[str]:
    """Which of several limits binds."""
    allowed = problem.constraint.limits
    if len(allowed) < 2:
        return []
    used, binding = problem.constraint.used(widths), binding_limit(problem.graph, widths, allowed)
    parts = [f"{format_cost(allowed[name], name)}: {used[name]:.1%} used" for name in used]
    return [f"Of the limits ({'; '.join(parts)}), that of {binding} binds."]


def with_latency(
    problem: Problem, rows: Sequence[Row], widths: Mapping[str, Widths]
) -> tuple[list[Row], list[str]]:
    """The rows with predicted and measured latency, and notes on how far the budget was missed."""
    graph, model = problem.graph, problem.graph.latency_model
    if model is None or not rows:
        return list(rows), []
    found = [replace(row, predicted_latency=graph.latency(widths[row.name]) * 1e9) for row in rows]
    if not _is_measured_here(model):
        return found, []
    try:
        timer = LatencyTimer.like(problem.model, graph, model.conditions, seconds=SECONDS)
        times = timer([widths[row.name] for row in found])
    except (PeelError, ImportError, RuntimeError) as error:
        return found, [f"The latency of the networks could not be measured: {error}"]
    measured = [replace(row, latency=time) for row, time in zip(found, times, strict=True)]
    budget = problem.constraint.limits.get("latency")
    slims = [row for row in measured if row.name != "original"]
    return measured, [*timer.notes, *(_verdict(row, budget) for row in slims if budget is not None)]


def _verdict(row: Row, budget: int) -> str:
    assert row.latency is not None
    assert row.predicted_latency is not None
    difference = row.latency / budget - 1
    text = f"{-difference:.1%} below" if difference <= 0 else f"{difference:.1%} above: it missed"
    return (
        f"Latency of {row.name}: predicted {format_latency(row.predicted_latency)}, measured "
        f"{format_latency(row.latency)}, {text} the budget of {format_latency(budget)}."
    )
