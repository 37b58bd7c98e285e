"""Gates: layers that compute factors for the channels of a feature map, as squeeze-excite does.

A gate is multiplied with a map and has fewer values per channel than the map (one, mostly).
"""

from math import prod

from torch import Tensor
from torch.fx import Node

from .call import operator_of
from .capture import Capture
from .grouping import spatial_size
from .interpreter import Interpreter


def gate_parameters(captured: Capture, interpreter: Interpreter) -> frozenset[str]:
    """The parameters and buffers of the layers that compute gates."""
    found: set[str] = set()
    for node in captured.nodes:
        factors = [factor for factor in node.all_input_nodes if _is_computed(factor, captured)]
        if operator_of(node) in ("aten::mul", "aten::mul_") and len(factors) == 2:
            for gate, gated in (factors, factors[::-1]):
                found.update(_between(gated, gate, captured, interpreter))
    return frozenset(found)


def _between(gated: Node, gate: Node, captured: Capture, interpreter: Interpreter) -> list[str]:
    """The parameters that compute the gate from pooled maps; none if it is no gate of the other factor."""

    def values_per_channel(node: Node) -> int:
        return prod(spatial_size(node, interpreter)) if isinstance(node.meta.get("val"), Tensor) else 1

    limit, others = values_per_channel(gate), values_per_channel(gated)
    # A gate has fewer values per channel than the map. With as many, it is a product of two maps (GLU). Where
    # both have one value, sizes cannot tell: the end of this function decides.
    if limit > others or limit == others > 1:
        return []
    names: list[str] = []
    seen, pending = {gated}, [gate]
    is_from_gated = False
    while pending:
        node = pending.pop()
        is_from_gated |= node is gated
        if node.name in captured.tensors:
            names.append(captured.tensors[node.name])
        # Go back through what is as small as the gate: the pooling is where the map begins.
        elif node not in seen and values_per_channel(node) <= limit:
            pending += node.all_input_nodes
        seen.add(node)
    # Where the map is 1x1 itself, the gate is the factor that is computed from the other one.
    return names if limit < others or is_from_gated else []


def _is_computed(node: Node, captured: Capture) -> bool:
    """Whether the node is a tensor that depends on the input, not a parameter."""
    return node.name not in captured.tensors and isinstance(node.meta.get("val"), Tensor)
