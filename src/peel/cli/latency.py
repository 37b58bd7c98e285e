"""`peel latency`: a latency model, which makes latency a resource like MACs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..cost.budget import format_latency
from ..cost.rounding import Divisor
from ..utils.files import check_target
from ..utils.terminal import make_console, print_json, show_status
from .inspect import parse_shape

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost.latency import LatencyModel


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """The conditions of deployment, and how much is measured."""

    backend: str = "eager"
    """What runs the network in deployment: eager, compile or onnxruntime."""
    batch: int = 1
    """Samples per batch in deployment."""
    threads: int | None = None
    """CPU threads in deployment. Default: one per core."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    networks: int = 64
    """How many networks of other widths are timed. A quarter of them judges the model."""
    divisor: Divisor = "auto"
    """Widths are multiples of this: give the divisor of the later run."""
    seconds: float = 0.5
    """About this long for each network."""
    seed: int = 0
    """Seed of the widths."""


def latency(
    model: str,
    /,
    *,
    output: Path,
    settings: Annotated[LatencySettings | None, Parameter(name="*")] = None,
    input: str | None = None,
    num_classes: int | None = None,
    json: bool = False,
) -> int:
    """Time a model at many widths on this machine, and write a latency model for `peel run --latency`.

    Parameters
    ----------
    model
        Name or reference of the model.
    output
        The file to write, such as latency.json.
    input
        Shape of one input: channels,height,width. Default: what a model of torchvision or timm was made for.
    num_classes
        Number of classes, where the model takes that argument.
    json
        Print JSON instead of text.
    """
    import torch

    from .. import zoo
    from ..deploy.latency import measure_latency
    from ..deploy.networks import known_shape

    check_target(output, "--output")
    console, notes = make_console(), make_console(stderr=True)
    shape = parse_shape(input) or known_shape(model)
    with show_status(notes, f"building {model}") as status:
        network, example = zoo.create(model, num_classes=num_classes), torch.zeros(1, *shape)
        chosen = vars(settings or LatencySettings())
        status.update(f"input {_format_shape(shape)}, batch {chosen['batch']}")
        found = measure_latency(network, example, progress=status.update, **chosen)
    path = found.save(output)
    if json:
        print_json(_as_dict(found, path))
    else:
        _draw(found, path, console)
    return 0


def _original(model: LatencyModel) -> float:
    """Nanoseconds of the original."""
    key = model.network
    return float(model.total([width // key.steps[name] for name, width in key.widths.items()]))


def _as_dict(model: LatencyModel, path: Path) -> dict[str, object]:
    return {
        "file": str(path),
        "original_nanoseconds": _original(model),
        "median_error": model.accuracy.median,
        "p95_error": model.accuracy.p95,
        "judged_on": model.accuracy.networks,
        "input_shapes": [list(shape) for shape in model.network.input_shapes],
        "conditions": model.conditions,
    }


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _draw(model: LatencyModel, path: Path, console: Console) -> None:
    given, error = model.conditions, model.accuracy
    shapes = ", ".join(map(_format_shape, model.network.input_shapes))
    console.print(
        f"input {shapes}, batch {given['batch']}, {given['device']}, {given['backend']}, "
        f"threads {given['threads']}",
        markup=False,
    )
    console.print(f"the original takes {format_latency(_original(model))}", markup=False)
    console.print(
        f"error on {error.networks} unseen networks: {error.median:.1%} (median), {error.p95:.1%} (95th "
        "percentile)",
        markup=False,
    )
    if given.get("note"):
        console.print(f"note: {given['note']}", markup=False)
    console.print(f"\nwritten: {path}; use it with --resource latency --latency {path}", markup=False)
