"""Run the user's code at other widths, to find widths that the code itself fixes, and check chosen networks.

The analysis reads what operators did. It cannot see whether a number such as the 26 of `torch.split(x, 26,
1)` was computed from a shape or written down, nor what an `if x.shape[1] >= 32` does at other widths. So the
code runs on tensors without data, at widths that are larger, smaller and equal. It must call the same
functions on the same tensors, with shapes that the analysis knows, and cost what the graph predicts.
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from statistics import median
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # has no public name

from ..errors import WidthsError
from .channel_graph import ChannelGraph
from .program import Program, Recording
from .recording import Failure, Twin
from .submodules import as_calls

_GOLDEN = 0.6180339887

Item = TypeVar("Item")


def probing_units(graph: ChannelGraph) -> list[list[int]]:
    """Units to try: larger and smaller in every tie, by factors that differ; the same width in every tie.

    Code that takes the first 16 of 16 channels still runs with fewer channels, but not with more. No two of
    the larger widths are equal: two that must fit together do not do so by chance. Code that compares widths
    (`if x.shape[1] >= 32`, `if x.shape != y.shape`) may do something else when they are smaller or equal.
    """
    # Multiples of the golden ratio are spread evenly over 0 to 1: neighboring ties get different factors.
    spread = [(i + 1) * _GOLDEN % 1 for i in range(len(graph.widths))]
    pairs = list(zip(graph.units(), spread, strict=True))
    steps = list(graph.steps.values())
    larger: list[int] = []
    taken: set[int] = set()
    for (units, part), step in zip(pairs, steps, strict=True):
        new = units + max(1, int(units * (0.1 + 0.4 * part)))
        while new * step in taken:
            new += 1
        taken.add(new * step)
        larger.append(new)
    smaller = [max(1, int(units * (0.25 + 0.3 * part))) for units, part in pairs]
    # Not one channel: an axis of length one fits any other, and einsum then does no product that is counted.
    smaller = [
        2 if new * step == 1 and units > 2 else new
        for new, step, units in zip(smaller, steps, graph.units(), strict=True)
    ]
    common = lcm(*steps)
    # The same width in all ties, as far as their steps allow it: half of the usual one.
    width = max(1, round(median(graph.widths.values()) / 2 / common)) * common
    equal = [max(1, round(width / step)) for step in steps]
    return [larger, smaller, equal] if len(steps) > 1 else [larger, smaller]


def smallest_cause(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """The items that are needed for a failure, for every failure that needs other items.

    `fails` says whether something fails with these items; it must fail with all of them.
    """
    # Bisection for the shortest prefix that fails together with those needed so far. Its last item is needed:
    # without it the prefix does not fail. So each needed item takes about log2(n) runs. The rest of the
    # prefix may hold more of the same cause; what is behind it need not change for this failure.
    found: list[Item] = []
    rest = list(items)
    while rest and fails(rest):
        needed: list[Item] = []
        candidates = rest
        while candidates and not (needed and fails(needed)):
            low, high = 0, len(candidates)  # `high` candidates fail together with those needed, `low` do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fails([*needed, *candidates[:middle]]) else (middle, high)
            needed.append(candidates[high - 1])
            candidates = candidates[: high - 1]
        found += needed
        # Another failure may need none of these items.
        rest = [item for item in rest if item not in needed]
    return found


def check_network(
    network: nn.Module, graph: ChannelGraph, widths: Mapping[str, int], original: nn.Module
) -> None:
    """Refuse a network that does something else than the graph predicts for its widths.

    `network` is the original at these widths. Its code runs once, without data.
    """
    difference = find_difference(network, graph, graph.units(widths), original)
    if difference is not None:
        name = type(network).__name__
        raise WidthsError(
            f"at these widths the code of {name} does something else than the network that was traced: "
            f"{difference}. Choose other widths, or change the code so that it does the same at all widths."
        )


def find_difference(
    network: nn.Module, graph: ChannelGraph, units: Sequence[int], original: nn.Module
) -> str | None:
    """What a network at these units does otherwise than predicted, with the line of code; or None."""
    params, predicted = sum(map(Tensor.numel, network.parameters())), graph.param_cost.total(units)
    if params != predicted:
        return f"it has {params:,} parameters; {predicted:,} are predicted"
    program, macs = graph.program, graph.mac_cost.total(units)
    if program is None:
        return None
    if graph.module_calls is not None:  # only these calls are predicted
        network, original = (as_calls(model, graph.module_calls)[0] for model in (network, original))
    difference = _difference(network, program, units, macs)
    if difference is not None:
        # The original may have been changed after it was traced: another dropout rate, another activation.
        now = Twin(original, program.example, with_data=program.with_data).run()
        if isinstance(now, Recording) and not program.has_same_calls(now):
            return _difference(network, program.with_calls(now), units, macs)
    return difference


def _difference(network: nn.Module, program: Program, units: Sequence[int], macs: int) -> str | None:
    twin = Twin(network, program.example, with_data=program.with_data)
    done = twin.run(program.calls)
    if isinstance(done, Recording) and program.training_calls:
        trained = twin.run(program.training_calls, training=True)
        done = trained if isinstance(trained, Failure) else done
    if isinstance(done, Failure):
        return done.line or f"the code of {done.modules[-1] or 'the model'} fails"
    return program.difference(done, units, macs)


def output_shapes(result: Any) -> list[tuple[int, ...]]:
    """Shapes of all tensors in what a model returned."""
    return [tuple(value.shape) for value in tree_leaves(result) if isinstance(value, Tensor)]
