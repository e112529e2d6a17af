"""Claims about `automl.features`: what texts and pairs of texts become."""

from __future__ import annotations

import numpy as np
import pytest

from adapterbank.automl.features import VECTORS, Features, overlap
from adapterbank.tasks.spec import Examples

TEXTS = ["the cat sat on the mat", "a dog ran home", "the cat ran", "who let the dog out", ""]
CHOICE = {"words": 2, "chars": 4, "rarest": 1, "sublinear": True, "bits": 10, "components": 3}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("vectors", VECTORS)
def test_other_texts_have_the_columns_of_the_training_texts(vectors, dense):
    made = Features({**CHOICE, "vectors": vectors}, dense=dense, seed=0)
    fitted = made.fit(Examples(TEXTS))
    other = made.table(Examples(["a cat that nobody has seen", "the cat sat on the mat"]))
    assert fitted.shape == (5, 3) if dense else fitted.shape[0] == 5
    assert other.shape == (2, fitted.shape[1])
    assert made.numbers > 0 if dense else made.numbers == 0
    table = other if dense else other.toarray()
    np.testing.assert_allclose(table[1], (fitted if dense else fitted.toarray())[0], atol=1e-8)


@pytest.mark.parametrize("dense", [False, True])
def test_a_pair_adds_six_columns_of_similarity(dense):
    made = Features({**CHOICE, "vectors": "words"}, dense=dense, seed=0)
    alone = Features({**CHOICE, "vectors": "words"}, dense=dense, seed=0)
    first = Examples(TEXTS, TEXTS[:2] + ["nothing of it"] * 3)
    found = made.fit(first)
    joined = Examples([f"{one} ‖ {two}" for one, two in zip(first.texts, first.pairs, strict=True)])
    assert found.shape[1] == alone.fit(joined).shape[1] + 6
    table = found if dense else found.toarray()
    np.testing.assert_allclose(table[0, -6:], 1.0)
    assert (table[2:, -6:-1] < 0.5).all()


def test_a_table_may_have_fewer_columns_than_components():
    made = Features({**CHOICE, "vectors": "words", "words": 1, "components": 200}, dense=True, seed=0)
    assert made.fit(Examples(["yes", "no", "yes no"])).shape == (3, 1)


def test_the_overlap_of_a_pair_is_counted_in_words_letters_and_lengths():
    (row,) = overlap(["The cat sat"], ["the dog"])
    assert row[:3] == pytest.approx([1 / 4, 1 / 3, 1 / 2])
    assert row[3] == pytest.approx(2 / 12)  # "the" and "he " of nine and five triples
    assert row[4] == pytest.approx(8 / 12)


@pytest.mark.parametrize(("one", "two"), [("", ""), ("a", ""), ("", "ab"), ("...", "?")])
def test_the_overlap_of_texts_without_words_is_defined(one, two):
    found = overlap([one], [two])
    assert found.shape == (1, 5)
    assert ((found >= 0) & (found <= 1)).all()
