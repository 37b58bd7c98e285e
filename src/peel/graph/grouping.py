"""Step 3 of the paper: layers whose feature maps have the same spatial size form a group.

Literally, "the same spatial size" would tear blocks apart: a block with stride works at two sizes, and its inner channels are tied to
neither. So a block counts as a whole, with the size of its output. A block is a module whose own forward adds (or, failing that,
multiplies or concatenates) what its parts computed: `torch.export` tells which module each operator came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from .axes import Unit, is_free
from .capture import Capture
from .channel_graph import Tie
from .interpreter import Interpreter, Producer, module_of

_ADD = {"aten::add", "aten::add_"}
_MERGE = {"aten::mul", "aten::mul_", "aten::cat"}

Size = tuple[int, ...]


def spatial_sizes(
    births_of: Mapping[Unit, Sequence[Producer]], capture: Capture, interpreter: Interpreter
) -> dict[Unit, Size]:
    """The spatial size that each unit counts with."""
    blocks = _blocks(capture, interpreter)
    sizes: dict[Unit, Size] = {}
    for unit, producers in births_of.items():
        homes = [_ancestors(module_of(producer.node)) for producer in producers]
        common = set(homes[0]).intersection(*homes[1:])
        for kind in ("add", "merge"):
            inside = [
                name for name, (block_kind, _) in blocks.items() if name in common and block_kind == kind
            ]
            # Channels of the block's own output belong to the stream, whose other layers say more than this one block.
            if inside:
                block = max(inside, key=len)
                sizes[unit] = blocks[block][1]
                break
        else:
            sizes[unit] = _usual([producer.spatial for producer in producers])
    return sizes


def _usual(sizes: list[Size]) -> Size:
    """The size most layers have, the smaller of equals; gates at 1x1 say nothing where there are feature maps."""
    sizes = [size for size in sizes if _area(size) > 1] or sizes
    return max(sizes, key=lambda size: (sizes.count(size), -_area(size)))


def _blocks(capture: Capture, interpreter: Interpreter) -> dict[str, tuple[str, Size]]:
    """Module name -> (how it joins its parts, spatial size of its output)."""
    kinds: dict[str, str] = {}
    outputs: dict[str, Node] = {}
    leaving: dict[str, set[Node]] = {}
    for node in capture.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        module = module_of(node)
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        tensors = [arg for arg in node.all_input_nodes if arg.name not in capture.tensors]
        if module and len(tensors) > 1:
            if name in _ADD:
                kinds[module] = "add"
            elif name in _MERGE:
                kinds.setdefault(module, "merge")
        for ancestor in _ancestors(module):
            outputs[ancestor] = node
            if any(ancestor not in _ancestors(module_of(user)) for user in node.users):
                leaving.setdefault(ancestor, set()).add(node)
    return {
        name: (kind, _spatial(outputs[name], interpreter))
        for name, kind in kinds.items()
        if len(leaving.get(name, ())) == 1
    }


def _spatial(node: Node, interpreter: Interpreter) -> Size:
    """The axes of a feature map that are neither the batch nor channels."""
    axes = interpreter.values()[node]
    shape = tuple(node.meta["val"].shape)
    channel = next((i for i, axis in enumerate(axes) if i > 0 and is_free(axis)), 1)
    return tuple(size for i, size in enumerate(shape) if i not in (0, channel))


def _ancestors(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _area(size: Size) -> int:
    area = 1
    for length in size:
        area *= length
    return area


def group_ties(ties: Iterable[Tie]) -> dict[str, tuple[str, ...]]:
    """Free ties by spatial size, in the order of the network. Ties after the last feature map join the last group, a stem that
    would be alone joins the group it leads to."""
    ties = list(ties)
    maps = [tie for tie in ties if _area(tie.spatial) > 1]
    if not maps:
        return {"all": tuple(tie.name for tie in ties)} if ties else {}
    groups: dict[Size, list[str]] = {}
    for tie in ties:
        size = tie.spatial if _area(tie.spatial) > 1 else maps[-1].spatial
        groups.setdefault(size, []).append(tie.name)
    sizes = list(groups)
    if len(sizes) > 1 and len(groups[sizes[0]]) == 1:
        groups[sizes[1]] = groups.pop(sizes[0]) + groups[sizes[1]]
    return {"x".join(map(str, size)): tuple(groups[size]) for size in sizes if size in groups}
