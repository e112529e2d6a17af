"""`kinds.tag_cells`: words and tags in every form, told apart, converted, counted, or refused in one sentence."""

from __future__ import annotations

import pytest

from adapterbank.errors import DataError
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.tables import Table
from kinds.tasks_of import read_rows as read
from kinds.tasks_of import tags_of


def test_words_and_tags_are_recognized_and_state_the_labels():
    task, examples, report = read(
        [{"tokens": ["EU", "and", "New", "York"], "ner_tags": ["B-org", "O", "B-loc", "I-loc"]}]
    )
    assert (task.kind, task.metric) == ("tagging", "tag_f1")
    assert task.labels == ("O", "B-org", "I-org", "B-loc", "I-loc")
    assert examples.targets[0] == ((0, 2, 1, "B-org"), (3, 6, 0, "O"), (7, 10, 3, "B-loc"), (11, 15, 4, "I-loc"))
    assert not report.notes


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        (["I-loc", "I-loc", "O", "I-loc", "B-loc"], "are IOB1"),
        (["B-loc", "E-loc", "O", "S-loc", "S-loc"], "are BIOES"),
        (["B-loc", "L-loc", "O", "U-loc", "U-loc"], "are BILOU"),
    ],
)
def test_other_schemes_become_iob2_and_are_told(tags, told):
    _, examples, report = read([{"tokens": list("abcde"), "tags": tags}])
    assert tags_of(examples) == ["B-loc", "I-loc", "O", "B-loc", "B-loc"]
    assert told in report.notes[0]


def test_lists_that_were_written_as_text_are_words_and_tags():
    row = {"tokens": "['EU', 'rose', '1.0']", "tags": "['B-org', 'O', 'O']"}
    task, examples, _ = read([row])
    assert (task.kind, examples.texts) == ("tagging", ["EU rose 1.0"])
    assert tags_of(examples) == ["B-org", "O", "O"]


def test_broken_sequences_are_counted_and_told():
    good = {"tokens": ["a", "b"], "tags": ["B-x", "I-x"]}
    _, examples, report = read([good, good | {"tokens": ["c", "d"]}, {"tokens": ["e", "f"], "tags": ["O", "I-x"]}])
    assert tags_of(examples, 2) == ["O", "B-x"]
    assert "1 of 3 rows have tags that IOB2 does not allow" in report.notes[0]


def test_plain_tags_stay_as_they_are():
    task, examples, _ = read([{"tokens": ["dogs", "bark"], "tags": ["NOUN", "VERB"]}])
    assert task.labels == ("NOUN", "VERB")
    assert tags_of(examples) == ["NOUN", "VERB"]


def test_numbers_need_their_names():
    rows = [{"tokens": ["dogs", "bark"], "ner_tags": [1, 0]}]
    with pytest.raises(DataError, match=r"are numbers \(0, 1\); name them in their order with --labels"):
        read(rows)
    _, examples, report = read(rows, labels=["O", "B-x", "I-x"])
    assert tags_of(examples) == ["B-x", "O"]
    assert "are read as indices" in report.notes[0]


@pytest.mark.parametrize(
    "spans",
    [
        [{"start": 6, "end": 14, "label": "loc"}],
        [[6, 14, "loc"]],
        [{"start_offset": 6, "end_offset": 14, "type": "loc"}],
    ],
)
def test_texts_with_spans_of_characters(spans):
    task, examples, report = read([{"text": "I saw New York.", "label": spans}, {"text": "no place", "label": []}])
    assert task.labels == ("O", "B-loc", "I-loc")
    assert tags_of(examples) == ["O", "O", "B-loc", "I-loc", "O"]
    assert tags_of(examples, 1) == ["O", "O"]
    assert not report.notes


def test_spans_that_do_not_fit_words_are_moved_or_left_out_and_told():
    spans = [[2, 4, "loc"], [0, 6, "loc"], [6, 7, "loc"]]
    _, examples, report = read([{"text": "Berlin is big", "spans": spans}])
    assert tags_of(examples) == ["B-loc", "O", "O"]
    assert report.notes == ["data: entities that overlap another or contain no word, and are left out: 2."]
    _, _, report = read([{"text": "Berlin is big", "spans": [[2, 4, "loc"]]}])
    assert report.notes == ["data: entities whose borders are moved to those of their words: 1."]


@pytest.mark.parametrize("labels", [None, ["O", "B-x", "I-x"]])
@pytest.mark.parametrize("span", [[5, 2, "x"], ["1", "2", ""], [-1, 2, "x"], {"start": 0, "end": 2}, [0, 1], 7, None])
def test_a_span_that_is_none_is_refused_with_its_row(span, labels):
    with pytest.raises(DataError, match=r"row 2: .* is not a start, a later end and a label in column 'spans'; corr"):
        read([{"text": "a b", "spans": [[0, 1, "x"]]}, {"text": "a b", "spans": [span]}], labels=labels)


def test_a_span_that_ends_after_the_text_is_refused():
    with pytest.raises(
        DataError, match=r"\[2, 4, 'x'\] ends after the text, which has 3 characters, in column 'spans'"
    ):
        read([{"text": "a b", "spans": [[2, 4, "x"]]}])


def test_another_number_of_tags_than_words_is_refused():
    with pytest.raises(DataError, match="row 1: 'tokens' has 2 words, and 'tags' has 1 tag; give a tag for each word"):
        read([{"tokens": ["a", "b"], "tags": ["X"]}, {"tokens": ["a"], "tags": ["Y"]}])


def test_a_word_without_a_tag_is_refused():
    with pytest.raises(DataError, match="row 2: word 2 has no tag in 'tags'; write one, such as O"):
        read([{"tokens": ["a"], "tags": ["B-x"]}, {"tokens": ["a", "b"], "tags": ["O", None]}])


def test_tags_that_are_numbers_and_names_at_once_are_names():
    _, examples, report = read([{"tokens": ["a", "b"], "tags": ["1", "2"]}], labels=["1", "2"])
    assert tags_of(examples) == ["1", "2"]
    assert not report.notes


def test_a_tag_that_training_did_not_have_is_refused():
    task, _, _ = read([{"tokens": ["a", "b"], "tags": ["X", "Y"]}])
    with pytest.raises(DataError, match="the tag 'Z' is not one of the task's"):
        read_examples(Table({"tokens": [["a"]], "tags": [["Z"]]}), task)
