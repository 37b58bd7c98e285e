"""How channels pass through each operator: a table from operator name to one small function, its rule.

An operator without a rule fixes every channel that reaches it: the analysis is sometimes conservative, never
wrong.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import TraceError, did_you_mean
from ..call import RULES, Rule
from . import contraction, elementwise, normalization, reduction, shape  # noqa: F401 (they fill RULES)

__all__ = ["RULES", "Rule", "register_rule", "user_rules"]

_registered: dict[str, Rule] = {}


def register_rule(operator: str, rule: Rule | None = None) -> Any:
    """Add or replace the channel rule of an operator in every later `peel.trace`. Also works as a decorator.

    `operator` is the name without overload, such as `"aten::cumsum"` or `"mylib::scan"`. torch must know it,
    so import the library that defines it first.

    A rule is called as `rule(call, *args, **kwargs)` with the arguments of the operator. A tensor argument is
    a tuple of axes, a list of tensors is a list of such tuples, and every other argument is passed as it is.
    The rule tells `call` (a `peel.graph.Call`) what it knows with `call.unify`, `call.same_size`, `call.fix`
    and `call.mark_inexact`. A call that it does not cover ends in `return call.refuse(reason)`.

    It returns the result as a tuple of axes, one per dimension (`call.shape` holds their lengths), or a tuple
    of such tuples if the operator returns several tensors. Axes of arguments are passed on;
    `peel.graph.constant(size)` makes an axis that never changes.

    >>> @peel.graph.register_rule("aten::cumsum")
    ... def cumsum(call, value, dim, **options):
    ...     call.mark_inexact(value[dim], f"{call} sums over the channels")
    ...     return value
    """
    if rule is None:
        return lambda function: register_rule(operator, function)
    _check_rules({operator: rule})
    _registered[operator] = rule
    return rule


def user_rules(rules: Mapping[str, Rule] | None = None) -> dict[str, Rule]:
    """The registered rules, and those given for one trace."""
    _check_rules(rules or {})
    return {**_registered, **(rules or {})}


def _check_rules(rules: Mapping[str, Rule]) -> None:
    for name, rule in rules.items():
        namespace, _, operator = str(name).partition("::")
        if not operator or not hasattr(getattr(torch.ops, namespace), operator):
            # Only for the hint: torch has no public list of its operators.
            known = {known.partition(".")[0] for known in torch._C._dispatch_get_all_op_names()}
            raise TraceError(
                f"torch knows no operator {name!r}.{did_you_mean(str(name), known)} Names have no "
                "overload (aten::add, not aten::add.Tensor); first import the library that defines it."
            )
        if not callable(rule):
            raise TraceError(f"the rule for {name} must be a function, not {rule!r}.")
