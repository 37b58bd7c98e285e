"""`bench`: latency and throughput of networks, side by side."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import map_tensors
from ..errors import ConfigError, PeelError
from ..train.engine import find_device
from ..utils.environment import count_cores
from ..utils.process_state import preserve_process_state
from ..utils.tables import as_text
from ..utils.text import first_line
from ..utils.validation import check_value
from ..version import __version__
from .backends import BACKENDS, available_backends, can_run, make_runner
from .bench_table import draw_bench
from .networks import Network, load_networks, make_network
from .timing import Speedup, Timing, compare, current_load, load_note, measure, spread_note


@dataclass(frozen=True)
class Entry:
    """One network in one backend."""

    network: str
    backend: str
    seconds: Timing
    """Of one batch."""
    throughput: float
    """Samples per second."""
    macs: int | None
    params: int | None
    baseline: str | None = None
    """The network that it is compared with."""
    speedup: Speedup | None = None
    mac_reduction: float | None = None

    @property
    def efficiency(self) -> float | None:
        """The speed-up over the reduction of MACs: 1 where time falls as MACs do."""
        if self.speedup is None or self.mac_reduction is None:
            return None
        return self.speedup.median / self.mac_reduction

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the times of the rounds."""
        values = asdict(self)
        del values["seconds"]["rounds"]
        values["seconds"]["round_count"] = len(self.seconds.rounds)
        if self.speedup is not None:
            values["speedup"]["verdict"] = self.speedup.verdict
        return {**values, "efficiency": self.efficiency}


@dataclass(frozen=True, repr=False)
class Benchmark:
    """What `bench` measured, and under which conditions. Printed, it is a table."""

    entries: Sequence[Entry]
    conditions: Mapping[str, Any]
    notes: Sequence[str]

    def __repr__(self) -> str:
        return as_text(partial(draw_bench, self))

    def to_dict(self) -> dict[str, Any]:
        entries = [entry.to_dict() for entry in self.entries]
        return {"conditions": dict(self.conditions), "entries": entries, "notes": list(self.notes)}


def bench(
    networks: Mapping[str, nn.Module] | Sequence[str | Path],
    example_input: Tensor | None = None,
    *,
    batch: int = 1,
    threads: int | None = None,
    device: str = "cpu",
    backends: Sequence[str] | None = None,
    seconds: float = 5.0,
    model: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Time networks side by side: modules by name, or references as `peel bench` takes them.

    A slim network is compared with its own original where a reference brings it along; every other network
    with the first. Networks are interleaved in one process, for about `seconds` each in every backend.
    `backends` are by default all that are installed and fit. `model` names what builds your own originals.

    >>> peel.bench({"original": model, "slim": small}, torch.randn(1, 3, 224, 224)).entries[-1].speedup
    """
    batch, threads = check_value("batch", batch, int), check_value("threads", threads, int | None)
    if batch < 1 or (threads is not None and threads < 1) or not seconds > 0:
        raise ConfigError(f"batch, threads and seconds must be positive, not {batch}, {threads}, {seconds}.")
    with preserve_process_state():
        place = find_device(device)
        chosen, threads = _choose_backends(backends, place), thread_count(threads, place)
        return bench_networks(
            _networks(networks, example_input, model, threads, progress),
            chosen,
            batch=batch,
            threads=threads,
            device=place,
            seconds=seconds,
            all_must_work=backends is not None,
            progress=progress,
        )


def bench_networks(
    networks: Sequence[Network],
    backends: Sequence[str],
    *,
    batch: int = 1,
    threads: int,
    device: torch.device,
    seconds: float,
    all_must_work: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """`bench` of networks that are loaded already, for about `seconds` each in every backend."""
    entries: list[Entry] = []
    notes: list[str] = []
    with preserve_process_state():
        torch.set_num_threads(threads)
        load = current_load()
        for backend in backends:
            fitting = [network for network in networks if can_run(backend, network.model)]
            try:
                timings = _time(fitting, backend, batch, threads, device, seconds, progress)
            except Exception as error:
                if all_must_work or isinstance(error, PeelError):
                    raise
                notes.append(f"{backend} failed: {type(error).__name__}: {first_line(error)}")
                continue
            entries += _entries(fitting, backend, batch, timings)
            notes += [f"{backend}: {note}" for note in filter(None, [spread_note(timings)])]
        if not entries:
            reasons = " ".join([f"None of {', '.join(backends)} can run these networks.", *notes])
            raise ConfigError(reasons)
        notes[:0] = filter(None, [load_note(load, threads)])
        return Benchmark(entries, conditions_of(device, threads, batch, seconds, load), notes)


def thread_count(threads: int | None, device: torch.device) -> int:
    """The threads of a measurement: by default, one per core on a CPU."""
    return threads or (count_cores() if device.type == "cpu" else torch.get_num_threads())


def _choose_backends(backends: Sequence[str] | None, device: torch.device) -> list[str]:
    for name in backends or ():
        if name not in BACKENDS:
            raise ConfigError(f"backend is one of {', '.join(BACKENDS)}, not {name!r}.")
    return list(backends) if backends else available_backends(device)


def _networks(
    given: Mapping[str, nn.Module] | Sequence[str | Path],
    example: Tensor | None,
    model: str | None,
    threads: int,
    progress: Callable[[str], None],
) -> list[Network]:
    shape = tuple(example.shape[1:]) if example is not None else None
    if isinstance(given, Mapping):
        found = [make_network(name, module, shape) for name, module in given.items()]
    else:
        found = []
        for reference in given:
            progress(f"loading {reference}")
            found += load_networks(str(reference), model=model, threads=threads, shape=shape)
    unique: dict[str, Network] = {}
    for network in found:
        unique.setdefault(network.key, network)
    if not unique:
        raise ConfigError("name at least one network.")
    return list(unique.values())


def _time(
    networks: Sequence[Network],
    backend: str,
    batch: int,
    threads: int,
    device: torch.device,
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, Timing]:
    calls: dict[str, Callable[[], object]] = {}
    for network in networks:
        progress(f"{backend}: preparing {network.name}")
        args, kwargs = network.arguments(batch)
        example = args[0] if args else None
        runner = make_runner(backend, network.model, example, device=device, threads=threads)
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
        calls[network.name] = partial(runner, *args, **kwargs)
        calls[network.name]()  # compiles
    progress(f"{backend}: timing {len(calls)} networks")
    return measure(calls, seconds=seconds) if calls else {}


def _entries(
    networks: Sequence[Network], backend: str, batch: int, timings: Mapping[str, Timing]
) -> list[Entry]:
    by_key = {network.key: network for network in networks}
    entries = []
    for network in networks:
        timing, baseline = timings[network.name], by_key.get(network.baseline or "", networks[0])
        compared: dict[str, Any] = {}
        if baseline is not network:
            compared = {"baseline": baseline.name, "speedup": compare(timings[baseline.name], timing)}
            if baseline.macs and network.macs:
                compared["mac_reduction"] = baseline.macs / network.macs
        entry = Entry(
            network.name, backend, timing, batch / timing.median, network.macs, network.params, **compared
        )
        entries.append(entry)
    return entries


def conditions_of(
    device: torch.device, threads: int, batch: int, seconds: float, load: float
) -> dict[str, Any]:
    """What the times depend on, beside the network and the backend."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        runtime: str | None = version("onnxruntime")
    except PackageNotFoundError:
        runtime = None
    return {
        "device": device_name(device),
        "cores": count_cores(),
        "threads": threads,
        "batch": batch,
        "precision": "float32",
        "seconds": seconds,
        "load_before": round(load, 2),
        "peel": __version__,
        "torch": str(torch.__version__),
        "onnxruntime": runtime,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """The name of the CPU, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
