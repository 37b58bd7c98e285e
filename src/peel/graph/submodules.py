"""Models that `torch.export` cannot capture as a whole: capture the calls of some of their submodules.

A detection network is one: it chooses boxes by their scores. Its backbone and heads can be captured, and they
hold the weights. The model runs once on the example input, which shows what each of these submodules is
called with. `as_calls` is a copy of the model whose forward makes the same calls and nothing else. A tensor
that one call returns and another receives links the two, so their channels are tied. A tensor that other code
reads keeps its channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # has no public name
from torch.utils._pytree import tree_leaves, tree_map  # has no public name

from ..errors import TraceError, did_you_mean
from .capture import capture, untouched, with_batch
from .copying import FORWARD_HOOKS, structural_copy


@dataclass(frozen=True)
class Received:
    """A tensor that reaches a call from outside the recorded calls: its number among those."""

    index: int


@dataclass(frozen=True)
class Returned:
    """A tensor that a call returned: the number of the call, and of the value in what it returned."""

    call: int
    place: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a submodule. In its arguments, `Received` and `Returned` stand for the tensors."""

    module: str
    args: Any
    kwargs: Any

    @property
    def reads(self) -> list[Returned]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Returned)]


@dataclass
class ModuleCalls:
    """The calls of some submodules during one forward pass of the model, in order."""

    modules: tuple[str, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """The tensors that reach the calls from outside."""
    results: dict[Returned, Tensor] = field(default_factory=dict)
    outputs: set[Returned] = field(default_factory=set)
    """What code outside the calls reads."""

    def bridges(self, module: str) -> bool:
        """Whether a module receives what other calls return, and returns what other calls receive."""
        own = {i for i, call in enumerate(self.calls) if call.module == module}
        receives = any(read.call not in own for i in own for read in self.calls[i].reads)
        others = (call for i, call in enumerate(self.calls) if i not in own)
        return receives and any(read.call in own for call in others for read in call.reads)


Key = tuple[Any, ...]


def _key(tensor: Tensor) -> Key:
    """The same for two objects that are one tensor. No mode sees `x.as_subclass(...)`, which fastai calls."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of submodules. Between calls, it notes which of their results operators read."""

    def __init__(self, model: nn.Module, modules: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module_calls = ModuleCalls(tuple(modules))
        self.depth = 0
        self.source: dict[Key, Received | Returned] = {}
        self.tensors_read: set[Key] = set()
        self.parameters = {_key(parameter) for parameter in model.parameters()}
        for name in modules:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *call: self._enter())
            module.register_forward_hook(self._leave(name), with_kwargs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth:
            self.read((args, kwargs))
        return func(*args, **(kwargs or {}))

    def read(self, values: Any) -> None:
        """Code outside the calls reads these values."""
        found = {_key(value) for value in tree_leaves(values) if isinstance(value, Tensor)}
        # Only tensors that stay alive: the memory of another one may come again.
        self.tensors_read |= found & (self.source.keys() | self.parameters)

    def _enter(self) -> None:
        self.depth += 1

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self.depth -= 1
            if self.depth:  # a submodule of one that is recorded
                return
            calls, results = self.module_calls.calls, self.module_calls.results
            args, kwargs = tree_map(self._source_of, (args, kwargs))
            for place, value in enumerate(tree_leaves(result)):
                if isinstance(value, Tensor):
                    returned = Returned(len(calls), place)
                    # A module may return what it received. Then the tensor keeps its first source.
                    results[returned] = value
                    self.source.setdefault(_key(value), returned)
            calls.append(ModuleCall(name, args, kwargs))

        return leave

    def _source_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _key(value) not in self.source:
            self.source[_key(value)] = Received(len(self.module_calls.inputs))
            self.module_calls.inputs.append(value)  # also keeps its memory
        return self.source[_key(value)]


def record_calls(model: nn.Module, example_input: Any, modules: Sequence[str]) -> ModuleCalls:
    """Run a copy of the model on the example input and record the calls of these submodules."""
    twin = _copy_to_run(model)
    args, kwargs = with_batch(example_input, 1)
    with untouched(), torch.no_grad():
        recorder = _Recorder(twin, modules)
        with recorder:
            result = twin(*args, **kwargs)
            recorder.read(result)
    module_calls = recorder.module_calls
    inside = tuple(f"{name}." for name in modules)
    others = [tensor for name, tensor in twin.named_parameters() if not f"{name}.".startswith(inside)]
    # Code that did not run on this example has weights of its own and may read anything.
    is_complete = all(_key(tensor) in recorder.tensors_read for tensor in others)
    for returned, tensor in module_calls.results.items():
        if not is_complete or _key(tensor) in recorder.tensors_read:
            module_calls.outputs.add(returned)
    return module_calls


def _copy_to_run(model: nn.Module) -> nn.Module:
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    return structural_copy(model, copies).eval()


def as_calls(model: nn.Module, module_calls: ModuleCalls) -> tuple[nn.Module, Any]:
    """A copy of the model whose forward makes the recorded calls only, and its example input.

    Modules and tensors have their names in the model. What is read outside the calls is returned.
    """
    calls, outputs = (
        list(module_calls.calls),
        sorted(module_calls.outputs, key=lambda own: (own.call, own.place)),
    )

    def forward(self: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
        results: list[list[Any]] = []

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Returned):
                return results[leaf.call][leaf.place]
            return inputs[leaf.index] if isinstance(leaf, Received) else leaf

        for call in calls:
            args, kwargs = tree_map(value, (call.args, call.kwargs))
            results.append(tree_leaves(self.get_submodule(call.module)(*args, **kwargs)))
        return [results[own.call][own.place] for own in outputs]

    twin = structural_copy(model)
    twin.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    for name in FORWARD_HOOKS:  # those of the model itself expect its own inputs and outputs
        getattr(twin, name).clear()
    return twin, (list(module_calls.inputs),)


def record_modules(model: nn.Module, example_input: Any, modules: Sequence[str]) -> ModuleCalls:
    """`record_calls`, where each of the submodules must have been called."""
    module_calls = record_calls(model, example_input, modules)
    missing = set(modules) - {call.module for call in module_calls.calls}
    if missing:
        raise TraceError(
            f"modules: the forward pass does not call {', '.join(sorted(missing))}, or only inside another "
            "of them. Name submodules that it calls."
        )
    return module_calls


def check_modules(model: nn.Module, modules: str | Sequence[str]) -> tuple[str, ...]:
    """The names of submodules that the caller chose."""
    names = (modules,) if isinstance(modules, str) else tuple(modules)
    known = dict(model.named_modules())
    for name in names:
        if not name or name not in known:
            raise TraceError(f"modules: the model has no submodule {name!r}.{did_you_mean(name, known)}")
    return names


def find_modules(model: nn.Module, example_input: Any) -> tuple[str, ...]:
    """The largest submodules with weights that can be captured, and those that pass channels between them."""
    # Each is captured by itself. What hooks hand to it from others (skips) is then of this example, not of
    # whatever the model ran on last.
    model, (args, kwargs) = _copy_to_run(model), with_batch(example_input, 1)
    with untouched(), torch.no_grad():
        model(*args, **kwargs)
    chosen: list[str] = []
    pending = [name for name, _ in model.named_children()]
    while pending:
        module_calls = record_calls(model, example_input, [*chosen, *pending])
        called = {call.module for call in module_calls.calls}
        further: list[str] = []
        for name in pending:
            module = model.get_submodule(name)
            has_weights = any(True for _ in module.parameters())
            # Not called by itself: its children may be (a ModuleList), if there is anything to cut in them.
            if name not in called:
                parts = has_weights
            # Without weights it matters only where it passes channels from one module to another, as ROI
            # pooling does.
            elif not has_weights and not module_calls.bridges(name):
                continue
            elif _can_be_captured(model, module_calls, name):
                chosen.append(name)
                continue
            else:
                # It cannot be captured: try its children.
                parts = True
            further += [f"{name}.{child}" for child, _ in module.named_children() if parts]
        pending = further
    order = list(dict(model.named_modules()))
    return tuple(sorted(chosen, key=order.index))


def _can_be_captured(model: nn.Module, module_calls: ModuleCalls, name: str) -> bool:
    """Whether the calls of a submodule can be captured, apart from the others."""
    alone = ModuleCalls()
    for call in module_calls.calls:
        if call.module == name:

            def received(leaf: Any) -> Any:
                if isinstance(leaf, Returned):
                    tensor = module_calls.results[leaf]
                elif isinstance(leaf, Received):
                    tensor = module_calls.inputs[leaf.index]
                else:
                    return leaf
                alone.inputs.append(tensor)
                return Received(len(alone.inputs) - 1)

            args, kwargs = tree_map(received, (call.args, call.kwargs))
            alone.calls.append(ModuleCall(name, args, kwargs))
    try:
        capture(*as_calls(model, alone))
    except TraceError:
        return False
    return True
