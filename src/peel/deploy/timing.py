"""Times of several calls, interleaved in one process: what slows the machine down slows all of them alike."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..utils.environment import count_cores
from ..utils.text import format_number_of

#: Every call runs this long before it is timed, and at least `WARM_CALLS` times.
WARM_SECONDS, WARM_CALLS = 0.2, 3
#: In a round each call is repeated for about this time, between 1 and `MOST_CALLS` times.
ROUND_SECONDS, MOST_CALLS = 0.02, 50
#: A round ends early after this many times its time: another process has taken the cores.
SLOW_ROUND = 5
#: Fewer rounds than this have no interval.
MIN_ROUNDS = 10
#: A speed-up counts from here on: the same network in other memory differs by about as much.
MARGIN = 0.02
#: The load is sampled so many times within so many seconds.
LOAD_SAMPLES, LOAD_SECONDS = 10, 0.3
#: From this spread on, times are not those of an idle machine.
MAX_SPREAD = 0.3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: percentiles over all calls, and the median of each round."""

    median: float
    p10: float
    p90: float
    rounds: tuple[float, ...]

    @property
    def spread(self) -> float:
        """From p10 to p90, as a fraction of the median."""
        return (self.p90 - self.p10) / self.median


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as a baseline: the median over rounds, with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `no measurable gain` where the interval does not exclude 1 by `MARGIN`."""
        if self.low > 1 + MARGIN:
            return "faster"
        return "slower" if self.high < 1 / (1 + MARGIN) else "no measurable gain"


def measure(calls: Mapping[str, Callable[[], object]], *, seconds: float = 5.0) -> dict[str, Timing]:
    """Time every call for about `seconds`, and at least `MIN_ROUNDS` rounds.

    In a round each call runs once untimed, which fills the caches, and then several times. Every second round
    has the reverse order. A call must return when its work is done: on a GPU it has to synchronize.

    >>> times = measure({"full": lambda: full(images), "slim": lambda: slim(images)})
    >>> compare(times["full"], times["slim"]).median
    """
    counts = {name: _calls_per_round(_warm_up(call)) for name, call in calls.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    order, collects = list(calls), gc.isenabled()
    gc.disable()
    try:
        end, done = time.perf_counter() + seconds * len(calls), 0
        while done < MIN_ROUNDS or time.perf_counter() < end:
            for name in order:
                rounds[name].append(_time_calls(calls[name], counts[name]))
            order.reverse()
            done += 1
    finally:
        if collects:
            gc.enable()
    return {name: _summarize(times) for name, times in rounds.items()}


def _warm_up(call: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    times: list[float] = []
    while len(times) < WARM_CALLS or sum(times) < WARM_SECONDS:
        times.append(_seconds(call))
    return min(times)


def _calls_per_round(seconds: float) -> int:
    return max(1, min(MOST_CALLS, round(ROUND_SECONDS / max(seconds, 1e-9))))


def _time_calls(call: Callable[[], object], count: int) -> list[float]:
    """The times of `count` calls; of fewer where they take much longer than in the warm-up."""
    call()
    times: list[float] = []
    while len(times) < count and sum(times) < SLOW_ROUND * ROUND_SECONDS:
        times.append(_seconds(call))
    return times


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _summarize(rounds: Sequence[Sequence[float]]) -> Timing:
    times = [value for values in rounds for value in values]
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    medians = tuple(statistics.median(values) for values in rounds)
    return Timing(statistics.median(times), tenths[0], tenths[-1], medians)


def compare(baseline: Timing, other: Timing) -> Speedup:
    """How many times as fast `other` is. Both come from one `measure`: rounds are compared in pairs."""
    ratios = sorted(a / b for a, b in zip(baseline.rounds, other.rounds, strict=True))
    skipped = _order_statistic(len(ratios))
    return Speedup(statistics.median(ratios), ratios[skipped], ratios[-1 - skipped])


def _order_statistic(count: int) -> int:
    """How many of `count` sorted values lie outside the 95 % interval of their median, on each side."""
    # P(fewer than k of `count` coin tosses are heads) <= 0.025, in whole numbers.
    skipped, tosses = 0, 1
    while 40 * (tosses + math.comb(count, skipped + 1)) <= 2**count:
        skipped += 1
        tosses += math.comb(count, skipped)
    return skipped


def current_load() -> float:
    """How many other threads of the machine want a core now, on average. Take it before measuring.

    The load average of the system would count what this process did in the last minute, such as training.
    """
    others = []
    for _ in range(LOAD_SAMPLES):
        time.sleep(LOAD_SECONDS / LOAD_SAMPLES)
        try:
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        except (OSError, IndexError):  # not Linux
            return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        others.append(max(0, int(running) - 1))
    return statistics.fmean(others)


def load_note(load: float, threads: int) -> str | None:
    """A remark where the load before measuring leaves too few cores."""
    cores = count_cores()
    if load + threads <= cores + 0.5:
        return None
    load_text = f"a load of {load:.1f} on {format_number_of(cores, 'core')}"
    return f"the machine was busy: {load_text}, before the timing with {format_number_of(threads, 'thread')}."


def spread_note(timings: Mapping[str, Timing]) -> str | None:
    """A remark where times vary too much for an idle machine."""
    name = max(timings, key=lambda name: timings[name].spread, default=None)
    if name is None or timings[name].spread <= MAX_SPREAD:
        return None
    text = f"from p10 to p90 the times of {name} vary by {timings[name].spread:.0%} of their median"
    return f"{text}: the machine is busy or changes its clock."
