"""The gradients of the numbers that a slot has at a site: sums over its tokens. Knows no layers and no names.

    gain: sum of dout n;  shift: sum of dout;  up: dz' act(a), sum of dz;  down: da' y, sum of da

A program adds up some tokens for some columns of the hidden width; one more kernel adds up the programs' sums, always
in the same order, and adds them to where the gradients are wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.dropout import FIRST, SECOND, threshold
from adapterbank.encoder.kernels.forms import ACTIVATIONS, TrainedSite
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import activate, keep

_COLUMNS, _TOKENS = 64, 32
_PROGRAMS = 264
"""About twice as many as a large GPU has multiprocessors."""
_WARPS, _STAGES = 4, 3
"""Of a program that adds up tokens; twice the warps for bottlenecks wider than 64."""
_SUMMED = 512


@triton.jit(do_not_specialize=["count", "each"])
def _sums(  # type: ignore[no-untyped-def]
    dout, z, stats, y, keys, columns, dx, da, inner, sums, count, each, inverse,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, NORM: tl.constexpr,
    ADAPTER: tl.constexpr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Add up `each` of the `count` tokens of a place: columns, parts of its tokens, places are the grid."""
    n, m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, M)
    first = tl.program_id(2).to(tl.int64) * count
    start = tl.program_id(1) * each
    stop = tl.minimum(start + each, count)
    # Added up over tokens only at the end: each such sum waits for all threads of a program.
    gain, shift = tl.zeros([TOKENS, COLUMNS], tl.float32), tl.zeros([TOKENS, COLUMNS], tl.float32)
    up_bias, down_bias = tl.zeros([TOKENS, COLUMNS], tl.float32), tl.zeros([TOKENS, M], tl.float32)
    down, up = tl.zeros([M, COLUMNS], tl.float32), tl.zeros([COLUMNS, M], tl.float32)
    for k in tl.range(start, stop, TOKENS):
        here = k + tl.arange(0, TOKENS) < stop
        t = first + k + tl.arange(0, TOKENS)
        at, mask = t[:, None] * D + n[None, :], here[:, None] & (n < D)[None, :]
        if NORM:
            d = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(stats + 2 * t, mask=here, other=0.0)
            inverted = tl.load(stats + 2 * t + 1, mask=here, other=0.0)
            gain += d * (tl.load(z + at, mask=mask, other=0.0).to(tl.float32) - mean[:, None]) * inverted[:, None]
            shift += d
        if ADAPTER:
            g = tl.load(dx + at, mask=mask, other=0.0)
            v = tl.load(y + at, mask=mask, other=0.0)
            b = tl.load(da + t[:, None] * M + m[None, :], mask=here[:, None], other=0.0)
            a = tl.load(inner + t[:, None] * M + m[None, :], mask=here[:, None], other=0.0).to(tl.float32)
            if DROP:
                numbers = tl.load(keys + t, mask=here, other=0)[:, None]
                numbers = numbers ^ tl.load(columns + n, mask=n < D, other=0)[None, :]
                v = tl.where(keep(numbers, FIRST, SECOND, THRESHOLD), v.to(tl.float32) * inverse, 0.0).to(v.dtype)
            up_bias += g.to(tl.float32)
            down_bias += b.to(tl.float32)
            down = tl.dot(tl.trans(b), v, down, input_precision="ieee" if EXACT else "tf32")
            a = activate(a, ACTIVATION).to(g.dtype)
            up = tl.dot(tl.trans(g), a, up, input_precision="ieee" if EXACT else "tf32")
    sums += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (3 * D + M + 2 * M * D)
    if NORM:
        tl.store(sums + n, tl.sum(gain, 0), mask=n < D)
        tl.store(sums + D + n, tl.sum(shift, 0), mask=n < D)
    if ADAPTER:
        tl.store(sums + 2 * D + n, tl.sum(up_bias, 0), mask=n < D)
        if tl.program_id(0) == 0:
            tl.store(sums + 3 * D + m, tl.sum(down_bias, 0))
        sums += 3 * D + M
        tl.store(sums + m[:, None] * D + n[None, :], down, mask=(n < D)[None, :])
        tl.store(sums + M * D + n[:, None] * M + m[None, :], up, mask=(n < D)[:, None])


@triton.jit(do_not_specialize=["parts", *(f"stride{k}" for k in range(6))])
def _add(  # type: ignore[no-untyped-def]
    sums, gain, shift, up_bias, down_bias, down, up, stride0, stride1, stride2, stride3, stride4, stride5, parts, begin,
    NORM: tl.constexpr, ADAPTER: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of all parts of a place's tokens to its gradients."""
    place = tl.program_id(1).to(tl.int64)
    whole: tl.constexpr = 3 * D + M + 2 * M * D
    n = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, PARTS)
    there = (k < parts)[:, None] & (n < whole)[None, :]
    total = tl.sum(tl.load(sums + (place * parts + k)[:, None] * whole + n[None, :], mask=there, other=0.0), 0)
    # Which gradient a number belongs to, and where; the rows of `up` are as wide as M in the sums.
    w = n - 3 * D - M
    u = w - M * D
    where = tl.where(n < D, gain + place * stride0 + n, shift + place * stride1 + n - D)
    where = tl.where(n < 2 * D, where, up_bias + place * stride2 + n - 2 * D)
    where = tl.where(n < 3 * D, where, down_bias + place * stride3 + n - 3 * D)
    where = tl.where(w < 0, where, down + place * stride4 + w)
    where = tl.where(u < 0, where, up + place * stride5 + u // M * WIDTH + u % M)
    wanted = (n < 3 * D) | ((w < 0) & (n - 3 * D < WIDTH)) | ((w >= 0) & (w < WIDTH * D)) | ((u >= 0) & (u % M < WIDTH))
    wanted = wanted & (n < whole) & (n >= (0 if NORM else 2 * D)) & (n < (whole if ADAPTER else 2 * D))
    tl.store(where, tl.load(where, mask=wanted, other=0.0) + total, mask=wanted)


def add_gradients(
    about: TrainedSite, saved: tuple[Tensor, ...], dout: Tensor, dx: Tensor, da: Tensor, width: int
) -> None:
    """Add the gradients of the slots' numbers to `about.into`; `width` is that of the bottleneck in the kernels."""
    y, z, inner, stats = saved
    norm, adapter, drop = bool(about.into.norm), bool(about.form), about.drop
    if not (norm or adapter):
        return
    places, hidden = len(about.places.table), dout.shape[1]
    count, columns = len(dout) // places, triton.cdiv(hidden, _COLUMNS)
    most = max(1, _PROGRAMS // (columns * places))
    parts = max(1, min(triton.cdiv(count, 4 * _TOKENS), most))
    each = triton.cdiv(triton.cdiv(count, parts), _TOKENS) * _TOKENS
    parts = triton.cdiv(count, each)
    whole = 3 * hidden + width + 2 * width * hidden
    sums = torch.empty(places * parts, whole, dtype=torch.float32, device=dout.device)
    constants = {"NORM": norm, "ADAPTER": adapter, "D": hidden, "M": width}
    launch(
        _sums, (columns, parts, places),
        dout, z, stats, y, drop.tokens if drop else stats, drop.columns if drop else stats, dx, da, inner, sums, count,
        each, 1 / (1 - drop.rate) if drop else 1.0,
        FIRST=FIRST, SECOND=SECOND, THRESHOLD=threshold(drop.rate) if drop else 0, DROP=drop is not None,
        ACTIVATION=ACTIVATIONS.index(about.form.activation) if about.form else 0, EXACT=dout.dtype == torch.float32,
        COLUMNS=_COLUMNS, TOKENS=_TOKENS, num_warps=_WARPS if width <= 64 else 2 * _WARPS, num_stages=_STAGES,
        **constants,
    )  # fmt: skip
    gain, shift = about.into.norm or (sums, sums)
    down, down_bias, up, up_bias = about.into.adapter or (sums, sums, sums, sums)
    targets = gain, shift, up_bias, down_bias, down, up
    begin, end = 0 if norm else 2 * hidden, whole if adapter else 2 * hidden
    launch(
        _add, (triton.cdiv(end - begin, _SUMMED), places),
        sums, *targets, *(target.stride(0) for target in targets), parts, begin,
        WIDTH=about.form.widest if about.form else 0, PARTS=triton.next_power_of_2(most), BLOCK=_SUMMED, **constants,
    )  # fmt: skip
