"""Examples -> rows of tokens, and rows -> batches. Knows nothing of slots' tensors or of losses."""

from __future__ import annotations

from collections.abc import Sequence
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


_WINDOW = 4
"""Batches whose rows are sorted among themselves: enough for near lengths, few enough that batches stay mixed."""


def epoch_order(lengths: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut a seeded permutation of all rows into batches; every row is seen once, whatever happened before.

    Within a window of some batches rows are sorted by length, so that attention pads little, and the window's batches
    come in random order. That order does not depend on the seed: runs side by side have short and long batches at the
    same time. Only the last batch of the epoch may be smaller.
    """
    order, sizes = np.random.default_rng([seed, epoch]).permutation(len(lengths)), np.asarray(lengths)
    random = np.random.default_rng(epoch)
    found: list[np.ndarray] = []
    for start in range(0, len(order), batch * _WINDOW):
        window = order[start : start + batch * _WINDOW]
        window = window[np.argsort(sizes[window], kind="stable")]
        parts = [window[i : i + batch] for i in range(0, len(window), batch)]
        whole = len(parts) - (len(parts[-1]) < batch)
        found += [parts[i] for i in random.permutation(whole)] + parts[whole:]
    return found
