"""Schemes of tags: entities as seqeval reads them, and every scheme written and read again."""

from __future__ import annotations

import random

import pytest

from adapterbank.kinds.schemes import BILOU, BIOES, IOB1, IOB2, PLAIN, count_broken, scheme_of, write_tags
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


def test_the_f1_of_plain_tags_is_their_accuracy():
    given, true = [["NOUN", "VERB", "X"], ["NOUN"]], [["NOUN", "NOUN", "X"], ["VERB"]]
    assert METRICS["tag_f1"].function(given, true, 0) == METRICS["tag_accuracy"].function(given, true, 0) == 0.5
