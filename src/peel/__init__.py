"""Make a convolutional network fit a budget.

    graph = peel.trace(model, example_input)         which channels are tied, and what they cost
    widths = peel.uniform(graph, budget="50%")       one integer per tie
    result = peel.prune(model, data, budget="50%")   the five steps: result.model, result.plan, result.history
    small = peel.slim(model, widths, graph=graph)    a new model of the same class
    peel.save(small, "slim"); peel.load("slim")      safetensors and JSON

`import peel` is cheap: it imports neither torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .cost.budget import parse_budget
from .cost.widths import Widths
from .errors import (
    BudgetError,
    ConfigError,
    CorruptFileError,
    DataError,
    DivergedError,
    ModelError,
    OutOfMemoryError,
    PeelError,
    RunError,
    StoreError,
    TraceError,
    WidthsError,
)
from .version import __version__

if TYPE_CHECKING:
    from .cost.rounding import round_to_budget, uniform
    from .data.datasets import Data, load_data
    from .graph import ChannelGraph, Tie, trace
    from .methods.plan import Plan
    from .report.record import RunRecord
    from .run.config import Config
    from .run.prune import prune
    from .run.result import Result
    from .steps.backbone import backbone
    from .steps.reallocation import reallocate
    from .surgery import Verification, slim, verify
    from .surgery.serialization import load, save
    from .train.callbacks import Callback

#: Public name -> the module that defines it, which is imported when the name is first used.
_HOME = {
    "Callback": "train.callbacks",
    "ChannelGraph": "graph",
    "Config": "run.config",
    "Data": "data.datasets",
    "Plan": "methods.plan",
    "Result": "run.result",
    "RunRecord": "report.record",
    "Tie": "graph",
    "Verification": "surgery",
    "backbone": "steps.backbone",
    "load": "surgery.serialization",
    "load_data": "data.datasets",
    "prune": "run.prune",
    "reallocate": "steps.reallocation",
    "round_to_budget": "cost.rounding",
    "save": "surgery.serialization",
    "slim": "surgery",
    "trace": "graph",
    "uniform": "cost.rounding",
    "verify": "surgery",
}

__all__ = [
    "BudgetError",
    "Callback",
    "ChannelGraph",
    "Config",
    "ConfigError",
    "CorruptFileError",
    "Data",
    "DataError",
    "DivergedError",
    "ModelError",
    "OutOfMemoryError",
    "PeelError",
    "Plan",
    "Result",
    "RunError",
    "RunRecord",
    "StoreError",
    "Tie",
    "TraceError",
    "Verification",
    "Widths",
    "WidthsError",
    "__version__",
    "backbone",
    "load",
    "load_data",
    "parse_budget",
    "prune",
    "reallocate",
    "round_to_budget",
    "save",
    "slim",
    "trace",
    "uniform",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("graph", "zoo"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'peel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "graph", "zoo"})
