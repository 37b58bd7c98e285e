"""The command line. Only this package prints."""

from .main import main

__all__ = ["main"]
