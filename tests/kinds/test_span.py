"""Span: the best answers of all windows, found by exhaustive search, and "no answer" as SQuAD 2.0 defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tokenizers import Tokenizer, models, pre_tokenizers

from adapterbank.benchmarks import squad
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.windows import tokenize_windows
from adapterbank.kinds import span as spans

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
CONTEXT = " ".join(WORDS)
PLACES = [(CONTEXT.index(word), CONTEXT.index(word) + len(word)) for word in WORDS]


def window(first: int, last: int) -> Tokens:
    """Return a row of [CLS], a question's word, [SEP], some words of the context and [SEP]."""
    offsets = np.array([(-1, -1)] * 3 + PLACES[first:last] + [(-1, -1)])
    return Tokens(np.arange(len(offsets)), np.zeros(len(offsets), np.int64), offsets)


SMALL = arrays.arrays(np.float32, st.tuples(st.integers(1, 40), st.just(2)), elements=st.integers(-9, 9))


@given(SMALL, st.integers(1, 50))
def test_the_best_spans_are_those_of_an_exhaustive_search(x: np.ndarray, count: int) -> None:
    longest = spans.LONGEST_ANSWER
    every = [(float(x[i, 0] + x[j, 1]), i, j) for i in range(len(x)) for j in range(i, min(len(x), i + longest))]
    expected = sorted(every, key=lambda span: (-span[0], span[1], span[2]))[:count]
    assert spans.best_spans(x, count) == expected


def test_a_span_may_be_30_tokens_long_and_no_longer() -> None:
    x = np.zeros((60, 2), np.float32)
    x[10, 0] = x[39, 1] = 5
    assert spans.best_spans(x, 1) == [(10.0, 10, 39)]
    x[39, 1], x[40, 1] = 0, 5
    ((_, first, last),) = spans.best_spans(x, 1)
    assert (first == 10) != (last == 40)


def test_the_best_answer_is_the_best_of_all_windows() -> None:
    rows = [window(0, 5), window(3, 8)]
    outs = [np.zeros((len(row), 2), np.float32) for row in rows]
    outs[0][3 + 1, 0] = outs[0][3 + 2, 1] = 2.0  # two three
    outs[1][3 + 2, 0] = outs[1][3 + 3, 1] = 3.0  # six seven
    found = spans.read(outs, rows, CONTEXT, count=5)
    assert [answer.text for answer in found.answers[:1]] == ["six seven"]
    assert found.answers[0].score == 6.0
    assert CONTEXT[found.answers[0].start : found.answers[0].end] == "six seven"
    assert len({answer.text for answer in found.answers}) == len(found.answers) == 5
    scores = [answer.score for answer in found.answers]
    assert scores == sorted(scores, reverse=True)
    assert "two three" in [answer.text for answer in spans.read(outs, rows, CONTEXT, count=40).answers]


def test_an_answer_in_two_windows_is_listed_once_with_its_better_score() -> None:
    rows = [window(0, 5), window(3, 8)]
    outs = [np.zeros((len(row), 2), np.float32) for row in rows]
    outs[0][3 + 4] = (2.0, 2.0)  # five
    outs[1][3 + 1] = (3.0, 3.0)  # five again
    found = spans.read(outs, rows, CONTEXT, count=10)
    assert [(a.text, a.score) for a in found.answers if a.text == "five"] == [("five", 6.0)]


def test_no_answer_is_the_lowest_first_token_of_all_windows() -> None:
    rows = [window(0, 5), window(3, 8)]
    outs = [np.zeros((len(row), 2), np.float32) for row in rows]
    outs[0][0], outs[1][0] = (4.0, 3.0), (1.0, 0.5)
    outs[1][4] = (1.0, 1.0)
    found = spans.read(outs, rows, CONTEXT)
    assert found.null == 1.5
    assert found.null_odds == 1.5 - 2.0
    assert found.choose(None).text == "five"
    assert found.choose(0.0).text == "five"
    assert found.choose(-0.5).text == "five"  # not above the threshold
    silent = found.choose(-0.6)
    assert (silent.text, silent.start, silent.end) == ("", 0, 0)


def test_listed_probabilities_sum_to_one_and_include_no_answer_only_with_a_threshold() -> None:
    rows = [window(0, 8)]
    outs = [np.random.default_rng(0).normal(size=(len(rows[0]), 2)).astype(np.float32)]
    found = spans.read(outs, rows, CONTEXT, count=4)
    plain, with_null = found.listed(None), found.listed(0.0)
    assert [len(plain), len(with_null)] == [4, 5]
    assert "" not in [one["text"] for one in plain]
    assert "" in [one["text"] for one in with_null]
    for listed in (plain, with_null):
        shares = np.array([one["probability"] for one in listed])
        assert shares.sum() == pytest.approx(1)
        expected = np.exp([one["score"] for one in listed])
        np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-6)
        assert list(shares) == sorted(shares, reverse=True)


def test_answers_start_at_the_word_if_tokens_include_the_blank_before_it() -> None:
    """Metaspace, as in ALBERT, XLM-RoBERTa and CamemBERT."""
    pieces = [("[UNK]", 0.0), *((f"\u2581{word}", -1.0) for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    (row,), _ = tokenize_windows(tokenizer, ["one"], [CONTEXT], 64, 128)
    assert row.offsets is not None
    assert [tuple(place) for place in row.offsets[2:4]] == [(3, 7), (7, 13)]  # blanks among them
    out = np.zeros((len(row), 2), np.float32)
    out[2, 0] = out[3, 1] = 5.0
    found = spans.read([out], [row], CONTEXT, count=9).answers
    assert (found[0].text, found[0].start, found[0].end) == ("two three", 4, 13)
    for answer in found:
        assert answer.text == answer.text.strip() == CONTEXT[answer.start : answer.end]
        assert answer.text


def test_a_document_without_tokens_has_the_empty_answer() -> None:
    row = Tokens(np.arange(4), np.zeros(4, np.int64), np.full((4, 2), -1))
    found = spans.read([np.ones((4, 2), np.float32)], [row], "")
    assert (found.answers[0].text, found.answers[0].start, found.answers[0].end) == ("", 0, 0)


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_the_tuned_threshold_is_as_good_as_any(rows: list[tuple[float, bool, bool]]) -> None:
    """`rows`: odds, whether there is an answer, whether ours is right."""
    readings = [
        spans.Reading((spans.SpanAnswer("yes" if right else "no", 0, 3, 0.0),), odds) for odds, _, right in rows
    ]
    targets = [(0, 3, ("yes",)) if answerable else (-1, -1, ("",)) for _, answerable, _ in rows]

    def total(threshold: float) -> float:
        gold = {str(i): list(target[2]) if target[0] >= 0 else [] for i, target in enumerate(targets)}
        said = {str(i): one.choose(threshold).text for i, one in enumerate(readings)}
        return squad.evaluate(gold, said, version="2.0")["f1"]

    tried = [total(odds) for odds in [*(odds for odds, _, _ in rows), -6.0]]
    assert total(spans.tune_threshold(readings, targets)) == pytest.approx(max(tried))


@pytest.mark.parametrize("odds", [-7.5, -0.0, 3.0])
def test_the_threshold_is_below_all_odds_if_no_answer_is_worth_giving(odds: float) -> None:
    reading = spans.Reading((spans.SpanAnswer("no", 0, 2, 0.0),), odds)
    found = spans.tune_threshold([reading, reading], [(-1, -1, ("",))] * 2)
    assert np.isfinite(found)
    assert reading.choose(found).text == ""


def test_answers_with_equal_odds_are_all_given_or_none() -> None:
    """One right answer would gain, but two wrong ones at the same odds cost more."""
    readings = [spans.Reading((spans.SpanAnswer("yes", 0, 3, 0.0),), odds) for odds in (-1.0, -1.0, -1.0, -2.0)]
    targets = [(0, 3, ("yes",)), (-1, -1, ("",)), (-1, -1, ("",)), (0, 3, ("yes",))]
    assert spans.tune_threshold(readings, targets) == -2.0
