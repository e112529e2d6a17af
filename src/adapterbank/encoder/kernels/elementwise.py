"""Elementwise kernels: dropout and its hash, GELU, the update of Adam. Knows no layers and no schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.dropout import FIRST, SECOND, threshold
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import keep

_BLOCK = 1024


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    x, out, keys, columns, count, D, inverse,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    numbers = tl.load(keys + at // D, mask=there, other=0) ^ tl.load(columns + at % D, mask=there, other=0)
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * inverse
    v = tl.where(keep(numbers, FIRST, SECOND, THRESHOLD), v, 0.0)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=there)


@triton.jit
def _mix(x, out, count, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0)
    v = (v ^ ((v >> 16) & 0xFFFF)) * FIRST
    v = (v ^ ((v >> 13) & 0x7FFFF)) * SECOND
    tl.store(out + at, v ^ ((v >> 16) & 0xFFFF), mask=at < count)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    p, m, v, g, numbers, width, first, second, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, at, numbers = n < width, row * width + n, numbers + row * 7
    active, rate, decay = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    epsilon, fix_first, fix_second = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    grad = tl.load(g + at, mask=there, other=0.0) * tl.load(numbers + 6)
    old_m, old_v = tl.load(m + at, mask=there, other=0.0), tl.load(v + at, mask=there, other=0.0)
    new_m = old_m + (1 - first) * active * (grad - old_m)
    new_v = old_v + (1 - second) * active * (grad * grad - old_v)
    old = tl.load(p + at, mask=there, other=0.0)
    change = (new_m / fix_first) / tl.maximum(tl.sqrt(new_v / fix_second) + epsilon, 1e-30)
    tl.store(m + at, new_m, mask=there)
    tl.store(v + at, new_v, mask=there)
    tl.store(p + at, old - rate * (change + decay * old), mask=there)


@triton.jit
def _error_function(z):  # type: ignore[no-untyped-def]
    """Return erf(z) for z >= 0 and exp(-z^2): 7.1.26 of Abramowitz and Stegun, off by at most 1.5e-7."""
    t = 1 / (1 + 0.3275911 * z)
    e = tl.exp(-z * z)
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return 1 - p * e, e


@triton.jit
def _gelu(x, dy, out, count, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """X P(X < x) for a normal X, or `dy` times its derivative."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    f, e = _error_function(tl.abs(v) * 0.7071067811865476)
    below = 0.5 + 0.5 * tl.where(v < 0, -f, f)
    if GRADIENT:
        d = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        v = d * (below + v * 0.3989422804014327 * e)
    else:
        v = v * below
    tl.store(out + at, v.to(out.dtype.element_ty), mask=there)


class _Gelu(torch.autograd.Function):
    """`gelu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _launch_gelu(x, None)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dy = douts[0].contiguous()
        return _launch_gelu(x, dy, out=dy)  # nobody else reads it, and less memory is touched


def _launch_gelu(x: Tensor, dy: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    dy = x if dy is None else dy
    grid = (triton.cdiv(x.numel(), 4 * _BLOCK),)
    launch(_gelu, grid, x, dy, out, x.numel(), GRADIENT=dy is not x, BLOCK=4 * _BLOCK, num_warps=8)
    return out


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU, as far as 16 bits can tell; torch's own is exact to 32. Without gradients, in place."""
    if x.dtype == torch.float32 or not x.is_contiguous():
        return F.gelu(x)
    if not x.requires_grad:
        return _launch_gelu(x, None, out=x)
    out: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return out


def mix(x: Tensor) -> Tensor:
    """Hash int32 numbers, as `dropout.mix` does."""
    x = x.contiguous()
    out, grid = torch.empty_like(x), (triton.cdiv(x.numel(), _BLOCK),)
    launch(_mix, grid, x, out, x.numel(), FIRST=FIRST, SECOND=SECOND, BLOCK=_BLOCK)
    return out


class _Drop(torch.autograd.Function):
    """`drop`; its gradient is dropped at the same places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(keys, columns)
        ctx.rate = rate
        return _launch(x, keys, columns, rate)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        keys, columns = ctx.saved_tensors
        return _launch(douts[0], keys, columns, ctx.rate), None, None, None


def _launch(x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(
        _drop, (triton.cdiv(x.numel(), _BLOCK),),
        x, out, keys, columns, x.numel(), x.shape[-1], 1 / (1 - rate),
        FIRST=FIRST, SECOND=SECOND, THRESHOLD=threshold(rate), BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def drop(x: Tensor, keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Drop elements of `[n, width]` by the keys `[n]` of its rows and `[width]` of its columns (`dropout.Mask`)."""
    out: Tensor = _Drop.apply(x, keys, columns, rate)  # type: ignore[no-untyped-call]
    return out


def update(p: Tensor, m: Tensor, v: Tensor, g: Tensor, numbers: Tensor, *, first: float, second: float) -> None:
    """Update rows `[n, width]` in place by Adam with the decay rates `first` and `second`; see `optimizer._update`."""
    width = p.shape[1]
    grid = triton.cdiv(width, _BLOCK), len(p)
    launch(_update, grid, p, m, v, g, numbers, width, first, second, BLOCK=_BLOCK)
