"""`Widths`: one integer per tie, the whole description of a slim architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..errors import WidthsError


class Widths(Mapping[str, int]):
    """An immutable mapping from tie name to number of channels."""

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
