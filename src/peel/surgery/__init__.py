"""From widths to a model: `slim`, channel selection, padding, `verify`, `save` and `load`."""

from .slim import slim
from .verify import Check, Verification, verify

__all__ = ["Check", "Verification", "slim", "verify"]
