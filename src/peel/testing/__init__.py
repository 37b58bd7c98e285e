"""Checks for methods of your own, on small networks of every kind."""

from .conformance import BUDGETS, NETWORKS, check_method

__all__ = ["BUDGETS", "NETWORKS", "check_method"]
