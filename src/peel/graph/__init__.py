"""Which channels are tied: from a model to a `ChannelGraph`, and from widths back to a model."""

from .channel_graph import ChannelGraph, Member, Tie
from .surgery import slim
from .trace import trace
from .verify import Check, Verification, verify

__all__ = ["ChannelGraph", "Check", "Member", "Tie", "Verification", "slim", "trace", "verify"]
