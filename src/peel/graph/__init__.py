"""Which channels are tied: from a model to a `ChannelGraph`."""

from .axes import Axis, constant
from .call import Call
from .channel_graph import ChannelGraph, Member, Tie
from .rules import register_rule
from .trace import trace

__all__ = ["Axis", "Call", "ChannelGraph", "Member", "Tie", "constant", "register_rule", "trace"]
