"""From widths to a model: `slim`, channel selection, padding, `verify`, `save` and `load`."""

from .info import SlimInfo, attach_info, info_of
from .slim import slim
from .verify import Check, Verification, verify

__all__ = ["Check", "SlimInfo", "Verification", "attach_info", "info_of", "slim", "verify"]
