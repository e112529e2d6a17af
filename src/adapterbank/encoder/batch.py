"""A packed batch: the tokens of all rows end to end, without padding. Knows nothing of tasks or tensors' meaning.

The linear layers, LayerNorms and adapters of the pass run on the `T` real tokens; only attention needs to know where a
row begins and ends. `to_grid` lays packed tokens out as rows of equal length for it, `to_packed` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)  # not frozen: there is one for each text
class Tokens:
    """One text, or one pair of texts, as the tokenizer gave it."""

    ids: np.ndarray
    """Token ids, int64 [length]."""
    types: np.ndarray
    """Which text of a pair a token belongs to, int64 [length]."""
    offsets: np.ndarray | None = None
    """For span tasks: first and last-plus-one character of each token of the second text, -1 elsewhere, [length, 2]."""

    cut: bool = False
    """Whether the text was longer than the limit and lost its end."""

    def __len__(self) -> int:
        """Give the length in tokens, special tokens included."""
        return len(self.ids)


@dataclass(frozen=True)
class Grid:
    """Runs of tokens of several lengths laid out side by side, `runs x longest`, and the way back."""

    runs: int
    longest: int
    cells: Tensor | None
    """[T] where each token stands in the grid; None when all runs are equally long."""

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | None) -> Grid:
        """Lay out runs of these lengths, which stand end to end."""
        longest = int(lengths.max())
        if (lengths == longest).all():
            return cls(len(lengths), longest, None)
        cells = laid_at(lengths, np.arange(len(lengths)) * longest)
        return cls(len(lengths), longest, torch.from_numpy(cells).to(device))

    def to_grid(self, x: Tensor) -> Tensor:
        """Lay `[T, n]` out as `[runs, longest, n]`, zeros where a run is shorter."""
        if self.cells is None:
            return x.view(self.runs, self.longest, -1)
        grid: Tensor = _Spread.apply(x, self.cells, self.runs * self.longest)  # type: ignore[no-untyped-call]
        return grid.view(self.runs, self.longest, -1)

    def to_packed(self, grid: Tensor) -> Tensor:
        """Take the real tokens `[T, n]` out of `[runs, longest, n]`."""
        flat = grid.reshape(-1, grid.shape[-1])
        if self.cells is None:
            return flat
        packed: Tensor = _Gather.apply(flat, self.cells)  # type: ignore[no-untyped-call]
        return packed


Fused = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
"""See `kernels.attend`."""


@dataclass(frozen=True)
class PaddedLayout:
    """The way there and back for rows that are all filled up to one length, padding among the tokens."""

    like: Tensor
    """[rows, 1, 1, longest]: sizes read off a tensor need not be compiled into the pass."""
    fused: Fused | None = None
    """A kernel that attends to such rows."""

    def to_grid(self, x: Tensor) -> Tensor:
        """See `Grid`."""
        return x.view(self.like.shape[0], self.like.shape[3], -1)

    def to_packed(self, grid: Tensor) -> Tensor:
        """See `Grid`."""
        return grid.reshape(-1, grid.shape[-1])


@dataclass(frozen=True)
class PackedBatch:
    """`B` rows of `T` tokens in all, end to end."""

    ids: Tensor
    """[T] token ids."""
    types: Tensor
    """[T] token types."""
    positions: Tensor
    """[T] place of each token in its row, from 0."""
    rows: Tensor
    """[T] row of each token."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    starts: Tensor
    """[B] where each row begins."""
    grid: Grid = field(repr=False)
    """Rows side by side."""
    mask: Tensor | None
    """[B, 1, 1, longest] true at real tokens; None when all rows are equally long."""
    counts: Tensor
    """[B] tokens of each row, as float32: bf16 has no 257."""
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Give the length of the longest row."""
        return max(self.lengths)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Give what attention adds to its scores: minus infinity where a row has no token; None without padding."""
        if self.mask is None:
            return None
        if dtype not in self._bias:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._bias[dtype] = zeros.masked_fill_(~self.mask, -torch.inf)
        return self._bias[dtype]

    def by_row(self, x: Tensor) -> Tensor:
        """Lay `[T, n]` out as `[B, longest, n]`, zeros where a row is shorter."""
        return self.grid.to_grid(x)

    def first(self, x: Tensor) -> Tensor:
        """Give the first token of each row, `[B, n]`."""
        return x.index_select(0, self.starts)


@dataclass(frozen=True)
class PaddedBatch:
    """`B` rows, each filled up to `longest` tokens, end to end: shapes that do not depend on the rows' lengths.

    For devices where a fixed sequence of kernels is worth more than the arithmetic saved. What stands in the padding is
    arbitrary; it never reaches a real token.
    """

    ids: Tensor
    """[B * longest], as the next three."""
    types: Tensor
    positions: Tensor
    rows: Tensor
    mask: Tensor
    """[B, 1, 1, longest] true at real tokens."""
    counts: Tensor
    """[B] as in `PackedBatch`."""
    fused: Fused | None = None
    """A kernel that attends to such rows."""

    @classmethod
    def of(cls, ids: Tensor, types: Tensor, lengths: Tensor, fused: Fused | None = None) -> PaddedBatch:
        """Take the tokens `[B * longest]` of rows that are filled up already."""
        positions = torch.arange(len(ids) // len(lengths), device=ids.device).expand(len(lengths), -1)
        numbers = torch.arange(len(lengths), device=ids.device)[:, None].expand_as(positions)
        real = (positions < lengths[:, None])[:, None, None]
        return cls(ids, types, positions.flatten(), numbers.flatten(), real, lengths.float(), fused)

    @property
    def longest(self) -> int:
        """Give the length that rows are filled up to."""
        return self.mask.shape[3]

    @property
    def grid(self) -> PaddedLayout:
        """Rows side by side."""
        return PaddedLayout(self.mask, self.fused)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """See `PackedBatch`."""
        zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
        return zeros.masked_fill(~self.mask, -torch.inf)

    def by_row(self, x: Tensor) -> Tensor:
        """See `PackedBatch`."""
        return self.grid.to_grid(x).masked_fill(~self.mask[:, 0, 0, :, None], 0.0)

    def first(self, x: Tensor) -> Tensor:
        """See `PackedBatch`."""
        return self.grid.to_grid(x)[:, 0]


_STEPS = ((64, 8), (128, 16), (256, 32))
"""Rows are filled up to a multiple of 8 tokens as long as they have at most 64, and so on; beyond, of 64."""


def laid_at(lengths: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Say where each token of runs that stand end to end goes, if the first of each run goes to `firsts`."""
    ends = lengths.cumsum()
    return np.repeat(firsts - ends + lengths, lengths) + np.arange(int(ends[-1]))


@cache
def room(length: int, largest: int) -> int:
    """Give the length that rows are filled up to: few different ones, little padding."""
    unit = next((unit for limit, unit in _STEPS if length <= limit), 64)
    return min(largest, -(-length // unit) * unit)


@dataclass(frozen=True)
class TokenStore:
    """The tokens of many rows on a device, end to end: batches are looked up there, not carried there."""

    ids: Tensor
    types: Tensor
    starts: Tensor
    """[rows], as the next."""
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tokens], device: torch.device) -> TokenStore:
        """Lay rows end to end."""
        lengths = np.array([len(row) for row in rows])
        ids, types = (np.concatenate([getattr(row, name) for row in rows]) for name in ("ids", "types"))
        arrays = (ids, types, np.cumsum(lengths) - lengths, lengths)
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))

    def batch(self, rows: Tensor, longest: int, fused: Fused | None = None) -> tuple[PaddedBatch, Tensor]:
        """Give rows `[B]` filled up, and `[B * longest]` where each token stands in the store."""
        positions = torch.arange(longest, device=rows.device)
        lengths = self.lengths[rows]
        where = torch.where(positions < lengths[:, None], self.starts[rows][:, None] + positions, 0).flatten()
        return PaddedBatch.of(self.ids[where], self.types[where], lengths, fused), where


class _Spread(torch.autograd.Function):
    """Rows `[T, n]` to places of a zero `[cells, n]`; no two go to one place, so its backward is a plain look-up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cells)
        return x.new_zeros(count, x.shape[-1]).index_copy_(0, cells, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        return grads[0].index_select(0, cells), None, None


class _Gather(torch.autograd.Function):
    """The way back; its backward needs no sums, which is what the general look-up's would spend its time on."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.count = len(grid)
        return grid.index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.count, grads[0].shape[-1]).index_copy_(0, cells, grads[0]), None


def pack(rows: Sequence[Tokens], device: torch.device | None = None) -> PackedBatch:
    """Put rows end to end, in the order given."""
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max())
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    row = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(int(lengths.sum())) - starts[row]
    ragged = bool((lengths != longest).any())

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return PackedBatch(
        ids=move(np.concatenate([r.ids for r in rows])),
        types=move(np.concatenate([r.types for r in rows])),
        positions=move(positions),
        rows=move(row),
        lengths=tuple(int(n) for n in lengths),
        starts=move(starts),
        grid=Grid.of(lengths, device),
        mask=move((np.arange(longest)[None] < lengths[:, None])[:, None, None]) if ragged else None,
        counts=move(lengths.astype(np.float32)),
    )


def by_length(
    rows: Sequence[Tokens],
    budget: int,
    groups: Sequence[Any] | None = None,
    most: int | None = None,
    filled: Callable[[int], int] = lambda length: length,
) -> Iterator[list[int]]:
    """Cut rows into batches of one group and near lengths, at most `budget` padded tokens each; gives row numbers.

    A batch has at most `most` rows. `filled` gives the length that rows will be filled up to, if not to the longest of
    the batch: those of one such length stay beside those that they came with.
    """
    group = groups if groups is not None else [0] * len(rows)
    sizes = [len(row.ids) for row in rows]  # len(row) is a call of Python's, thrice as slow
    rooms = {length: filled(length) for length in set(sizes)}
    keys = [(mine, -rooms[length]) for mine, length in zip(group, sizes, strict=True)]
    alike: dict[Any, list[int]] = {}
    for i in sorted(range(len(rows)), key=keys.__getitem__):
        alike.setdefault(group[i], []).append(i)
    for order in alike.values():
        start = 0
        while start < len(order):  # the first is the longest of its batch
            count = max(1, budget // -keys[order[start]][1])
            stop = start + (count if most is None else min(count, most))
            yield order[start:stop]
            start = stop
