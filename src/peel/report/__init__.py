"""The page of a run: one HTML file with everything in it."""

from .page import render

__all__ = ["render"]
