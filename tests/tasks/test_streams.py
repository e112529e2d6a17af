"""Tests of `adapterbank.tasks.streams`: the rows of a file are those of `read_table`, one by one."""

from __future__ import annotations

import csv
import gzip
import io
import random

import pyarrow
import pyarrow.parquet
import pytest

from adapterbank.errors import DataError
from adapterbank.tasks import streams, text_rows
from adapterbank.tasks.streams import as_table, chunks, format_of, open_stream
from adapterbank.tasks.tables import read_table
from small_data import write

TEXTS = ["plain", "a, comma", 'a "quote"', "two\nlines", "", "日本語 🙂", "tab\tinside", " blanks "]


def rows_of(source, **options):
    with open_stream(source, **options) as stream:
        return [(row.number, row.values, row.problem) for row in stream.rows]


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "jsonl", "ndjson", "jsonl.gz", "json", "parquet"])
def test_a_stream_has_the_rows_of_the_table(tmp_path, ending):
    file = write(tmp_path / f"in.{ending}", list(enumerate(TEXTS)), ("id", "text"))
    with open_stream(file) as stream:
        found = as_table(list(stream.rows), str(file))
    assert found.columns == read_table(file).columns


@pytest.mark.parametrize("seed", range(20))
def test_random_tables_come_back_as_the_csv_module_wrote_them(tmp_path, seed):
    draw = random.Random(seed)
    width = draw.randint(2, 4)
    cells = [*TEXTS, '"', '""', "\r\n", "x\ry", "1;2|3"]
    rows = [[draw.choice(cells) for _ in range(width)] for _ in range(draw.randint(1, 40))]
    text = io.StringIO()
    # With "\n" alone the csv module does not quote a text that contains "\r".
    style = {"lineterminator": "\n", "quoting": csv.QUOTE_ALL} if seed % 3 else {}
    csv.writer(text, **style).writerows([[f"c{i}" for i in range(width)], *rows])
    (tmp_path / "in.csv").write_bytes(text.getvalue().encode("utf-8-sig" if seed % 2 else "utf-8"))
    assert [list(values.values()) for _, values, problem in rows_of(tmp_path / "in.csv") if not problem] == rows


@pytest.mark.parametrize("text", ["text\na\n\nb\n\n\n", "text\r\na\r\n\r\nb", "\n\ntext\na\n\nb\n"])
def test_blank_lines_of_one_column_are_rows_except_at_the_end(tmp_path, text):
    (tmp_path / "in.csv").write_text(text, newline="")
    assert [values["text"] for _, values, _ in rows_of(tmp_path / "in.csv")] == ["a", "", "b"]
    assert read_table(tmp_path / "in.csv").columns == {"text": ["a", "", "b"]}


def test_a_line_without_end_is_one_bad_row_and_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "LONGEST", 1000)
    long = "x" * 5000
    (tmp_path / "in.txt").write_text(f"a\n{long}\nb\n")
    assert [(n, bool(problem)) for n, _, problem in rows_of(tmp_path / "in.txt")] == [(1, False), (2, True), (3, False)]
    (tmp_path / "in.jsonl").write_text(f'{{"t": 1}}\n{{"t": "{long}"}}\n{{"t": 2}}\n')
    assert [bool(problem) for _, _, problem in rows_of(tmp_path / "in.jsonl")] == [False, True, False]
    (tmp_path / "in.csv").write_text(f'a,b\n1,2\n3,"{long}"\n4,5\n6,"{"y " * 400}\n{"z " * 400}\n7,8\n')
    found = rows_of(tmp_path / "in.csv")
    assert [n for n, _, problem in found if problem] == [3, 5, 6]
    assert found[-1] == (7, {"a": "7", "b": "8"}, "")


def test_chunks_are_bounded_in_rows_and_in_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_ROWS", 3)
    monkeypatch.setattr(streams, "CHUNK_CHARACTERS", 10)
    (tmp_path / "in.txt").write_text("\n".join(["a", "b", "c", "d", "e" * 20, "f"]))
    with open_stream(tmp_path / "in.txt") as stream:
        assert [[row.number for row in chunk] for chunk in chunks(stream.rows)] == [[1, 2, 3], [4, 5], [6]]


def test_the_position_reaches_the_total(tmp_path):
    for ending in ("csv", "csv.gz", "parquet"):
        file = write(tmp_path / f"in.{ending}", [(i, "the cat") for i in range(5000)], ("id", "text"))
        with open_stream(file) as stream:
            assert stream.position() <= stream.total
            for _ in stream.rows:
                pass
            assert stream.position() == stream.total
    with open_stream(io.BytesIO(b"a\nb\n")) as stream:
        assert stream.total is None


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("in.csv", b"", "is empty"),
        ("in.csv", b"\n\n", "is empty"),
        ("in.csv", b"a,a\n1,2\n", "two columns named 'a'"),
        ("in.csv", b'"a,b\n1,2\n', "close every quote"),
        ("in.csv", b"\xe9,b\n1,2\n", "byte 0xe9 is not UTF-8"),
        ("in.csv", gzip.compress(b"a,b\n1,2\n", mtime=0), "does not end in .gz"),
        ("in.csv.gz", b"a,b\n1,2\n", "cannot be decompressed"),
        ("in.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 10**6, mtime=0)[:-20], "cannot be decompressed"),
        ("in.parquet", b"PAR1", "cannot be read as a Parquet file"),
        ("in.xlsx", b"x", "'.xlsx', which is not one of"),
    ],
)
def test_what_concerns_the_whole_file_is_refused_in_one_sentence(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=reason) as caught:
        rows_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_pairs_on_lines_need_one_tab():
    found = rows_of(io.BytesIO(b"a\tb\nc\nd\te\tf\n"), line_columns=("first", "second"))
    assert found[0] == (1, {"first": "a", "second": "b"}, "")
    assert [problem.partition(";")[0] for _, _, problem in found[1:]] == ["0 tabs", "2 tabs"]


def test_a_parquet_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_ROWS", 10)
    table = pyarrow.table({"text": [str(i) for i in range(95)]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=40)
    with open_stream(tmp_path / "in.parquet") as stream:
        next(stream.rows)
        assert stream.position() <= 10
        assert [row.number for row in stream.rows] == list(range(2, 96))


def test_formats_follow_from_extensions():
    found = {name: format_of(name) for name in ("A.CSV", "a.tsv.gz", "a.b.ndjson", "a.txt", "a", "a.gz", "a.doc")}
    assert list(found.values()) == ["csv", "tsv", "jsonl", "lines", None, None, None]


@pytest.mark.parametrize("name", ["a.conll", "a.iob", "a.bio.gz", "a.conllu"])
def test_sentences_are_rows_of_words(tmp_path, name):
    word = "1\tAnn\tAnn\tPROPN\tNNP\t_\t0\troot\t_\t_" if name == "a.conllu" else "Ann\tB-PER"
    data = f"{word}\n\n# no\n\n{word}\n{word}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    table = read_table(tmp_path / name)
    with open_stream(tmp_path / name) as stream:
        rows = list(stream.rows)
        assert (stream.columns, stream.total) == (tuple(table.columns), 2)
        assert stream.at(2) == f"{tmp_path / name}, row 2"
        assert (stream.text.notes if stream.text else ()) == table.notes
    assert [row.values["tokens"] for row in rows] == [["Ann"], ["Ann", "Ann"]]
    assert as_table(rows, "").columns == table.columns


def test_a_chunk_counts_the_characters_of_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_CHARACTERS", 10)
    (tmp_path / "a.conll").write_text("abcd\tO\n\nabcd\tO\nabcd\tO\n\na\tO\n")
    with open_stream(tmp_path / "a.conll") as stream:
        assert [len(chunk) for chunk in chunks(stream.rows)] == [2, 1]
