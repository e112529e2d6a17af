"""Claims about `adapterbank.schema`: a dataclass is its own schema, and a message is short whatever the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterbank import schema
from adapterbank.config import Config
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.storage.package import Manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Inside(TypedDict):
    """A mapping with a field that may be absent."""

    count: Annotated[int, {"low": 0}]
    note: NotRequired[str | None]


@dataclass(frozen=True)
class Sample:
    """One field of each sort."""

    name: str
    parts: tuple[int, ...] = schema.limited((), low=0, high=9)
    share: float = 0.5
    color: str = schema.limited("red", choices=("red", "blue"))
    inside: Annotated[dict[str, Any], Inside] | None = None
    table: dict[str, list[float]] | None = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"unknown": 1}, None),
        ({"share": 1}, None),
        ({"inside": {"count": 3}}, None),
        ({"inside": {"count": 3, "note": None}}, None),
        ({"table": {"a": [1, 2.5]}}, None),
        ({"name": None}, "name is None, not text"),
        ({"name": ...}, "name is missing"),
        ({"share": float("nan")}, "share is nan, not a finite number"),
        ({"share": True}, "share is True, not a finite number"),
        ({"share": 10**400}, "share is a huge number, not a finite number"),
        ({"parts": 3}, "parts is 3, not a list"),
        ({"parts": [1, 10]}, "parts[1] is 10, not from 0 to 9"),
        ({"parts": [1, 1]}, "parts has an item twice"),
        ({"color": "green"}, "color is 'green', not one of red, blue"),
        ({"inside": {}}, "inside.count is missing"),
        ({"inside": {"count": -1}}, "inside.count is -1, not at least 0"),
        ({"inside": []}, "inside is [], not a mapping"),
        ({"table": {"a": [1, "b"]}}, "table.a[1] is 'b', not a finite number"),
    ],
)
def test_the_first_field_that_does_not_fit_is_named(change: dict[str, Any], problem: str | None) -> None:
    value = {key: item for key, item in ({"name": "x"} | change).items() if item is not ...}
    assert schema.problem(Sample, value) == problem


@given(JSON)
def test_no_value_makes_the_check_fail_or_talk_long(value: Any) -> None:
    for kind in (Sample, Manifest):
        found = schema.problem(kind, value)
        assert found is None or len(found) < 300


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(schema.problem(Sample, {"name": "x", "color": "g" * 10**6}) or "") < 200


def test_an_addition_in_a_file_has_the_limits_of_the_options_of_a_run() -> None:
    high = Config.__dataclass_fields__["depth"].metadata["high"]
    assert schema.problem(Adapter, {"depth": high}) is None
    assert schema.problem(Adapter, {"depth": 10**8}) == f"depth is 100000000, not from 1 to {high}"
    assert schema.problem(Adapter, {"activation": "sine"}) is not None
