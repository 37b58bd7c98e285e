"""Multiply-adds counted by torch while a model runs: the independent check of predicted costs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # has no public name
from torch.utils.flop_counter import flop_registry


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run attention without fused kernels, which torch does not count."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by the formulas of `torch.utils.flop_counter`, without its bookkeeping by module.

    `FlopCounterMode` took up to twice the time of a trace, and CaiT did not run in it without data.
    """

    macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formula = flop_registry.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if formula is not None:
            self.macs += formula(*args, **(kwargs or {}), out_val=result) // 2
        return result


class _EinsumCount(TorchFunctionMode):
    """Counts the products of `einsum` over a single channel."""

    macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.einsum:
            self.macs += macs_over_one_channel(args, result)
        return result


def macs_over_one_channel(args: Any, result: Tensor) -> int:
    """MACs of an `einsum` of two tensors over an axis of length 1: torch multiplies, and counts nothing."""
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        tensors = list(tensors[0])
    terms, arrow, right = equation.replace(" ", "").partition("->")
    first, *others = terms.split(",")
    if len(others) != 1:
        return 0
    # Letters that both operands have and the result has not: these are summed over.
    shared = (set(first) & set(others[0])) - {"."}
    if arrow:  # without one, a letter that occurs twice is summed over
        shared -= set(right)
    sizes = [_length(first, letter, tensors[0].shape) for letter in shared]
    return result.numel() if sizes and set(sizes) == {1} else 0


def _length(term: str, letter: str, shape: Sequence[int]) -> int:
    """The length of the axis of a letter. Axes after an ellipsis are counted from the end."""
    before, _, after = term.partition("...")
    return shape[before.index(letter)] if letter in before else shape[after.index(letter) - len(after)]


def count_macs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """MACs of one forward pass."""
    with (
        torch.no_grad(),
        plain_attention(),
        OperatorCount() as counter,  # type: ignore[no-untyped-call]
        _EinsumCount() as products,
    ):
        model(*args, **kwargs)
    return int(counter.macs + products.macs)
