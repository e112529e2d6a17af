"""Promise: `predict` writes the rows that it read, in order, with answers beside them; bad rows stop nothing."""

from __future__ import annotations

import csv
import gzip
import io
import json
import signal
import subprocess
import time

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import DataError, InputError
from adapterbank.inference import rows as token_rows
from adapterbank.tasks import streams, writers
from small_data import COMMAND, process, reviews, shell, write

ROWS = [(i, text, 'x,"y"\nz' if i == 2 else "plain") for i, (text, _) in enumerate(reviews(11))]
COLUMNS = ("id", "text", "note")
LONG = "the cat was good " * 30
READ = {
    "csv": lambda path: pandas.read_csv(path, keep_default_na=False, dtype=str),
    "tsv": lambda path: pandas.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False, dtype=str),
    "jsonl": lambda path: pandas.read_json(path, lines=True, dtype=False),
    "parquet": pandas.read_parquet,
}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_ROWS", 4)
    monkeypatch.setattr(writers, "_GROUP", 5)


def run(*words, task="sentiment", code=0, **options):
    found = shell("predict", "--bank", "bank", *(["--task", task] if task else []), *words, **options)
    assert found.code == code, found
    return found


def expected(task, texts):
    return [one.to_json() for one in open_bank("bank", device="cpu").predict(task, texts)]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "csv.gz"])
@pytest.mark.parametrize("given", ["csv", "jsonl", "parquet", "json", "jsonl.gz"])
def test_rows_keep_their_columns_and_order_in_every_format(here, small_chunks, given, ending):
    run(write(here / f"in.{given}", ROWS, COLUMNS), "--output", f"out.{ending}")
    found = READ[ending.removesuffix(".gz")](here / f"out.{ending}")
    assert [str(one) for one in found["id"]] == [str(i) for i in range(11)]
    assert list(found["text"]) == [text for _, text, _ in ROWS]
    breaks = 'x,"y" z' if ending == "tsv" else ROWS[2][2]
    assert list(found["note"]) == [breaks if i == 2 else "plain" for i in range(11)]
    told = expected("sentiment", [text for _, text, _ in ROWS])
    assert list(found["label"]) == [one["label"] for one in told]
    if ending == "jsonl":
        assert list(found.columns) == [*COLUMNS, "label", "probabilities"]
    else:
        assert list(found.columns) == [*COLUMNS, "label", "probability", "truncated", "error"]
        likely = [one["probabilities"][one["label"]] for one in told]
        assert [float(one) for one in found["probability"]] == pytest.approx(likely, abs=1e-5)
    assert not list(here.glob("*.part"))


def test_a_parquet_file_keeps_the_types_of_its_columns(here, small_chunks):
    table = pyarrow.table(
        {
            "text": [text for text, _ in reviews(9)],
            "when": pyarrow.array(np.arange(9), pyarrow.timestamp("ms")),
            "small": pyarrow.array(range(9), pyarrow.int8()),
            "words": [["a", "b"], None, [], ["c"], ["d"], [], [], [], []],
        }
    )
    pyarrow.parquet.write_table(table, here / "in.parquet")
    run("in.parquet", "-o", "out.parquet", task="tags")
    found = pyarrow.parquet.read_table(here / "out.parquet")
    assert found.select(table.column_names).equals(table)
    assert found.schema.field("labels").type == pyarrow.list_(pyarrow.string())
    told = expected("tags", table["text"].to_pylist())
    assert found["labels"].to_pylist() == [list(one["labels"]) for one in told]
    assert [json.loads(one).keys() for one in found["probabilities"].to_pylist()] == [{"red", "big"}] * 9


def test_several_tasks_answer_one_file_in_one_pass_and_tokenise_its_texts_once(here, monkeypatch):
    file = write(here / "in.csv", ROWS, COLUMNS)
    seen = []
    real = token_rows.tokenize

    def counted(tokenizer, texts, *more, **options):
        seen.extend(texts)
        return real(tokenizer, texts, *more, **options)

    monkeypatch.setattr(token_rows, "tokenize", counted)
    run(file, "--out", "out.csv", task="sentiment,score, tags")
    assert seen.count(ROWS[5][1]) == 1
    found = pandas.read_csv(here / "out.csv", keep_default_na=False)
    answers = ["sentiment.label", "sentiment.probability", "sentiment.truncated", "score.value", "score.truncated"]
    assert list(found.columns) == [*COLUMNS, *answers, "tags.labels", "tags.probabilities", "tags.truncated", "error"]
    texts = [text for _, text, _ in ROWS]
    assert list(found["sentiment.label"]) == [one["label"] for one in expected("sentiment", texts)]
    assert list(found["score.value"]) == pytest.approx([one["value"] for one in expected("score", texts)], abs=1e-5)
    assert list(found["tags.labels"]) == ["|".join(one["labels"]) for one in expected("tags", texts)]
    (first, *_) = run(file, task="sentiment,score").answers
    assert set(first) == {"sentiment.label", "sentiment.probabilities", "score.value"}
    (both,) = run("--text", "good", task="sentiment,score").answers
    assert both.keys() == first.keys()


def test_a_column_named_like_an_answer_is_kept_and_the_answer_has_the_name_of_its_task(here):
    write(here / "in.csv", reviews(3))
    found = run("in.csv", "-o", "out.csv")
    assert "note: The file has columns that are named like the answers" in found.err
    table = pandas.read_csv(here / "out.csv")
    assert list(table["label"]) == [label for _, label in reviews(3)]
    assert set(table["sentiment.label"]) <= {"positive", "negative"}
    again = shell("predict", "--bank", "bank", "--task", "sentiment", "out.csv", "-o", "more.csv")
    assert again.code == 2
    assert "out.csv has a column 'sentiment.label', as the answers have; rename it." in again.err


def test_the_text_column_can_be_named(here):
    write(here / "in.csv", [("x", "the cat was good")], ("text", "body"))
    assert run("in.csv", "--text-column", "body").answers == expected("sentiment", ["the cat was good"])
    wrong = run("in.csv", "--text-column", "bodi", code=2)
    assert "has no column 'bodi'. Did you mean 'body'?" in wrong.err
    write(here / "two.csv", [("who", "a cat")], ("a", "b"))
    pair = run("two.csv", "--text-column", "a", "--text-pair-column", "b", task="pair").answers
    one = open_bank("bank", device="cpu").predict("pair", [("who", "a cat")])[0].to_json()
    assert pair == [one]
    assert "reads one text a row" in run("two.csv", "--text-column", "a", "--text-pair-column", "b", code=2).err


BAD = {
    "csv": (
        b'id,text\n1,good\n2,good,more\n3,"good" x\n4,bad\n5,caf\xc3\xa9 \xff\n6,"two\nlines"\n7,"open\n8,good\n',
        [3, 4, 6, 9],
        ["3 fields, but the header has 2", "expected after '\"'", "byte 0xff is not UTF-8", "unexpected end of data"],
    ),
    "tsv": (b"id\ttext\n1\tgood\n2\n3\tgo\tod\n4\tba\0d\n5\tbad\n", [3, 4, 5], ["1 fields", "3 fields", "NUL"]),
    "jsonl": (
        b'{"text": "good"}\n{"text": \n[1]\n{"text": ["a"]}\n{"txt": "a"}\n\n{"text": "bad"}\n',
        [2, 3, 4, 5],
        ["not valid JSON", "is not a JSON object", "is not a text", "it has no 'text'"],
    ),
}


@pytest.mark.parametrize("form", BAD)
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_bad_row_is_named_and_the_others_are_answered(here, form, ending):
    data, lines, reasons = BAD[form]
    (here / f"in.{form}").write_bytes(data)
    found = run(f"in.{form}", "--out", f"out.{ending}", code=1)
    told = [line for line in found.err.splitlines() if ", line " in line]
    assert [int(line.split(", line ")[1].partition(":")[0].partition(",")[0]) for line in told] == lines
    for line, reason in zip(told, reasons, strict=True):
        assert reason in line
    assert f"{len(lines)} of " in found.err
    rows = int(found.err.split(f"{len(lines)} of ")[1].split()[0].replace(",", ""))
    assert f"Wrote {rows - len(lines):,} prediction" in found.err
    if ending == "csv":
        rows = list(csv.DictReader(io.StringIO((here / "out.csv").read_text())))
    else:
        rows = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    errors = [row["error"] for row in rows if row.get("error")]
    assert [f"adapterbank: {error}" for error in errors] == told
    assert all(bool(row.get("label")) != bool(row.get("error")) for row in rows)
    plain = run(f"in.{form}", code=1).answers
    assert [set(one) for one in plain] == [{"error"} if r.get("error") else {"label", "probabilities"} for r in rows]


def test_an_unclosed_quote_does_not_take_the_rest_of_the_file_with_it(here):
    (here / "in.csv").write_text('id,text\n1,good\n2,"open\n' + "".join(f"{i},bad\n" for i in range(3, 5000)))
    run("in.csv", "-o", "out.csv", code=1)
    found = pandas.read_csv(here / "out.csv", keep_default_na=False, dtype=str)
    assert list(found["id"]) == ["1", '2,"open', *map(str, range(3, 5000))]
    assert [i for i, error in enumerate(found["error"]) if error] == [1]


def test_only_the_first_of_many_bad_rows_are_printed(here):
    (here / "in.jsonl").write_text('{"text": "good"}\n' + "x\n" * 50)
    found = run("in.jsonl", code=1)
    assert found.err.count("not valid JSON") == 20
    assert sum("error" in one for one in found.answers) == 50


def test_a_text_that_is_cut_is_named_in_the_file(here):
    write(here / "in.csv", [("good",), (LONG,)], ("text",))
    run("in.csv", "-o", "out.csv")
    assert list(pandas.read_csv(here / "out.csv", keep_default_na=False)["truncated"]) == ["", "true"]
    assert [one.get("truncated") for one in run("in.csv").answers] == [None, True]
    run("in.csv", "-o", "out.parquet")
    assert pyarrow.parquet.read_table(here / "out.parquet")["truncated"].to_pylist() == [None, True]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_go_through_a_pipe(here, form):
    data = write(here / f"in.{form}", reviews(5), ("text", "gold")).read_bytes()
    words = ("predict", "--bank", "bank", "--task", "sentiment", "-", "--format", form, "--output-format", form)
    piped = subprocess.run([*COMMAND, *words], input=data, capture_output=True, check=False)
    assert (piped.returncode, piped.stderr) == (0, b"")
    out = piped.stdout
    (here / f"out.{form}").write_bytes(out)
    found = READ[form](here / f"out.{form}")
    assert list(found["text"]) == [text for text, _ in reviews(5)]
    assert list(found["gold"]) == [label for _, label in reviews(5)]
    assert list(found["label"]) == [one["label"] for one in expected("sentiment", list(found["text"]))]


def test_ctrl_c_leaves_whole_rows_and_says_so(here):
    (here / "in.csv").write_text("id,text\n" + "".join(f"{i},the big cat was good\n" for i in range(400_000)))
    (here / "out.csv").write_text("mine\n")
    with process("predict", "--bank", "bank", "--task", "sentiment", "in.csv", "--out", "out.csv") as running:
        until = time.monotonic() + 300
        while not (here / "out.csv.part").exists() or (here / "out.csv.part").stat().st_size < 50_000:
            assert running.poll() is None, running.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=300)
    assert running.returncode == 130
    rows = list(csv.reader(io.StringIO((here / "out.csv.part").read_text())))
    assert f"adapterbank: wrote {len(rows) - 1} rows; they are in out.csv.part." in err
    assert (here / "out.csv.part").read_text().endswith("\n")
    assert {len(row) for row in rows} == {6}
    assert [row[0] for row in rows[1:]] == [str(i) for i in range(len(rows) - 1)]
    assert (here / "out.csv").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["in.csv", "-o", "out.xlsx"], "'out.xlsx' is not a name with the extension of a format that can be written"),
        (["in.csv", "--output-format", "xml"], "'xml' is not a format of the output"),
        (["in.odt"], "name its format with --format"),
        (["--text", "a", "--text-column", "b"], "name columns of a FILE"),
        (["empty.csv"], "has columns (id, text) but no rows"),
        (["in.csv", "-o", "no/out.csv"], "no/out.csv cannot be used"),
        (["in.csv", "-o", "in.csv"], "in.csv is the file that is read; write the answers to another one"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(here, words, reason):
    write(here / "in.csv", ROWS, COLUMNS)
    (here / "in.odt").write_text("x")
    (here / "empty.csv").write_text("id,text\n")
    found = run(*words, code=2)
    assert reason in found.err
    assert len(found.err.splitlines()) == 1


def test_rows_that_name_their_tasks_keep_their_columns_in_json_lines_only(here):
    write(here / "in.csv", [("sentiment", "good", 1), ("score", "bad", 2)], ("task", "text", "id"))
    words = ("--bank", "bank", "--task-column", "task", "in.csv")
    assert shell("predict", *words, "-o", "out.jsonl").code == 0
    first, second = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert set(first) == {"task", "text", "id", "label", "probabilities"}
    assert set(second) == {"task", "text", "id", "value"}
    refused = shell("predict", *words, "-o", "out.csv")
    assert (refused.code, "write jsonl" in refused.err) == (2, True)


def test_python_predicts_files_as_the_shell_does(here):
    write(here / "in.csv", ROWS, COLUMNS)
    report = open_bank("bank", device="cpu").predict_file(["sentiment", "score"], "in.csv", "python.csv")
    assert (report.rows, report.failed) == (11, 0)
    run("in.csv", "-o", "shell.csv", task="sentiment,score")
    assert (here / "python.csv").read_bytes() == (here / "shell.csv").read_bytes()
    seen, told, notes = [], [], []
    (here / "odd.csv").write_text("text,label\ngood,a\nbad\n" + "good,b\n" * 3000)
    calls = {"watch": lambda *now: seen.append(now), "problem": told.append, "note": notes.append}
    report = open_bank("bank", device="cpu").predict_file("sentiment", "odd.csv", "python.csv", **calls)
    assert (report.rows, report.failed) == (3002, 1)
    assert [rows for rows, _, _ in seen] == [2048, 3002]
    assert seen[-1][1] == seen[-1][2] == (here / "odd.csv").stat().st_size
    assert [one.partition(":")[0] for one in told] == ["odd.csv, line 3"]
    assert len(notes) == 1
    with pytest.raises(InputError, match="either task, or task_column"):
        open_bank("bank", device="cpu").predict_file(None, "in.csv", "python.csv")
    with pytest.raises(DataError, match="There is no file"):
        open_bank("bank", device="cpu").predict_file("sentiment", "inn.csv", "python.csv")


def test_compressed_output_is_whole_after_every_chunk(here, small_chunks):
    write(here / "in.csv", ROWS, COLUMNS)
    run("in.csv", "-o", "out.jsonl.gz")
    with gzip.open(here / "out.jsonl.gz", "rt") as file:
        assert [json.loads(line)["id"] for line in file] == [str(i) for i in range(11)]
