"""Step 3 of the paper: layers whose feature maps have the same spatial size form a group.

Taken literally, "the same spatial size" would split a block between groups: a block with stride works at two
sizes, and its inner channels are tied to neither. So a block counts as a whole, with the size of its output.
A block is a module whose own forward adds (or else multiplies or concatenates) what its parts computed.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor
from torch.fx import Node

from .axes import Symbol, is_free
from .call import Producer, module_of, operator_of
from .capture import Capture
from .channel_graph import Tie
from .interpreter import Interpreter

_ADD = {"aten::add", "aten::add_"}
_MERGE = {"aten::mul", "aten::mul_", "aten::cat"}

Size = tuple[int, ...]


def spatial_sizes(
    producers_of: Mapping[Symbol, Sequence[Producer]], captured: Capture, interpreter: Interpreter
) -> dict[Symbol, Size]:
    """The spatial size by which each symbol is grouped."""
    blocks = _blocks(captured, interpreter)
    sizes: dict[Symbol, Size] = {}
    for symbol, producers in producers_of.items():
        modules = [_ancestors(module_of(producer.node)) for producer in producers]
        # A tie is grouped by the innermost block that holds all layers that write it. So the inner channels
        # of a block with stride are not grouped by the size before the stride.
        common = set(modules[0]).intersection(*modules[1:], blocks)
        if common:
            # The innermost block that adds or, if none adds, the innermost block.
            sizes[symbol] = blocks[max(common, key=lambda name: (blocks[name][0], len(name)))][1]
        else:
            sizes[symbol] = _most_common([producer.spatial for producer in producers])
    return sizes


def _most_common(sizes: list[Size]) -> Size:
    """The size of most layers, the smaller one of equals. Gates (1x1) count only if there is nothing else."""
    sizes = [size for size in sizes if prod(size) > 1] or sizes
    return max(sizes, key=lambda size: (sizes.count(size), -prod(size)))


def _blocks(captured: Capture, interpreter: Interpreter) -> dict[str, tuple[bool, Size]]:
    """Module name -> (whether it adds its parts, spatial size of its output), for modules with one output.

    A module that concatenates or multiplies what leaves the model is a head, and no block.
    """
    adds: dict[str, bool] = {}
    last: dict[str, Node] = {}
    outputs: dict[str, set[Node]] = {}
    for node in captured.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        module, name = module_of(node), operator_of(node)
        tensors = [arg for arg in node.all_input_nodes if arg.name not in captured.tensors]
        if module and len(tensors) > 1 and name in _ADD | _MERGE:
            adds[module] = name in _ADD or adds.get(module, False)
        for ancestor in _ancestors(module):
            last[ancestor] = node
            # What code outside the module reads is an output of it.
            if any(ancestor not in _ancestors(module_of(user)) for user in node.users):
                outputs.setdefault(ancestor, set()).add(node)
    return {
        name: (is_sum, spatial_size(last[name], interpreter))
        for name, is_sum in adds.items()
        if len(outputs.get(name, ())) == 1 and (is_sum or any(map(is_free, interpreter.values[last[name]])))
    }


def spatial_size(node: Node, interpreter: Interpreter) -> Size:
    """The axes of a feature map that are neither the batch nor channels."""
    axes = interpreter.values[node]
    # Channels-last code has them at the end, and fixed channels are at axis 1.
    channel = next((i for i, axis in enumerate(axes) if i > 0 and is_free(axis)), 1)
    return tuple(size for i, size in enumerate(node.meta["val"].shape) if i not in (0, channel))


def _ancestors(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def group_ties(ties: Sequence[Tie]) -> dict[str, tuple[str, ...]]:
    """Free ties by spatial size, in the order of the network.

    Ties after the last feature map join the last group. A stem that would be alone joins the group after it.
    """
    maps = [tie for tie in ties if prod(tie.spatial) > 1]
    if not maps:
        return {"all": tuple(tie.name for tie in ties)} if ties else {}
    groups: dict[Size, list[str]] = {}
    for tie in ties:
        size = tie.spatial if prod(tie.spatial) > 1 else maps[-1].spatial
        groups.setdefault(size, []).append(tie.name)
    sizes = list(groups)
    if len(sizes) > 1 and len(groups[sizes[0]]) == 1:
        groups[sizes[1]] = groups.pop(sizes[0]) + groups[sizes[1]]
    return {"x".join(map(str, size)): tuple(groups[size]) for size in sizes if size in groups}
