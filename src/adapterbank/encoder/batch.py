"""Batches of token ids: packed end to end without padding, or padded to one length. Knows no tasks.

The linear layers, LayerNorms and adapters of the pass run on the `T` real tokens; only attention needs to know where a
row begins and ends. For it `to_grid` lays packed tokens out as rows of equal length; `to_packed` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)  # not frozen, which would be slower: there is one for each text
class Tokens:
    """One text, or one pair of texts, as the tokenizer returned it."""

    ids: np.ndarray
    """Token ids, int64 [length]."""
    types: np.ndarray
    """Which text of a pair a token belongs to, int64 [length]."""
    offsets: np.ndarray | None = None
    """For span tasks: first and last-plus-one character of each token of the second text, -1 elsewhere, [length, 2]."""
    cut: bool = False
    """Whether the text was longer than the limit and lost its end."""

    def __len__(self) -> int:
        """Return the length in tokens, special tokens included."""
        return len(self.ids)


@dataclass(frozen=True)
class Grid:
    """Rows of tokens of several lengths, laid out as `rows x longest`."""

    rows: int
    longest: int
    cells: Tensor | None
    """[T] the cell of each token in the grid; None when all rows are equally long."""

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | None) -> Grid:
        """Lay out rows of these lengths, which are packed end to end."""
        longest = int(lengths.max())
        if (lengths == longest).all():
            return cls(len(lengths), longest, None)
        cells = cell_numbers(lengths, np.arange(len(lengths)) * longest)
        return cls(len(lengths), longest, torch.from_numpy(cells).to(device))

    def to_grid(self, x: Tensor) -> Tensor:
        """Lay `[T, n]` out as `[rows, longest, n]`, zeros where a row is shorter."""
        if self.cells is None:
            return x.view(self.rows, self.longest, -1)
        grid: Tensor = _Scatter.apply(x, self.cells, self.rows * self.longest)  # type: ignore[no-untyped-call]
        return grid.view(self.rows, self.longest, -1)

    def to_packed(self, grid: Tensor) -> Tensor:
        """Return the real tokens `[T, n]` of `[rows, longest, n]`."""
        flat = grid.reshape(-1, grid.shape[-1])
        if self.cells is None:
            return flat
        packed: Tensor = _Gather.apply(flat, self.cells)  # type: ignore[no-untyped-call]
        return packed


FusedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
"""See `kernels.attention.attend`."""


@dataclass(frozen=True)
class PaddedLayout:
    """The same for rows that are all padded to one length, padding among the tokens."""

    like: Tensor
    """[rows, 1, 1, longest]: sizes that are read from a tensor need not be compiled into the pass."""
    fused: FusedAttention | None = None
    """A kernel for attention within such rows."""

    def to_grid(self, x: Tensor) -> Tensor:
        """See `Grid`."""
        return x.view(self.like.shape[0], self.like.shape[3], -1)

    def to_packed(self, grid: Tensor) -> Tensor:
        """See `Grid`."""
        return grid.reshape(-1, grid.shape[-1])


@dataclass(frozen=True)
class PackedBatch:
    """`B` rows with `T` tokens in all, end to end."""

    ids: Tensor
    """[T] token ids."""
    types: Tensor
    """[T] token types."""
    positions: Tensor
    """[T] position of each token in its row, from 0."""
    rows: Tensor
    """[T] row of each token."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    starts: Tensor
    """[B] where each row begins."""
    grid: Grid = field(repr=False)
    """The rows laid out for attention."""
    mask: Tensor | None
    """[B, 1, 1, longest] true at real tokens; None when all rows are equally long."""
    counts: Tensor
    """[B] tokens of each row, as float32: bf16 cannot represent 257."""
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        return max(self.lengths)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return what attention adds to its scores: minus infinity where a row has no token; None without padding."""
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
        """Return the first token of each row, `[B, n]`."""
        return x.index_select(0, self.starts)


@dataclass(frozen=True)
class PaddedBatch:
    """`B` rows, each padded to `longest` tokens, end to end: shapes that do not depend on the lengths of the rows.

    For devices where a fixed sequence of kernels saves more than arithmetic on padding costs. The values at padding
    are arbitrary; they never reach a real token.
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
    fused: FusedAttention | None = None
    """A kernel for attention within such rows."""

    @classmethod
    def of(cls, ids: Tensor, types: Tensor, lengths: Tensor, fused: FusedAttention | None = None) -> PaddedBatch:
        """Take the tokens `[B * longest]` of rows that are padded already."""
        positions = torch.arange(len(ids) // len(lengths), device=ids.device).expand(len(lengths), -1)
        numbers = torch.arange(len(lengths), device=ids.device)[:, None].expand_as(positions)
        real = (positions < lengths[:, None])[:, None, None]
        return cls(ids, types, positions.flatten(), numbers.flatten(), real, lengths.float(), fused)

    @property
    def longest(self) -> int:
        """The length that rows are padded to."""
        return self.mask.shape[3]

    @property
    def grid(self) -> PaddedLayout:
        """The rows laid out for attention."""
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
"""Rows of at most 64 tokens are padded to a multiple of 8, and so on; longer ones to a multiple of 64."""


def cell_numbers(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the cell of each token of packed rows, if the first token of each row has the cell `starts`."""
    ends = lengths.cumsum()
    return np.repeat(starts - ends + lengths, lengths) + np.arange(int(ends[-1]))


@cache
def padded_length(length: int, largest: int) -> int:
    """Return the length that rows are padded to: few different ones, little padding, never above `largest`."""
    unit = next((unit for limit, unit in _STEPS if length <= limit), 64)
    return min(largest, -(-length // unit) * unit)


@dataclass(frozen=True)
class TokenStore:
    """The tokens of many rows on a device, end to end: batches are looked up there instead of copied there."""

    ids: Tensor
    types: Tensor
    starts: Tensor
    """[rows], as the next."""
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tokens], device: torch.device) -> TokenStore:
        """Copy rows to the device."""
        lengths = np.array([len(row) for row in rows])
        ids, types = (np.concatenate([getattr(row, name) for row in rows]) for name in ("ids", "types"))
        arrays = (ids, types, np.cumsum(lengths) - lengths, lengths)
        return cls(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))

    def batch(self, rows: Tensor, longest: int, fused: FusedAttention | None = None) -> tuple[PaddedBatch, Tensor]:
        """Return the rows `[B]` padded to `longest`, and the index `[B * longest]` of each token in the store."""
        positions = torch.arange(longest, device=rows.device)
        lengths = self.lengths[rows]
        where = torch.where(positions < lengths[:, None], self.starts[rows][:, None] + positions, 0).flatten()
        return PaddedBatch.of(self.ids[where], self.types[where], lengths, fused), where


class _Scatter(torch.autograd.Function):
    """Copy rows `[T, n]` to cells of a zero `[cells, n]`. No two share a cell, so the backward is a plain look-up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cells)
        return x.new_zeros(count, x.shape[-1]).index_copy_(0, cells, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        return grads[0].index_select(0, cells), None, None


class _Gather(torch.autograd.Function):
    """The inverse. Its backward needs no sums, on which that of a general look-up would spend its time."""

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
    """Pack rows end to end, in the order given."""
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
    max_rows: int | None = None,
    padded: Callable[[int], int] = lambda length: length,
) -> Iterator[list[int]]:
    """Yield batches of row numbers: of one group and similar lengths, at most `budget` padded tokens each.

    A batch has at most `max_rows` rows. `padded` returns the length that a row will be padded to, if not to the longest
    of its batch: rows of one such length keep their order.
    """
    group = groups if groups is not None else [0] * len(rows)
    sizes = [len(row.ids) for row in rows]  # len(row) is a call in Python, three times as slow
    lengths = {length: padded(length) for length in set(sizes)}
    keys = [(mine, -lengths[length]) for mine, length in zip(group, sizes, strict=True)]
    grouped: dict[Any, list[int]] = {}
    if len(set(group)) == 1:
        grouped[group[0]] = sorted(range(len(rows)), key=keys.__getitem__)
    else:
        for i in sorted(range(len(rows)), key=keys.__getitem__):
            grouped.setdefault(group[i], []).append(i)
    for order in grouped.values():
        start = 0
        while start < len(order):  # the first is the longest of its batch
            count = max(1, budget // -keys[order[start]][1])
            stop = start + (count if max_rows is None else min(count, max_rows))
            yield order[start:stop]
            start = stop
