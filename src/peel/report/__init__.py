"""The page of a run: one self-contained HTML file."""

from .page import render
from .record import RunRecord

__all__ = ["RunRecord", "render"]
