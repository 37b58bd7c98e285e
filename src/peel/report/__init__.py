"""The page of a run: one HTML file that needs no other."""

from .page import render
from .record import RunRecord

__all__ = ["RunRecord", "render"]
