"""Rows become examples, and the message for a bad row names it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from adapterbank.errors import DataError
from adapterbank.tasks.examples import read_examples, read_texts
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table, table_from

CLASSES = Task("t", "classification", ("text",), "label", ("neg", "pos"), "accuracy")
PAIRS = Task("p", "classification", ("a", "b"), "label", ("0", "1"), "accuracy")
MANY = Task("m", "multilabel", ("text",), "label", ("x", "y", "z"), "micro_f1")
NUMBER = Task("n", "regression", ("text",), "label", (), "spearman")
SPAN = Task("s", "span", ("question", "context"), "answers", (), "span_f1")


def rows(labels: list[Any], texts: list[Any] | None = None) -> Table:
    """A table of texts and these labels."""
    return table_from({"text": texts or [f"t{n}" for n in range(len(labels))], "label": labels}, "a.csv")


def span_rows(*answers: Any, context: str = "Ann met Ann in Rome.", **more: list[Any]) -> Table:
    """A table of one context, asked for these answers."""
    count = len(answers)
    return table_from({"question": ["Who?"] * count, "context": [context] * count, "answers": list(answers), **more})


def test_classes_become_indices_into_the_labels() -> None:
    examples, report = read_examples(rows(["pos", " neg "]), CLASSES)
    assert examples == Examples(["t0", "t1"], None, [1, 0])
    assert (report.rows, report.empty, report.notes) == (2, 0, [])


def test_the_texts_of_a_pair_are_separate_columns() -> None:
    examples, _ = read_examples(table_from([{"a": "x", "b": "y", "label": 1.0}]), PAIRS)
    assert examples == Examples(["x"], ["y"], [1])


def test_numbers_are_indices_if_the_labels_are_words() -> None:
    examples, report = read_examples(rows([1, "0", 1.0]), CLASSES)
    assert examples.targets == [1, 0, 1]
    assert report.notes == ["a.csv: the numbers in 'label' are read as indices into: neg, pos."]
    assert read_examples(rows([[0, 2], []]), MANY)[0].targets == [(0, 2), ()]


def test_numbers_beside_words_are_not_indices() -> None:
    with pytest.raises(DataError, match="row 2: the label '1' is not one of"):
        read_examples(rows(["pos", 1]), CLASSES)


def test_multilabel_targets_are_sorted_indices() -> None:
    examples, _ = read_examples(rows(["z|x", "", " y "]), MANY)
    assert examples.targets == [(0, 2), (), (1,)]
    assert read_examples(rows([["z", "x"], []]), MANY)[0].targets == [(0, 2), ()]


def test_zero_one_flags_are_not_lists_of_labels() -> None:
    with pytest.raises(DataError, match=r"row 1: \[0, 0, 1\] names a label twice; .*not a 0 or 1 for each"):
        read_examples(rows([[0, 0, 1]]), MANY)


def test_regression_targets_are_floats() -> None:
    assert read_examples(rows(["1", 2, " 2.5"]), NUMBER)[0].targets == [1.0, 2.0, 2.5]


def test_rows_with_an_empty_text_are_dropped_and_counted() -> None:
    data = rows(["pos", None, "neg", "ghost"], ["a", "", "b", None])
    examples, report = read_examples(data, CLASSES)
    assert examples == Examples(["a", "b"], None, [1, 0])
    assert (report.rows, report.empty) == (4, 2)
    assert report.notes == ["a.csv: dropped 2 rows of 4 with an empty text (first: row 2)."]


def test_an_empty_second_text_makes_a_row_empty() -> None:
    data = table_from({"a": ["x", "y", "z"], "b": ["p", None, " "], "label": [0, 0, 1]})
    examples, report = read_examples(data, PAIRS)
    assert (examples.texts, report.empty) == (["x"], 2)


def test_every_row_is_kept_for_prediction() -> None:
    data = table_from({"text": ["a", None, " ", 7, float("nan"), "\ud83d\ude00 \ud800"]})
    examples, report = read_examples(data, CLASSES, need_targets=False)
    assert examples == Examples(["a", "", " ", "7", "", "😀 \ufffd"])
    assert (report.rows, report.empty) == (6, 3)


BAD_ROWS: list[tuple[Table, Task, str]] = [
    (rows(["pos", None]), CLASSES, "a.csv, row 2: column 'label' is empty"),
    (rows(["pos", " "]), CLASSES, "row 2: column 'label' is empty"),
    (rows([1.5, float("nan")]), NUMBER, "row 2: column 'label' is empty"),
    (rows([["x"], None]), MANY, "row 2: column 'label' is empty"),
    (rows([1.5, "high"]), NUMBER, "row 2: 'high' in column 'label' is not a finite number"),
    (rows([1.5, "1e999"]), NUMBER, "row 2: '1e999'"),
    (
        rows(["pos", "meh", "neg", "bah"]),
        CLASSES,
        r"a.csv, row 2: the label 'meh' is not one of the task's 2 labels \(neg, pos\); 2 of 4 rows",
    ),
    (rows([0, 2]), CLASSES, "row 1: the label '0' is not one of"),
    (rows([-1, -1]), CLASSES, "row 1: the label '-1' is not one of"),
    (rows([["x"], ["y", "q"]]), MANY, "row 2: the label 'q' is not one of the task's 3 labels"),
    (rows([["pos"]]), CLASSES, "row 1: .*'pos'.* is not a single label"),
    (rows(["pos"], [" "]), CLASSES, "every row is empty in text; choose another column with --text"),
    (rows(["pos"], [["a", "list"]]), CLASSES, "row 1: .* in column 'text' is not a text"),
    (table_from({"txt": ["a"], "label": ["pos"]}), CLASSES, r"no column 'text'. Did you mean 'txt'\?"),
    (table_from({"text": ["a"], "lable": ["pos"]}), CLASSES, r"no column 'label'. Did you mean 'lable'\?"),
    (span_rows("Bob"), SPAN, "row 1: the answer 'Bob' does not occur in its context"),
    (span_rows(["Ann", ""]), SPAN, "row 1: the answer is empty; write an empty list for a question without"),
    (span_rows({"answer_start": [0]}), SPAN, "row 1: the answer is empty"),
    (
        span_rows({"text": ["Ann"], "answer_start": [0, 1]}),
        SPAN,
        r"row 1: answer_start is \[0, 1\]; give one position",
    ),
    (span_rows("Ann", answer_start=["x"]), SPAN, "row 1: answer_start is x"),
]


@pytest.mark.parametrize(("data", "task", "says"), BAD_ROWS)
def test_a_bad_row_is_named(data: Table, task: Task, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_examples(data, task)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (span_rows({"text": ["Ann", "Rome"], "answer_start": [8, 15]}), (8, 11, ("Ann", "Rome"))),
        (span_rows({"text": "Rome", "answer_start": 15}), (15, 19, ("Rome",))),
        (span_rows("Ann"), (0, 3, ("Ann",))),
        (span_rows("Ann", answer_start=["8"]), (8, 11, ("Ann",))),
        (span_rows("Ann", answer_start=[None]), (0, 3, ("Ann",))),
        (span_rows(["nobody", "Rome"]), (15, 19, ("nobody", "Rome"))),
        (span_rows({"text": ["Rome"]}), (15, 19, ("Rome",))),
        (span_rows(2024, context="In 2024."), (3, 7, ("2024",))),
    ],
)
def test_answers_of_every_shape_become_a_span(data: Table, expected: tuple[int, int, tuple[str, ...]]) -> None:
    examples, report = read_examples(data, SPAN)
    assert examples.targets == [expected]
    assert examples.pairs == data.columns["context"]
    assert report.notes == []


@pytest.mark.parametrize(("start", "place"), [(7, 8), (9, 8), (2, 0), (99, 8), (-5, 0)])
def test_a_misplaced_answer_moves_to_its_nearest_occurrence(start: int, place: int) -> None:
    examples, report = read_examples(span_rows({"text": [" Ann"], "answer_start": [start]}), SPAN)
    assert examples.targets == [(place, place + 3, ("Ann",))]
    assert report.notes == ["data: 1 of 1 answers are not at their answer_start; the nearest occurrence is used."]


def test_texts_come_from_tables_lines_and_streams(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("title,text,label\nno,a,?\nno,,?\n")
    (tmp_path / "usual.jsonl").write_text("".join(json.dumps({"id": 1, "Sentence": text}) + "\n" for text in ("a", "")))
    (tmp_path / "lines.txt").write_text("a\n\n")
    (tmp_path / "one.tsv").write_text("whatever\na\n\nb\n")
    for name in ("own.csv", "usual.jsonl", "lines.txt"):
        assert read_texts(tmp_path / name, CLASSES) == Examples(["a", ""]), name
    assert read_texts(str(tmp_path / "one.tsv"), CLASSES) == Examples(["a", "", "b"])
    assert read_texts(io.StringIO('\ufeffa\r\n\n{"text": "as it is"}'), CLASSES) == Examples(
        ["a", "", '{"text": "as it is"}']
    )


def test_pairs_come_from_tables_lines_and_streams(tmp_path: Path) -> None:
    (tmp_path / "usual.csv").write_text("premise,hypothesis\nx,y\n")
    (tmp_path / "lines.txt").write_text("x\ty\n")
    (tmp_path / "left.csv").write_text("label,one,two\n0,x,y\n")
    for source in (
        tmp_path / "usual.csv",
        tmp_path / "lines.txt",
        tmp_path / "left.csv",
        io.StringIO("x\ty\n"),
    ):
        assert read_texts(source, PAIRS) == Examples(["x"], ["y"])


def test_texts_that_do_not_fit_the_task_are_explained(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("x\ty\nno tab\n")
    (tmp_path / "single.csv").write_text("text,id,date\nx,1,2\n")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"lines.txt, line 2: 0 tabs; the task 'p' needs exactly one"):
        read_texts(tmp_path / "lines.txt", PAIRS)
    with pytest.raises(DataError, match="no columns with usual names for two texts"):
        read_texts(tmp_path / "single.csv", PAIRS)
    with pytest.raises(DataError, match="question and context"):
        read_texts(tmp_path / "single.csv", SPAN)
    with pytest.raises(DataError, match="is empty"):
        read_texts(tmp_path / "empty.txt", CLASSES)
    with pytest.raises(DataError, match="There is no file"):
        read_texts(tmp_path / "gone.txt", CLASSES)
    with pytest.raises(DataError, match="Standard input is empty"):
        read_texts(io.StringIO(""), CLASSES)
    with pytest.raises(DataError, match="Standard input is not UTF-8"):
        read_texts(io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"), CLASSES)
