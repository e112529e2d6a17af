"""SQuAD's scores: the numbers that the two official scripts print for the same files, and files in their format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapterbank.benchmarks.squad import evaluate, gold_answers, prediction_file
from adapterbank.errors import DataError, UnknownName
from adapterbank.kinds.scoring import report
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table, read_table

GOLD = {
    "several": ["Denver Broncos", "The Denver Broncos!", "Broncos"],
    "article": ["the Norman conquest of England"],
    "mark": ["24\u201310"],
    "comma": ["gold, silver"],
    "case": ["SANTA CLARA"],
    "twice": ["New York, New York"],
    "unicode": ["Café Müller"],
    "only": ["The"],
    "mixed": ["a", "an apple"],
    "none": [],
    "none2": [],
    "none3": [],
}
SAID = {
    "several": "the denver   broncos",
    "article": "Norman conquest",
    "mark": "24-10",
    "comma": "a silver medal",
    "case": "Santa Clara.",
    "twice": "new york",
    "unicode": "Cafe Müller",
    "only": "a",
    "mixed": "the",
    "none": "",
    "none2": "something",
    "none3": "the",
}
ODDS = {
    **{"several": -3.0, "article": -1.5, "mark": 0.5, "comma": -0.25, "case": -2.0, "twice": 1.0, "unicode": 0.0},
    **{"only": -0.5, "mixed": 0.25, "none": 2.0, "none2": -1.0, "none3": 1.5},
}
ANSWERABLE = {key: answers for key, answers in GOLD.items() if answers}

# What evaluate-v1.1.py gives for each question alone: exact match and F1.
FIRST = {
    "several": (100, 100),
    "article": (0, 200 / 3),
    "mark": (0, 0),
    "comma": (0, 50),
    "case": (100, 100),
    "twice": (0, 200 / 3),
    "unicode": (0, 50),
    "only": (100, 0),
    "mixed": (100, 0),
}


@pytest.mark.parametrize("key", FIRST)
def test_version_1_scores_each_question_as_its_script_does(key: str) -> None:
    found = evaluate({key: GOLD[key]}, SAID, version="1.1")
    assert found == {"exact_match": FIRST[key][0], "f1": pytest.approx(FIRST[key][1])}


def test_version_1_scores_a_file_as_its_script_does() -> None:
    assert evaluate(ANSWERABLE, SAID, version="1.1") == pytest.approx(
        {"exact_match": 400 / 9, "f1": 48.148148148148145}
    )
    part = {key: SAID[key] for key in ("several", "article", "only")}  # the rest counts as wrong
    assert evaluate(ANSWERABLE, part, version="1.1") == pytest.approx({"exact_match": 200 / 9, "f1": 18.51851851851852})


# What evaluate-v2.0.py gives for the whole file, without and with odds of "no answer".
SECOND = {
    "exact": 41.666666666666664,
    "f1": 61.11111111111111,
    "total": 12,
    "HasAns_exact": 33.333333333333336,
    "HasAns_f1": 59.25925925925925,
    "HasAns_total": 9,
    "NoAns_exact": 66.66666666666667,
    "NoAns_f1": 66.66666666666667,
    "NoAns_total": 3,
}
BEST = {
    "best_exact": 41.666666666666664,
    "best_exact_thresh": -2.0,
    "best_f1": 61.111111111111114,
    "best_f1_thresh": 1.0,
}


def test_version_2_scores_a_file_as_its_script_does() -> None:
    assert evaluate(GOLD, SAID, version="2.0") == pytest.approx(SECOND)
    assert evaluate(GOLD, SAID, version="2.0", null_odds=ODDS) == pytest.approx(SECOND | BEST)
    silent = SECOND | {"f1": 55.55555555555555, "HasAns_f1": 51.85185185185185} | BEST
    assert evaluate(GOLD, SAID, version="2.0", null_odds=ODDS, threshold=0.0) == pytest.approx(silent)


def test_a_file_without_unanswerable_questions_has_no_scores_of_them() -> None:
    found = evaluate(ANSWERABLE, SAID, version="2.0")
    assert set(found) == {"exact", "f1", "total", "HasAns_exact", "HasAns_f1", "HasAns_total"}


def test_the_metrics_of_a_run_are_those_of_the_script_of_its_data() -> None:
    for gold, version, names in (
        (ANSWERABLE, "1.1", ("exact_match", "f1")),
        (GOLD, "2.0", ("exact", "f1")),
    ):
        targets = [(0, 1, tuple(answers) or ("",)) for answers in gold.values()]
        official = evaluate(gold, SAID, version=version)
        said = [SAID[key] for key in gold]
        scores = report(Task("t", "span", ("question", "context"), "answers", (), "span_f1"), said, targets)
        assert 100 * scores["exact_match"] == pytest.approx(official[names[0]])
        assert 100 * scores["span_f1"] == pytest.approx(official[names[1]])


def test_missing_predictions_are_an_error_as_in_the_official_script() -> None:
    with pytest.raises(DataError, match=r"11 of 12 questions have no prediction \(article, mark, comma, …"):
        evaluate(GOLD, {"several": "x"}, version="2.0")
    with pytest.raises(DataError, match="1 of 12 questions have no prediction"):
        evaluate(GOLD, SAID, version="2.0", null_odds={key: odds for key, odds in ODDS.items() if key != "none"})
    with pytest.raises(DataError, match="no questions"):
        evaluate({}, SAID, version="1.1")
    with pytest.raises(UnknownName, match=r"'3' is not a version of SQuAD.*1\.1, 2\.0"):
        evaluate(GOLD, SAID, version="3")


def test_gold_answers_are_read_from_the_official_file(tmp_path: Path) -> None:
    questions = [
        {
            "id": "a",
            "question": "who?",
            "answers": [{"text": "Ann", "answer_start": 0}, {"text": "Ann", "answer_start": 0}],
        },
        {"id": "b", "question": "what?", "answers": [], "is_impossible": True},
    ]
    article = {"title": "T", "paragraphs": [{"context": "Ann ran.", "qas": questions}]}
    file = tmp_path / "dev-v2.0.json"
    file.write_text(json.dumps({"version": "v2.0", "data": [article]}))
    assert gold_answers(read_table(file)) == {"a": ["Ann", "Ann"], "b": []}


def test_gold_answers_may_be_lists_or_plain_texts_too() -> None:
    table = Table({"id": [1, 2, 3], "answer": ["Ann", ["Bob", "Bo"], []]})
    assert gold_answers(table, "answer") == {"1": ["Ann"], "2": ["Bob", "Bo"], "3": []}
    with pytest.raises(DataError, match="has no column 'id'; its columns: answer"):
        gold_answers(Table({"answer": ["Ann"]}), "answer")


def test_a_prediction_file_has_one_answer_for_each_id() -> None:
    assert prediction_file(["a", 7], ["x", ""]) == {"a": "x", "7": ""}
    with pytest.raises(DataError, match="1 questions share an id with another one"):
        prediction_file(["a", "a"], ["x", "y"])
