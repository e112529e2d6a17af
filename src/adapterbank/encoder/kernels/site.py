"""What happens at a site, in one kernel: dropout, adapter, residual sum, LayerNorm. Knows no layers and no names.

    y = drop(y);    z = x + y + up(act(down(y)));    out = LN(z) gain + shift

A program handles some tokens of one row. It looks up the slot of its row and reads that slot's numbers where they are,
at an offset from some tensor, so that rows of any slots share a launch and nothing is copied. A bottleneck of width 0
is none. A low-rank update is a bottleneck without activation, biases and residual sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.dropout import FIRST, SECOND, threshold
from adapterbank.encoder.kernels.forms import ACTIVATIONS, Drop, Form, Places, Saved
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import activate, drop_tiles, own, store_tiles, tiles

_NARROWEST = 16
"""The narrowest product of a GPU."""


@triton.jit
def _weights(weights, n, m, D, width, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a part of a down-projection `[width, D]` as `[n, m]`."""
    wanted = (n < D)[:, None] if FULL else (n < D)[:, None] & (m < width)[None, :]
    return tl.load(weights + m[None, :] * D + n[:, None], mask=wanted, other=0.0)


@triton.jit
def _normal(parts, base, table, width, D: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the bottleneck's own LayerNorm to the parts of each token."""
    total, squares = tl.sum(parts[0].to(tl.float32), 1), tl.sum(parts[0].to(tl.float32) * parts[0].to(tl.float32), 1)
    for i in tl.static_range(1, (D + STEP - 1) // STEP):
        a = parts[i].to(tl.float32)
        total, squares = total + tl.sum(a, 1), squares + tl.sum(a * a, 1)
    mean = total / D
    shrink = tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + 1e-5)
    normal = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        g = tl.load(own(base, table, 0) + n, mask=n < D * (width > 0), other=0.0).to(tl.float32)
        s = tl.load(own(base, table, 1) + n, mask=n < D * (width > 0), other=0.0).to(tl.float32)
        a = (parts[i].to(tl.float32) - mean[:, None]) * shrink[:, None] * g[None, :] + s[None, :]
        normal = normal + (a.to(parts[i].dtype),)
    return normal


@triton.jit
def _bottleneck(  # type: ignore[no-untyped-def]
    parts, base, table, inner, t, here, width, EXACT: tl.constexpr, ACTIVATION: tl.constexpr, INNER: tl.constexpr,
    DEPTH: tl.constexpr, BIASES: tl.constexpr, SAVE: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the activations of the bottleneck of each token, float32 `[BLOCK, M]`."""
    m = tl.arange(0, M)
    inside = m < width
    weights, all_weights = own(base, table, 2 * INNER), ()
    for i in tl.static_range((D + STEP - 1) // STEP):  # all loads before the first product
        all_weights = all_weights + (_weights(weights, i * STEP + tl.arange(0, STEP), m, D, width, FULL),)
    if INNER:
        parts = _normal(parts, base, table, width, D, STEP)
    h = tl.zeros([BLOCK, M], tl.float32)
    for i in tl.static_range((D + STEP - 1) // STEP):
        h = tl.dot(parts[i], all_weights[i], h, input_precision="ieee" if EXACT else "tf32")
    if BIASES:
        h += tl.load(own(base, table, 2 * INNER + 1) + m, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SAVE:
        kept = h.to(inner.dtype.element_ty)
        tl.store(inner + t[:, None] * M + m[None, :], kept, mask=here[:, None])
        h = kept.to(tl.float32)
    h = activate(h, ACTIVATION)
    for layer in tl.static_range(1, DEPTH):
        middle = own(base, table, 2 * INNER + 2 * layer)
        w = tl.load(middle + m[None, :] * width + m[:, None], mask=inside[:, None] & inside[None, :], other=0.0)
        h = tl.dot(h.to(w.dtype), w, input_precision="ieee" if EXACT else "tf32")
        h += tl.load(own(base, table, 2 * INNER + 2 * layer + 1) + m, mask=inside, other=0.0).to(tl.float32)[None, :]
        h = activate(h, ACTIVATION)
    return h


@triton.jit
def _up(  # type: ignore[no-untyped-def]
    h, base, table, n, width, EXACT: tl.constexpr, BIASES: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Return some columns of the up-projection of the activations `h`."""
    m = tl.arange(0, M)
    wanted = (n < D)[None, :] if FULL else (n < D)[None, :] & (m < width)[:, None]
    w = tl.load(own(base, table, 0) + n[None, :] * width + m[:, None], mask=wanted, other=0.0)
    u = tl.dot(h.to(w.dtype), w, input_precision="ieee" if EXACT else "tf32")
    if BIASES:
        u += tl.load(own(base, table, 1) + n, mask=n < D * (width > 0), other=0.0).to(tl.float32)[None, :]
    return u


@triton.jit
def _normalised(values, base, table, mean, inverted, D: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the LayerNorm whose gain and shift are in the table."""
    found = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        g = tl.load(own(base, table, 0) + n, mask=n < D, other=0.0).to(tl.float32)
        b = tl.load(own(base, table, 1) + n, mask=n < D, other=0.0).to(tl.float32)
        found = found + ((values[i].to(tl.float32) - mean[:, None]) * inverted[:, None] * g[None, :] + b[None, :],)
    return found


@triton.jit
def _statistics(total, squares, epsilon, stats, here, KNOWN: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mean and the inverse deviation of each token, from its sums or as they were kept."""
    if KNOWN:
        mean = tl.load(stats, mask=here, other=0.0)
        inverted = tl.load(stats + 1, mask=here, other=0.0)
    else:
        mean = total / D
        inverted = tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + epsilon)
    return mean, inverted


@triton.jit(do_not_specialize=["length", "table_stride", "norm_at", "adapter_at"])
def _site(  # type: ignore[no-untyped-def]
    y, x, v, out, z, inner, stats, base, places, table, tokens, columns,
    length, y_stride, v_stride, table_stride, norm_at, adapter_at, epsilon, scale, inverse,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    ADAPTER: tl.constexpr, ACTIVATION: tl.constexpr, PARALLEL: tl.constexpr, MULTIPLY: tl.constexpr,
    INNER: tl.constexpr, DEPTH: tl.constexpr, BIASES: tl.constexpr, SUBLAYER: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, KNOWN: tl.constexpr, SAVE: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr,
    D_IN: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = t < length
    own_table = table + tl.load(places + row).to(tl.int64) * table_stride
    first = row * length
    stats += 2 * first
    parts, residuals = (), ()
    if SUBLAYER:
        parts = tiles(y + first * y_stride, y_stride, t, here, D, STEP)
    if RESIDUAL:
        residuals = tiles(x + first * D, D, t, here, D, STEP)
    if DROP:
        keys = tl.load(tokens + first + t, mask=here, other=0)
        parts = drop_tiles(parts, keys, columns, inverse, FIRST, SECOND, THRESHOLD, D, STEP)
    h = tl.zeros([BLOCK, M], tl.float32)
    width = 0
    if ADAPTER:
        width = M if FULL else tl.load(own_table + adapter_at).to(tl.int32)
        reads = parts
        if PARALLEL:
            reads = tiles(v + first * v_stride, v_stride, t, here, D_IN, STEP)
        h = _bottleneck(
            reads, base, own_table + adapter_at + 1, inner + first * M, t, here, width, EXACT, ACTIVATION, INNER,
            DEPTH, BIASES, SAVE, FULL, D_IN, M, STEP, BLOCK,
        )  # fmt: skip
    total, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    sums = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        s = tl.zeros([BLOCK, STEP], tl.float32)
        if SUBLAYER:
            s = parts[i].to(tl.float32)
        if ADAPTER:
            last = own_table + adapter_at + 1 + 2 * INNER + (1 + BIASES) * DEPTH
            u = _up(h, base, last, i * STEP + tl.arange(0, STEP), width, EXACT, BIASES, FULL, D, M) * scale
            s += s * u if MULTIPLY else u
        if RESIDUAL:
            s += residuals[i].to(tl.float32)
        sums = sums + (s.to(out.dtype.element_ty),)
        if NORM and not KNOWN:
            s = sums[i].to(tl.float32)  # as the gradient reads it
            total += tl.sum(s, 1)
            squares += tl.sum(s * s, 1)
    if NORM:
        mean, inverted = _statistics(total, squares, epsilon, stats + 2 * t, here, KNOWN, D)
        if SAVE:
            tl.store(stats + 2 * t, mean, mask=here)
            tl.store(stats + 2 * t + 1, inverted, mask=here)
            store_tiles(z + first * D, D, t, here, sums, D, STEP)
        sums = _normalised(sums, base, own_table + norm_at, mean, inverted, D, STEP)
    store_tiles(out + first * y_stride, y_stride, t, here, sums, D, STEP)


def blocks(form: Form | None, width: int, exact: bool) -> dict[str, int]:
    """Return the sizes of a program: its tokens, how much of the hidden width it handles at once, its warps."""
    m = max(_NARROWEST, form.widest) if form else _NARROWEST
    step = min(triton.next_power_of_2(triton.cdiv(width, 4)), (8192 if exact else 16384) // m)
    # In float32 nothing is fused: a compiler that computes a sum twice would fuse it in one place and not in the other,
    # and what is computed again would differ from what was kept.
    unfused = {"enable_fp_fusion": False} if exact else {}
    return {"M": m, "BLOCK": 16 if exact else 32, "STEP": max(16, step), "num_warps": 8, "num_stages": 2, **unfused}


def site(
    y: Tensor | None, x: Tensor, places: Places, *, read: Tensor | None = None, out: Tensor | None = None,
    form: Form | None = None, adapter_at: int = 0, norm_at: int | None = None, epsilon: float = 0.0,
    residual: bool = True, drop: Drop | None = None, saved: Saved | None = None, known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what slots make of the output `y` of a sub-layer with the residual `x`, both `[T, width]`.

    `read` is what a parallel bottleneck reads. `adapter_at` and `norm_at` are columns of the table: the bottleneck's
    width and tensors begin at the first, the LayerNorm's gain and shift at the other, without which nothing is
    normalised, or if its statistics are `known`, as `Saved.stats`, with these. `out` may be a part of wider rows, also
    those of `y`; it is written in place.
    """
    given = x if y is None else y
    out = torch.empty_like(given) if out is None else out
    v = given if read is None else read
    rows = places.rows.numel()
    length, width = x.shape[0] // rows, out.shape[1]
    exact = x.dtype == torch.float32
    nothing = places.rows
    z, inner, stats = (saved.z, saved.inner, saved.stats) if saved else (out, out, nothing if known is None else known)
    constants = blocks(form, width, exact)
    launch(
        _site, (triton.cdiv(length, constants["BLOCK"]), rows),
        given, x, v, out, z, inner, stats, places.base, places.rows, places.table,
        drop.tokens if drop else nothing, drop.columns if drop else nothing,
        length, given.stride(0), v.stride(0), places.table.stride(0), norm_at or 0, adapter_at,
        epsilon, form.scale if form else 1.0, 1 / (1 - drop.rate) if drop else 1.0,
        FIRST=FIRST, SECOND=SECOND, THRESHOLD=threshold(drop.rate) if drop else 0, DROP=drop is not None, EXACT=exact,
        ADAPTER=form is not None, ACTIVATION=ACTIVATIONS.index(form.activation) if form else 0,
        PARALLEL=bool(form and form.parallel), MULTIPLY=bool(form and form.multiply),
        INNER=int(form.inner_norm) if form else 0, DEPTH=form.depth if form else 1,
        BIASES=int(form.biases) if form else 0, SUBLAYER=y is not None, RESIDUAL=residual, NORM=norm_at is not None,
        KNOWN=known is not None, SAVE=saved is not None, FULL=bool(form and form.equal and form.widest >= _NARROWEST),
        D=width, D_IN=v.shape[1],
        **constants,
    )  # fmt: skip
    return out
