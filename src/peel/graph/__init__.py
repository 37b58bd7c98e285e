"""Which channels are tied: from a model to a `ChannelGraph`."""

from .channel_graph import ChannelGraph, Member, Tie
from .trace import trace

__all__ = ["ChannelGraph", "Member", "Tie", "trace"]
