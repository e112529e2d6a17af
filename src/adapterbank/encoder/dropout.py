"""Dropout whose masks are computed, not drawn: from (run seed, step, row within the run, token, place). Knows no tasks.

A generator shared by all rows would make a row's mask depend on what else is in the batch. Here each element's number
is a hash of its coordinates, so a run gives the same result alone, beside others, cut into micro-batches or after a
resume, and there is no generator state to keep.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_FIRST, _SECOND = -2048144789, -1028477387  # murmur3's finalizer, 0x85ebca6b and 0xc2b2ae35 as signed 32-bit numbers
_GOLDEN = -1640531527  # 2**32 / golden ratio, 0x9e3779b9: spreads small whole numbers over all bits


def mix(x: Tensor) -> Tensor:
    """Hash int32 numbers elementwise; the shifts are masked because torch shifts signed numbers arithmetically."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def row_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """Give one int32 key for each row of a run at a step; `rows` [B] are places within the run's own batch."""
    start = torch.tensor([seed & 0x7FFFFFFF, step & 0x7FFFFFFF], dtype=torch.int32, device=rows.device)
    run, now = mix(start * _GOLDEN + 1)
    return mix(mix(rows.to(torch.int32) * _GOLDEN + run) ^ now)


@functools.lru_cache(maxsize=4096)
def _numbered(count: int, start: int, device: torch.device) -> Tensor:
    """Give `count` well-mixed keys; the same at every step, so they are kept."""
    with torch.inference_mode(False):
        return mix(torch.arange(count, dtype=torch.int32, device=device) * _GOLDEN + start)


class Dropout:
    """The masks of one step. Places are numbered in the order of the pass."""

    def __init__(self, keys: Tensor, rows: Tensor, positions: Tensor, *, rate: float, attention_rate: float) -> None:
        """`keys` [B] from `row_keys`; `rows`, `positions` [T] say where each packed token belongs."""
        self.rate, self.attention_rate = rate, attention_rate
        self.keys = keys
        self.tokens = self._token_keys(keys[rows], positions)

    def hidden(self, x: Tensor, place: int) -> Tensor:
        """Drop elements of packed hidden states `[T, n]`."""
        return self._drop(x, self.tokens[:, None], place, self.rate)

    def pooled(self, x: Tensor, rows: Tensor, place: int) -> Tensor:
        """Drop elements of one vector a row, `[len(rows), n]`."""
        return self._drop(x, mix(self.keys[rows] + place)[:, None], place, self.rate)

    def attention(self, weights: Tensor, place: int) -> Tensor:
        """Drop attention weights `[B, heads, queries, keys]`; padding changes no real element's number."""
        queries = torch.arange(weights.shape[2], device=weights.device)
        keys = self._token_keys(self.keys[:, None], queries[None])[:, None, :, None]
        heads = _numbered(weights.shape[1], place, weights.device)[None, :, None, None]
        return self._drop(weights, keys ^ heads, place, self.attention_rate)

    @staticmethod
    def _token_keys(keys: Tensor, positions: Tensor) -> Tensor:
        return mix(keys + positions.to(torch.int32) * _GOLDEN)

    @staticmethod
    def _drop(x: Tensor, keys: Tensor, place: int, rate: float) -> Tensor:
        """Keep an element where a hash of its row's and its column's well-mixed keys is above a threshold.

        Two multiplications are enough here: the comparison reads the high bits, which depend on all lower ones.
        """
        if rate == 0.0:
            return x
        numbers = keys ^ _numbered(x.shape[-1], (place + 1) * 7919, x.device)
        numbers.mul_(_FIRST)
        numbers.bitwise_xor_(numbers >> 15).mul_(_SECOND)
        keep = numbers >= round((rate - 0.5) * 2**32)
        return (x * (1.0 / (1.0 - rate))) * keep
