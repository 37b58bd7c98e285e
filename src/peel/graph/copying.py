"""Copies of models that work as the model does: with its hooks, and with what its last forward left behind.

`copy.deepcopy` alone refuses tensors that a module keeps from its last forward, and shares hooks that are
functions: what such a hook closes over would still belong to the original.
"""

import copy
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Where a module keeps its hooks; torch has no public way to list them.
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def deep_copy(model: nn.Module, replace: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model, except for the tensors replaced (by the `id` of the original)."""
    memo = dict(replace or {})
    with _DetachComputed():
        twin: nn.Module = copy.deepcopy(model, memo)
        for module in twin.modules():
            for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
                hooks = getattr(module, name)
                hooks.update({key: _bind(hook, memo) for key, hook in hooks.items()})
    return twin


def structural_copy(model: nn.Module, replace: dict[int, Tensor] | None = None) -> nn.Module:
    """A copy with new modules and shared tensors, except those replaced (by the `id` of the original).

    It is for forward passes only: backward hooks, which would appear in a capture, are left out.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = deep_copy(model, {**shared, **(replace or {})})
    for module in twin.modules():
        for name in BACKWARD_HOOKS:
            getattr(module, name).clear()
    return twin


class _DetachComputed(TorchFunctionMode):
    """deepcopy refuses tensors with a gradient history, wherever a module keeps them.

    Features of the last forward, or the weight that weight norm computed. The next forward computes them
    again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _bind(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook of the copy. deepcopy has bound methods and objects right, but not functions with a closure.

    fastai's U-Net hands its skips over through hooks: they must hold the modules of the copy. Whatever a hook
    collects goes into a copy, too, and no capture writes into the user's lists.
    """
    if not isinstance(hook, FunctionType):
        return hook
    cells = tuple(_bind_cell(cell, memo) for cell in hook.__closure__ or ())
    defaults = _copy_or_share(hook.__defaults__, memo)
    # The same code, with the closure and defaults of the copy.
    bound = FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, cells)
    bound.__kwdefaults__ = _copy_or_share(hook.__kwdefaults__, memo)
    vars(bound).update(vars(hook))
    return bound


def _bind_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """Two hooks may share a variable: its cell is copied once."""
    if id(cell) not in memo:
        new = memo[id(cell)] = CellType()
        new.cell_contents = _bind(_copy_or_share(cell.cell_contents, memo), memo)
    bound: CellType = memo[id(cell)]
    return bound


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an open file, a lock, a logger: the copy uses the user's
        return value
