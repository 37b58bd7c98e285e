"""Files that are nearly right: random changes of documents and of bytes, all from one seed."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import random
import struct
from collections.abc import Callable
from datetime import date
from typing import Any

Place = tuple[Any, Any]
"""A list or table, and a key of it."""


def deep(levels: int, table: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if table else [value]
    return value


#: Values of every type, and the limits of each.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 65_537, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63),
    *(10**30, 10**400, -(10**30), 0.0, -0.0, 0.5, -0.5, 1.5, 1e-320, 1e15, 1e30, 1e300, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf, "", "a", "0", "8", "-1", "1e999", "nan", "macs", "original", "peel"),
    *(
        "a\0b",
        "../../x",
        "/dev/null/x",
        "..",
        "x" * 5000,
        "one\ntwo\nthree\n",
        "\x1b[31m",
        "é漢\u202e",
        "$x$",
        "{}%s",
    ),
    *("cifar_resnet20", "torchvision:resnet18", "nowhere.py:f", "50%", "1e300%", "<b>&", "\ud800"),
    *([], [[]], {}, [1], ["a"], [None], [3, 8, 8], [math.nan] * 3, [2**31 - 1] * 3, {"a": 1}, {"": None}),
    *([0] * 3000, deep(20, True), deep(20, False), deep(40, True), deep(900, True), deep(900, False)),
)


def twin(value: Any) -> Any:
    """A deep copy, five times as fast as that of `copy`."""
    return pickle.loads(pickle.dumps(value))


def places(document: Any) -> list[Place]:
    found: list[Place] = []
    waiting = [document]
    while waiting:
        item = waiting.pop()
        pairs = list(item.items()) if isinstance(item, dict) else list(enumerate(item))
        found += [(item, key) for key, _ in pairs]
        waiting += [value for _, value in pairs if isinstance(value, dict | list)]
    return found


def odd_value(rng: random.Random, old: Any = None) -> Any:
    """An odd value, or one near the old."""
    if rng.random() < 0.3 and isinstance(old, int | float) and not isinstance(old, bool):
        changes: list[Callable[[Any], Any]] = [
            *(lambda x: -x, lambda x: x + 1, lambda x: x - 1, lambda x: x * 2, lambda x: x * 1000, str),
            *(float, lambda x: x / 3, lambda x: [x], lambda x: {"a": x}, lambda x: x * 10**9),
        ]
        with contextlib.suppress(OverflowError):
            return rng.choice(changes)(old)
    if rng.random() < 0.3 and isinstance(old, list) and old:
        lists: list[Callable[[Any], Any]] = [
            *(lambda x: x[:-1], lambda x: x + x[:1], lambda x: x * 20, lambda x: x[::-1], lambda x: [x]),
            lambda x: dict(enumerate(map(str, x))),
        ]
        return rng.choice(lists)(old)
    return twin(rng.choice(ODD))


def mutate(rng: random.Random, document: Any) -> Any:
    """A copy with a few changes of values, keys and shapes."""
    document = twin(document)
    if rng.random() < 0.01:
        return odd_value(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        found = places(document)
        if not found:
            break
        holder, key = rng.choice(found)
        kind = rng.random()
        if kind < 0.6:
            holder[key] = odd_value(rng, holder[key])
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.85:
            other, other_key = rng.choice(found)
            if not isinstance(other, list) or other_key < len(other):
                holder[key] = twin(other.get(other_key) if isinstance(other, dict) else other[other_key])
        elif isinstance(holder, dict):
            name = rng.choice((*(x for x in ODD if isinstance(x, str)), str(key) + "x", str(key).upper()))
            holder[name] = holder[key] if kind < 0.95 else odd_value(rng)
        else:
            holder.append(odd_value(rng, holder[key]))
    return document


def mutate_bytes(rng: random.Random, data: bytes, start: int = 0, end: int | None = None) -> bytes:
    """Flipped, removed, repeated and inserted bytes between `start` and `end`."""
    changed, end = bytearray(data), len(data) if end is None else end
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(start, max(start + 1, end))
        length = min(rng.choice((1, 1, 4, 16, 200)), max(0, end - at))
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at:at] = rng.choice(
                (b"\0", b'"', b"{", b"[" * 3000, b"\xff\xfe", b"9" * 5000, b"\n", b"-", b"e9")
            )
        elif rng.random() < 0.3:
            del changed[at:]
        end = max(start + 1, min(end, len(changed)))
    return bytes(changed)


def json_bytes(rng: random.Random, document: Any) -> bytes:
    """A mutated JSON document. One in eight is damaged as text."""
    if rng.random() < 0.125:
        return mutate_bytes(rng, json.dumps(document).encode())
    return json.dumps(mutate(rng, document)).encode()


def without_none(value: Any, level: int = 0) -> Any:
    """As TOML can hold it, and not so deep that tomli_w is slow."""
    if level > 40:
        return 1
    if isinstance(value, dict):
        pairs = [(without_none(str(key)), inner) for key, inner in value.items() if inner is not None]
        return {key: without_none(inner, level + 1) for key, inner in pairs}
    if isinstance(value, list | tuple):
        return [without_none(inner, level + 1) for inner in value if inner is not None]
    return value.replace("\ud800", "?") if isinstance(value, str) else value


def mutated_toml(rng: random.Random, document: dict[str, Any]) -> bytes:
    import tomli_w

    changed = mutate(rng, document)
    if not isinstance(changed, dict):
        changed = {"a": changed}
    if rng.random() < 0.05:
        changed[rng.choice(list(changed) or ["a"])] = date(1979, 5, 27)
    data = tomli_w.dumps(without_none(changed)).encode()
    if rng.random() < 0.01:
        data = b"a = " + b"[" * 2000 + b"]" * 2000
    if rng.random() < 0.02:
        data = ".".join("a" * rng.choice((10, 40, 3000))).encode() + b" = 1\n" + data
    return mutate_bytes(rng, data) if rng.random() < 0.125 else data


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the tensors."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_safetensors(header: bytes, tensors: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + tensors
