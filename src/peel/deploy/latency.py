"""`measure_latency`: networks of many widths are timed, and a latency model is fitted to them."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..cost.latency import LatencyModel
from ..cost.rounding import ALIGNMENTS, LATENCY_REACH, Divisor
from ..cost.widths import Widths
from ..errors import ConfigError, check_choice
from ..graph import ChannelGraph, trace
from ..surgery import slim
from ..train.engine import find_device
from ..utils.process_state import preserve_process_state
from ..utils.validation import check_value
from .backends import BACKENDS, make_runner
from .bench import conditions_of, thread_count
from .latency_fit import MIN_NETWORKS, fit_latency
from .timing import current_load, load_note, measure, spread_note

#: Networks that are timed together with the original, which tells how fast the machine is meanwhile.
TOGETHER = 8

#: Uniform networks among those that are timed, as factors on all widths.
FACTORS = (1.0, 0.75, 0.5, 0.35)

#: Random networks have a common factor between the first two, and factors of single ties around it: the
#: standard deviation of their logarithm, and the smallest and largest.
SMALLEST, LARGEST, SPREAD, FEWEST, MOST = 0.25, 1.0, 0.35, 0.1, 1.5

Measure = Callable[[Sequence[Widths]], Sequence[float]]
"""Networks -> nanoseconds of a batch."""

Progress = Callable[[str], None]


@dataclass
class LatencyTimer:
    """Times networks of a model at given widths, under the conditions of deployment."""

    model: nn.Module
    graph: ChannelGraph
    backend: str = "eager"
    batch: int = 1
    threads: int | None = None
    device: str = "cpu"
    seconds: float = 0.5
    """For each network, about."""
    progress: Progress = lambda text: None

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        self.batch = check_value("batch", self.batch, int)
        self.threads = check_value("threads", self.threads, int | None)
        if self.batch < 1 or (self.threads is not None and self.threads < 1) or not self.seconds > 0:
            given = f"{self.batch}, {self.threads}, {self.seconds}"
            raise ConfigError(f"batch, threads and seconds must be positive, not {given}.")
        if len(self.graph.input_shapes) != 1 or self.graph.modules:
            raise ConfigError("latency is measured on models with one input that are captured as a whole.")
        self.place = find_device(self.device)
        self.thread_count = thread_count(self.threads, self.place)
        self.notes: list[str] = []

    @classmethod
    def like(
        cls, model: nn.Module, graph: ChannelGraph, conditions: Mapping[str, Any], **changes: Any
    ) -> Self:
        """A timer with the conditions of a latency model."""
        names = ("backend", "batch", "threads")
        device = "cuda" if conditions["device_type"] == "cuda" else "cpu"
        return cls(model, graph, **{name: conditions[name] for name in names}, device=device, **changes)

    @property
    def conditions(self) -> dict[str, Any]:
        given = conditions_of(self.place, self.thread_count, self.batch, self.seconds, current_load())
        return {"backend": self.backend, "device_type": self.place.type, **given}

    def __call__(self, networks: Sequence[Widths]) -> list[float]:
        """Nanoseconds of a batch. Ratios to the original count: the speed of the machine may drift."""
        originals: list[float] = []
        factors: list[float] = []
        self.notes = [*filter(None, [load_note(current_load(), self.thread_count)])]
        with preserve_process_state():
            torch.set_num_threads(self.thread_count)
            for start in range(0, len(networks), TOGETHER):
                self.progress(f"timing {start + 1} of {len(networks)} networks in {self.backend}")
                original, ratios = self._time(networks[start : start + TOGETHER])
                originals.append(original)
                factors += ratios
        return [1e9 * statistics.median(originals) * factor for factor in factors]

    @cached_property
    def _original(self) -> Callable[[], object]:
        return self._call(self.graph.widths)

    @cached_property
    def _images(self) -> Tensor:
        return torch.randn(self.batch, *self.graph.input_shapes[0][1:], device=self.place)

    def _call(self, widths: Widths) -> Callable[[], object]:
        """Runs a batch through the network of these widths."""
        network = slim(self.model, widths, graph=self.graph).eval()
        runner = make_runner(
            self.backend, network, self._images, device=self.place, threads=self.thread_count
        )
        return partial(runner, self._images)

    def _time(self, networks: Sequence[Widths]) -> tuple[float, list[float]]:
        """Seconds of the original, and the time of each network as a fraction of it."""
        calls = {"original": self._original}
        for i, widths in enumerate(networks):
            if widths != self.graph.widths:
                calls[f"a slim network ({i + 1})"] = self._call(widths)
        times = measure(calls, seconds=self.seconds)
        self.notes += filter(None, [spread_note(times) if not self.notes else None])
        original = times.pop("original")
        # What else runs on the machine makes times longer: the p10 is nearer to the network's own time.
        ratios = iter([timing.p10 / original.p10 for timing in times.values()])
        return original.median, [1.0 if w == self.graph.widths else next(ratios) for w in networks]


def measure_latency(
    model: nn.Module,
    example_input: Tensor,
    *,
    graph: ChannelGraph | None = None,
    networks: int = 64,
    divisor: Divisor = "auto",
    seed: int = 0,
    measure: Measure | None = None,
    progress: Progress = lambda text: None,
    **conditions: Any,
) -> LatencyModel:
    """A latency model of the network on this machine, from the times of `networks` networks of other widths.

    `conditions` are those of deployment: `backend` ("eager", "compile", "onnxruntime"), `batch`, `threads`,
    `device`, and the `seconds` for each network. Networks have widths as the `divisor` makes them. `measure`
    is your own function from a list of widths to nanoseconds, such as one that asks a phone.

    >>> model = peel.measure_latency(network, torch.randn(1, 3, 224, 224), backend="onnxruntime", threads=1)
    >>> model.accuracy.median, model.save("latency.json")
    """
    if check_value("networks", networks, int) < MIN_NETWORKS:
        raise ConfigError(f"networks must be at least {MIN_NETWORKS}, not {networks}.")
    graph = graph if graph is not None else trace(model, example_input)
    chosen = design(graph, networks, divisor, seed)
    if measure is not None:
        if conditions.keys() - {"backend", "batch", "threads", "device"}:
            raise ConfigError("with measure=, conditions only describe: backend, batch, threads, device.")
        return fit_latency(graph, chosen, measure(chosen), {**conditions, "measured_by": "your own function"})
    timer = LatencyTimer(model, graph, progress=progress, **conditions)
    described = {**timer.conditions, "divisor": divisor, "networks": networks, "seed": seed}
    times = timer(chosen)
    progress("fitting")
    return fit_latency(graph, chosen, times, {**described, "note": " ".join(timer.notes) or None})


def design(graph: ChannelGraph, count: int, divisor: Divisor = "auto", seed: int = 0) -> list[Widths]:
    """Widths of the networks to time: a few uniform ones, then random ones."""
    rng = np.random.default_rng(seed)
    names = list(graph.widths)
    factors = [np.full(len(names), factor) for factor in FACTORS]
    while len(factors) < count:
        common = np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST)))
        spread = np.exp(rng.normal(0.0, SPREAD, len(names)))
        factors.append(np.clip(common * spread, FEWEST, MOST))

    def widths(of_ties: Iterable[float]) -> Widths:
        pairs = zip(names, of_ties, strict=True)
        return Widths(
            {name: _aligned(graph.widths[name] * f, graph.steps[name], divisor) for name, f in pairs}
        )

    return [graph.widths, *(widths(row) for row in factors[1:count])]


def _aligned(width: float, step: int, divisor: Divisor) -> int:
    """The nearest multiple of the divisor; with `auto`, of the coarsest alignment that is near enough."""
    alignments = (*ALIGNMENTS, 1) if divisor == "auto" else (divisor,)
    for alignment in alignments:
        multiple = lcm(alignment, step)
        nearest = max(1, round(width / multiple)) * multiple
        if abs(nearest - width) <= LATENCY_REACH * width:
            return nearest
    return nearest
