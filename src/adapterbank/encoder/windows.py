"""Windows: a document longer than the encoder takes becomes several overlapping rows. Knows no answers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.tokenizer import encode_whole
from adapterbank.errors import InputError

STRIDE = 128
"""Tokens between the beginnings of two windows, as in BERT's SQuAD code."""


def tokenize_windows(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    stride: int,
    start: int = 0,
) -> tuple[list[Tokens], list[int]]:
    """Tokenise texts, or pairs by their second text, in windows; also return the number of each row's text or pair.

    Every row of a pair holds the whole first text and a window of the second. The offsets of a window's tokens are the
    characters they stand for. `start` is the number of the first text or pair.
    """
    rows: list[Tokens] = []
    owners: list[int] = []
    for number, encoding in enumerate(encode_whole(tokenizer, texts, pairs, start), start):
        mine = list(_cut(encoding, max_length, stride, 0 if pairs is None else 1))
        rows += mine
        owners += [number] * len(mine)
    return rows, owners


def window_starts(length: int, room: int, stride: int) -> range:
    """Say where windows of `room` tokens begin in a text of `length`: a stride apart, and half a window at most.

    So any two neighbours overlap by half a window or more, and what fits into half a window lies whole in one.
    """
    step = min(stride, max(1, room // 2))
    return range(0, max(1, length - room + step), step)


def _cut(encoding: Encoding, max_length: int, stride: int, text: int) -> Iterator[Tokens]:
    ids, types = np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64)
    second = np.flatnonzero([sequence == text for sequence in encoding.sequence_ids])
    first, last = (int(second[0]), int(second[-1]) + 1) if len(second) else (len(ids), len(ids))
    room = max_length - first - (len(ids) - last)
    if room < (1 if len(second) else 0):
        raise InputError(f"A question alone is longer than max_length {max_length}. Raise --max-length.")
    offsets = np.full((len(ids), 2), -1)
    offsets[first:last] = np.array(encoding.offsets[first:last]).reshape(-1, 2)
    head, tail = np.arange(first), np.arange(last, len(ids))
    for start in window_starts(last - first, max(1, room), stride):
        chosen = np.concatenate([head, np.arange(first + start, min(last, first + start + room)), tail])
        yield Tokens(ids[chosen], types[chosen], offsets[chosen])
