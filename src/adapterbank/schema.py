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
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_LARGEST = 2**63
"""No whole number in any of our files is larger."""
_SHOWN = 60
"""Characters of a wrong value that a message quotes."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", types.NoneType: "null"}
_SEQUENCES = (list, tuple, frozenset)

Found = tuple[str, str] | None
"""Where in a value, and what is wrong there."""
Check = Callable[[Any], Found]


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
    found = _compiled(hint)(value)
    return None if found is None else f"{_join(name, found[0]) or 'it'} {found[1]}"


def unknown(kind: type, value: Mapping[str, Any], name: str) -> str | None:
    """Return which key a class does not have, where an unknown one must not be ignored."""
    keys = [key for key in value if key not in (_entries(kind) or {})]
    return f"{_join(name, _short(keys[0]))!r} is not known" if keys else None


@cache
def _compiled(hint: type) -> Check:
    return _check(hint, {})


def _check(hint: Any, limits: Mapping[str, Any]) -> Check:
    """Return the function that checks values of a type: made once, because a bank has many manifests."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: None
    if origin is typing.Annotated and isinstance(arguments[1], Mapping):  # the limits of a number
        return _check(arguments[0], arguments[1])
    if origin is typing.Annotated:  # what a dictionary holds
        return _both(_check(arguments[0], limits), _check(arguments[1], limits))
    if origin is typing.NotRequired:
        return _check(arguments[0], limits)
    if origin in (typing.Union, types.UnionType):
        return _any([_check(one, limits) for one in arguments])
    if isinstance(hint, type) and (entries := _entries(hint)) is not None:
        return _record({key: (_check(kind, own), required) for key, (kind, required, own) in entries.items()})
    if origin is dict:
        return _table(_check(arguments[1], limits))
    if origin in _SEQUENCES:
        return _sequence(
            _check(arguments[0], limits), plain=arguments[0] is float and not limits, distinct=bool(limits)
        )
    return _scalar(hint, limits)


@cache
def _entries(hint: type) -> dict[str, tuple[Any, bool, Mapping[str, Any]]] | None:
    """Return the keys of a dataclass or TypedDict: type, whether it is required, limits; None for other types."""
    hints = typing.get_type_hints(hint, include_extras=True)
    if dataclasses.is_dataclass(hint):
        absent = dataclasses.MISSING
        return {
            f.name: (hints[f.name], f.default is absent and f.default_factory is absent, f.metadata)
            for f in dataclasses.fields(hint)
        }
    if typing.is_typeddict(hint):
        # Not `__required_keys__`, which is wrong where annotations are strings.
        return {name: (kind, typing.get_origin(kind) is not typing.NotRequired, {}) for name, kind in hints.items()}
    return None


def _both(first: Check, second: Check) -> Check:
    return lambda value: first(value) or second(value)


def _any(checks: list[Check]) -> Check:
    def check(value: Any) -> Found:
        found = None
        for one in checks:
            if (now := one(value)) is None:
                return None
            found = found or now
        return found

    return check


def _record(entries: dict[str, tuple[Check, bool]]) -> Check:
    def check(value: Any) -> Found:
        if not isinstance(value, Mapping):
            return _wrong(value, "a mapping")
        for key, (inner, required) in entries.items():
            if key not in value:
                if required:
                    return key, "is missing"
            elif found := inner(value[key]):
                return _join(key, found[0]), found[1]
        return None

    return check


def _table(inner: Check) -> Check:
    def check(value: Any) -> Found:
        if not isinstance(value, dict):
            return _wrong(value, "a mapping")
        for key, item in value.items():
            if found := inner(item):
                return _join(_short(key), found[0]), found[1]
        return None

    return check


def _sequence(inner: Check, *, plain: bool, distinct: bool) -> Check:
    def check(value: Any) -> Found:
        if not isinstance(value, _SEQUENCES):
            return _wrong(value, "a list")
        if plain and {*map(type, value)} <= {float} and all(map(math.isfinite, value)):
            return None
        for number, item in enumerate(value):
            if found := inner(item):
                return _join(f"[{number}]", found[0]), found[1]
        return ("", "has an item twice") if distinct and len({*value}) < len(value) else None

    return check


def _scalar(kind: Any, limits: Mapping[str, Any]) -> Check:
    low, high, choices = (limits.get(key) for key in ("low", "high", "choices"))
    wanted = _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
    bounds = f"from {low} to {high}" if high is not None else f"at least {low}"

    def check(value: Any) -> Found:
        if not _fits(kind, value):
            return _wrong(value, wanted)
        if choices and value not in choices:
            return _wrong(value, f"one of {', '.join(choices)}")
        outside = isinstance(value, int | float) and (
            (low is not None and value < low) or (high is not None and value > high)
        )
        return _wrong(value, bounds) if outside else None

    return check


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type; true and false are no numbers, and no number is infinite or huge."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and -_LARGEST < value < _LARGEST
    if isinstance(value, float):
        return kind is float and math.isfinite(value)
    return isinstance(value, kind)


def _join(name: str, rest: str) -> str:
    return f"{name}.{rest}" if name and rest and not rest.startswith("[") else name + rest


def _wrong(value: Any, wanted: str) -> tuple[str, str]:
    return "", f"is {_short(value, quoted=True)}, not {wanted}"


def _short(value: Any, *, quoted: bool = False) -> str:
    """Return a value as text of bounded length, without writing out all of a long one."""
    if isinstance(value, dict | list | tuple) and value:
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST:
        return "a huge number"
    cut = value[: _SHOWN + 1] if isinstance(value, str) else value
    text = repr(cut) if quoted else str(cut)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
