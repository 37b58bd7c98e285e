"""From widths to a model: `slim`, channel selection, padding, `verify`, `save` and `load`."""

from .record import SlimRecord, attach_record, record_of
from .slim import slim
from .verify import Check, Verification, verify

__all__ = ["Check", "SlimRecord", "Verification", "attach_record", "record_of", "slim", "verify"]
