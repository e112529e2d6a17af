"""Every answer of the real SQuAD dev set, through the real tokenizer's windows and back to the same characters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from adapterbank.inference.rows import make_rows
from adapterbank.kinds import span as spans
from adapterbank.kinds.span import NO_ANSWER
from adapterbank.tasks.catalog import CATALOG, load, locate
from adapterbank.tasks.spec import Examples
from real_data import DATA, MISSING

INSIDE_A_PIECE = 215
"""Answers of the dev set that begin or end inside one of MiniLM's word pieces: no choice of tokens matches them."""


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.minilm
@pytest.mark.parametrize("max_length", [384, 128])
def test_every_answer_comes_back_as_the_same_characters_but_for_those_inside_a_piece(minilm, max_length):
    if locate(CATALOG["squad/v1"], DATA if DATA.exists() else None) is None:
        pytest.skip(MISSING)
    columns = load("squad/v1", DATA).tables["dev"].columns
    counts: Counter[tuple[int, int, int]] = Counter()
    for row, cell in enumerate(columns["label"]):
        for text, start in zip(cell["text"], cell["answer_start"], strict=True):
            assert columns["context"][row][start : start + len(text)] == text
            counts[row, start, start + len(text)] += 1
    assert counts.total() == 34726
    answers = list(counts)
    examples = Examples(
        [columns["question"][row] for row, _, _ in answers],
        [columns["context"][row] for row, _, _ in answers],
        [(start, end, (columns["context"][row][start:end],)) for row, start, end in answers],
    )
    rows = make_rows(minilm, examples, kind="span", max_length=max_length)
    assert rows.unreachable == 0
    assert len(rows) > len(answers)
    inside = 0
    for mine, context, answer in zip(rows.by_example(len(answers)), examples.pairs, answers, strict=True):
        wanted = answer[1:]
        held = [row for row in mine if rows.targets[row] != NO_ANSWER]
        places = {place(rows, row) for row in held}
        assert len(places) == 1  # whichever window holds it
        (found,) = places
        if found != wanted:
            # The pieces reach further than the answer on a side, and by part of a piece only.
            assert found[0] <= wanted[0] < wanted[1] <= found[1]
            assert " " not in context[found[0] : wanted[0]] + context[wanted[1] : found[1]]
            inside += counts[answer]
        if all(rows.targets[row][1] - rows.targets[row][0] < spans.LONGEST_ANSWER for row in held):
            outputs = [certain(len(rows.tokens[row]), rows.targets[row]) for row in mine]
            best = spans.read(outputs, [rows.tokens[row] for row in mine], context).answers[0]
            assert (best.start, best.end, best.text) == (*found, context[slice(*found)])
    assert inside == INSIDE_A_PIECE


def place(rows, row):
    """Return the characters that a row's target tokens stand for."""
    first, last = rows.targets[row]
    offsets = rows.tokens[row].offsets
    return int(offsets[first, 0]), int(offsets[last, 1])


def certain(length, target):
    """Return outputs that clearly favour the target, which is the first token if there is no answer."""
    out = np.zeros((length, 2), dtype=np.float32)
    out[target[0], 0] = out[target[1], 1] = 9.0
    return out
