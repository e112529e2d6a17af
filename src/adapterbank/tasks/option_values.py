"""Values from a shell, YAML or JSON as the type of an option. Knows no options."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

from adapterbank.tasks.compound import join_names


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to a field's type; raise ValueError with the expected type."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    kind = kinds[0]
    if set(kinds) == {int, str}:
        try:
            return convert(value, int)
        except ValueError:
            if not isinstance(value, str | list | tuple):
                raise
        kind = str
    if kind is bool:
        values = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if str(value).lower() not in values:
            raise ValueError("true or false")
        return values[str(value).lower()]
    if kind is str:
        if isinstance(value, list | tuple):  # a list of labels, columns, layers or sites
            return join_names(value)
        if isinstance(value, dict | bool):
            raise ValueError("text")
        return str(value)
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a whole number" if kind is int else "a number") from None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise ValueError("a whole number" if kind is int else "a number")
    return int(number) if kind is int else number
