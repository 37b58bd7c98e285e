"""How channels pass through each operator: a plain table from operator name to one small function.

A rule gets the `Interpreter`, the operator's `Node` and the values of its arguments (a `Value` where the argument is a tensor, the
plain argument otherwise), tells the interpreter what must be equal, and returns the value of the result. An operator that is not in the
table makes every channel that reaches it fixed: the analysis is sometimes conservative and never wrong.

Users add operators of their own with `peel.trace(..., rules={"mylib::op": rule})`.
"""

from ..interpreter import Rule
from . import attention, contraction, elementwise, normalisation, reduction, shape

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **contraction.RULES,
    **normalisation.RULES,
    **reduction.RULES,
    **shape.RULES,
    **attention.RULES,
}

__all__ = ["RULES", "Rule"]
