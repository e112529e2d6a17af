"""Examples -> rows of tokens, and rows -> batches. Knows nothing of slots' tensors or of losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapterbank.encoder.checkpoint import Backbone
from adapterbank.encoder.packed import Tokens
from adapterbank.encoder.tokenizer import tokenize
from adapterbank.errors import DataError
from adapterbank.tasks.spec import Examples


@dataclass(frozen=True)
class Rows:
    """Tokenised examples of one task."""

    tokens: list[Tokens] = field(repr=False)
    targets: list[Any] | None = field(repr=False)
    """What the loss compares with: as in `Examples`, but first and last token for spans."""
    cut: int = 0
    """How many rows were longer than the limit and lost their end."""
    unreachable: int = 0
    """Span tasks: how many rows were left out because their answer lies beyond the limit."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.tokens)


def make_rows(backbone: Backbone, examples: Examples, *, kind: str, max_length: int) -> Rows:
    """Tokenise examples; for span tasks also find the answers' tokens."""
    span = kind == "span"
    tokens = tokenize(backbone.tokenizer, examples.texts, examples.pairs, max_length, offsets=span)
    cut = sum(row.cut for row in tokens)
    if not span or examples.targets is None:
        return Rows(tokens, examples.targets, cut)
    found = [_answer_tokens(row, target[0], target[1]) for row, target in zip(tokens, examples.targets, strict=True)]
    kept = [i for i, answer in enumerate(found) if answer is not None]
    if not kept:
        raise DataError(f"No answer lies within the first {max_length} tokens. Raise --max-length.")
    return Rows([tokens[i] for i in kept], [found[i] for i in kept], cut, len(found) - len(kept))


def _answer_tokens(row: Tokens, start: int, end: int) -> tuple[int, int] | None:
    """Give the first and last token that overlap the characters `start` to `end` of the second text.

    None where there is no such token, or where the text was cut before the answer's end.
    """
    assert row.offsets is not None
    inside = np.flatnonzero((row.offsets[:, 0] < end) & (row.offsets[:, 1] > start) & (row.offsets[:, 0] >= 0))
    if len(inside) == 0 or (row.cut and end > row.offsets[:, 1].max()):
        return None
    return int(inside[0]), int(inside[-1])


def epoch_order(rows: int, batch: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut a seeded permutation of all rows into batches; every row is seen once, whatever happened before."""
    order = np.random.default_rng([seed, epoch]).permutation(rows)
    return [order[i : i + batch] for i in range(0, rows, batch)]
