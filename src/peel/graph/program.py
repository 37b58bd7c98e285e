"""`Program`: what the user's code does on the example input, as a prediction for any widths."""

import linecache
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..cost.polynomial import Form

Length = int | tuple[Form, ...]
"""A constant, or the forms that gave the recorded length at all widths that were tried."""


class RecordedCall(NamedTuple):
    """One call of a function of torch that returns or changes tensors."""

    name: str
    sources: tuple[int | str, ...]
    """Where its tensors come from: the number of an earlier call (of an input, if below 0), or a name."""
    numbers: tuple[Any, ...]
    """Its other arguments: numbers, strings and None."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its results."""
    place: tuple[str, int]
    """File and line of the user's code."""

    @property
    def line(self) -> str:
        """``net.py:12 `x = x + y` ``"""
        file, number = self.place
        text = linecache.getline(file, number).strip()
        return f"{Path(file).name}:{number} `{text}`" if text else self.name


@dataclass(frozen=True)
class Recording:
    """What one forward pass did."""

    calls: tuple[RecordedCall, ...]
    macs: int

    def changed_numbers(self, other: "Recording") -> dict[int, set[int]]:
        """Calls that have other numbers in another recording of the same calls -> the places of these."""
        found = {}
        for number, (mine, theirs) in enumerate(zip(self.calls, other.calls, strict=True)):
            if mine.numbers != theirs.numbers:
                found[number] = _places(mine.numbers, theirs.numbers)
        return found


def _places(mine: Sequence[Any], theirs: Sequence[Any]) -> set[int]:
    pairs = enumerate(zip(mine, theirs, strict=False))
    extra = range(min(len(mine), len(theirs)), max(len(mine), len(theirs)))
    return {place for place, (a, b) in pairs if a != b} | set(extra)


@dataclass(frozen=True)
class Program:
    """The prediction that every network made from the graph is checked against."""

    example: tuple[Any, Any] = field(compare=False, repr=False)
    """Positional and keyword arguments of one sample, without data unless `with_data`."""
    with_data: bool
    """Whether the code does not run on the meta device."""
    calls: tuple[RecordedCall, ...] = field(compare=False, repr=False)
    """Every call of the forward pass, in order, with the numbers and shapes of the original network."""
    training_calls: tuple[RecordedCall, ...] = field(compare=False, repr=False)
    """The calls in training mode, where parts of the network exist only there."""
    following: dict[int, set[int]] = field(compare=False, repr=False)
    """Call -> places of the numbers that the code computes from widths."""
    lengths: tuple[tuple[tuple[Length, ...], ...], ...] = field(compare=False, repr=False)
    """The shapes of the results of each call."""
    uncounted: int
    """What torch counts beside the prediction: negative where it does not count an operator with a rule."""

    def has_same_calls(self, other: Recording) -> bool:
        mine, theirs = ([call[:3] for call in calls] for calls in (self.calls, other.calls))
        return mine == theirs

    def with_calls(self, other: Recording) -> "Program":
        """The prediction for a network that was changed after it was traced."""
        # With other calls in between, shapes can no longer be told by the number of a call.
        keeps_calls = [call.name for call in self.calls] == [call.name for call in other.calls]
        lengths = self.lengths if keeps_calls else ()
        return replace(self, calls=other.calls, training_calls=(), lengths=lengths)

    def difference(self, done: Recording, units: Sequence[int], macs: int) -> str | None:
        """How a recording of the same calls differs from the prediction, with the line of code; or None."""
        for number, (wanted, call) in enumerate(zip(self.calls, done.calls, strict=True)):
            # A number may change only where it did in a probe: there the code computes it from widths.
            if places := _places(wanted.numbers, call.numbers) - self.following.get(number, set()):
                return (
                    f"{call.line}: {_show(call.numbers, places)} instead of {_show(wanted.numbers, places)}"
                )
            if self.lengths and not _fits(self.lengths[number], call.shapes, units):
                return (
                    f"{call.line} returns the shape {', '.join(map(str, call.shapes))}, not the predicted one"
                )
        # Whether torch counts a recurrent layer depends on its kernel.
        if done.macs not in (macs, macs + self.uncounted):
            return f"it does {done.macs:,} MACs; {macs + self.uncounted:,} are predicted"
        return None


def _show(numbers: Sequence[Any], places: set[int]) -> str:
    return ", ".join(str(numbers[place]) for place in sorted(places) if place < len(numbers)) or "nothing"


def _fits(predicted: Any, shapes: tuple[tuple[int, ...], ...], units: Sequence[int]) -> bool:
    """Whether each length is the predicted constant, or that of one of its forms."""
    if [len(lengths) for lengths in predicted] != [len(shape) for shape in shapes]:
        return False
    pairs = [
        pair
        for lengths, shape in zip(predicted, shapes, strict=True)
        for pair in zip(lengths, shape, strict=True)
    ]
    return all(
        size == length if isinstance(length, int) else any(form.value(units) == size for form in length)
        for length, size in pairs
    )


def predict_lengths(
    tried: Sequence[tuple[Sequence[int], Recording]], forms: Iterable[Form]
) -> tuple[tuple[tuple[tuple[Length, ...], ...], ...], int | None]:
    """The shapes of each call in terms of `forms`, and the first call for which these do not explain a shape.

    `tried` has units and what was recorded at these, the original widths first.
    """
    # A form is known by its values at all widths that were tried. Two forms with the same values stay both: a
    # chosen network may have either.
    by_values: dict[tuple[int, ...], list[Form]] = {}
    for form in dict.fromkeys(forms):
        by_values.setdefault(tuple(form.value(list(units)) for units, _ in tried), []).append(form)
    found: list[tuple[tuple[Length, ...], ...]] = []
    for number, call in enumerate(tried[0][1].calls):
        shapes = [done.calls[number].shapes for _, done in tried]
        results: list[tuple[Length, ...]] = []
        for result in range(len(call.shapes)):
            sizes = list(zip(*(shape[result] for shape in shapes), strict=True))
            # A length that follows no known axis: the code does something else than the rules say.
            if any(len(set(values)) > 1 and values not in by_values for values in sizes):
                return tuple(found), number
            results.append(
                tuple(values[0] if len(set(values)) == 1 else tuple(by_values[values]) for values in sizes)
            )
        found.append(tuple(results))
    return tuple(found), None
