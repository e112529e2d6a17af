"""Python data of every usual library is columns, and several splits may come in one object."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import pyarrow
import pytest

from adapterbank.errors import InputError
from adapterbank.tasks.python_data import columns_from, splits_from

COLUMNS = {"text": ["a", "b", "c", "d"], "label": ["x", "y", "x", "y"]}
FRAME = pandas.DataFrame(COLUMNS)
ROWS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]


class ClassLabel:
    """What `datasets` shows of a feature of class labels."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Sequence:
    """What `datasets` shows of a feature of lists."""

    def __init__(self, feature: Any) -> None:
        self.feature = feature


class HubDataset:
    """What `datasets` shows of a Dataset."""

    def __init__(self, columns: dict[str, list[Any]], **features: Any) -> None:
        self.values, self.features, self.column_names = columns, features, list(columns)

    def to_dict(self, batch_size: int | None = None) -> dict[str, list[Any]]:
        """Return the columns."""
        return self.values


class Series(list[Any]):
    """What polars shows of a column: a sequence without `tolist`."""

    def to_list(self) -> list[Any]:
        """Return plain values."""
        return list(self)


class PolarsFrame:
    """What polars shows of a DataFrame."""

    columns = ("text", "label")

    def to_dict(self, *, as_series: bool = True) -> dict[str, Series]:
        """Return columns."""
        return {"text": Series(["a", "b"]), "label": Series([Series(["x"]), Series([])])}


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME.astype("category"),
        FRAME.to_numpy(),
        FRAME.to_records(index=False),
        numpy.array(ROWS, dtype=object),
        (FRAME["text"], FRAME["label"]),
        (FRAME["text"].to_numpy(), FRAME["label"].tolist()),
        (COLUMNS["text"], COLUMNS["label"]),
        pyarrow.table(COLUMNS),
        {name: numpy.array(values) for name, values in COLUMNS.items()},
        tuple(ROWS),
    ],
    ids=lambda data: type(data).__name__,
)
def test_the_same_columns_come_from_every_form(data: Any) -> None:
    assert columns_from(data, "data") == COLUMNS


def test_labels_of_datasets_have_their_names() -> None:
    names = ClassLabel(["neg", "pos"])
    data = HubDataset({"text": ["a", "b", "c"], "label": [1, 0, -1]}, label=names)
    assert columns_from(data, "data")["label"] == ["pos", "neg", None]
    several = HubDataset({"text": ["a", "b"], "tags": [[0, 1], []]}, tags=Sequence(names))
    assert columns_from(several, "data")["tags"] == [["neg", "pos"], []]


def test_columns_of_polars_become_plain_values() -> None:
    assert columns_from(PolarsFrame(), "data") == {"text": ["a", "b"], "label": [["x"], []]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((["a", "b"], ["x", "y"]), "a tuple of lists, which may be rows or columns"),
        (pandas.DataFrame([[1, 2]], columns=["text", "text"]), "two columns named 'text'"),
        (numpy.array(["a", "b"]), "row 1: a does not match"),
        (numpy.float64(3.0), "is a float"),
        ((numpy.array(["a"]), numpy.array(["x", "y"])), "columns differ in length"),
    ],
)
def test_what_may_be_read_in_two_ways_is_refused(data: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        columns_from(data, "data")


def test_splits_may_come_in_one_object() -> None:
    assert splits_from(train=ROWS, dev=None, test=None) == {"train": ROWS}
    given = {"train": FRAME, "validation": "dev.csv", "test": ROWS}
    found = splits_from(train=given, dev=None, test=None)
    assert found == {"train": FRAME, "dev": "dev.csv", "test": ROWS}
    assert list(splits_from(train={"train": ROWS}, dev=None, test=ROWS)) == ["train", "test"]


@pytest.mark.parametrize(
    ("train", "more", "says"),
    [
        ({"train": ROWS, "unsupervised": ROWS}, {}, "has the split 'unsupervised'; name splits train, dev"),
        ({"train": ROWS, "dev": ROWS, "validation": ROWS}, {}, "'dev' is given twice"),
        ({"train": ROWS, "test": ROWS}, {"test": ROWS}, "'test' is given twice"),
    ],
)
def test_splits_that_do_not_fit_are_explained(train: Any, more: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        splits_from(**{"train": train, "dev": None, "test": None, **more})
