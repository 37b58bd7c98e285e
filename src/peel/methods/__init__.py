"""A method gets a `Problem` and some `Work`, and answers with the widths of the slim network."""

from .method import Answer, Given, Method, Needs, Problem, Recipes, Uniform
from .peel import Peel
from .plan import Plan
from .ranking import Magnitude, Taylor
from .sensitivity import LeastSensitive
from .work import Work

__all__ = [
    "Answer",
    "Given",
    "LeastSensitive",
    "Magnitude",
    "Method",
    "Needs",
    "Peel",
    "Plan",
    "Problem",
    "Recipes",
    "Taylor",
    "Uniform",
    "Work",
]
