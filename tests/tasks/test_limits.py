"""Claims about `adapterbank.tasks.limits`: a small file that stands for a large table is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pyarrow.parquet
import pytest

from adapterbank.errors import DataError
from adapterbank.tasks.limits import TableLimits
from adapterbank.tasks.tables import read_table

LIMITS = TableLimits(rows=100, columns=10, text=1000, memory=100_000)
GOOD = [{"text": f"text {i}", "label": i % 2} for i in range(100)]


def csv(folder, content):
    (folder / "t.csv").write_text(content)
    return folder / "t.csv"


def raw(folder, content):
    (folder / "t.csv").write_bytes(content)
    return folder / "t.csv"


def jsonl(folder, rows):
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "t.jsonl"


def parquet(folder, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet", compression="zstd", **options)
    return folder / "t.parquet"


def plain_json(folder, content):
    (folder / "t.json").write_text(content)
    return folder / "t.json"


def packed(folder, content):
    (folder / "t.csv.gz").write_bytes(gzip.compress(content.encode()))
    return folder / "t.csv.gz"


HOSTILE = {
    "csv: columns": (lambda folder: csv(folder, ",".join(map(str, range(11))) + "\n"), "more than 10 columns"),
    "csv: rows": (lambda folder: csv(folder, "a,b\n" + "1,2\n" * 101), "more than 100 rows"),
    "csv: text": (lambda folder: csv(folder, "a,b\n" + "x" * 1001 + ",y"), "a text of more than 1,000 characters"),
    "csv: many texts": (lambda folder: csv(folder, "a,b\n" + ("x" * 990 + ",y\n") * 95), "more than 100,000 bytes"),
    "csv: fields of a record": (
        lambda folder: csv(folder, "a,b\n" + "," * 5000),
        "a row of more than 4,000 characters",
    ),
    "csv: fields over quoted lines": (
        lambda folder: csv(folder, "a,b\n" + ((",x" * 500) + ',"\n"') * 20),
        "a row of more than",
    ),
    "csv: width of characters": (
        lambda folder: csv(folder, "a,b\n" + ("x" * 500 + ",y\n") * 60 + "\U0001f600,y"),
        "more than 100,000 bytes",
    ),
    "csv: UTF-16": (
        lambda folder: raw(folder, ("a,b\n" + "xy,z\n" * 9000).encode("utf-16")),
        "more than 100,000 bytes",
    ),
    "csv: Windows-1252": (
        lambda folder: raw(folder, ("a,b\n" + "né,on\n" * 6500).encode("cp1252")),
        "more than 100,000 bytes",
    ),
    "json: columns": (
        lambda folder: plain_json(folder, json.dumps({"a": ["x"] * 101, "b": ["y"] * 101})),
        "more than 100 rows",
    ),
    "gzip": (lambda folder: packed(folder, "a,b\n" + "\n" * 10**6), "more than 100,000 bytes"),
    "jsonl: rows": (lambda folder: jsonl(folder, [{"a": 1}] * 101), "more than 100 rows"),
    "jsonl: keys of a row": (lambda folder: jsonl(folder, [{str(i): 1 for i in range(11)}]), "more than 10 columns"),
    "jsonl: keys of all rows": (lambda folder: jsonl(folder, [{str(i): 1} for i in range(11)]), "more than 10 columns"),
    "jsonl: text": (lambda folder: jsonl(folder, [{"a": ["x" * 1001]}]), "a text of more than 1,000 characters"),
    "jsonl: row": (lambda folder: jsonl(folder, [{"a": [[]] * 5000}]), "a row of more than 4,000 characters"),
    "jsonl: values": (lambda folder: jsonl(folder, [{"a": [[]] * 900}] * 20), "more than 100,000 bytes"),
    "jsonl: levels": (lambda folder: jsonl(folder, [{"a": json.loads("[" * 40 + "]" * 40)}]), "more than 32 levels"),
    "parquet: rows": (lambda folder: parquet(folder, {"a": [1] * 101}), "more than 100 rows"),
    "parquet: columns": (lambda folder: parquet(folder, {str(i): [1] for i in range(11)}), "more than 10 columns"),
    "parquet: one text in all rows": (
        lambda folder: parquet(folder, {"a": ["x" * 1000] * 100}),
        "more than 100,000 bytes",
    ),
    "parquet: nested texts": (
        lambda folder: parquet(folder, {"a": [{"b": ["x" * 1000] * 100}]}),
        "more than 100,000 bytes",
    ),
    "parquet: text": (lambda folder: parquet(folder, {"a": ["x" * 1001]}), "a text of more than 1,000 characters"),
    "parquet: values": (lambda folder: parquet(folder, {"a": [[7] * 50_000]}), "more than 100,000 bytes"),
    "parquet: prefixes": (
        lambda folder: parquet(
            folder, {"a": ["x" * 1000] * 100}, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"}
        ),
        "cannot be read as a Parquet file",
    ),
    "parquet: wide values": (
        lambda folder: parquet(folder, {"a": pyarrow.array([b"x" * 900] * 9, pyarrow.binary(900))}),
        "900 bytes",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_table_beyond_its_limits_is_refused_in_one_sentence(tmp_path, name):
    write, message = HOSTILE[name]
    with pytest.raises(DataError, match=message) as caught:
        read_table(write(tmp_path), LIMITS)
    assert "\n" not in str(caught.value)


ROOMY = TableLimits(rows=20_000, columns=1_000, text=100_000, memory=2_000_000)
COSTLY = {
    "new keys after many rows": lambda folder: jsonl(
        folder, [*[{"t": 1}] * 10_000, {f"k{number}": 1 for number in range(900)}]
    ),
    "too many new keys after many rows": lambda folder: jsonl(
        folder, [*[{"t": 1}] * 10_000, {f"k{number}": 1 for number in range(9_000)}]
    ),
    "a header of empty names": lambda folder: csv(folder, "," * 390_000 + "\n1\n"),
    "JSON of empty objects": lambda folder: plain_json(folder, "[" + "{}," * 300_000 + "{}]"),
    "JSON of lists": lambda folder: plain_json(folder, '[{"a": [' + "[]," * 300_000 + "1]}]"),
    "JSON of numbers": lambda folder: plain_json(folder, '[{"a": [' + "300," * 300_000 + "1]}]"),
    "JSON of small objects": lambda folder: plain_json(folder, "[" + '{"a":1},' * 100_000 + "{}]"),
    "questions of SQuAD": lambda folder: plain_json(folder, '[{"paragraphs": [{"qas": [' + "{}," * 15_000 + "{}]}]}]"),
    "an emoji among letters": lambda folder: csv(folder, "a,b\n" + ("x" * 999 + ",y\n") * 1_900 + "\U0001f600,y"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_nothing_is_built_before_it_is_counted(tmp_path, name):
    path = COSTLY[name](tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than"):
            read_table(path, ROOMY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * ROOMY.memory


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".json", ".jsonl", ".parquet"])
def test_under_limits_only_a_regular_file_is_read(tmp_path, ending):
    path = tmp_path / f"pipe{ending}"
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        read_table(path, LIMITS)


def test_without_limits_a_pipe_is_read(tmp_path):
    path = tmp_path / "pipe.csv"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_text, "a,b\n1,2\n")
        assert read_table(path).columns == {"a": ["1"], "b": ["2"]}


def test_a_table_within_its_limits_is_read_as_without_them(tmp_path):
    rows = [{**row, "tags": ["a", "b"], "more": {"x": 1.5, "y": None}} for row in GOOD]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for file in (jsonl(tmp_path, rows), parquet(tmp_path, columns), csv(tmp_path, "a,b\n" + '"x\ny",z\r\n' * 100)):
        assert read_table(file, LIMITS) == read_table(file)


def test_what_the_footer_hides_is_counted_while_reading(tmp_path, monkeypatch):
    from adapterbank.tasks import parquet as reader

    monkeypatch.setattr(reader, "_check_footer", lambda footer, budget: ["a"])
    for column, message in ((["x"] * 101, "more than 100 rows"), (["x" * 1000] * 100, "more than 100,000 bytes")):
        with pytest.raises(DataError, match=message):
            read_table(parquet(tmp_path, {"a": column}), LIMITS)


def test_a_million_columns_are_looked_through_once(tmp_path):
    names = [f"c{i}" for i in range(10**6)]
    assert read_table(csv(tmp_path, ",".join(names) + "\n" + "," * (10**6 - 1))).rows == 1
    with pytest.raises(DataError, match="two columns named 'c7'"):
        read_table(csv(tmp_path, ",".join([*names, "c7"]) + "\n"))
