"""Examples -> rows of tokens, and rows -> batches. Knows nothing of slots' tensors or of losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.tokenizer import tokenize, tokenizer_hash
from adapterbank.encoder.windows import STRIDE, tokenize_windows
from adapterbank.errors import DataError
from adapterbank.storage import cache
from adapterbank.tasks.spec import Examples

NO_ANSWER = (0, 0)
"""The tokens that stand for "no answer in this window": the first one, as in BERT's SQuAD code."""
_AT_ONCE = 4096
"""Examples between two reports, and the most that the tokenizer's own objects, which are large, are held for."""
MIN_CACHED_ROWS = 1000
"""Fewer examples than this are tokenised faster than a file is found."""


@dataclass(frozen=True)
class Rows:
    """Tokenised examples of one task."""

    tokens: list[Tokens] = field(repr=False)
    targets: list[Any] | None = field(repr=False)
    """What the loss compares with: as in `Examples`, but first and last token for spans."""
    cut: int = 0
    """How many rows were longer than the limit and lost their end."""
    unreachable: int = 0
    """Span tasks: how many examples were left out because their answer fits into no window."""
    owners: list[int] | None = field(default=None, repr=False)
    """Span tasks: which example each row is a window of, in rising order; None where rows are the examples."""

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.tokens)

    def by_example(self, examples: int) -> list[list[int]]:
        """Give the rows of each example."""
        if self.owners is None:
            return [[i] for i in range(len(self))]
        found: list[list[int]] = [[] for _ in range(examples)]
        for row, owner in enumerate(self.owners):
            found[owner].append(row)
        return found


def make_rows(
    backbone: Backbone,
    examples: Examples,
    *,
    kind: str,
    max_length: int,
    stride: int = STRIDE,
    keep: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Rows:
    """Tokenise examples; a span example becomes a row for each window of its document, with the answer's tokens.

    With `keep` the tokens come from the cache where they are in it, and go there. `watch` hears how many of all
    examples are done.
    """
    spans = kind == "span" and examples.pairs is not None
    tokens, owners = _tokens(backbone, examples, max_length, stride if spans else None, keep, watch)
    cut = sum(row.cut for row in tokens)
    if owners is None or examples.targets is None:
        return Rows(tokens, examples.targets, cut, owners=owners)
    places = {owner: list(rows) for owner, rows in groupby(range(len(tokens)), key=lambda row: owners[row])}
    found: dict[int, tuple[int, int]] = {}
    for owner, mine in places.items():
        found |= _answers([tokens[row] for row in mine], mine, examples.targets[owner])
    kept = sorted(found)
    if not kept:
        raise DataError(f"No answer fits into a window of {max_length} tokens. Raise --max-length.")
    mine = [owners[row] for row in kept]
    left_out = len(examples) - len(set(mine))
    return Rows([tokens[row] for row in kept], [found[row] for row in kept], cut, left_out, mine)


def _answers(windows: Sequence[Tokens], numbers: Sequence[int], target: Any) -> dict[int, tuple[int, int]]:
    """Give each window's first and last token of the answer, or `NO_ANSWER`; nothing where no window has all of it."""
    start, end = target[0], target[1]
    if start < 0:
        return dict.fromkeys(numbers, NO_ANSWER)
    last = len(windows) - 1
    places = [_answer_tokens(row, start, end, first=i == 0, last=i == last) for i, row in enumerate(windows)]
    if not any(places):
        return {}
    return {number: place or NO_ANSWER for number, place in zip(numbers, places, strict=True)}


def _answer_tokens(row: Tokens, start: int, end: int, *, first: bool, last: bool) -> tuple[int, int] | None:
    """Give the first and last token that overlap the characters `start` to `end` of the second text.

    None where there is no such token, or where the answer goes on in a neighbouring window.
    """
    assert row.offsets is not None
    inside = np.flatnonzero((row.offsets[:, 0] < end) & (row.offsets[:, 1] > start) & (row.offsets[:, 0] >= 0))
    if len(inside) == 0:
        return None
    second = row.offsets[row.offsets[:, 0] >= 0]
    if (not first and start < second[0, 0]) or (not last and end > second[-1, 1]):
        return None
    return int(inside[0]), int(inside[-1])


# --- tokens, new or kept ------------------------------------------------------------------------------------


def _tokens(
    backbone: Backbone,
    examples: Examples,
    max_length: int,
    stride: int | None,
    keep: bool,
    watch: Callable[[int, int], None],
) -> tuple[list[Tokens], list[int] | None]:
    keep = keep and len(examples) >= MIN_CACHED_ROWS
    key = _key(backbone, examples, max_length, stride) if keep else ""
    if keep and (known := cache.get(key)) and (rows := _from_arrays(known, stride is not None)):
        watch(len(examples), len(examples))
        return rows
    tokens: list[Tokens] = []
    owners: list[int] = []
    for start in range(0, len(examples), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        texts, pairs = examples.texts[part], None if examples.pairs is None else examples.pairs[part]
        if stride is None:
            tokens += tokenize(backbone.tokenizer, texts, pairs, max_length, start=start)
        else:
            found, mine = tokenize_windows(backbone.tokenizer, texts, pairs or [], max_length, stride, start)
            tokens += found
            owners += mine
        watch(min(start + _AT_ONCE, len(examples)), len(examples))
    if keep:
        cache.put(key, _to_arrays(tokens, owners))
    return tokens, owners if stride is not None else None


CACHE_FORMAT = 1
"""Of what is kept; raise it whenever tokens of the same texts, or the arrays that hold them, come out otherwise."""


def _key(backbone: Backbone, examples: Examples, max_length: int, stride: int | None) -> str:
    """Name the tokens of these texts by content: texts, tokenizer, how documents are cut, and how we keep them."""
    digest = hashlib.sha256(f"{CACHE_FORMAT} {tokenizer_hash(backbone.tokenizer)} {max_length} {stride}".encode())
    for texts in (examples.texts, examples.pairs or []):
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        digest.update(b"\xff" * 9)  # no length
    return f"tokens-{digest.hexdigest()}"


def _to_arrays(tokens: Sequence[Tokens], owners: Sequence[int]) -> dict[str, np.ndarray]:
    found = {
        "lengths": np.array([len(row) for row in tokens], np.int32),
        "cut": np.array([row.cut for row in tokens], bool),
        "ids": np.concatenate([row.ids for row in tokens]).astype(np.int32),
        "types": np.concatenate([row.types for row in tokens]).astype(np.int8),
        "owners": np.array(owners, np.int32),
    }
    offsets = [row.offsets for row in tokens if row.offsets is not None]
    return found | ({"offsets": np.concatenate(offsets).astype(np.int32)} if offsets else {})


def _from_arrays(known: dict[str, np.ndarray], spans: bool) -> tuple[list[Tokens], list[int] | None] | None:
    if not {"lengths", "cut", "ids", "types", "owners", *(("offsets",) if spans else ())} <= known.keys():
        return None
    ends = np.cumsum(known["lengths"])
    ids, types = known["ids"].astype(np.int64), known["types"].astype(np.int64)
    offsets = known["offsets"].astype(np.int64) if spans else None
    if len(ends) == 0 or not ends[-1] == len(ids) == len(types):
        return None
    bounds = zip(ends - known["lengths"], ends, known["cut"].tolist(), strict=True)
    rows = [Tokens(ids[a:b], types[a:b], None if offsets is None else offsets[a:b], cut) for a, b, cut in bounds]
    return rows, known["owners"].tolist() if spans else None


# --- batches ------------------------------------------------------------------------------------------------


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
