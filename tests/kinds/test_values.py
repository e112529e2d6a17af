"""Cell values: what counts as missing, as a number and as a text, whatever the file format."""

from __future__ import annotations

import math
from typing import Any

import pytest

from adapterbank.kinds.values import as_number, as_text, is_missing, listed, short


@pytest.mark.parametrize(("value", "number"), [("1e3", 1000.0), (".5", 0.5), ("5.", 5.0), (" 2 ", 2.0), (3, 3.0)])
def test_a_number_is_the_same_in_every_format(value: Any, number: float) -> None:
    assert as_number(value) == number


@pytest.mark.parametrize("value", ["", "1,5", "inf", None, True])
def test_words_and_booleans_are_not_numbers(value: Any) -> None:
    assert as_number(value) is None


def test_none_nan_and_whitespace_are_missing_and_nothing_else_is() -> None:
    missing: list[Any] = [None, "", " \t", math.nan]
    present: list[Any] = [0, False, "0", [], {}]
    assert all(map(is_missing, missing))
    assert not any(map(is_missing, present))


def test_the_text_of_a_cell_is_one_that_tokenizers_take() -> None:
    values: dict[Any, str] = {"a": "a", None: "", 7: "7", "\ud83d\ude00 \ud800": "😀 \ufffd"}
    assert {value: as_text(value) for value in values} == values


def test_messages_quote_the_first_names_and_cut_long_values() -> None:
    assert listed("abc") == "a, b, c"
    assert listed("abcd", 2) == "a, b, … (4 in all)"
    assert short("x" * 50) == "x" * 39 + "…"
    assert short(3) == "3"
