"""How fast the networks of the table are. They are timed once, together, at the end of a run.

With a latency model from this machine, they are timed under its conditions, and compared with the budget;
else in torch eager. Times are not results: they stand in `bench` of result.json, beside the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..cost.budget import format_cost, format_latency
from ..cost.constraint import binding_limit
from ..cost.latency import LatencyModel
from ..deploy.bench import bench_networks, device_name, thread_count
from ..deploy.networks import Network
from ..errors import ConfigError, PeelError
from ..graph import ChannelGraph
from ..graph.copying import deep_copy
from ..report.record import parse_result
from ..train.engine import find_device
from ..utils.process_state import preserve_process_state
from ..utils.text import first_line
from .loaded import Loaded
from .result import Row
from .store import RunFolder

Bench = Mapping[str, Any]
"""What `peel bench --json` prints. Where networks cannot be timed, only the `error`."""


def measure_speed(
    loaded: Loaded, models: Mapping[str, nn.Module], macs: Mapping[str, int], seconds: float
) -> Bench:
    """Time networks by name, for about `seconds` in all. The first is the baseline."""
    device, data, threads = loaded.engine.device, loaded.data, loaded.config.threads
    backend, batch = "eager", 1
    model = loaded.graph.latency_model
    if model is not None and _is_measured_here(model):
        device = find_device(str(model.conditions["device_type"]))
        backend, batch = str(model.conditions["backend"]), int(str(model.conditions["batch"]))
        threads = int(str(model.conditions["threads"]))
    try:
        example, shape = (data.example(), ()) if data.is_own else (None, data.shape)
        networks = [
            Network(
                name,
                _as_saved(network),
                shape,
                macs=macs[name],
                params=sum(parameter.numel() for parameter in network.parameters()),
                key=name,
                example=example,
            )
            for name, network in models.items()
        ]
        with preserve_process_state():
            # As in a process of its own: training may have set these otherwise.
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = False
            torch.set_float32_matmul_precision("highest")
            return bench_networks(
                networks,
                [backend],
                batch=batch,
                threads=thread_count(threads, device),
                device=device,
                seconds=seconds / len(networks),
            ).to_dict()
    except Exception as error:  # the networks are trained: the run does not fail for a measurement
        reason = first_line(error)
        return {"error": reason if isinstance(error, PeelError) else f"{type(error).__name__}: {reason}"}


def _as_saved(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in the memory format in which a saved network is loaded."""
    twin = deep_copy(model)
    return twin.cpu().to(memory_format=torch.contiguous_format).eval()


def stored_speed(folder: RunFolder | None, macs: Mapping[str, int]) -> Bench | None:
    """What an earlier start measured of the same networks (name -> MACs)."""
    if folder is None or not folder.has("result.json"):
        return None
    bench: Bench = {}
    with contextlib.suppress(PeelError):  # a corrupt file is written again
        bench = folder.read("result.json", parse_result).get("bench") or {}
    found = {entry["network"]: entry["macs"] for entry in bench.get("entries", ())}
    return bench if found == macs else None


def with_speed(rows: Sequence[Row], bench: Bench | None, loaded: Loaded) -> list[Row]:
    """The rows with their speed-ups and, with a latency model from this machine, their latency."""
    entries = {entry["network"]: entry for entry in (bench or {}).get("entries", ())}
    model = loaded.graph.latency_model
    is_latency = model is not None and _is_measured_here(model)

    def fill(row: Row) -> Row:
        entry = entries.get(row.name)
        if entry is None:
            return row
        if is_latency:
            row = replace(row, latency=1e9 * entry["seconds"]["median"])
        speedup = entry["speedup"]
        if not speedup:
            return row
        return replace(row, speedup=speedup["median"], efficiency=entry["efficiency"])

    return [fill(row) for row in rows]


def with_predicted_latency(rows: Sequence[Row], widths: Mapping[str, Any], graph: ChannelGraph) -> list[Row]:
    if graph.latency_model is None:
        return list(rows)
    return [replace(row, predicted_latency=graph.latency(widths[row.name]) * 1e9) for row in rows]


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


def budget_notes(loaded: Loaded, widths: Mapping[str, int]) -> list[str]:
    """Which of several limits binds."""
    allowed = loaded.constraint.limits
    if len(allowed) < 2:
        return []
    used, binding = loaded.constraint.used(widths), binding_limit(loaded.graph, widths, allowed)
    parts = [f"{format_cost(allowed[name], name)}: {used[name]:.1%} used" for name in used]
    return [f"Of the limits ({'; '.join(parts)}), that of {binding} binds."]


def latency_verdicts(rows: Sequence[Row], loaded: Loaded, bench: Bench | None) -> list[str]:
    """How far the budget of latency was missed."""
    budget = loaded.constraint.limits.get("latency")
    if loaded.graph.latency_model is not None and bench and "error" in bench:
        return [f"The latency of the networks could not be measured: {bench['error']}"]
    slims = [row for row in rows if row.name != "original" and row.latency is not None]
    return [_verdict(row, budget) for row in slims] if budget is not None else []


def _verdict(row: Row, budget: int) -> str:
    assert row.latency is not None
    assert row.predicted_latency is not None
    difference = row.latency / budget - 1
    text = f"{-difference:.1%} below" if difference <= 0 else f"{difference:.1%} above: it missed"
    return (
        f"Latency of {row.name}: predicted {format_latency(row.predicted_latency)}, measured "
        f"{format_latency(row.latency)}, {text} the budget of {format_latency(budget)}."
    )
