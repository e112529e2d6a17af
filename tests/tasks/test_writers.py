"""Tests of `adapterbank.tasks.writers`: what is written is read back by libraries that know nothing of it."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json

import pandas
import pyarrow.parquet
import pytest

from adapterbank.errors import DataError
from adapterbank.tasks import writers
from adapterbank.tasks.writers import ENCODERS, Compressed, OutputColumn, OutputLayout, value_type

LAYOUT = OutputLayout(
    [OutputColumn("t"), OutputColumn("n", "number"), OutputColumn("i", "integer"), OutputColumn("f", "flag"),
     OutputColumn("l", "texts")]
)  # fmt: skip
ROWS = [
    {"t": 'a "b", c\nd\te', "n": 0.1, "i": 3, "f": True, "l": ["x", "y"]},
    {"t": None, "n": None, "i": None, "f": None, "l": None},
    {"t": {"k": 1}, "n": 2, "i": 4, "f": False, "l": []},
]


def written(form, rows=ROWS, layout=LAYOUT, parts=1):
    encoder = ENCODERS[form](layout)
    return b"".join([encoder.encode(rows[i::parts]) for i in range(parts)]) + encoder.finish()


def test_csv_has_one_record_for_each_row():
    header, *rows = csv.reader(io.StringIO(written("csv").decode()))
    assert header == ["t", "n", "i", "f", "l"]
    assert rows == [['a "b", c\nd\te', "0.1", "3", "true", "x|y"], [""] * 5, ['{"k": 1}', "2", "4", "false", ""]]


def test_csv_keeps_line_ends_within_texts():
    rows = [{"t": text} for text in ("a\rb", "a\r\nb", "\n", '"\r', "a,b")]
    _, *found = csv.reader(io.StringIO(written("csv", rows).decode(), newline=""))
    assert [row[0] for row in found] == [row["t"] for row in rows]


def test_tsv_has_one_line_for_each_row():
    lines = written("tsv").decode().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["t", 'a "b", c d e', "", '{"k": 1}']


def test_the_separator_of_the_input_is_kept():
    assert written("csv", layout=OutputLayout(LAYOUT.columns, ";")).startswith(b"t;n;i;f;l\n")


def test_json_lines_hold_what_a_row_has_and_no_numbers_that_json_lacks():
    rows = [{"a": [1, {"b": None}], "c": "\x1b[31m\x9b"}, {"a": float("nan")}, {"a": datetime.date(2026, 1, 2)}]
    text = written("jsonl", rows).decode()
    assert [json.loads(line) for line in text.splitlines()] == [rows[0], {"a": None}, {"a": "2026-01-02"}]
    assert not set("\x1b\x9b") & set(text)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_parquet_has_the_types_of_its_columns(monkeypatch, size):
    monkeypatch.setattr(writers, "_GROUP", size)
    found = pyarrow.parquet.read_table(io.BytesIO(written("parquet")))
    assert [str(field.type) for field in found.schema] == ["string", "double", "int64", "bool", "list<element: string>"]
    assert found.to_pylist() == [ROWS[0], ROWS[1], {**ROWS[2], "t": '{"k": 1}'}]
    with pytest.raises(DataError, match=r"Column 'i' does not have the same type in all rows .*write \.jsonl instead"):
        written("parquet", [{"i": "x"}])


def test_compressed_bytes_are_a_whole_file_after_each_part():
    encoder = Compressed(ENCODERS["csv"](LAYOUT))
    first = encoder.encode(ROWS[:1])
    assert len(pandas.read_csv(io.BytesIO(gzip.decompress(first)))) == 1
    assert len(pandas.read_csv(io.BytesIO(gzip.decompress(first + encoder.encode(ROWS[1:]) + encoder.finish())))) == 3


def test_types_follow_from_values():
    values = ([1, None], [1, 2.5], [True], [True, 1], ["a"], [None], [1, "a"], [[1]])
    assert [value_type(one) for one in values] == ["integer", "number", "flag", *["text"] * 5]
