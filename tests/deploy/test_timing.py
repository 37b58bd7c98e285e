"""The timing core: what is faster, what is not, and what it says of a busy machine."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from peel.deploy import timing
from peel.deploy.timing import MIN_ROUNDS, Speedup, Timing, compare, load_note, measure, spread_note


class Clock:
    """A clock that only calls move, so that the tests do not depend on what else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def taking(self, seconds: float | Callable[[], float], name: str = "") -> Callable[[], None]:
        """A call that takes this time."""

        def call() -> None:
            self.calls.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def made(rounds: list[float]) -> Timing:
    return Timing(statistics.median(rounds), min(rounds), max(rounds), tuple(rounds))


def test_half_the_work_is_twice_as_fast_in_spite_of_noise(clock: Clock) -> None:
    rng = np.random.default_rng(0)
    full, half = (clock.taking(lambda s=s: s * rng.lognormal(0, 0.2)) for s in (0.004, 0.002))
    times = measure({"full": full, "half": half}, seconds=5)
    speedup = compare(times["full"], times["half"])
    assert 1.9 < speedup.low <= speedup.median <= speedup.high < 2.1
    assert speedup.verdict == "faster"
    assert compare(times["half"], times["full"]).verdict == "slower"
    assert times["full"].median == pytest.approx(0.004, rel=0.05)
    assert times["full"].p10 == pytest.approx(0.004 * np.exp(-0.2 * 1.28), rel=0.05)
    assert times["full"].p90 == pytest.approx(0.004 * np.exp(0.2 * 1.28), rel=0.05)


def test_the_same_work_is_no_measurable_gain(clock: Clock) -> None:
    rng = np.random.default_rng(0)
    calls = {name: clock.taking(lambda: 0.002 * rng.lognormal(0, 0.2)) for name in ("one", "other")}
    times = measure(calls, seconds=5)
    assert compare(times["one"], times["other"]).verdict == "no measurable gain"


def test_a_drift_of_the_machine_does_not_count() -> None:
    """Each round compares times that were taken next to each other."""
    drift = [1 + i / 10 for i in range(40)]
    speedup = compare(made([2 * x for x in drift]), made(drift))
    assert (speedup.low, speedup.median, speedup.high) == (2, 2, 2)


def test_calls_are_interleaved_and_the_order_changes(clock: Clock) -> None:
    # Each takes so long that it is timed once in a round, after a call that is not timed.
    measure({"a": clock.taking(0.03, "a"), "b": clock.taking(0.03, "b")}, seconds=0.01)
    assert clock.calls[-4 * MIN_ROUNDS :] == list("aabbbbaa" * (MIN_ROUNDS // 2))


def test_slow_calls_are_measured_often_enough_for_an_interval(clock: Clock) -> None:
    times = measure({"a": clock.taking(2.0)}, seconds=1)
    assert len(times["a"].rounds) == MIN_ROUNDS
    assert times["a"].spread == 0
    assert gc.isenabled()


def test_calls_that_become_slow_after_the_warm_up_do_not_take_long(clock: Clock) -> None:
    """Another process takes the cores: a call of a millisecond takes 300."""
    seconds = iter([0.001] * 210)
    measure({"a": clock.taking(lambda: next(seconds, 0.3))}, seconds=1)
    assert clock.now < 10


def test_fast_calls_are_repeated_in_a_round_and_for_the_time_given(clock: Clock) -> None:
    times = measure({"a": clock.taking(0.001, "a")}, seconds=10)
    assert clock.now == pytest.approx(10, rel=0.05)
    assert len(times["a"].rounds) == pytest.approx(10 / 0.021, rel=0.05)


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
