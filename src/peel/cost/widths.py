"""The whole description of a slim architecture: one integer per tie."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import WidthsError

__all__ = ["Widths", "make_divisible"]


def make_divisible(value: float, divisor: int) -> int:
    """The nearest multiple of `divisor`, at least one of it, and never below 90 % of `value`: the rounding of the MobileNet papers."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


class Widths(Mapping[str, int]):
    """An immutable mapping from tie name to number of channels.

    >>> Widths({"conv1": 64, "conv2": 128}).scale(0.5)
    Widths(conv1=32, conv2=64)
    """

    __slots__ = ("_channels",)

    def __init__(self, channels: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
        try:
            items = dict(channels)
        except (TypeError, ValueError) as error:
            raise WidthsError(
                f"widths are a mapping from tie names to whole numbers, not {channels!r}."
            ) from error
        for name, width in items.items():
            if isinstance(width, bool) or not _is_whole(width):
                raise WidthsError(f"{name}: the width must be a whole number, not {width!r}.")
            if width < 1:
                raise WidthsError(f"{name}: the width must be at least 1, not {width}.")
        self._channels: dict[str, int] = {name: int(width) for name, width in items.items()}

    def __getitem__(self, name: str) -> int:
        return self._channels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._channels)

    def __len__(self) -> int:
        return len(self._channels)

    def __repr__(self) -> str:
        return f"Widths({', '.join(f'{name}={width}' for name, width in self._channels.items())})"

    def __hash__(self) -> int:
        return hash(frozenset(self._channels.items()))

    def replace(self, channels: Mapping[str, int]) -> Widths:
        """The same widths with some of them changed; an unknown name is an error."""
        unknown = [name for name in channels if name not in self._channels]
        if unknown:
            raise WidthsError(f"no tie is called {unknown[0]}.")
        return Widths({**self._channels, **channels})

    def scale(self, factor: float, *, divisor: int = 1, freeze: Iterable[str] = ()) -> Widths:
        """Every width times `factor`, rounded to the nearest multiple of `divisor`; those in `hold` stay.

        With a divisor above 1 the rounding is `make_divisible`. Steps of ties are not known here: `peel.uniform` keeps them.
        """
        held = set(freeze)

        def scaled(width: int) -> int:
            return make_divisible(width * factor, divisor) if divisor > 1 else max(1, round(width * factor))

        return Widths(
            {name: width if name in held else scaled(width) for name, width in self._channels.items()}
        )

    def to_json(self) -> str:
        return json.dumps(self._channels, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Widths:
        try:
            channels = json.loads(text)
        except json.JSONDecodeError as error:
            raise WidthsError(f"not JSON: {error}") from error
        if not isinstance(channels, dict):
            raise WidthsError("widths in JSON are an object: tie name -> channels.")
        return cls(channels)


def _is_whole(value: Any) -> bool:
    try:
        return bool(int(value) == value)
    except (TypeError, ValueError, OverflowError):
        return False
