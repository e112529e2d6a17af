"""Schemas: checks JSON from outside against the type hints of dataclasses. Knows nothing else of the library.

A dataclass or a TypedDict is its own schema: its hints give the types, and the metadata of a dataclass's fields (`low`,
`high`, `choices`, as in `config.Config`) give the ranges. In a list, ranges apply to the items, which must differ from
each other. Keys that the class does not have are ignored, so that a later release may add some.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

_LARGEST = 2**63
"""No whole number in any of our files is larger."""
_SHOWN = 60
"""Characters of a wrong value that a message quotes."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", types.NoneType: "null"}
_SEQUENCES = (list, tuple, frozenset)


def limited(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: typing.Collection[str] = (),
) -> Any:
    """Declare a dataclass field with a range."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "choices": choices})


def problem(hint: Any, value: Any, name: str = "") -> str | None:
    """Return why a JSON value does not fit a type, as the end of a sentence (`metrics is [], not a mapping`)."""
    return _problem(hint, value, name, {})


def unknown(kind: type, value: Mapping[str, Any], name: str) -> str | None:
    """Return which key a class does not have, where an unknown one must not be ignored."""
    keys = [key for key in value if key not in (_entries(kind) or {})]
    return f"{_join(name, keys[0])!r} is not known" if keys else None


def _problem(hint: Any, value: Any, name: str, limits: Mapping[str, Any]) -> str | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None
    if origin is typing.Annotated:  # what a dictionary holds, or the limits of a number
        inner = arguments[1]
        return _problem(arguments[0], value, name, inner if isinstance(inner, Mapping) else limits) or (
            None if isinstance(inner, Mapping) else _problem(inner, value, name, limits)
        )
    if origin is typing.NotRequired:
        return _problem(arguments[0], value, name, limits)
    if origin in (typing.Union, types.UnionType):
        found = [_problem(one, value, name, limits) for one in arguments]
        return None if None in found else next(one for one in found if one)
    if isinstance(hint, type) and _entries(hint) is not None:
        return _mapping_problem(hint, value, name)
    if origin is dict:
        if not isinstance(value, dict):
            return _wrong(name, value, "a mapping")
        return next(filter(None, (_problem(arguments[1], v, _join(name, k), limits) for k, v in value.items())), None)
    if origin in _SEQUENCES:
        return _sequence_problem(arguments[0], value, name, limits)
    return _scalar_problem(hint, value, name, limits)


@cache
def _entries(hint: Any) -> dict[str, tuple[Any, bool, Mapping[str, Any]]] | None:
    """Return the keys of a dataclass or TypedDict: type, whether it is required, limits; None for other types."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = dataclasses.fields(hint)
        return {
            f.name: (
                hints[f.name],
                f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
                f.metadata,
            )
            for f in fields
        }
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        # Not `__required_keys__`, which is wrong where annotations are strings.
        return {name: (kind, typing.get_origin(kind) is not typing.NotRequired, {}) for name, kind in hints.items()}
    return None


def _mapping_problem(hint: Any, value: Any, name: str) -> str | None:
    if not isinstance(value, Mapping):
        return _wrong(name, value, "a mapping")
    for key, (kind, required, limits) in (_entries(hint) or {}).items():
        if key not in value:
            if required:
                return f"{_join(name, key)} is missing"
        elif found := _problem(kind, value[key], _join(name, key), limits):
            return found
    return None


def _sequence_problem(kind: Any, value: Any, name: str, limits: Mapping[str, Any]) -> str | None:
    if not isinstance(value, _SEQUENCES):
        return _wrong(name, value, "a list")
    for number, item in enumerate(value):
        if found := _problem(kind, item, f"{name}[{number}]", limits):
            return found
    if limits and len({*value}) < len(value):
        return f"{name} has an item twice"
    return None


def _scalar_problem(kind: Any, value: Any, name: str, limits: Mapping[str, Any]) -> str | None:
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
        fits = fits and (isinstance(value, float) or abs(value) < _LARGEST)
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        fits = fits and (kind is not int or abs(value) < _LARGEST)
    if not fits:
        return _wrong(name, value, _NAMES.get(kind, getattr(kind, "__name__", str(kind))))
    low, high, choices = (limits.get(key) for key in ("low", "high", "choices"))
    if choices and value not in choices:
        return _wrong(name, value, f"one of {', '.join(choices)}")
    if isinstance(value, int | float) and ((low is not None and value < low) or (high is not None and value > high)):
        return _wrong(name, value, f"from {low} to {high}" if high is not None else f"at least {low}")
    return None


def _join(name: str, key: Any) -> str:
    return f"{name}.{_short(key)}" if name else _short(key)


def _wrong(name: str, value: Any, wanted: str) -> str:
    return f"{name or 'it'} is {_short(value, quoted=True)}, not {wanted}"


def _short(value: Any, *, quoted: bool = False) -> str:
    """Return a value as text of bounded length, without writing out all of a long one."""
    if isinstance(value, dict | list | tuple) and value:
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST:
        return "a huge number"
    cut = value[: _SHOWN + 1] if isinstance(value, str) else value
    text = repr(cut) if quoted else str(cut)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
