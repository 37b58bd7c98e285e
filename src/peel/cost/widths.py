"""`Widths`: one integer per tie, the whole description of a slim architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..errors import WidthsError


def make_divisible(value: float, divisor: int) -> int:
    """The rounding of the MobileNet papers: the nearest multiple, but never below 90 % of `value`."""
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
            raise WidthsError(f"widths map tie names to whole numbers, not {channels!r}.") from error
        self._channels = {name: _whole(name, width) for name, width in items.items()}

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
        """The same widths with some of them changed. An unknown name is an error."""
        unknown = [name for name in channels if name not in self._channels]
        if unknown:
            raise WidthsError(f"no tie is called {unknown[0]}.")
        return Widths({**self._channels, **channels})

    def scale(self, factor: float, *, divisor: int = 1, freeze: Iterable[str] = ()) -> Widths:
        """Every width times `factor`, rounded to a multiple of `divisor`. Ties in `freeze` keep their width.

        With a divisor above 1 the rounding is `make_divisible`. Unlike `peel.uniform`, this ignores the steps
        of ties.
        """
        frozen = set(freeze)

        def scaled(width: int) -> int:
            return make_divisible(width * factor, divisor) if divisor > 1 else max(1, round(width * factor))

        return Widths({name: width if name in frozen else scaled(width) for name, width in self.items()})


def _whole(name: str, width: object) -> int:
    try:
        whole = int(width)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        whole = None
    if isinstance(width, bool) or whole is None or whole != width:
        raise WidthsError(f"{name}: the width must be a whole number, not {width!r}.")
    if whole < 1:
        raise WidthsError(f"{name}: the width must be at least 1, not {width}.")
    return int(whole)
