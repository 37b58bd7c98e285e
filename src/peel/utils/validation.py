"""Values of settings, checked against their types."""

import re
from typing import Any

import msgspec

from ..errors import ConfigError


def check_value(setting: str, value: Any, kind: Any) -> Any:
    """The value as this type, which may have msgspec's limits. A wrong one is a ConfigError that names it."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{setting}: {describe_error(error)}, not {value!r}.") from error


def describe_error(error: Exception) -> str:
    """msgspec's "Expected `int | null`, got `str` - at `$.rounds`" -> "expected int"."""
    text = re.sub(r", got .*| - at .*", "", str(error).replace("`", "")).replace(" | null", "")
    return f"{text[:1].lower()}{text[1:]}".replace("expected array", "expected a list")
