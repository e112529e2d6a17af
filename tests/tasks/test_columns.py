"""Columns are found by usual names, tasks are inferred, and what cannot be inferred needs an option."""

from __future__ import annotations

import math
from typing import Any

import pytest

from adapterbank.errors import DataError, InputError, UnknownName
from adapterbank.tasks.columns import LABELS, PAIRS, TEXTS, Columns, find_columns, find_texts, infer_task
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table, table_from


def table(*names: str) -> Table:
    """A table of one row with these columns."""
    return Table({name: ["x"] for name in names}, "a.csv")


def infer(column: list[Any], **options: Any) -> Task:
    """The task of a text column beside these labels."""
    data = table_from({"text": [f"text {n}" for n in range(len(column))], "label": column}, "a.csv")
    return infer_task(data, Columns(("text",), "label"), name="t", **options)


@pytest.mark.parametrize(
    ("names", "text", "label"),
    [
        (("idx", "sentence", "label"), ("sentence",), "label"),
        (("Review", "Sentiment"), ("Review",), "Sentiment"),
        (("id", "sentence1", "sentence2", "gold_label"), ("sentence1", "sentence2"), "gold_label"),
        (("hypothesis", "premise", "label"), ("premise", "hypothesis"), "label"),
        (("question1", "question2", "is_duplicate"), ("question1", "question2"), "is_duplicate"),
        (("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("#1 String", "#2 String"), "Quality"),
        (("question", "sentence", "label"), ("question", "sentence"), "label"),
        (("id", "title", "context", "question", "answers"), ("question", "context"), "answers"),
        (("question", "answer", "label"), ("question", "answer"), "label"),
        (("question", "answer"), ("question",), "answer"),
        (("text", "text_pair", "label"), ("text", "text_pair"), "label"),
        (("title", "text", "category"), ("text",), "category"),
        (("words", "label"), ("words",), "label"),
        (("text", "spam"), ("text",), "spam"),
        (("premise", "hypothesis", "relation"), ("premise", "hypothesis"), "relation"),
    ],
)
def test_usual_names_are_found(names: tuple[str, ...], text: tuple[str, ...], label: str) -> None:
    assert find_columns(table(*names)) == Columns(text, label)


def test_every_usual_name_is_found_in_any_case() -> None:
    for first, second in PAIRS:
        assert find_columns(table("label", first.upper(), second.title())).text == (
            first.upper(),
            second.title(),
        )
    for name in TEXTS:
        assert find_columns(table("label", "id", name.upper())).text == (name.upper(),)
    for name in LABELS:
        assert find_columns(table("text", "id", name.upper())).label == name.upper()


def test_named_columns_take_precedence_over_usual_names() -> None:
    here = table("text", "title", "body", "label", "topic")
    assert find_columns(here, "body", label="topic") == Columns(("body",), "topic")
    assert find_columns(here, "title", "body") == Columns(("title", "body"), "label")
    assert find_columns(here, "label", label="text") == Columns(("label",), "text")


def test_numbers_are_names_where_a_frame_numbers_its_columns_from_0() -> None:
    here = table("0", "1", "2")
    assert find_columns(here, "0", label="2") == Columns(("0",), "2")
    with pytest.raises(InputError, match=r"no column '3'. Choose with --label from: 0, 1, 2"):
        find_columns(here, "1", label="3")
    assert find_columns(table("text", "2019", "2020"), "1", label="3") == Columns(("text",), "2020")


def test_a_label_may_be_missing_if_it_is_not_needed() -> None:
    assert find_columns(table("text", "id", "date"), need_label=False) == Columns(("text",), None)
    assert find_columns(table("anything"), need_label=False) == Columns(("anything",), None)


def test_span_needs_question_context_and_answer() -> None:
    here = table("question", "context", "answer", "label")
    assert find_columns(here, kind="span") == Columns(("question", "context"), "answer")
    with pytest.raises(DataError, match="question and context"):
        find_columns(table("text", "answer"), kind="span")
    with pytest.raises(DataError, match="--label"):
        find_columns(table("question", "context", "label"), kind="span")
    with pytest.raises(InputError, match="name both columns, with --text and --text-pair"):
        find_columns(here, "question", kind="span")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"text": "txt"},
            r"a.csv has no column 'txt'. Did you mean 'text'\? Choose with --text from: text, label",
        ),
        ({"text": "text", "text_pair": "zzz"}, "no column 'zzz'. Choose with --text-pair from"),
        ({"label": "labl"}, r"Did you mean 'label'\? Choose with --label"),
        ({"text_pair": "text"}, "Only 'text' was named; name both"),
        ({"text": "text", "text_pair": "text"}, "are the same"),
        ({"text": "text", "label": "text"}, "are the same"),
        ({"kind": "ranking"}, "not a kind of task"),
    ],
)
def test_named_columns_that_do_not_fit_are_explained(options: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        find_columns(table("text", "label"), **options)  # type: ignore[arg-type]


def test_columns_without_a_usual_name_need_the_option() -> None:
    with pytest.raises(
        DataError, match=r"a.csv has no columns with usual names for texts; name them with --text.*a, b, c"
    ):
        find_columns(table("a", "b", "c"))
    with pytest.raises(DataError, match=r"labels; name it with --label. Its columns: text, b, c"):
        find_columns(table("text", "b", "c"))
    with pytest.raises(DataError, match="two texts"):
        find_texts(table("text", "label", "id"), count=2)


def test_a_stated_number_of_texts_is_respected() -> None:
    assert find_texts(table("sentence1", "sentence2", "text"), count=1) == ("text",)
    assert find_texts(table("first", "second"), count=2) == ("first", "second")


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["pos", "neg"], "classification"),
        ([0, 1, 2], "classification"),
        (["0", "1", "1.0"], "classification"),
        ([1.0, 2.0], "classification"),
        ([True, False], "classification"),
        (["1.5", "word"], "classification"),
        (["1_000.5", "2"], "classification"),
        ([0.5, 1], "regression"),
        (["3.75", "5", "-1e-3"], "regression"),
        ([["a"], ["a", "b"]], "multilabel"),
        (["a|b", "a"], "multilabel"),
        ([{"text": ["x"], "answer_start": [0]}], "span?"),
    ],
)
def test_the_kind_is_inferred_from_the_labels(labels: list[Any], kind: str) -> None:
    if kind == "span?":
        with pytest.raises(InputError, match="two text columns"):
            infer(labels)
    else:
        assert infer(labels).kind == kind


def test_question_context_and_answer_are_a_span_task() -> None:
    data = table_from([{"question": "Who?", "context": "Ann is.", "answer": "Ann"}])
    task = infer_task(data, find_columns(data), name="qa")
    assert task == Task("qa", "span", ("question", "context"), "answer", (), "span_f1")
    stated = infer_task(data, find_columns(data), name="qa", kind="classification", labels=["Ann", "Bob"])
    assert stated.kind == "classification"


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", " b ", "c"], ("b", "a", "c")),
        ([10, 2, 1.0, "2.0"], ("1", "2", "10")),
        (["10", "9", "-1"], ("-1", "9", "10")),
        ([True, False], ("false", "true")),
        (["True", "False", "Other"], ("true", "false", "Other")),
        (["b", None, "", "a", math.nan], ("b", "a")),
        ([["b", "a"], [], ["c", "b"]], ("b", "a", "c")),
        (["b | a", "c|", "a"], ("b", "a", "c")),
        ([[2, 1], [0]], ("0", "1", "2")),
    ],
)
def test_labels_are_strings_in_a_fixed_order(labels: list[Any], names: tuple[str, ...]) -> None:
    assert infer(labels).labels == names


def test_stated_labels_kind_and_metric_are_kept() -> None:
    task = infer([0, 1], labels=[" no", "yes"], metric="matthews")
    assert (task.labels, task.metric) == (("no", "yes"), "matthews")
    assert infer([1, 2, 3], kind="regression").labels == ()
    assert infer(["a", "b"], kind="multilabel").metric == "micro_f1"


def test_labels_of_rows_without_text_do_not_count() -> None:
    data = table_from({"text": ["a", "", "b"], "label": ["x", "ghost", "y"]})
    assert infer_task(data, Columns(("text",), "label"), name="t").labels == ("x", "y")


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        (["a", "a"], {}, "every row has the label 'a' in column 'label'; a classifier needs two labels"),
        ([None, ""], {}, "no row has a text and a value in 'label'"),
        (["1", "x"], {"kind": "regression"}, "a.csv, row 2: 'x' in column 'label' is not a finite number"),
        ([0.5, math.inf], {}, "row 2: 'inf' in column 'label' is not a finite number"),
        (["0.5", "nan"], {"kind": "regression"}, "row 2: 'nan'"),
        ([0.5, True], {"kind": "regression"}, "row 2: 'True'"),
        ([10**400, 1], {"kind": "regression"}, "row 1: '1000.*…' in"),
        (
            [["a"], ["b"]],
            {"kind": "classification"},
            "row 1: .*'a'.* is not a single label; use --kind multilabel",
        ),
        (
            list(range(30)),
            {},
            "30 different labels in 30 rows .*use --kind regression, or choose another column",
        ),
        ([f"id{n}" for n in range(21)], {}, "too many to be classes; if it holds identifiers or texts, choose"),
        ([n % 1001 for n in range(4004)], {}, "1001 different labels in 4004 rows"),
    ],
)
def test_labels_that_state_no_task_are_explained(labels: list[Any], options: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        infer(labels, **options)


def test_few_rows_may_show_each_class_once() -> None:
    assert len(infer([f"c{n}" for n in range(20)]).labels) == 20
    assert len(infer([f"c{n % 12}" for n in range(24)]).labels) == 12
    assert len(infer(list("abcdefghijklmnopqrstuvwxyz"), labels=list("abcdefghijklmnopqrstuvwxyz")).labels) == 26


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kind": "clasification"}, UnknownName, "Did you mean 'classification'"),
        ({"metric": "speerman"}, UnknownName, "Did you mean 'spearman'"),
        ({"metric": "pearson"}, InputError, "cannot score a classification task; choose one of: accuracy"),
        ({"labels": ["one"]}, InputError, "needs 2 labels or more"),
        ({"labels": ["1", "1.0"]}, InputError, "names the label '1' twice"),
        ({"kind": "regression", "labels": ["a", "b"]}, InputError, "has no labels"),
    ],
)
def test_options_that_do_not_fit_are_explained(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        infer([0, 1], **options)


def test_a_task_needs_a_label_column() -> None:
    with pytest.raises(DataError, match="has no label column"):
        infer_task(table("text"), Columns(("text",), None), name="t")
