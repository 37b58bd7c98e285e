"""A method gets a `Problem` and answers with a `Plan`: the widths of the slim network."""

from .plan import Plan
from .problem import Problem

__all__ = ["Plan", "Problem"]
