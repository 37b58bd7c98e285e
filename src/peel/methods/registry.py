"""The methods by name, and methods of the user's own."""

from collections.abc import Callable

from ..errors import ConfigError, did_you_mean
from ..steps.importance import Criterion
from ..utils.references import load_object
from .method import Method, Uniform
from .peel import Peel
from .ranking import Magnitude, Taylor
from .sensitivity import LeastSensitive

#: Name -> class. The first line of its docstring is its description.
METHODS: dict[str, Callable[[], Method]] = {
    "peel": Peel,
    "uniform": Uniform,
    "magnitude": Magnitude,
    "taylor": Taylor,
    "sensitivity": LeastSensitive,
}


def find_method(name: str, criterion: Criterion | None = None) -> Method:
    """The method of this name, or the user's own class as `path/file.py:Name`."""
    if name == "peel":
        return Peel(criterion)
    if name in METHODS:
        return METHODS[name]()
    if ":" not in name:
        raise ConfigError(
            f"no method is called {name!r}.{did_you_mean(name, METHODS)} Known are {', '.join(METHODS)}; for "
            "your own, write path/to/file.py:Name or package.module:Name."
        )
    found = load_object(name, ConfigError)
    method = found() if isinstance(found, type) else found
    if not isinstance(method, Method):
        raise ConfigError(f"the method {name!r} is not a subclass of peel.methods.Method.")
    return method
