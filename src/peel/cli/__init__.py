"""The command line. The only room that prints."""

from .main import main

__all__ = ["main"]
