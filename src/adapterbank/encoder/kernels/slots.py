"""What a slot brings beside bottlenecks: scales and biases of a linear layer, heads. Knows no layers and no names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.kernels.forms import Places
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import own

_TOKENS, _WIDTH = 16, 128
_OUTPUTS = 32


@triton.jit(do_not_specialize=["length", "table_stride", "scale_at", "shift_at"])
def _vectors(  # type: ignore[no-untyped-def]
    y, base, places, table, length, D, stride, table_stride, scale_at, shift_at,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    own_table = table + tl.load(places + row).to(tl.int64) * table_stride
    where = y + (row * length + t)[:, None] * stride + n[None, :]
    there = (t < length)[:, None] & (n < D)[None, :]
    s = tl.load(where, mask=there, other=0.0).to(tl.float32)
    if SCALE:
        s *= tl.load(own(base, own_table, scale_at) + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        s += tl.load(own(base, own_table, shift_at) + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
    tl.store(where, s.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["length", "WIDE", "table_stride", "at"])
def _project(  # type: ignore[no-untyped-def]
    x, out, base, places, table, length, D, WIDE, table_stride, at,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    own_table = table + tl.load(places + row).to(tl.int64) * table_stride
    inside, here = o < tl.load(own_table + at), t < length
    weights = own(base, own_table, at + 1)
    y = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for k in range(0, D, WIDTH):
        n = k + tl.arange(0, WIDTH)
        w = tl.load(weights + o[:, None] * D + n[None, :], mask=inside[:, None] & (n < D)[None, :], other=0.0)
        if TOKENS == 1:
            a = tl.load(x + row * length * D + n, mask=n < D, other=0.0)
            y += tl.sum(w * a[None, :], 1)[None, :]
        else:
            there = here[:, None] & (n < D)[None, :]
            a = tl.load(x + (row * length + t)[:, None] * D + n[None, :], mask=there, other=0.0)
            y = tl.dot(a, tl.trans(w), y, input_precision="ieee")
    y += tl.load(own(base, own_table, at + 2) + o, mask=inside, other=0.0)[None, :]
    tl.store(out + (row * length + t)[:, None] * WIDE + o[None, :], y, mask=here[:, None] & (o < WIDE)[None, :])


def vectors(y: Tensor, places: Places, *, scale_at: int | None = None, shift_at: int | None = None) -> None:
    """Multiply `y` `[T, width]` by the scales of each row's slot and add its shifts, in place; the two are columns."""
    rows, width = places.rows.numel(), y.shape[1]
    length = len(y) // rows
    launch(
        _vectors, (triton.cdiv(length, _TOKENS), rows, triton.cdiv(width, _WIDTH)),
        y, places.base, places.rows, places.table, length, width, y.stride(0), places.table.stride(0), scale_at or 0,
        shift_at or 0, SCALE=scale_at is not None, SHIFT=shift_at is not None, TOKENS=_TOKENS, WIDTH=_WIDTH,
    )  # fmt: skip


def project(x: Tensor, places: Places, outputs: int, at: int) -> Tensor:
    """Return the outputs `[n, outputs]` of each row's own linear layer, float32; a narrower one fills up with zeros.

    The width, the weight and the bias of a layer are the columns from `at` on.
    """
    rows = places.rows.numel()
    length, out = len(x) // rows, torch.empty(len(x), outputs, dtype=torch.float32, device=x.device)
    tokens = 1 if length == 1 else _TOKENS
    launch(
        _project, (triton.cdiv(length, tokens), rows, triton.cdiv(outputs, _OUTPUTS)),
        x.contiguous(), out, places.base, places.rows, places.table, length, x.shape[1], outputs,
        places.table.stride(0), at,
        TOKENS=tokens, WIDTH=256 if tokens == 1 else _WIDTH, OUTPUTS=_OUTPUTS,
    )  # fmt: skip
    return out
