"""One run: config, stages, run folder, resume, result."""

from .prune import prune

__all__ = ["prune"]
