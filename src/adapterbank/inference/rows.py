"""Examples -> rows of tokens, and rows -> batches. Knows nothing of slots' tensors or of losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np

from adapterbank.draws import RandomStream
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.tokenizer import tokenize, tokenizer_hash
from adapterbank.encoder.windows import STRIDE, tokenize_windows
from adapterbank.errors import DataError
from adapterbank.kinds.kind import Kind
from adapterbank.kinds.table import KINDS
from adapterbank.storage import cache
from adapterbank.tasks.spec import Examples

_AT_ONCE = 4096
"""Examples between two progress reports. The tokenizer's own objects, which are large, are kept for no more."""
MIN_CACHED_ROWS = 1000
"""Tokenising fewer examples than this takes less time than finding a file."""


@dataclass(frozen=True)
class Rows:
    """Tokenised examples of one task."""

    tokens: list[Tokens] = field(repr=False)
    targets: list[Any] | None = field(repr=False)
    """What the loss compares with: as in `Examples`, or the kind's `window_targets`."""
    cut: int = 0
    """How many rows were longer than the limit and lost their end."""
    unreachable: int = 0
    """With windows: how many examples were left out because their answer fits no window."""
    owners: list[int] | None = field(default=None, repr=False)
    """With windows: which example each row is a window of, in rising order; None if rows are the examples."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    def split(self, sizes: Iterable[int]) -> list[Rows]:
        """Cut rows without targets and windows, which were tokenised together, into parts of these sizes."""
        tokens = iter(self.tokens)
        parts = [list(islice(tokens, size)) for size in sizes]
        return [Rows(part, None, sum(one.cut for one in part) if self.cut else 0) for part in parts]

    def by_example(self, examples: int) -> list[list[int]]:
        """Return the rows of each example."""
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
    """Tokenise examples; for a kind with windows an example becomes a row for each window of its document.

    With `keep` the tokens are read from the cache if they are there, and written to it if not. `watch` is called with
    the number of examples done and of all examples.
    """
    row = KINDS[kind]
    tokens, owners = _tokens(backbone, examples, max_length, stride if row.windows else None, keep, watch)
    cut = sum(one.cut for one in tokens)
    if owners is None or examples.targets is None:
        return Rows(tokens, examples.targets, cut, owners=owners)
    targets = _window_targets(row, tokens, owners, examples.targets)
    kept = sorted(targets)
    if not kept:
        raise DataError(f"No answer fits into a window of {max_length} tokens. Raise --max-length.")
    mine = [owners[i] for i in kept]
    left_out = len(examples) - len(set(mine))
    return Rows([tokens[i] for i in kept], [targets[i] for i in kept], cut, left_out, mine)


def _window_targets(
    kind: Kind, tokens: Sequence[Tokens], owners: Sequence[int], targets: Sequence[Any]
) -> dict[int, Any]:
    """Return the target of each row; rows of an example that is left out have none."""
    assert kind.window_targets is not None
    found: dict[int, Any] = {}
    for owner, group in groupby(range(len(tokens)), key=lambda row: owners[row]):
        mine = list(group)
        given = kind.window_targets([tokens[row] for row in mine], targets[owner])
        found |= zip(mine, given, strict=True) if given else {}
    return found


# --- tokens, new or cached ------------------------------------------------------------------------------------


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
    known = cache.get(key) if keep else None
    if known and _is_valid(known, backbone, len(examples), max_length, stride is not None):
        watch(len(examples), len(examples))
        return _from_arrays(known, stride is not None)
    tokens: list[Tokens] = []
    owners: list[int] = []
    for start in range(0, len(examples), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        texts, pairs = examples.texts[part], None if examples.pairs is None else examples.pairs[part]
        if stride is None:
            tokens += tokenize(backbone.tokenizer, texts, pairs, max_length, start=start)
        else:
            found, mine = tokenize_windows(backbone.tokenizer, texts, pairs, max_length, stride, start)
            tokens += found
            owners += mine
        watch(min(start + _AT_ONCE, len(examples)), len(examples))
    if keep:
        cache.put(key, _to_arrays(tokens, owners))
    return tokens, owners if stride is not None else None


CACHE_FORMAT = 1
"""Version of the cached arrays; raise it whenever the same texts give other tokens or other arrays."""


def _key(backbone: Backbone, examples: Examples, max_length: int, stride: int | None) -> str:
    """Return a name for the tokens of these texts: a hash of texts, tokenizer, limits and format."""
    digest = hashlib.sha256(f"{CACHE_FORMAT} {tokenizer_hash(backbone.tokenizer)} {max_length} {stride}".encode())
    for texts in (examples.texts, examples.pairs or []):
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        digest.update(b"\xff" * 9)  # not a length
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


_ARRAYS = {"lengths": "int32", "cut": "bool", "ids": "int32", "types": "int8", "owners": "int32"}
"""Types of the arrays of one dimension."""


def _is_valid(known: dict[str, np.ndarray], backbone: Backbone, examples: int, max_length: int, windows: bool) -> bool:
    """Return whether a cached entry could be the tokens of so many examples; its file may hold anything."""
    wanted = {name: (dtype, 1) for name, dtype in _ARRAYS.items()} | ({"offsets": ("int32", 2)} if windows else {})
    if {name: (array.dtype.name, array.ndim) for name, array in known.items()} != wanted:
        return False
    lengths, ids, owners = known["lengths"], known["ids"], known["owners"]
    if len(known["cut"]) != len(lengths) or not len(ids) == len(known["types"]) == lengths.sum(dtype=np.int64):
        return False
    ranges = [(lengths, 0, max_length), (ids, 0, backbone.config.vocabulary - 1), (known["types"], 0, 127)]
    if windows:
        # Every example has one window or more, and windows are in the order of the examples.
        steps = np.diff(owners, prepend=0, append=examples - 1)
        if len(owners) != len(lengths) or known["offsets"].shape != (len(ids), 2) or steps[0] or steps[-1]:
            return False
        ranges += [(steps, 0, 1), (known["offsets"], -1, np.iinfo(np.int32).max)]
    elif len(lengths) != examples or len(owners):
        return False
    return all(((low <= array) & (array <= high)).all() for array, low, high in ranges)


def _from_arrays(known: dict[str, np.ndarray], windows: bool) -> tuple[list[Tokens], list[int] | None]:
    ends = np.cumsum(known["lengths"], dtype=np.int64)
    ids, types = known["ids"].astype(np.int64), known["types"].astype(np.int64)
    offsets = known["offsets"].astype(np.int64) if windows else None
    bounds = zip(ends - known["lengths"], ends, known["cut"].tolist(), strict=True)
    rows = [Tokens(ids[a:b], types[a:b], None if offsets is None else offsets[a:b], cut) for a, b, cut in bounds]
    return rows, known["owners"].tolist() if windows else None


# --- batches ------------------------------------------------------------------------------------------------


_WINDOW = 4
"""Batches whose rows are sorted by length together: enough for similar lengths, few enough to keep batches mixed."""


def epoch_order(lengths: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut a seeded permutation of all rows into batches; each row occurs once in an epoch.

    Within a window of several batches rows are sorted by length, so that attention pads little, and the window's
    batches come in random order. That order does not depend on the seed: parallel runs have short and long batches at
    the same time. Only the last batch of the epoch may be smaller.
    """
    order, sizes = RandomStream(seed, "rows", epoch).permutation(len(lengths)), np.asarray(lengths)
    random = RandomStream("batches", epoch)
    found: list[np.ndarray] = []
    for start in range(0, len(order), batch * _WINDOW):
        window = order[start : start + batch * _WINDOW]
        window = window[np.argsort(sizes[window], kind="stable")]
        parts = [window[i : i + batch] for i in range(0, len(window), batch)]
        whole = len(parts) - (len(parts[-1]) < batch)
        found += [parts[i] for i in random.permutation(whole)] + parts[whole:]
    return found
