"""Hidden states of the frozen lower layers, computed once per row and cached. Knows no tasks and no slots.

When nothing below layer `first` trains, the output of that part of the encoder for a text is always the same (it runs
without dropout, see `forward`). So it is computed once, when the rows are first used, and looked up from then on: in
memory while the budget lasts, else in a memory-mapped temporary file. Beyond both budgets it is computed every time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import PackedBatch, Tokens, by_length, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import Frozen, hidden_below

PrefixKey = tuple[str, int, torch.dtype, torch.device]
"""What determines a prefix beside the backbone: the tokens of its rows, the layer, the type, the device."""

_TOKENS_AT_ONCE = 4096
"""Padded tokens of one batch when a prefix is computed."""


@dataclass
class PrefixCache:
    """The cached prefixes of one backbone, shared by all runs on the same rows."""

    config: EncoderConfig
    frozen: Mapping[str, Tensor] = field(repr=False)
    memory: int = 2 << 30
    """Bytes that all prefixes together may take in memory."""
    disk: int = 16 << 30
    """Bytes that they may take in mapped files."""
    _prefixes: dict[PrefixKey, Prefix] = field(default_factory=dict, repr=False)
    _seen: dict[tuple[int, int], tuple[Sequence[Tokens], Prefix]] = field(default_factory=dict, repr=False)

    def get(self, tokens: Sequence[Tokens], first: int) -> Prefix:
        """Return the prefix of these rows below layer `first`, computed once."""
        if (id(tokens), first) not in self._seen:  # hashed once per list; the list is kept, so its id stays unique
            some = next(iter(self.frozen.values()))
            key = (_digest(tokens), first, some.dtype, some.device)
            if key not in self._prefixes:
                self._prefixes[key] = Prefix(self, tokens, first)
            self._seen[id(tokens), first] = (tokens, self._prefixes[key])
        return self._seen[id(tokens), first][1]

    def allocate(self, rows: int, width: int) -> Tensor | None:
        """Allocate `[rows, width]` hidden states within the budgets; None where neither has that much left."""
        some = next(iter(self.frozen.values()))
        size = rows * width * some.element_size()
        if size <= self.memory:
            found = torch.empty(rows, width, dtype=some.dtype, device=some.device)
            self.memory -= size
            return found
        if size <= self.disk and some.device.type == "cpu" and some.dtype == torch.float32:
            with tempfile.NamedTemporaryFile() as file:  # removed from the folder at once, from the disk when unmapped
                if not _reserve(file.fileno(), Path(file.name), size):
                    return None
                self.disk -= size
                return torch.from_numpy(np.memmap(file.name, np.float32, "r+", shape=(rows, width)))
        return None


class Prefix:
    """The hidden states below one layer, of one set of rows."""

    def __init__(self, owner: PrefixCache, tokens: Sequence[Tokens], first: int) -> None:
        """See `PrefixCache.get`."""
        self._config, self._frozen, self.first = owner.config, owner.frozen, first
        lengths = np.array([len(row) for row in tokens])
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        # The hidden states, rows end to end in the order of `tokens`; None where they are not cached.
        self.store = owner.allocate(int(lengths.sum()), owner.config.hidden)
        if self.store is not None:
            self._fill(tokens, self.store)

    def rows(self, chosen: Sequence[int], batch: PackedBatch) -> Tensor:
        """Return the hidden states `[T, hidden]` of the rows that `batch` was packed from, in its order."""
        if self.store is not None:
            return self.store.index_select(0, self._token_numbers(chosen))
        with torch.no_grad():
            return hidden_below(self._config, Frozen(self._frozen), batch, self.first)

    def _fill(self, tokens: Sequence[Tokens], store: Tensor) -> None:
        """Compute all rows in batches that depend on nothing else: a resumed run must read the same bits."""
        with torch.no_grad():
            for chosen in by_length(tokens, _TOKENS_AT_ONCE):
                batch = pack([tokens[i] for i in chosen], store.device)
                hidden = hidden_below(self._config, Frozen(self._frozen), batch, self.first)
                store.index_copy_(0, self._token_numbers(chosen), hidden)

    def _token_numbers(self, chosen: Sequence[int]) -> Tensor:
        numbers = np.concatenate([np.arange(self._starts[i], self._ends[i]) for i in chosen])
        return torch.from_numpy(numbers).to(next(iter(self._frozen.values())).device)


def _reserve(file: int, path: Path, size: int) -> bool:
    """Reserve disk space now: writing to a mapped file on a full disk would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
            return True
        os.truncate(file, size)
        return shutil.disk_usage(path.parent).free > 2 * size
    except OSError:
        return False


def _digest(tokens: Sequence[Tokens]) -> str:
    digest = hashlib.sha256()
    for row in tokens:
        digest.update(len(row).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(row.ids).data)
        digest.update(np.ascontiguousarray(row.types).data)
    return digest.hexdigest()
