"""The gradient of `site`, for what entered it. Knows no layers and no names.

With `z = x + y + up(act(down(y)))` and `out = LN(z) gain + shift`, for each token:

    dz = inverse deviation (g - mean(g) - n mean(g n)),  g = dout gain,  n = LN(z)          dx = dz
    da = up' dz act'(a),  a = down(y)                                                     dy = dz + down' da

One kernel computes these; `site_weights` adds up over tokens what the slots' own numbers need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.dropout import FIRST, SECOND, threshold
from adapterbank.encoder.kernels.forms import ACTIVATIONS, Saved, TrainedSite
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import drop_tiles, own, slope, store_tiles, tiles
from adapterbank.encoder.kernels.site import blocks, site
from adapterbank.encoder.kernels.site_weights import add_gradients


@triton.jit
def _norm_gradient(  # type: ignore[no-untyped-def]
    douts, normals, base, table, mean, inverted, here, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Return the gradient of what a LayerNorm read."""
    c1, c2 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        g = tl.load(own(base, table, 0) + n, mask=n < D, other=0.0).to(tl.float32)
        d = douts[i].to(tl.float32) * g[None, :]
        c1 += tl.sum(d, 1) / D
        c2 += tl.sum(d * ((normals[i].to(tl.float32) - mean[:, None]) * inverted[:, None]), 1) / D
    found = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        g = tl.load(own(base, table, 0) + n, mask=n < D, other=0.0).to(tl.float32)
        s = (normals[i].to(tl.float32) - mean[:, None]) * inverted[:, None]
        d = (douts[i].to(tl.float32) * g[None, :] - c1[:, None] - s * c2[:, None]) * inverted[:, None]
        d = tl.where(here[:, None] & (n < D)[None, :], d, 0.0)
        found = found + (d.to(douts[i].dtype),)
    return found


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    dxs, h, base, table, width, EXACT: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Add what comes back through the down-projection."""
    m = tl.arange(0, M)
    found = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        wanted = (n < D)[None, :] if FULL else (n < D)[None, :] & (m < width)[:, None]
        w = tl.load(own(base, table, 0) + m[:, None] * D + n[None, :], mask=wanted, other=0.0)
        found = found + (tl.dot(h, w, dxs[i].to(tl.float32), input_precision="ieee" if EXACT else "tf32"),)
    return found


@triton.jit(do_not_specialize=["length", "table_stride", "norm_at", "adapter_at"])
def _gradient(  # type: ignore[no-untyped-def]
    dout, z, inner, stats, dx, dy, da, base, places, table, tokens, columns,
    length, table_stride, norm_at, adapter_at, inverse,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
    ADAPTER: tl.constexpr, ACTIVATION: tl.constexpr, SUBLAYER: tl.constexpr, NORM: tl.constexpr, FULL: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = t < length
    own_table = table + tl.load(places + row).to(tl.int64) * table_stride
    first = row * length
    inner, da = inner + first * M, da + first * M
    m = tl.arange(0, M)
    dxs = tiles(dout + first * D, D, t, here, D, STEP)
    if NORM:
        mean = tl.load(stats + 2 * (first + t), mask=here, other=0.0)
        inverted = tl.load(stats + 2 * (first + t) + 1, mask=here, other=0.0)
        normals = tiles(z + first * D, D, t, here, D, STEP)
        dxs = _norm_gradient(dxs, normals, base, own_table + norm_at, mean, inverted, here, D, BLOCK, STEP)
    a = tl.zeros([BLOCK, M], tl.float32)
    width = 0
    if ADAPTER:
        width = M if FULL else tl.load(own_table + adapter_at).to(tl.int32)
        a = tl.load(inner + t[:, None] * M + m[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    h = tl.zeros([BLOCK, M], tl.float32)
    for i in tl.static_range((D + STEP - 1) // STEP):
        if ADAPTER:
            n = i * STEP + tl.arange(0, STEP)
            wanted = (n < D)[:, None] if FULL else (n < D)[:, None] & (m < width)[None, :]
            w = tl.load(own(base, own_table + adapter_at, 3) + n[:, None] * width + m[None, :], mask=wanted, other=0.0)
            h = tl.dot(dxs[i], w, h, input_precision="ieee" if EXACT else "tf32")
    h = tl.where(here[:, None], h * slope(a, ACTIVATION), 0.0)
    short = h.to(dx.dtype.element_ty)
    store_tiles(dx + first * D, D, t, here, dxs, D, STEP)
    if SUBLAYER:
        dys = dxs
        if ADAPTER:
            dys = _down(dxs, short, base, own_table + adapter_at + 1, width, EXACT, FULL, D, M, STEP)
        if DROP:
            keys = tl.load(tokens + first + t, mask=here, other=0)
            dys = drop_tiles(dys, keys, columns, inverse, FIRST, SECOND, THRESHOLD, D, STEP)
        store_tiles(dy + first * D, D, t, here, dys, D, STEP)
    if ADAPTER:
        tl.store(da + t[:, None] * M + m[None, :], short, mask=here[:, None])


class _Site(torch.autograd.Function):
    """`site` with gradients of its inputs; those of the slots' numbers are added to where they are wanted."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, y: Tensor | None, x: Tensor, about: TrainedSite, saved: Saved) -> Tensor:
        needed = saved.inner.new_empty(0) if about.form is None or y is None else y
        ctx.save_for_backward(needed, saved.z, saved.inner, saved.stats)
        ctx.about, ctx.alone = about, y is None
        return site(
            y, x, about.places, form=about.form, adapter_at=about.adapter_at, norm_at=about.norm_at,
            epsilon=about.epsilon, drop=about.drop, saved=saved,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        about, dout = ctx.about, douts[0].contiguous()
        dx, dy, da = _launch(ctx.saved_tensors, about, dout, ctx.alone)
        add_gradients(about, ctx.saved_tensors, dout, dx, da, da.shape[1])
        return None, None if ctx.alone else dy, dx, None, None


def _launch(saved: tuple[Tensor, ...], about: TrainedSite, dout: Tensor, alone: bool) -> tuple[Tensor, ...]:
    """Return the gradients of `x`, of `y` and before the bottleneck's activation."""
    _, z, inner, stats = saved
    places, form, drop = about.places, about.form, about.drop
    rows = places.rows.numel()
    length, width = len(dout) // rows, dout.shape[1]
    exact, nothing = dout.dtype == torch.float32, places.rows
    constants = blocks(form, width, exact)
    dx, dy = torch.empty_like(dout), dout if alone else torch.empty_like(dout)
    da = torch.empty_like(inner)
    launch(
        _gradient, (triton.cdiv(length, constants["BLOCK"]), rows),
        dout, z, inner, stats, dx, dy, da, places.base, places.rows, places.table,
        drop.tokens if drop else nothing, drop.columns if drop else nothing,
        length, places.table.stride(0), about.norm_at or 0, about.adapter_at, 1 / (1 - drop.rate) if drop else 1.0,
        FIRST=FIRST, SECOND=SECOND, THRESHOLD=threshold(drop.rate) if drop else 0, DROP=drop is not None, EXACT=exact,
        ADAPTER=form is not None, ACTIVATION=ACTIVATIONS.index(form.activation) if form else 0, SUBLAYER=not alone,
        NORM=about.norm_at is not None, FULL=bool(form and form.equal and form.widest >= constants["M"]), D=width,
        **constants,
    )  # fmt: skip
    return dx, dy, da


def _saved(y: Tensor | None, x: Tensor, about: TrainedSite) -> Saved:
    """Return the memory for what the gradient reads; without a sub-layer, what is normalised is there already."""
    norms, count = about.norm_at is not None, len(x)
    z = x.new_empty(0) if not norms else x.detach() if y is None else torch.empty_like(x)
    inner = x.new_empty(count if about.form else 0, blocks(about.form, x.shape[1], False)["M"])
    return Saved(z, inner, torch.empty(count if norms else 0, 2, dtype=torch.float32, device=x.device))


def trained_site(
    anchor: Tensor, y: Tensor | None, x: Tensor, about: TrainedSite
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return `site` of `y` and `x` with gradients, without `y` a LayerNorm alone, and what computes it again.

    The gradients of the slots' numbers are added to `about.into` when `anchor` is asked for its gradient, which is
    none. Only the output of a LayerNorm can be computed again, from what its gradient keeps.
    """
    saved = _saved(y, x, about)
    out: Tensor = _Site.apply(anchor, y, x, about, saved)  # type: ignore[no-untyped-call]
    again = partial(site, None, saved.z, about.places, norm_at=about.norm_at, known=saved.stats)
    return out, again
