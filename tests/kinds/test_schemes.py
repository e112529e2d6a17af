"""Schemes of tags: entities as seqeval reads them, and every scheme written and read again."""

from __future__ import annotations

import random

import pytest

from adapterbank.kinds.schemes import BILOU, BIOES, IOB1, IOB2, PLAIN, count_broken, scheme_of, write_tags
from adapterbank.kinds.table import KINDS
from adapterbank.metrics import METRICS, entities

SCHEMES = (IOB1, IOB2, BIOES, BILOU)


def sentences(marks, count, seed=0):
    """Return random sequences of tags, most of them impossible ones."""
    draw = random.Random(seed)
    tags = ["O", "O", *(f"{mark}-{kind}" for mark in marks for kind in ("place", "new-york"))]
    return [draw.choices(tags, k=draw.randint(1, 12)) for _ in range(count)]


@pytest.mark.parametrize("marks", ["BI", "BIES", "I"])
def test_entities_and_scores_are_those_of_seqeval_on_thousands_of_random_sequences(marks):
    seqeval = pytest.importorskip("seqeval.metrics", reason="pip install seqeval")
    labelling = pytest.importorskip("seqeval.metrics.sequence_labeling", reason="pip install seqeval")
    given, true = sentences(marks, 4000), [
        [tag if random.Random(f"{i} {k}").random() < 0.7 else "O" for k, tag in enumerate(row)]
        for i, row in enumerate(sentences(marks, 4000))
    ]  # fmt: skip
    for row in given:
        assert entities(row) == [(kind, start, end + 1) for kind, start, end in labelling.get_entities(row)]
    assert METRICS["tag_f1"].function(given, true, 0) == pytest.approx(seqeval.f1_score(true, given), abs=1e-12)
    assert METRICS["tag_accuracy"].function(given, true, 0) == pytest.approx(seqeval.accuracy_score(true, given))


@pytest.mark.parametrize("scheme", [*SCHEMES, "broken"])
def test_precision_recall_and_f1_by_type_are_those_of_seqeval(scheme):
    seqeval = pytest.importorskip("seqeval.metrics", reason="pip install seqeval")
    true, given = sentences("BI", 3000, seed=3), sentences("BI", 3000, seed=4)
    given = [(row + mine)[: len(row)] if i % 2 else row for i, (row, mine) in enumerate(zip(true, given, strict=True))]
    given = [one + ["O"] * (len(row) - len(one)) for one, row in zip(given, true, strict=True)]
    given = [["O" if (i + k) % 5 == 0 else tag for k, tag in enumerate(row)] for i, row in enumerate(given)]
    if scheme != "broken":
        given, true = ([write_tags(entities(row), len(row), scheme) for row in rows] for rows in (given, true))
    read = [true, given]
    if scheme == BILOU:  # which seqeval's lenient reading does not know
        read = [[write_tags(entities(row), len(row)) for row in rows] for rows in read]
    wanted = seqeval.classification_report(*read, output_dict=True, zero_division=0)
    found = KINDS["tagging"].details(given, true, ("O", "B-place", "I-place", "B-new-york", "I-new-york"))
    assert len(found["types"]) == 2
    for name, mine in {**found["types"], "micro avg": found["all_types"]}.items():
        theirs = {key.removesuffix("-score"): value for key, value in wanted[name].items()}
        assert mine == pytest.approx(theirs)
    assert [found["precision"], found["recall"]] == [found["all_types"][key] for key in ("precision", "recall")]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_entities_survive_being_written_in_any_scheme(scheme):
    for row in sentences("BI", 2000, seed=1):
        found = entities(row)
        assert entities(write_tags(found, len(row), scheme)) == found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_are_told_apart(scheme):
    rows = [write_tags(entities(row), len(row), scheme) for row in sentences("BI", 50, seed=2)]
    assert scheme_of(rows) == scheme
    assert count_broken(rows, scheme) == 0


def test_tags_of_no_scheme_are_plain():
    assert scheme_of([["NOUN", "VERB"], ["O"]]) == PLAIN
    assert scheme_of([["O", "O"]]) == PLAIN
    assert scheme_of([["-LRB-", "B-NP"]]) == PLAIN


def test_a_sentence_whose_entity_does_not_begin_is_broken():
    rows = [["B-place", "I-place"], ["B-place"], ["O", "I-place", "I-other"]]
    assert scheme_of(rows) == IOB2
    assert count_broken(rows, IOB2) == 1
    assert entities(rows[2]) == [("place", 1, 2), ("other", 2, 3)]


def test_scores_are_those_that_conlleval_prints():
    """By hand: the boundaries of conlleval's startOfChunk and endOfChunk, over sentences that touch."""
    true = [["B-a", "I-a", "O", "B-b"], ["I-b", "I-b", "B-b"], ["I-a", "I-b"], ["O"]]
    given = [["B-a", "I-a", "O", "I-b"], ["B-b", "I-b", "I-b"], ["B-a", "B-b"], ["B-a"]]
    found = KINDS["tagging"].details(given, true, ("O", "B-a", "I-a", "B-b", "I-b"))
    # a: true (0-2), (0-1); given the same, and one more. b: true (3-4), (0-2), (2-3), (1-2); given (3-4), (0-3), (1-2)
    assert found["types"]["a"] == pytest.approx({"precision": 2 / 3, "recall": 1.0, "f1": 0.8, "support": 2})
    assert found["types"]["b"] == pytest.approx({"precision": 2 / 3, "recall": 0.5, "f1": 4 / 7, "support": 4})
    assert METRICS["tag_f1"].function(given, true, 5) == pytest.approx(2 * 4 / 12)


def test_the_f1_of_plain_tags_is_their_accuracy():
    given, true = [["NOUN", "VERB", "X"], ["NOUN"]], [["NOUN", "NOUN", "X"], ["VERB"]]
    assert METRICS["tag_f1"].function(given, true, 0) == METRICS["tag_accuracy"].function(given, true, 0) == 0.5
