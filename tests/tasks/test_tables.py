"""Every format is read as the same table, and the error for a bad file is one sentence with the remedy."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapterbank.errors import DataError, InputError
from adapterbank.tasks.tables import READERS, Table, read_lines, read_table, table_from

ROWS = [{"text": "good, really", "label": "pos"}, {"text": 'so "bad"\nit is', "label": "neg"}]
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
COLUMNS = {"text": ["good, really", 'so "bad"\nit is'], "label": ["pos", "neg"]}


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file byte by byte, line ends as given."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_csv(path: Path, rows: list[dict[str, str]], **options: Any) -> Path:
    """Write a CSV file as the standard library does."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_all_formats_are_read_as_the_same_table(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    paths = [
        write_csv(tmp_path / "a.csv", ROWS),
        write_csv(tmp_path / "unix.CSV", ROWS, lineterminator="\n"),
        write(tmp_path, "a.jsonl", lines),
        write(tmp_path, "a.ndjson", lines + "\n\n"),
        write(tmp_path, "a.json", json.dumps(ROWS)),
        write(tmp_path, "a.jsonl.gz", gzip.compress(lines.encode())),
        write(tmp_path, "data.json", json.dumps({"data": ROWS})),
    ]
    pyarrow.parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "a.parquet")
    for path in [*paths, tmp_path / "a.parquet"]:
        table = read_table(path)
        assert table.columns == COLUMNS, path
        assert (table.rows, table.source) == (2, str(path))
        assert read_table(str(path)) == table


def test_a_byte_order_mark_crlf_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", b"\xef\xbb\xbf\r\ntext, label\r\ngut,1\r\n\r\n\r\nschlecht,0\r\n\r\n")
    assert read_table(path).columns == {"text": ["gut", "schlecht"], "label": ["1", "0"]}


def test_tsv_keeps_stray_quotes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", 'sentence\tlabel\n"unclosed\t1\nhe said "no"\t0\n""\t1\n')
    assert read_table(path).columns["sentence"] == ['"unclosed', 'he said "no"', '""']


def test_very_long_fields_are_read(tmp_path: Path) -> None:
    text = "word " * 50_000
    assert read_table(write(tmp_path, "a.csv", f"text\n{text}\n")).columns["text"] == [text]


def test_in_a_single_column_a_blank_line_is_a_row(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, "a.tsv", "text\na\n\nb\n")).columns["text"] == ["a", "", "b"]


def test_columns_without_a_name_get_one(tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path, "a.csv", ",text\n0,hi\n")).columns) == ["column1", "text"]


def test_json_rows_may_lack_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n{"label": 1, "text": "b"}\n')
    assert read_table(path).columns == {"text": ["a", "b"], "label": [None, 1]}


def test_squad_files_become_one_row_for_each_question(tmp_path: Path) -> None:
    asked = {"id": "1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]}
    article = {"title": "T", "paragraphs": [{"context": "Ann is.", "qas": [asked]}]}
    table = read_table(write(tmp_path, "a.json", json.dumps({"version": "1.1", "data": [article]})))
    assert table.columns["question"] == ["Who?"]
    assert table.columns["context"] == ["Ann is."]
    assert table.columns["answers"] == [{"text": ["Ann"], "answer_start": [0]}]


BAD_FILES: list[tuple[str, str | bytes, str]] = [
    ("empty.csv", "", "is empty; it needs rows"),
    ("blank.tsv", "\n \n", "is empty"),
    ("empty.jsonl", "", "is empty"),
    ("empty.parquet", b"", "is empty"),
    ("header.csv", "text,label\n", r"has columns \(text, label\) but no rows"),
    ("header.tsv", "text\tlabel\r\n", "but no rows"),
    ("none.json", "[]", "has no rows"),
    (
        "long.csv",
        'text,label\na,1\n"b\nc",1\nd,e,1\n',
        r"line 5: 3 fields, but the header has 2; quote a text",
    ),
    (
        "short.tsv",
        "text\tlabel\na\t1\nb\n",
        "line 3: 1 field, but the header has 2; a text must not contain a tab",
    ),
    ("open.csv", 'text,label\na,1\n"b,1\nc,1\n', "line 3: unexpected end of data; close every quote"),
    ("odd.csv", 'text,label\n"a" b,1\n', "line 2: .*; close every quote"),
    ("twice.csv", "text,text\na,b\n", "has two columns named 'text'"),
    ("semi.csv", "text;label\na;b;1\n", "line 2: 3 fields, .* contains ';', or state the separator with --sep"),
    ("two.csv", "a;b,c\nd;e,f\n", "may separate its fields with ',' or ';'; state which with --separator"),
    ("again.csv", "text,label\na,1\ntext,label\nb,0\n", "line 3 repeats the header; remove that line"),
    (
        "packed.csv",
        gzip.compress(b"text,label\nok,1\n", mtime=0),
        r"packed\.csv is compressed with gzip, but its name does not end in \.gz; decompress or rename it\.",
    ),
    (
        "russian.csv",
        "text,label\nok,1\nхорошо,1\nочень плохо,0\n".encode("cp1251"),
        r"not UTF-8: byte 16 \(line 3\) is 0xf5.*iconv -f",
    ),
    ("broken.csv", "text,label\ncafé,1\nthé,1\n".encode() + b"\xe9t,1\n", r"not UTF-8: byte 26 \(line 4\)"),
    ("wide.csv", "text,label\n".encode("utf-16"), "but no rows"),
    ("cut.csv", "text,label\na,1\n".encode("utf-16")[:-1], "begins as UTF-16, but byte 30 does not fit"),
    ("nul.csv", b"text,label\na\0b,1\n", "NUL byte on line 2"),
    ("nul.jsonl", b'{"text": "a"}\n\0\n', "NUL byte on line 2"),
    (
        "bad.jsonl",
        '{"text": "a"}\n\n{"text": oops}\n',
        r"line 3, column 10: not valid JSON, expecting value, near 'oops",
    ),
    ("list.jsonl", '{"text": "a"}\n[1, 2]\n', r"line 2: \[1, 2\] is not a JSON object"),
    ("bad.json", '[{"text": "a"},\n {"text" 1}]', "line 2, column 10: not valid JSON"),
    ("scalar.json", "3", "is not a list of objects"),
    ("columns.json", '{"text": ["a"], "label": [1, 2]}', "nor an object of columns of the same length"),
    ("object.json", '{"text": "a"}', "is neither a list of objects nor"),
    ("rows.json", '[{"text": "a"}, 7]', "row 2: 7 is not a JSON object"),
    ("deep.json", "[" * 100_000, "JSON"),
    ("paragraphs.json", '[{"paragraphs": [1]}]', "is not nested like SQuAD; write lists of objects"),
    ("questions.json", '[{"paragraphs": [{"qas": null}]}]', "is not nested like SQuAD"),
    ("digits.jsonl", '{"a": ' + "1" * 5000 + "}", "line 1: this JSON cannot be used"),
    ("fake.parquet", "text,label\na,1\n", "cannot be read as a Parquet file"),
    ("cut.parquet", b"PAR1" + b"x" * 40 + b"PAR1", "cannot be read as a Parquet file"),
    ("a.xlsx", b"PK", r"extension '.xlsx', which is not one of .csv, .tsv, .jsonl, .ndjson, .json, .parquet"),
    ("noending", "text\n", "has the extension ''"),
    ("a.csv.gz", "text\na\n", "cannot be decompressed .*; compress it again"),
    ("cut.csv.gz", gzip.compress(b"text\na\n", mtime=0)[:-6], "cannot be decompressed"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD_FILES, ids=[row[0] for row in BAD_FILES])
def test_a_bad_file_is_one_clear_sentence(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=says) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_suggests_similar_names(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", "")
    with pytest.raises(DataError, match=r"There is no file .*trian.csv; did you mean train.csv\?"):
        read_table(tmp_path / "trian.csv")
    with pytest.raises(DataError, match=r"its folder contains: train.csv"):
        read_table(tmp_path / "q")
    with pytest.raises(DataError, match=r"and no folder .*nowhere"):
        read_table(tmp_path / "nowhere" / "a.csv")
    with pytest.raises(DataError, match="cannot be a file"):
        read_table("word " * 2000)


def test_a_folder_lists_its_tables(tmp_path: Path) -> None:
    write(tmp_path, "dev.parquet", "")
    write(tmp_path, "notes.md", "")
    with pytest.raises(DataError, match=r"is a folder; name a file in it: dev.parquet\.$"):
        read_table(tmp_path)


def test_blank_lines_of_a_text_file_are_kept(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path, "a.txt", "\ufeffone\r\n\r\ntwo\u2028still two\n")) == [
        "one",
        "",
        "two\u2028still two",
    ]


class Frame:
    """What pandas shows of a DataFrame."""

    def to_dict(self, orient: str = "dict") -> Any:
        """Return columns for `list`, as pandas does."""
        assert orient == "list"
        return {"text": ["a", float("nan")], 7: numpy.array([1, 2])}


class Dataset:
    """What `datasets` shows of a Dataset."""

    def to_dict(self, batch_size: int | None = None) -> Any:
        """Return columns."""
        return {"text": ("a", "b")}


class NAType:
    """Pandas' missing value, by its name."""


def test_python_data_of_every_shape_becomes_a_table() -> None:
    table = Table(COLUMNS)
    assert table_from(table) is table
    assert table_from(ROWS, source="rows") == Table(COLUMNS, "rows")
    assert table_from(COLUMNS) == table
    assert table_from([("a", 1), ["b", 0]]).columns == {"text": ["a", "b"], "label": [1, 0]}
    assert list(table_from([("a", "b", 1)]).columns) == ["text", "text_pair", "label"]
    assert table_from(Dataset()).columns == {"text": ["a", "b"]}
    assert table_from({"n": [NAType(), 1]}).columns == {"n": [None, 1]}


def test_arrays_and_frames_become_plain_values() -> None:
    columns = table_from(Frame()).columns
    assert list(columns) == ["text", "7"]
    assert columns["7"] == [1, 2]
    assert all(type(value) is int for value in columns["7"])
    nested = table_from([{"text": "a", "labels": numpy.array([0, 1])}]).columns["labels"]
    assert nested == [[0, 1]]


def test_a_path_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text\nhi\n")
    assert table_from(path) == table_from(str(path)) == read_table(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, "is a int; give a path"),
        (None, "is a NoneType"),
        ((row for row in ROWS), "is a generator"),
        (["just text"], "row 1: just text does not match the other rows"),
        ([("a", 1), ("b",)], "row 2: .*'b',.* does not match"),
        ([("a", 1), {"text": "b"}], "row 2"),
        ([("a", "b", "c", "d")], "row 1"),
        ({"text": "abc"}, "column 'text' is a str"),
        ({"text": 3}, "column 'text' is a int"),
        ({"text": ["a"], "label": [1, 2]}, r"differ in length .*'label': 2"),
        ([], "has no rows"),
        ({}, "has no rows"),
        ({"text": []}, "has no rows"),
    ],
)
def test_other_python_data_is_refused(data: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        table_from(data)


texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1)


@settings(max_examples=40, deadline=None, suppress_health_check=SHARED)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_any_text_round_trips_through_csv_jsonl_and_parquet(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    columns = {"text": [first for first, _ in rows], "label": [second for _, second in rows]}
    records = [{"text": first, "label": second} for first, second in rows]
    write_csv(tmp_path / "a.csv", records, quoting=csv.QUOTE_ALL)
    write(tmp_path, "a.jsonl", "\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert read_table(tmp_path / name).columns == columns


@settings(max_examples=150, deadline=None, suppress_health_check=SHARED)
@given(st.sampled_from(sorted(READERS)), st.binary(max_size=60))
def test_any_bytes_give_a_table_or_a_data_error(tmp_path: Path, ending: str, content: bytes) -> None:
    path = write(tmp_path, "any" + ending, content)
    with contextlib.suppress(DataError):
        assert read_table(path).rows > 0
