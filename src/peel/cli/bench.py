"""`peel bench`: latency and throughput of networks, side by side."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..utils.terminal import make_console, print_json, show_status
from .inspect import parse_shape


def bench(
    *networks: str,
    batch: int = 1,
    threads: int | None = None,
    device: str = "cpu",
    backend: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = (),
    seconds: float = 5.0,
    model: str | None = None,
    input: str | None = None,
    json: bool = False,
) -> int:
    """Latency and throughput of networks, interleaved in one process.

    Parameters
    ----------
    networks
        Run folders and saved models (slim.safetensors), each with its original; files .onnx; names of models.
    batch
        Samples per batch.
    threads
        CPU threads. Default: one per core.
    device
        cpu, cuda, cuda:1, ...
    backend
        eager, compile, onnxruntime. Default: all that are installed and fit.
    seconds
        About this long for each network in each backend.
    model
        What builds the original of your own saved model: path/to/file.py:callable.
    input
        Shape of one input: channels,height,width. Default: what the networks were trained or made for.
    json
        Print JSON instead of a table.
    """
    import torch

    from ..deploy.bench import bench as run_bench
    from ..deploy.bench_table import draw_bench
    from ..errors import PeelError

    if not networks:
        raise PeelError("name a run folder, a saved model, a file .onnx or a model: peel bench RUN.")
    console, notes = make_console(), make_console(stderr=True)
    with show_status(notes, "loading") as status:
        result = run_bench(
            networks,
            torch.zeros(1, *shape) if (shape := parse_shape(input)) is not None else None,
            batch=batch,
            threads=threads,
            device=device,
            backends=backend or None,
            seconds=seconds,
            model=model,
            progress=status.update,
        )
    if json:
        print_json(result.to_dict())
    else:
        draw_bench(result, console)
    return 0
