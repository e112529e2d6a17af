"""Label names: one spelling in every file format, one order for the same set of names."""

from __future__ import annotations

from typing import Any

import pytest

from adapterbank.errors import InputError
from adapterbank.kinds.labels import check_index, in_order, label_name
from adapterbank.kinds.multilabel import cell_labels


@pytest.mark.parametrize(
    ("name", "values"),
    [("1", (1, 1.0, "1", " 1.0 ")), ("true", (True, "True")), ("0.5", (0.5, "0.5")), ("x", ("x ",))],
)
def test_a_label_has_one_name_in_every_format(name: str, values: tuple[Any, ...]) -> None:
    assert {label_name(value) for value in values} == {name}


def test_numbers_are_ordered_by_size_and_words_by_appearance() -> None:
    assert in_order(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert in_order(["b", "a", "b"]) == ("b", "a")
    assert in_order(["true", "false"]) == ("false", "true")


def test_a_multilabel_cell_is_a_list_or_names_between_bars() -> None:
    assert cell_labels("a | b|") == ["a", "b"]
    assert cell_labels(["a", None, 2.0]) == ["a", "2"]
    assert cell_labels(3) == ["3"]


def test_an_index_is_checked_against_the_number_of_labels() -> None:
    assert check_index(1, 2, "Target 1") == 1
    with pytest.raises(InputError, match=r"Target 1 is 2, not the index of a label \(0 to 1\)"):
        check_index(2, 2, "Target 1")
