"""A method gets a `Problem` and answers with a `Plan`: the widths of the slim network."""

from .method import Method
from .plan import Plan
from .problem import Problem

__all__ = ["Method", "Plan", "Problem"]
