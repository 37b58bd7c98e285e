"""Values of settings, checked against their types."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .text import brief, short

#: Numbers as files hold them. Within these limits, sums, products with 100 and quotients stay finite.
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Channels = Annotated[int, Meta(ge=1, lt=2**31)]
Epoch = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Value = Annotated[float, Meta(ge=-1e30, le=1e30)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

# Of settings.
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]


def check_value(setting: str, value: Any, kind: Any) -> Any:
    """The value as this type, which may have msgspec's limits. A wrong one is a ConfigError that names it."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{setting}: {describe_error(error)}, not {short(value)}.") from error


def describe_error(error: Exception) -> str:
    """msgspec's "Expected `int | null`, got `str` - at `$.rounds`" -> "expected int"."""
    text = re.sub(r", got .*| - at .*", "", brief(error).replace("`", "")).replace(" | null", "")
    return f"{text[:1].lower()}{text[1:]}".replace("expected array", "expected a list")
