"""How fast the networks of the table are: `peel bench` at the end of a run."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..deploy.bench import bench_networks, thread_count
from ..deploy.networks import Network
from ..deploy.onnx_model import first_line
from ..errors import PeelError
from ..graph.copying import deep_copy
from ..methods.problem import Problem
from ..report.record import parse_result
from ..utils.process_state import preserve_process_state
from .folder import RunFolder
from .result import Row

Bench = Mapping[str, Any]
"""What `peel bench --json` prints. Where networks cannot be timed, only the `error`."""


def measure_speed(
    problem: Problem,
    models: Mapping[str, nn.Module],
    macs: Mapping[str, int],
    seconds: float,
    threads: int | None,
) -> Bench:
    """Time networks by name in torch eager, for about `seconds` in all. The first is the baseline."""
    device, data = problem.engine.device, problem.data
    try:
        example, shape = (data.example(), ()) if data.is_own else (None, data.shape)
        networks = [
            Network(
                name,
                _as_saved(model),
                shape,
                macs=macs[name],
                params=sum(parameter.numel() for parameter in model.parameters()),
                key=name,
                example=example,
            )
            for name, model in models.items()
        ]
        with preserve_process_state():
            # As in a process of its own: training may have set these otherwise.
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = False
            torch.set_float32_matmul_precision("highest")
            threads = thread_count(threads, device)
            each = seconds / len(networks)
            return bench_networks(networks, ["eager"], threads=threads, device=device, seconds=each).to_dict()
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


def with_speed(rows: Sequence[Row], bench: Bench | None) -> list[Row]:
    """The rows with their speed-ups."""
    entries = {entry["network"]: entry for entry in (bench or {}).get("entries", ()) if entry["speedup"]}

    def fill(row: Row) -> Row:
        entry = entries.get(row.name)
        if entry is None:
            return row
        return replace(row, speedup=entry["speedup"]["median"], efficiency=entry["efficiency"])

    return [fill(row) for row in rows]
