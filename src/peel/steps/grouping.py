"""Step 3: layers whose feature maps have the same spatial size form a group, which grows by one common factor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..graph import ChannelGraph

__all__ = ["group_layers"]


def group_layers(graph: ChannelGraph, groups: Mapping[str, Iterable[str]] | None = None) -> ChannelGraph:
    """The graph with the groups that the method uses: those that tracing found, or the caller's own (group name -> tie names).

    Tracing applies the paper's rule, with a residual block counted as a whole at the size of its output, and the stem joined to the
    group it is tied to.
    """
    return graph if groups is None else graph.regroup(groups)
