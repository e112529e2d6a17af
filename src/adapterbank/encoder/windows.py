"""Windows: a text longer than the encoder's limit becomes several rows. Knows no answers, no tensors.

Where each token has an answer, windows overlap so that a token has context in one of them. Where a whole text has one
answer, they cover it with as few rows as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.tokenizer import check_room, encode_whole
from adapterbank.errors import InputError

STRIDE = 128
"""Tokens between the starts of two windows, as in BERT's SQuAD code."""


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
    encodings = encode_whole(tokenizer, texts, pairs, start)
    return _divided(encodings, start, lambda one: _cut(one, max_length, stride, 0 if pairs is None else 1))


def tokenize_parts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    most: int,
    start: int = 0,
) -> tuple[list[Tokens], list[int]]:
    """Tokenise texts or pairs in at most `most` windows each; also return the number of each row's text or pair.

    The windows of a text are evenly spaced from its beginning to its end, and overlap no more than they must. Of a pair
    the longer text is divided, and every row holds the other one, or its beginning if both are long.
    """
    check_room(tokenizer, max_length, paired=pairs is not None)
    return _divided(encode_whole(tokenizer, texts, pairs, start), start, lambda one: _parts(one, max_length, most))


def _divided(
    encodings: Sequence[Encoding], start: int, divide: Callable[[Encoding], Iterator[Tokens]]
) -> tuple[list[Tokens], list[int]]:
    rows: list[Tokens] = []
    owners: list[int] = []
    for number, encoding in enumerate(encodings, start):
        mine = list(divide(encoding))
        rows += mine
        owners += [number] * len(mine)
    return rows, owners


def window_starts(length: int, size: int, stride: int) -> range:
    """Return where windows of `size` tokens start in a text of `length`: a stride apart, and at most half a window.

    So any two neighbours overlap by at least half a window, and what fits into half a window is whole in one of them.
    """
    step = min(stride, max(1, size // 2))
    return range(0, max(1, length - size + step), step)


def _cut(encoding: Encoding, max_length: int, stride: int, text: int) -> Iterator[Tokens]:
    ids, types = np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64)
    second = np.flatnonzero([sequence == text for sequence in encoding.sequence_ids])
    first, last = (int(second[0]), int(second[-1]) + 1) if len(second) else (len(ids), len(ids))
    size = max_length - first - (len(ids) - last)
    if size < (1 if len(second) else 0):
        raise InputError(f"A question alone is longer than max_length {max_length}. Raise --max-length.")
    offsets = np.full((len(ids), 2), -1)
    offsets[first:last] = np.array(encoding.offsets[first:last]).reshape(-1, 2)
    head, tail = np.arange(first), np.arange(last, len(ids))
    for start in window_starts(last - first, max(1, size), stride):
        chosen = np.concatenate([head, np.arange(first + start, min(last, first + start + size)), tail])
        yield Tokens(ids[chosen], types[chosen], offsets[chosen])


def _parts(encoding: Encoding, max_length: int, most: int) -> Iterator[Tokens]:
    ids, types = np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64)
    if len(ids) <= max_length:
        yield Tokens(ids, types)
        return
    owner = np.array([-1 if text is None else text for text in encoding.sequence_ids])
    special, first, second = (np.flatnonzero(owner == text) for text in (-1, 0, 1))
    divided, other = (first, second) if len(first) >= len(second) else (second, first)
    room = max_length - len(special)
    kept = other[: max(room // 2, room - len(divided))]
    size = max(1, room - len(kept))
    count = min(most, -(-len(divided) // size))
    cut = len(kept) < len(other) or count * size < len(divided)
    for begin in np.linspace(0, max(0, len(divided) - size), count).round().astype(int):
        chosen = np.sort(np.concatenate([special, kept, divided[begin : begin + size]]))
        yield Tokens(ids[chosen], types[chosen], cut=cut)
