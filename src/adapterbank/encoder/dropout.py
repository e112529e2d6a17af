"""Dropout with computed masks: a hash of (run seed, step, row within the run, token, place). Knows no tasks.

A generator shared by all rows would make a row's mask depend on what else is in the batch. Here each element's number
is a hash of its coordinates, so a run has the same result alone, beside others, cut into micro-batches or after a
resume, and there is no generator state to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FIRST, SECOND = -2048144789, -1028477387  # murmur3's finalizer, 0x85ebca6b and 0xc2b2ae35 as signed 32-bit numbers
_GOLDEN = -1640531527  # 2**32 / golden ratio, 0x9e3779b9: spreads small whole numbers over all bits

DropFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""See `kernels.elementwise.drop`."""
MixFn = Callable[[Tensor], Tensor]
"""See `mix`."""


class Faster(Protocol):
    """Kernels for what is composed of torch's operations here."""

    @property
    def drop(self) -> DropFn:
        """Drop elements of hidden states."""
        ...

    @property
    def mix(self) -> MixFn:
        """Hash numbers."""
        ...


def mix(x: Tensor) -> Tensor:
    """Hash int32 numbers elementwise; the shifts are masked because torch shifts signed numbers arithmetically."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    x = (x ^ ((x >> 13) & 0x7FFFF)) * SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def row_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """Return one int32 key for each row of a run at a step; `rows` [B] are row numbers within the run's own batch."""
    return step_keys(torch.tensor([[seed & 0x7FFFFFFF, step & 0x7FFFFFFF]], device=rows.device), rows)


def step_keys(seeds_and_steps: Tensor, rows: Tensor, hashed: MixFn = mix) -> Tensor:
    """Return the `row_keys` of several runs, one after the other; `seeds_and_steps` is `[runs, 2]`, 31-bit numbers."""
    run, now = hashed(seeds_and_steps.to(torch.int32) * _GOLDEN + 1)[:, :, None].unbind(1)  # each [runs, 1]
    return hashed(hashed(rows.to(torch.int32) * _GOLDEN + run) ^ now).flatten()


@functools.cache
def _numbered(count: int, start: int, device: torch.device) -> Tensor:
    """Return `count` well-mixed keys. They are the same at every step and never freed: captured graphs read them.

    There is one tensor for each place and length, at most some ten thousand small ones.
    """
    with torch.inference_mode(False):
        return mix(torch.arange(count, dtype=torch.int32, device=device) * _GOLDEN + start)


class Dropout:
    """The masks of one step. Places are numbered in the order of the pass."""

    def __init__(
        self,
        keys: Tensor,
        rows: Tensor,
        positions: Tensor,
        *,
        rate: float,
        attention_rate: float,
        faster: Faster | None = None,
    ) -> None:
        """Take `keys` [B] from `row_keys`, and the row and position of each token, both in the shape of the tokens."""
        self.rate, self.attention_rate, self._kernel = rate, attention_rate, faster.drop if faster else None
        self._mix = faster.mix if faster else mix
        self.keys = keys
        self.tokens = _token_keys(keys[rows], positions, self._mix)
        self._queries: dict[int, Tensor] = {}

    def hidden(self, x: Tensor, place: int) -> Tensor:
        """Drop elements of hidden states `[T, n]`."""
        return self.mask(x.shape[-1], place).drop(x)

    def mask(self, width: int, place: int) -> Mask:
        """Return the mask of hidden states `[T, width]`."""
        return Mask(self.rate, self.tokens[..., None], self._columns(width, place), self._kernel)

    def pooled(self, x: Tensor, place: int) -> Tensor:
        """Drop elements of one vector a row, `[B, n]`."""
        keys = self._mix(self.keys + place)[:, None]
        return Mask(self.rate, keys, self._columns(x.shape[-1], place), self._kernel).drop(x)

    def layer(self, i: int, *, hidden: int, heads: int, longest: int) -> LayerDropout:
        """Return the masks of layer `i`."""
        if longest not in self._queries:
            if self.tokens.numel() == len(self.keys) * longest:  # rows padded to one length: each token is a query
                queries = self.tokens.view(-1, longest)
            else:
                positions = torch.arange(longest, device=self.keys.device)
                queries = _token_keys(self.keys[:, None], positions[None], self._mix)
            self._queries[longest] = queries[:, None, :, None]
        attention, first, second = range(3 * i + 1, 3 * i + 4)
        return LayerDropout(
            self.rate,
            self.attention_rate,
            self.tokens[..., None],
            self._queries[longest],
            _numbered(heads, attention, self.keys.device)[None, :, None, None],
            self._columns(longest, attention),
            self._columns(hidden, first),
            self._columns(hidden, second),
        )

    def _columns(self, count: int, place: int) -> Tensor:
        return _numbered(count, (place + 1) * 7919, self.keys.device)


@dataclass(frozen=True)
class Mask:
    """The mask of one place, not yet computed."""

    rate: float
    keys: Tensor
    """[T, 1] key of each token."""
    columns: Tensor
    """[width] key of each column."""
    kernel: DropFn | None = None

    def drop(self, x: Tensor) -> Tensor:
        """Drop elements of `[T, width]`."""
        if self.kernel and self.rate:
            return self.kernel(x, self.keys.flatten(), self.columns, self.rate)
        return _drop(x, self.keys, self.columns, self.rate)


@dataclass(frozen=True)
class LayerDropout:
    """The masks of one layer. Layers differ in tensors alone, so that one compiled form serves all of them."""

    rate: float
    attention_rate: float
    tokens: Tensor
    """[T, 1] key of each token."""
    queries: Tensor
    """[B, 1, L, 1] key of each query."""
    heads: Tensor
    """[1, heads, 1, 1] key of each head."""
    columns: Tensor
    """[L] key of each column of the attention weights."""
    attention_units: Tensor
    """[hidden] key of each unit of the attention's output, as the next of the feed-forward's."""
    feedforward_units: Tensor

    def attention(self, weights: Tensor) -> Tensor:
        """Drop attention weights `[B, heads, queries, keys]`; padding changes no real element's number."""
        return _drop(weights, self.queries ^ self.heads, self.columns, self.attention_rate)

    @property
    def after_attention(self) -> Mask:
        """The mask of the attention's output `[T, hidden]`."""
        return Mask(self.rate, self.tokens, self.attention_units)

    @property
    def after_feedforward(self) -> Mask:
        """The mask of the feed-forward output `[T, hidden]`."""
        return Mask(self.rate, self.tokens, self.feedforward_units)


def threshold(rate: float) -> int:
    """Return the number that a share `rate` of all int32 numbers is below."""
    return round((rate - 0.5) * 2**32)


def _token_keys(keys: Tensor, positions: Tensor, mix: MixFn) -> Tensor:
    return mix(keys + positions.to(torch.int32) * _GOLDEN)


def _drop(x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Keep an element where a hash of the well-mixed keys of its row and column is not below a threshold.

    Two multiplications are enough: the comparison reads the high bits, which depend on all lower ones.
    """
    if rate == 0.0:
        return x
    numbers = keys ^ columns
    numbers.mul_(FIRST)
    numbers.bitwise_xor_(numbers >> 15).mul_(SECOND)
    keep = numbers >= threshold(rate)
    scale = 1.0 / (1.0 - rate)
    if x.dtype == torch.float32:
        return x * keep.to(x.dtype).mul_(scale)  # one product each way
    return torch.where(keep, x * scale, 0.0)  # a bf16 mask would round the scale
