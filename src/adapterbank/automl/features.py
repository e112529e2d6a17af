"""Features of texts without an encoder: TF-IDF, hashed n-grams, overlap of pairs. Knows no models and no search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
from sklearn.pipeline import FeatureUnion
from sklearn.preprocessing import normalize

from adapterbank.tasks.spec import Examples

VECTORS = ("words", "chars", "both", "hashed")
_MOST = 100_000
"""Columns of a TF-IDF table; if there would be more, the rarest n-grams are left out."""
_BREAK = " \u2016 "
"""Joins the two texts of a pair, so that no n-gram spans both without showing it."""
_WORD = re.compile(r"\w+")


class Features:
    """One choice of features, fitted to the training texts."""

    def __init__(self, choice: Mapping[str, Any], *, dense: bool, seed: int) -> None:
        """With `dense` a singular value decomposition reduces the n-grams to a few columns."""
        self._vectors = _vectorizer(choice)
        self._reduced = TruncatedSVD(choice["components"], random_state=seed) if dense else None

    def fit(self, examples: Examples) -> Any:
        """Learn vocabulary and weights from the training texts, and return their features."""
        found = self._vectors.fit_transform(_joined(examples))
        if self._reduced is not None:
            # A decomposition cannot have more components than its table has columns.
            self._reduced.set_params(n_components=max(1, min(self._reduced.n_components, min(found.shape) - 1)))
            found = self._reduced.fit_transform(found)
        return self._with_overlap(found, examples)

    def table(self, examples: Examples) -> Any:
        """Return the features of other texts: a sparse matrix, or an array with `dense`."""
        found = self._vectors.transform(_joined(examples))
        return self._with_overlap(found if self._reduced is None else self._reduced.transform(found), examples)

    @property
    def numbers(self) -> int:
        """How many numbers the reduction learned."""
        return int(self._reduced.components_.size) if self._reduced is not None else 0

    def _with_overlap(self, found: Any, examples: Examples) -> Any:
        if examples.pairs is None:
            return found
        first, second = (normalize(self._vectors.transform(texts)) for texts in (examples.texts, examples.pairs))
        alike = np.asarray(first.multiply(second).sum(1)).reshape(-1, 1)
        more = np.hstack([alike, overlap(examples.texts, examples.pairs)])
        return np.hstack([found, more]) if self._reduced is not None else sparse.hstack([found, more], format="csr")


def overlap(texts: Sequence[str], pairs: Sequence[str]) -> np.ndarray:
    """Return five similarities of each pair's texts, from 0 to 1.

    Shared words among all words, among the first text's and among the second's; shared letter trigrams among all;
    ratio of lengths.
    """
    rows = [list(_shares(one, two)) for one, two in zip(texts, pairs, strict=True)]
    return np.array(rows, dtype=float).reshape(-1, 5)


def _shares(one: str, two: str) -> Iterator[float]:
    words = [set(_WORD.findall(text.lower())) for text in (one, two)]
    both = len(words[0] & words[1])
    yield both / max(1, len(words[0] | words[1]))
    yield from (both / max(1, len(mine)) for mine in words)
    triples = [{text.lower()[i : i + 3] for i in range(max(1, len(text) - 2))} for text in (one, two)]
    yield len(triples[0] & triples[1]) / len(triples[0] | triples[1])
    yield (1 + min(len(one), len(two))) / (1 + max(len(one), len(two)))


def _joined(examples: Examples) -> list[str]:
    if examples.pairs is None:
        return examples.texts
    return [f"{one}{_BREAK}{two}" for one, two in zip(examples.texts, examples.pairs, strict=True)]


def _vectorizer(choice: Mapping[str, Any]) -> Any:
    words = {"token_pattern": r"(?u)\b\w+\b", "ngram_range": (1, choice["words"])}
    if choice["vectors"] == "hashed":
        # Only positive counts: naive Bayes takes no others.
        return HashingVectorizer(n_features=2 ** choice["bits"], alternate_sign=False, **words)
    common = {"sublinear_tf": choice["sublinear"], "min_df": choice["rarest"], "max_features": _MOST}
    made = {
        "words": TfidfVectorizer(**common, **words),
        "chars": TfidfVectorizer(analyzer="char_wb", ngram_range=(2, choice["chars"]), **common),
    }
    if choice["vectors"] == "both":
        return FeatureUnion(list(made.items()))
    return made[choice["vectors"]]
