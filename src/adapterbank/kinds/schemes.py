"""Schemes of tags: how the tags of words mark entities. Functions on lists of tags; they know no tokens.

`B-place` begins an entity and `I-place` continues it; `O` is outside. IOB2 begins every entity with B. IOB1 begins one
with B only after another of the same type. BIOES also marks the last word (E) and an entity of one word (S); BILOU
writes L and U for these. Tags that are none of these, such as parts of speech, are plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from adapterbank.metrics import OUTSIDE, Entity, entities, marks_entities, parts_of

if TYPE_CHECKING:
    import numpy as np

PLAIN, IOB1, IOB2, BIOES, BILOU = "plain", "IOB1", "IOB2", "BIOES", "BILOU"
_LETTERS = {IOB2: ("B", "I", "B", "I"), BIOES: ("B", "I", "S", "E"), BILOU: ("B", "I", "U", "L")}
"""By scheme: the marks of a first, an inner, an only and a last word."""


def write_tags(found: Iterable[Entity], words: int, scheme: str = IOB2) -> list[str]:
    """Return the tags of a sentence with these entities."""
    tags = [OUTSIDE] * words
    before: Entity = ("", 0, 0)
    for kind, start, end in found:
        if scheme == IOB1:
            adjacent = before[0] == kind and before[2] == start
            marks = ("B" if adjacent else "I") + "I" * (end - start - 1)
        else:
            first, inner, only, last = _LETTERS[scheme]
            marks = only if end - start == 1 else first + inner * (end - start - 2) + last
        tags[start:end] = [f"{mark}-{kind}" for mark in marks]
        before = (kind, start, end)
    return tags


def scheme_of(sentences: Sequence[Sequence[str]]) -> str:
    """Return the scheme of a data set: that of its marks, and of IOB1 and IOB2 the one that fits more sentences."""
    tags = {tag for sentence in sentences for tag in sentence}
    if not tags - {OUTSIDE} or not marks_entities(tags):
        return PLAIN
    marks = {parts_of(tag)[0] for tag in tags}
    if marks & set("ESLU"):
        return BILOU if marks & set("LU") and not marks & set("ES") else BIOES
    return IOB1 if count_broken(sentences, IOB1) < count_broken(sentences, IOB2) else IOB2


def count_broken(sentences: Sequence[Sequence[str]], scheme: str) -> int:
    """Return how many sentences have tags that the scheme would not give to their entities."""
    return sum(write_tags(entities(one), len(one), scheme) != list(one) for one in sentences)


@lru_cache(maxsize=256)
def _rules(labels: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return which labels may begin a text and which may follow which, as 0 and -inf; None for plain tags."""
    import numpy as np

    if not marks_entities(labels):
        return None
    parts = [parts_of(label) for label in labels]
    after = np.array([[mark != "I" or (left in "BI" and old == new) for mark, new in parts] for left, old in parts])
    after &= np.array([mark in "BIO" for mark, _ in parts])
    begin = np.array([mark in "BO" for mark, _ in parts])
    return np.where(begin, 0.0, -np.inf), np.where(after, 0.0, -np.inf)


def best_path(scores: np.ndarray, labels: tuple[str, ...]) -> np.ndarray:
    """Return the labels of a text's words, `[words]`: the best sequence that the tags allow (Viterbi).

    `scores` are log-probabilities, `[words, labels]`.
    """
    import numpy as np

    best: np.ndarray = scores.argmax(1)
    rules = _rules(labels)
    if rules is None or not len(best):
        return best
    begin, after = rules
    if begin[best[0]] == 0 and (after[best[:-1], best[1:]] == 0).all():
        return best
    total, back = scores[0] + begin, np.zeros(scores.shape, np.int64)
    for word in range(1, len(scores)):
        paths = total[:, None] + after
        back[word] = paths.argmax(0)
        total = paths.max(0) + scores[word]
    best[-1] = total.argmax()
    for word in range(len(scores) - 1, 0, -1):
        best[word - 1] = back[word, best[word]]
    return best
