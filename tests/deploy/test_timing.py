"""The timing core: what is faster, what is not, and what it says of a busy machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest

from peel.deploy import timing
from peel.deploy.timing import MIN_ROUNDS, Speedup, Timing, compare, load_note, measure, spread_note


def sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def made(rounds: list[float]) -> Timing:
    return Timing(statistics.median(rounds), min(rounds), max(rounds), tuple(rounds))


def test_half_the_work_is_twice_as_fast() -> None:
    times = measure({"full": sleeping(0.004), "half": sleeping(0.002)}, seconds=0.2)
    speedup = compare(times["full"], times["half"])
    assert 1.5 < speedup.low <= speedup.median <= speedup.high < 2.3
    assert speedup.verdict == "faster"
    assert compare(times["half"], times["full"]).verdict == "slower"
    assert times["full"].p10 <= times["full"].median <= times["full"].p90
    assert times["full"].median == pytest.approx(0.004, rel=0.5)


def test_the_same_work_is_no_measurable_gain() -> None:
    times = measure({"one": sleeping(0.002), "other": sleeping(0.002)}, seconds=0.2)
    assert compare(times["one"], times["other"]).verdict == "no measurable gain"


def test_a_drift_of_the_machine_does_not_count() -> None:
    """Each round compares times that were taken next to each other."""
    drift = [1 + i / 10 for i in range(40)]
    speedup = compare(made([2 * x for x in drift]), made(drift))
    assert (speedup.low, speedup.median, speedup.high) == (2, 2, 2)


def test_calls_are_interleaved_and_the_order_changes() -> None:
    calls: list[str] = []

    def record(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            time.sleep(0.03)  # one call a round, and one before it

        return call

    measure({"a": record("a"), "b": record("b")}, seconds=0.01)
    assert calls[-4 * MIN_ROUNDS :][:8] == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_slow_calls_are_measured_often_enough_for_an_interval() -> None:
    times = measure({"a": sleeping(0.02)}, seconds=0.001)
    assert len(times["a"].rounds) == MIN_ROUNDS
    assert gc.isenabled()


def test_the_interval_covers_the_median_in_95_percent_of_all_cases() -> None:
    rng = np.random.default_rng(0)
    for count in (10, 41):
        hits = 0
        for _ in range(1000):
            speedup = compare(made(list(rng.lognormal(0.1, 0.3, count))), made([1.0] * count))
            hits += speedup.low <= np.exp(0.1) <= speedup.high
        assert 940 <= hits <= 995


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.05, 1.2, "faster"),
        (1.01, 1.2, "no measurable gain"),
        (0.9, 1.2, "no measurable gain"),
        (0.8, 0.9, "slower"),
    ],
)
def test_the_interval_decides(low: float, high: float, verdict: str) -> None:
    assert Speedup(1.0, low, high).verdict == verdict


def test_a_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "count_cores", lambda: 4)
    assert load_note(0.3, 4) is None
    assert load_note(3.0, 1) is None
    assert "load of 3.0 on 4 cores" in str(load_note(3.0, 2))
    assert spread_note({"calm": Timing(1.0, 0.95, 1.1, (1.0,))}) is None
    uneven = {"calm": Timing(1.0, 0.95, 1.1, (1.0,)), "uneven": Timing(1.0, 0.9, 1.9, (1.0,))}
    assert "times of uneven vary by 100%" in str(spread_note(uneven))
