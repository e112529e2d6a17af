"""Labels that `datasets` stores as numbers, with their names beside: the names take the place of the numbers.

A Parquet file of `datasets` has the names in its schema's metadata. That is JSON from outside: what does not have the
expected form is ignored, and the numbers stay.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_KEY = b"huggingface"
_LONGEST = 1 << 20
"""Bytes of metadata that are parsed: enough for tens of thousands of names."""
_LEVELS = 3
"""Lists in lists down to which names are looked for."""


def with_names(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a number, or those of the numbers in a list; -1 is a missing label.

    A number that has no name becomes a text, so that it is an unknown label instead of a missing one.
    """
    if isinstance(value, (list, tuple)):
        return [with_names(one, names) for one in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return names[value] if 0 <= value < len(names) else None if value == -1 else str(value)


def stored_names(schema: Any) -> dict[str, list[str]]:
    """Return the label names of each column of an Arrow schema that has numbers and states names for them."""
    data = (schema.metadata or {}).get(_KEY, b"")
    try:
        features = json.loads(data)["info"]["features"] if 0 < len(data) <= _LONGEST else None
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    if not isinstance(features, dict):
        return {}
    # Of two columns with one name the schema cannot return either; the readers refuse them.
    once = [name for name, count in Counter(schema.names).items() if count == 1 and name in features]
    found = {name: _names(features[name]) for name in once if _is_numbers(schema.field(name).type)}
    return {name: names for name, names in found.items() if names}


def named_schema(schema: Any, names: Mapping[str, Any]) -> Any:
    """Return the schema of the columns once these have their names."""
    import pyarrow

    for name in names:
        place = schema.get_field_index(name)
        schema = schema.set(place, pyarrow.field(name, _texts(schema.field(place).type)))
    return schema.remove_metadata() if names else schema


def _names(feature: Any) -> list[str]:
    """Return the names of a feature: a `ClassLabel`, or a list of them, whose `_type` depends on the release."""
    for _ in range(_LEVELS):
        if isinstance(feature, list) and len(feature) == 1:
            (feature,) = feature
        elif isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return names if len({*names}) == len(names) else []


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_numbers(kind: Any) -> bool:
    from pyarrow import types

    for _ in range(_LEVELS):
        kind = kind.value_type if _is_list(kind) else kind
    return bool(types.is_integer(kind))


def _texts(kind: Any) -> Any:
    import pyarrow

    return pyarrow.list_(_texts(kind.value_type)) if _is_list(kind) else pyarrow.string()
