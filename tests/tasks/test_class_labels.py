"""Names of labels in Parquet files of `datasets`: in place of numbers, in tables and in streams, or ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterbank.tasks.class_labels import named_schema, stored_names, with_names
from adapterbank.tasks.layouts import Parquet
from adapterbank.tasks.limits import TableLimits
from adapterbank.tasks.streams import open_stream
from adapterbank.tasks.tables import read_numbers, read_table
from adapterbank.tasks.writers import OutputColumn, OutputLayout, ParquetRows

TAGS = {"names": ["O", "B-PER", "I-PER"], "_type": "ClassLabel"}
COLUMNS: dict[str, list[Any]] = {
    "tokens": [["Ann", "left"], [], None],
    "ner_tags": [[1, 0], [], None],
    "label": [1, -1, 0],
    "count": [7, 8, 9],
}
NAMED = {**COLUMNS, "ner_tags": [["B-PER", "O"], [], None], "label": ["B-PER", None, "O"]}
FORMS = {
    "sequence": {"feature": TAGS, "_type": "Sequence"},
    "with a length": {"feature": TAGS, "length": -1, "_type": "Sequence"},
    "list": {"feature": TAGS, "_type": "List"},
    "large list": {"feature": TAGS, "_type": "LargeList"},
    "a list of one": [TAGS],
}


def features(**found: Any) -> bytes:
    return json.dumps({"info": {"features": found}}).encode()


def put(path: Path, metadata: bytes, columns: dict[str, Any] = COLUMNS) -> Path:
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"huggingface": metadata}), path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_names_take_the_place_of_numbers_in_tables_and_streams(tmp_path: Path, form: str) -> None:
    stated = features(tokens=[{"dtype": "string", "_type": "Value"}], ner_tags=FORMS[form], label=TAGS, gone=TAGS)
    path = put(tmp_path / "a.parquet", stated)
    assert read_table(path).columns == read_table(path, TableLimits()).columns == NAMED
    assert read_numbers(path).columns == COLUMNS
    with open_stream(path) as stream:
        rows = [row.values for row in stream.rows]
        assert {name: [row[name] for row in rows] for name in NAMED} == NAMED
        assert stream.columns == tuple(COLUMNS)
        layout = OutputLayout([OutputColumn(name) for name in COLUMNS], schema=stream.schema)
    encoder = ParquetRows(layout)
    (tmp_path / "b.parquet").write_bytes(encoder.encode(rows) + encoder.finish())
    assert read_table(tmp_path / "b.parquet").columns == NAMED


def test_a_number_without_a_name_is_an_unknown_label_and_not_a_missing_one() -> None:
    assert with_names([0, 2, -1, -2, None, True, 1.5], ["a", "b"]) == ["a", "2", None, "-2", None, True, 1.5]
    assert with_names([[0], [[1]]], ["a", "b"]) == [["a"], [["b"]]]


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"info": {"features": 1}}',
        b'{"info": {"features": "label"}}',
        b'{"info": {"features": ["label"]}}',
        features(label=None, ner_tags=[]),
        features(label={"names": "ab", "_type": "ClassLabel"}),
        features(label={"names": ["a", 1], "_type": "ClassLabel"}),
        features(label={"names": ["a", "a"], "_type": "ClassLabel"}),
        features(label={"names": [["a"]], "_type": "ClassLabel"}),
        features(label={"names": ["a", "b"], "_type": "Value"}),
        features(tokens=FORMS["list"]),  # texts, and no numbers
        features(label=TAGS) + b" " * (1 << 20),
    ],
)
def test_metadata_of_another_form_is_ignored(tmp_path: Path, metadata: bytes) -> None:
    path = put(tmp_path / "a.parquet", metadata)
    assert read_table(path).columns == read_table(path, TableLimits()).columns == COLUMNS
    with open_stream(path) as stream:
        assert [row.values["label"] for row in stream.rows] == COLUMNS["label"]


JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["ClassLabel", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["names", "feature", "_type"]), inner),
)


@given(JSON)
def test_no_metadata_crashes(feature: Any) -> None:
    schema = pyarrow.schema({"x": pyarrow.int8()}, metadata={b"huggingface": features(x=feature)})
    names = stored_names(schema)
    assert named_schema(schema, names).field("x").type in (pyarrow.int8(), pyarrow.string())


def test_the_catalog_keeps_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    path = put(tmp_path / "x" / "train.parquet", features(label=TAGS), {"text": ["a", "b"], "label": [1, 0]})
    layout = Parquet(("no", "yes"))
    assert layout.read({"train": [path]}, ("text",))["train"].columns["label"] == ["yes", "no"]
