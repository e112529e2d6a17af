"""Examples -> rows of tokens, and rows -> batches. Knows nothing of slots' tensors or of losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, ClassVar

import numpy as np

from adapterbank.draws import RandomStream
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.tokenizer import tokenize, tokenizer_hash
from adapterbank.encoder.windows import STRIDE, tokenize_parts, tokenize_windows
from adapterbank.errors import DataError
from adapterbank.kinds.kind import Kind
from adapterbank.kinds.table import KINDS
from adapterbank.storage import cache
from adapterbank.tasks.spec import Examples

_AT_ONCE = 4096
"""Examples between two progress reports. The tokenizer's own objects, which are large, are kept for no more."""
MEAN, WEIGHTS = "mean", "weights"
"""How the outputs of a text's windows become one."""
MIN_CACHED_ROWS = 1000
"""Tokenising fewer examples than this takes less time than finding a file."""


@dataclass(frozen=True)
class Rows:
    """Tokenised examples of one task."""

    tokens: list[Tokens] = field(repr=False)
    targets: list[Any] | None = field(repr=False)
    """What the loss compares with, for each unit: as in `Examples`, or the kind's `window_targets`."""
    cut: int = 0
    """How many examples were longer than the limit and are read in part."""
    unreachable: int = 0
    """With windows: how many examples were left out because their answer fits no window."""
    owners: list[int] | None = field(default=None, repr=False)
    """With windows: which example each row is a window of, in rising order; None if rows are the examples."""
    pooling: str = ""
    """How the outputs of an example's windows become one, by their `mean` or by `weights`; empty if they do not."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each unit, and the number of rows: training takes units, each with one target.

        A unit is an example with all its windows if these are pooled, and else a row.
        """
        if not self.pooling:
            return np.arange(len(self.tokens) + 1)
        owners = np.asarray(self.owners)
        return np.concatenate([np.flatnonzero(np.diff(owners, prepend=-1)), [len(owners)]])

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self.starts) - 1

    @property
    def most_windows(self) -> int:
        """The most rows of a unit."""
        return int(np.diff(self.starts).max(initial=1))

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

    def pool(self, outputs: np.ndarray) -> np.ndarray:
        """Return the output of each example, `[examples, outputs]`, from those of its windows.

        With weights, the last column says how much a window counts: its softmax over the windows of the text.
        """
        if not self.pooling:
            return outputs
        starts, sizes = self.starts[:-1], np.diff(self.starts)
        values, shares = outputs, np.ones((len(outputs), 1), outputs.dtype)
        if self.pooling == WEIGHTS:
            values, scores = outputs[:, :-1], outputs[:, -1:]
            shares = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), sizes, axis=0))
        return np.asarray(np.add.reduceat(values * shares, starts) / np.add.reduceat(shares, starts))


def make_rows(
    backbone: Backbone,
    examples: Examples,
    *,
    kind: str,
    max_length: int,
    stride: int = STRIDE,
    windows: int = 0,
    pooling: str = MEAN,
    keep: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Rows:
    """Tokenise examples; with windows an example becomes a row for each window of its text.

    `windows` is the most of a text; 0 is the kind's own default: no windows, or any number of overlapping ones for a
    kind with an answer in each. With `keep` the tokens are read from the cache if they are there, and written to it if
    not. `watch` is called with the number of examples done and of all examples.
    """
    row = KINDS[kind]
    form = _Overlapping(max_length, stride, windows) if row.windows else _Form(max_length, windows)
    tokens, owners = _tokens(backbone, examples, form, keep, watch)
    pooled = pooling if owners is not None and not row.windows else ""
    cut = len({k if owners is None else owners[k] for k, one in enumerate(tokens) if one.cut})
    if owners is None or examples.targets is None or pooled:
        return Rows(tokens, examples.targets, cut, owners=owners, pooling=pooled)
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


@dataclass(frozen=True)
class _Form:
    """How texts become rows: cut at a limit, or in windows that cover them."""

    max_length: int
    windows: int = 0
    """The most windows of a text; 0 if texts are cut."""

    has_offsets: ClassVar[bool] = False

    @property
    def divides(self) -> bool:
        """Whether a text may become several rows."""
        return self.windows > 1

    def rows(self, backbone: Backbone, examples: Examples, start: int) -> tuple[list[Tokens], list[int]]:
        """Return the rows of examples, and with windows the example of each."""
        given = (backbone.tokenizer, examples.texts, examples.pairs, self.max_length)
        return tokenize_parts(*given, self.windows, start) if self.divides else (tokenize(*given, start=start), [])


@dataclass(frozen=True)
class _Overlapping:
    """How documents become overlapping windows, whose tokens know their characters."""

    max_length: int
    stride: int
    windows: int = 0
    """1 if only the first window of a document is read; 0 for all."""

    has_offsets: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    def rows(self, backbone: Backbone, examples: Examples, start: int) -> tuple[list[Tokens], list[int]]:
        """Return the windows of examples, and the example of each."""
        tokens, owners = tokenize_windows(
            backbone.tokenizer, examples.texts, examples.pairs, self.max_length, self.stride, start
        )
        if self.windows != 1:
            return tokens, owners
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        counts = np.diff([*first, len(owners)])
        return [replace(tokens[k], cut=bool(n > 1)) for k, n in zip(first, counts, strict=True)], sorted(set(owners))


def _tokens(
    backbone: Backbone, examples: Examples, form: _Form | _Overlapping, keep: bool, watch: Callable[[int, int], None]
) -> tuple[list[Tokens], list[int] | None]:
    keep = keep and len(examples) >= MIN_CACHED_ROWS
    key = _key(backbone, examples, form) if keep else ""
    known = cache.get(key) if keep else None
    if known and _is_valid(known, backbone, len(examples), form):
        watch(len(examples), len(examples))
        return _from_arrays(known, form)
    tokens: list[Tokens] = []
    owners: list[int] = []
    for start in range(0, len(examples), _AT_ONCE):
        small = len(examples) <= _AT_ONCE
        part = examples if small else examples.select(range(start, min(start + _AT_ONCE, len(examples))))
        found, mine = form.rows(backbone, part, start)
        tokens += found
        owners += mine
        watch(min(start + _AT_ONCE, len(examples)), len(examples))
    if keep:
        cache.put(key, _to_arrays(tokens, owners))
    return tokens, owners if form.divides else None


CACHE_FORMAT = 1
"""Version of the cached arrays; raise it whenever the same texts give other tokens or other arrays."""


def _key(backbone: Backbone, examples: Examples, form: _Form | _Overlapping) -> str:
    """Return a name for the tokens of these texts: a hash of texts, tokenizer, form and format."""
    digest = hashlib.sha256(f"{CACHE_FORMAT} {tokenizer_hash(backbone.tokenizer)} {form}".encode())
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


def _is_valid(known: dict[str, np.ndarray], backbone: Backbone, examples: int, form: _Form | _Overlapping) -> bool:
    """Return whether a cached entry could be the tokens of so many examples; its file may hold anything."""
    wanted = {name: (dtype, 1) for name, dtype in _ARRAYS.items()}
    wanted |= {"offsets": ("int32", 2)} if form.has_offsets else {}
    if {name: (array.dtype.name, array.ndim) for name, array in known.items()} != wanted:
        return False
    lengths, ids, owners = known["lengths"], known["ids"], known["owners"]
    if len(known["cut"]) != len(lengths) or not len(ids) == len(known["types"]) == lengths.sum(dtype=np.int64):
        return False
    ranges = [(lengths, 0, form.max_length), (ids, 0, backbone.config.vocabulary - 1), (known["types"], 0, 127)]
    if form.divides:
        # Every example has one window or more, and windows are in the order of the examples.
        steps = np.diff(owners, prepend=0, append=examples - 1)
        if len(owners) != len(lengths) or steps[0] or steps[-1]:
            return False
        ranges += [(steps, 0, 1)]
    if form.has_offsets:
        if known["offsets"].shape != (len(ids), 2):
            return False
        ranges += [(known["offsets"], -1, np.iinfo(np.int32).max)]
    if not form.divides and (len(lengths) != examples or len(owners)):
        return False
    return all(((low <= array) & (array <= high)).all() for array, low, high in ranges)


def _from_arrays(known: dict[str, np.ndarray], form: _Form | _Overlapping) -> tuple[list[Tokens], list[int] | None]:
    ends = np.cumsum(known["lengths"], dtype=np.int64)
    ids, types = known["ids"].astype(np.int64), known["types"].astype(np.int64)
    offsets = known["offsets"].astype(np.int64) if form.has_offsets else None
    bounds = zip(ends - known["lengths"], ends, known["cut"].tolist(), strict=True)
    rows = [Tokens(ids[a:b], types[a:b], None if offsets is None else offsets[a:b], cut) for a, b, cut in bounds]
    return rows, known["owners"].tolist() if form.divides else None


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
