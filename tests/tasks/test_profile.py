"""The profile of a data set: counts by hand, percentiles by numpy, and labels that train does not have."""

from __future__ import annotations

import numpy as np

from adapterbank.tasks.profile import PERCENTILES, profile, unknown_labels
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table, table_from

TASK = Task("t", "classification", ("text",), "label", ("pos", "neg"), "accuracy")


def table(*rows: tuple[str, object]) -> Table:
    return Table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})


def test_every_split_is_counted() -> None:
    tables = {
        "train": table(("a", "pos"), ("a", "neg"), ("", "pos"), ("b", "pos")),
        "dev": table(("b", "neg"), ("c", "neg"), (" ", "pos")),
        "test": table(("c", None), ("d", None)),
    }
    lengths = {"train": [3, 9, 2, 5], "dev": [3, 3, 200], "test": [1, 1]}
    found = profile(TASK, tables, lengths, 8)
    train = found["splits"]["train"]
    assert (train["rows"], train["empty"], train["repeated"], train["longer"]) == (4, 1, 1, 1)
    assert train["labels"] == {"pos": 3, "neg": 1}
    assert list(train["labels"]) == ["pos", "neg"]  # the most frequent first
    assert found["splits"]["dev"]["longer"] == 1
    assert found["splits"]["test"] == {
        **{"rows": 2, "empty": 0, "repeated": 0, "longer": 0, "windows": False, "labelled": False},
        "tokens": {f"p{place}": 1 for place in PERCENTILES},
    }
    assert found["shared"] == [{"of": "dev", "in": "train", "rows": 1}, {"of": "test", "in": "dev", "rows": 1}]
    assert found["warnings"] == []


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = np.random.RandomState(0).randint(3, 400, 1000).tolist()
    tables = {"train": table(*[(str(i), "pos") for i in range(1000)])}
    found = profile(TASK, tables, {"train": lengths}, 128)["splits"]["train"]
    ordered = sorted(lengths)
    assert found["tokens"] == {f"p{p}": ordered[max(0, -(-p * 1000 // 100) - 1)] for p in PERCENTILES}
    assert found["longer"] == sum(length > 128 for length in lengths)


def test_pairs_are_the_same_only_if_both_texts_are() -> None:
    task = Task("t", "regression", ("a", "b"), "label", (), "spearman")
    tables = {
        "train": table_from({"a": ["x", "x"], "b": ["y", "z"], "label": [1.0, 3.0]}),
        "dev": table_from({"a": ["x", "y"], "b": ["y", "x"], "label": [0.5, 0.5]}),
    }
    found = profile(task, tables, {"train": [1, 1], "dev": [1, 1]}, 8)
    assert found["shared"] == [{"of": "dev", "in": "train", "rows": 1}]
    assert found["splits"]["train"]["numbers"] == {"min": 1.0, "mean": 2.0, "max": 3.0}
    assert found["splits"]["train"]["repeated"] == 0


def test_questions_without_an_answer_are_counted() -> None:
    task = Task("t", "span", ("question", "context"), "answers", (), "span_f1")
    answers = [{"text": [], "answer_start": []}, {"text": ["x"], "answer_start": [0]}]
    tables = {"train": table_from({"question": ["q", "r"], "context": ["x", "x"], "answers": answers})}
    assert profile(task, tables, {"train": [1, 1]}, 8)["splits"]["train"]["unanswerable"] == 1


def test_a_label_that_train_spells_differently_or_does_not_have_is_a_warning() -> None:
    tables = {
        "train": table(("a", "very good"), ("b", "Bad"), ("c", 1)),
        "dev": table(("a", "Very-Good"), ("b", "bad"), ("b", "bad"), ("c", 1.0), ("d", "ugly"), ("e", "-1")),
    }
    assert unknown_labels(TASK, tables) == [
        "dev has the label 'Very-Good' (1 rows); train spells it 'very good'.",
        "dev has the label 'bad' (2 rows); train spells it 'Bad'.",
        "dev has the label 'ugly' (1 rows); train has no row with it.",
        "dev has the label '-1' (1 rows); train has no row with it.",
    ]
    assert unknown_labels(TASK, {"dev": tables["dev"]}) == []
