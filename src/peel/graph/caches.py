"""Caches of the user's functions (`functools.lru_cache`) during a capture or a run without data.

A helper that caches a table would keep a tensor without values, and hand it to the user's next forward. And
it would compute the table in the first of several runs only, which are to make the same calls.
"""

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves  # has no public name

#: Of these, no cache holds tensors of a model.
_OTHERS = ("torch", "sympy", "peel")


@contextmanager
def no_cached_tensors() -> Iterator[None]:
    """Empty the caches that hold tensors, before and after."""
    _empty_caches()
    try:
        yield
    finally:
        _empty_caches()


def _empty_caches() -> None:
    for function in _cached_functions(len(sys.modules)):
        if function.cache_info().currsize and _holds_tensors(function):
            function.cache_clear()


def _holds_tensors(function: Any) -> bool:
    """There is no public access to what a cache holds, but the garbage collector has it."""
    parts = gc.get_referents(function)
    results = [entry for part in parts for entry in (part.values() if type(part) is dict else (part,))]
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(results))


@functools.lru_cache(maxsize=1)
def _cached_functions(modules: int) -> list[Any]:
    """They are made when a module is imported, so the list holds for a number of modules."""
    # The type of functools.lru_cache has no public name.
    kind = type(_cached_functions)
    found = (item for item in gc.get_objects() if type(item) is kind)
    return [item for item in found if str(item.__module__).partition(".")[0] not in _OTHERS]
