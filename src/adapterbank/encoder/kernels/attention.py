"""Attention in one kernel each way: with computed dropout, directly from the joined projections. Knows no layers.

    out = (keep * softmax(q k' / sqrt(width) + bias) / (1 - rate)) v

No library's fused attention accepts a computed mask (`dropout`), and without fusion every layer writes the attention
weights, their mask and three transposed copies to memory. Here a program handles one block of queries of one head and
iterates over the keys, as in FlashAttention (Dao et al. 2022); the backward pass recomputes the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapterbank.encoder.dropout import FIRST, SECOND, threshold
from adapterbank.encoder.kernels.launch import launch
from adapterbank.encoder.kernels.parts import keep

_WHOLE, _WHOLE_NUMBERS = 128, 128 * 64
"""The longest rows, and the most numbers of a head's queries, that the gradient handles as one block."""
_WARPS, _STAGES, _WHOLE_WARPS = 4, 2, 8
"""Of a program, and of one whose block has the longest rows."""


@triton.jit
def _keys(keys, n, length, DROP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load dropout keys; there are none without dropout."""
    if DROP:
        return tl.load(keys + n, mask=n < length, other=0)
    return n


@triton.jit
def _scores(q, k, bias, row, n, length, scale, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    return s + tl.load(bias + row * length + n, mask=n < length, other=float("-inf")).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["length"])
def _forward(  # type: ignore[no-untyped-def]
    x, bias, queries, heads, columns, out, sums, length, scale, inverse,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr,
    DROP: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here = m < length
    x += row * length * 3 * HEADS * WIDTH + head * WIDTH
    q = tl.load(x + m[:, None] * (3 * HEADS * WIDTH) + d[None, :], mask=here[:, None], other=0.0)
    keys = _keys(queries + row * length, m, length, DROP)
    if DROP:
        keys = keys ^ tl.load(heads + head)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        there = (n < length)[:, None]
        k = tl.load(x + HEADS * WIDTH + n[:, None] * (3 * HEADS * WIDTH) + d[None, :], mask=there, other=0.0)
        v = tl.load(x + 2 * HEADS * WIDTH + n[:, None] * (3 * HEADS * WIDTH) + d[None, :], mask=there, other=0.0)
        s = _scores(q, k, bias, row, n, length, scale, EXACT)
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        if DROP:
            numbers = keys[:, None] ^ tl.load(columns + n, mask=n < length, other=0)[None, :]
            p = tl.where(keep(numbers, FIRST, SECOND, THRESHOLD), p * inverse, 0.0)
        y = y * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        highest = higher
    out += row * length * HEADS * WIDTH + head * WIDTH
    tl.store(out + m[:, None] * (HEADS * WIDTH) + d[None, :], (y / total[:, None]).to(q.dtype), mask=here[:, None])
    tl.store(sums + (row * HEADS + head) * length + m, highest + tl.log(total), mask=here)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    q, k, v, dy, bias, sums, keys, columns, row, n, length, scale, inverse,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Recompute a block's weights before and after dropout, and the gradient of those before."""
    p = tl.exp(_scores(q, k, bias, row, n, length, scale, EXACT) - sums[:, None])
    dp = tl.dot(dy, tl.trans(v), input_precision="ieee" if EXACT else "tf32")
    kept = p
    if DROP:
        kept_ones = keep(keys[:, None] ^ columns[None, :], FIRST, SECOND, THRESHOLD)
        kept = tl.where(kept_ones, p * inverse, 0.0)
        dp = tl.where(kept_ones, dp * inverse, 0.0)
    return p, kept, dp


@triton.jit(do_not_specialize=["length"])
def _backward(  # type: ignore[no-untyped-def]
    x, bias, queries, heads, columns, out, sums, dout, dx, length, scale, inverse,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr,
    DROP: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries, then of the same block of keys and values."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    mine, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here = mine < length
    x += row * length * 3 * HEADS * WIDTH + head * WIDTH
    dx += row * length * 3 * HEADS * WIDTH + head * WIDTH
    out += row * length * HEADS * WIDTH + head * WIDTH
    dout += row * length * HEADS * WIDTH + head * WIDTH
    sums += (row * HEADS + head) * length
    at = mine[:, None] * (3 * HEADS * WIDTH) + d[None, :]
    at_out = mine[:, None] * (HEADS * WIDTH) + d[None, :]
    q = tl.load(x + at, mask=here[:, None], other=0.0)
    k = tl.load(x + HEADS * WIDTH + at, mask=here[:, None], other=0.0)
    v = tl.load(x + 2 * HEADS * WIDTH + at, mask=here[:, None], other=0.0)
    dy = tl.load(dout + at_out, mask=here[:, None], other=0.0)
    delta = tl.sum(tl.load(out + at_out, mask=here[:, None], other=0.0).to(tl.float32) * dy.to(tl.float32), 1)
    total = tl.load(sums + mine, mask=here, other=float("inf"))
    head_key = tl.load(heads + head) if DROP else 0
    query_keys = _keys(queries + row * length, mine, length, DROP) ^ head_key
    column_keys = _keys(columns, mine, length, DROP)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        there = n < length
        other = n[:, None] * (3 * HEADS * WIDTH) + d[None, :]
        k_n = tl.load(x + HEADS * WIDTH + other, mask=there[:, None], other=0.0)
        v_n = tl.load(x + 2 * HEADS * WIDTH + other, mask=there[:, None], other=0.0)
        p, _, dp = _weights(
            q, k_n, v_n, dy, bias, total, query_keys, _keys(columns, n, length, DROP), row, n, length, scale, inverse,
            FIRST, SECOND, THRESHOLD, DROP, EXACT,
        )  # fmt: skip
        ds = (p * (dp - delta[:, None]) * scale).to(k_n.dtype)
        dq += tl.dot(ds, k_n, input_precision="ieee" if EXACT else "tf32")
    tl.store(dx + at, dq.to(q.dtype), mask=here[:, None])
    for start in range(0, length, BLOCK):
        m = start + tl.arange(0, BLOCK)
        there = m < length
        other_out = m[:, None] * (HEADS * WIDTH) + d[None, :]
        q_m = tl.load(x + m[:, None] * (3 * HEADS * WIDTH) + d[None, :], mask=there[:, None], other=0.0)
        dy_m = tl.load(dout + other_out, mask=there[:, None], other=0.0)
        y_m = tl.load(out + other_out, mask=there[:, None], other=0.0).to(tl.float32)
        delta_m = tl.sum(y_m * dy_m.to(tl.float32), 1)
        total_m = tl.load(sums + m, mask=there, other=float("inf"))
        keys_m = _keys(queries + row * length, m, length, DROP) ^ head_key
        p, kept, dp = _weights(
            q_m, k, v, dy_m, bias, total_m, keys_m, column_keys, row, mine, length, scale, inverse,
            FIRST, SECOND, THRESHOLD, DROP, EXACT,
        )  # fmt: skip
        dv += tl.dot(tl.trans(kept).to(dy_m.dtype), dy_m, input_precision="ieee" if EXACT else "tf32")
        ds = tl.trans(p * (dp - delta_m[:, None]) * scale).to(q_m.dtype)
        dk += tl.dot(ds, q_m, input_precision="ieee" if EXACT else "tf32")
    tl.store(dx + HEADS * WIDTH + at, dk.to(q.dtype), mask=here[:, None])
    tl.store(dx + 2 * HEADS * WIDTH + at, dv.to(q.dtype), mask=here[:, None])


@triton.jit(do_not_specialize=["length"])
def _backward_whole(  # type: ignore[no-untyped-def]
    x, bias, queries, heads, columns, sums, dout, dx, length, scale, inverse,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr,
    DROP: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows that are one block: their weights are computed once, not for queries and again for keys.

    The sum of the output times its gradient, which the gradient of a softmax needs, is that of the weights times
    theirs, and all weights are here: the output need not be kept.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here = t < length
    at = row * length * 3 * HEADS * WIDTH + head * WIDTH + t[:, None] * (3 * HEADS * WIDTH) + d[None, :]
    at_out = row * length * HEADS * WIDTH + head * WIDTH + t[:, None] * (HEADS * WIDTH) + d[None, :]
    q = tl.load(x + at, mask=here[:, None], other=0.0)
    k = tl.load(x + HEADS * WIDTH + at, mask=here[:, None], other=0.0)
    v = tl.load(x + 2 * HEADS * WIDTH + at, mask=here[:, None], other=0.0)
    dy = tl.load(dout + at_out, mask=here[:, None], other=0.0)
    total = tl.load(sums + (row * HEADS + head) * length + t, mask=here, other=float("inf"))
    query_keys = _keys(queries + row * length, t, length, DROP)
    if DROP:
        query_keys = query_keys ^ tl.load(heads + head)
    p, kept, dp = _weights(
        q, k, v, dy, bias, total, query_keys, _keys(columns, t, length, DROP), row, t, length, scale, inverse,
        FIRST, SECOND, THRESHOLD, DROP, EXACT,
    )  # fmt: skip
    dv = tl.dot(tl.trans(kept.to(dy.dtype)), dy, input_precision="ieee" if EXACT else "tf32")
    tl.store(dx + 2 * HEADS * WIDTH + at, dv.to(q.dtype), mask=here[:, None])
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
    dq = tl.dot(ds, k, input_precision="ieee" if EXACT else "tf32")
    tl.store(dx + at, dq.to(q.dtype), mask=here[:, None])
    dk = tl.dot(tl.trans(ds), q, input_precision="ieee" if EXACT else "tf32")
    tl.store(dx + HEADS * WIDTH + at, dk.to(q.dtype), mask=here[:, None])


def _options(x: Tensor, bias: Tensor, heads: int, rate: float) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of programs and the constants that the kernels are specialised on."""
    rows, length, width = bias.shape[0], bias.shape[-1], x.shape[-1] // (3 * heads)
    block = min(64, max(32, triton.next_power_of_2(length)))
    constants = {"HEADS": heads, "WIDTH": width, "FIRST": FIRST, "SECOND": SECOND, "THRESHOLD": threshold(rate)}
    exact = x.dtype == torch.float32
    return (triton.cdiv(length, block), heads, rows), {
        **constants, "DROP": rate > 0, "EXACT": exact, "BLOCK": block, "num_warps": _WARPS, "num_stages": _STAGES,
    }  # fmt: skip


def _attend(
    x: Tensor, bias: Tensor, queries: Tensor, keys: Tensor, columns: Tensor, heads: int, rate: float
) -> tuple[Tensor, Tensor]:
    """Return the attention's output `[T, hidden]` and, for its gradient, the log-sum-exp of the scores.

    `x` `[T, 3 hidden]` are the joined projections, `bias` `[rows, 1, 1, longest]` is added to the scores. The others
    are those of a `LayerDropout`: `queries` `[rows, longest]`, `keys` `[heads]`, `columns` `[longest]`.
    """
    grid, options = _options(x, bias, heads, rate)
    width, length = x.shape[-1] // (3 * heads), bias.shape[-1]
    out = torch.empty(x.shape[0], heads * width, dtype=x.dtype, device=x.device)
    sums = torch.empty(grid[2], heads, length, dtype=torch.float32, device=x.device)
    scale, inverse = 1 / math.sqrt(width), 1 / (1 - rate)
    launch(_forward, grid, x, bias, queries, keys, columns, out, sums, length, scale, inverse, **options)
    return out, sums


def _like_attend(
    x: Tensor, bias: Tensor, queries: Tensor, keys: Tensor, columns: Tensor, heads: int, rate: float
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], x.shape[1] // 3)
    return out, x.new_empty(bias.shape[0], heads, bias.shape[3], dtype=torch.float32)


def _attend_backward(
    x: Tensor, bias: Tensor, queries: Tensor, keys: Tensor, columns: Tensor, out: Tensor, sums: Tensor, dout: Tensor,
    heads: int, rate: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of `x`; rows that are one block need no `out`, and any tensor may stand for it."""
    grid, options = _options(x, bias, heads, rate)
    dx, dout = torch.empty_like(x), dout.contiguous()
    width, length = x.shape[-1] // (3 * heads), bias.shape[-1]
    numbers = length, 1 / math.sqrt(width), 1 / (1 - rate)
    if not _whole(x, bias, heads):
        launch(_backward, grid, x, bias, queries, keys, columns, out, sums, dout, dx, *numbers, **options)
        return dx
    block, grid = max(32, triton.next_power_of_2(length)), (1, *grid[1:])
    options |= {"BLOCK": block, "num_warps": _WHOLE_WARPS if block == _WHOLE else _WARPS, "num_stages": 1}
    launch(_backward_whole, grid, x, bias, queries, keys, columns, sums, dout, dx, *numbers, **options)
    return dx


def _whole(x: Tensor, bias: Tensor, heads: int) -> bool:
    """Return whether the gradient handles each row as one block."""
    length = bias.shape[-1]
    return length <= _WHOLE and x.shape[-1] // (3 * heads) * length <= _WHOLE_NUMBERS


def _like_attend_backward(
    x: Tensor, bias: Tensor, queries: Tensor, keys: Tensor, columns: Tensor, out: Tensor, sums: Tensor, dout: Tensor,
    heads: int, rate: float,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads, ctx.rate = inputs
    (x, bias, *_), (out, sums) = inputs, output
    known = isinstance(bias.shape[-1], int)  # not where torch compiles for rows of any length
    ctx.save_for_backward(*tensors, sums if known and _whole(x, bias, ctx.heads) else out, sums)


def _gradient(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dx = attend_backward(*ctx.saved_tensors, dout, ctx.heads, ctx.rate)
    return dx, None, None, None, None, None, None


def _register(name: str, arguments: str, outputs: str, function: Any, like: Any) -> Any:
    """Let torch know an operation, which then may be compiled around. `custom_op` would import torch's compiler."""
    torch.library.define(f"adapterbank::{name}", f"({arguments}) -> {outputs}")
    torch.library.impl(f"adapterbank::{name}", ("cuda", "cpu"), function)
    torch.library.register_fake(f"adapterbank::{name}", like)
    return getattr(torch.ops.adapterbank, name)


_INPUTS = "Tensor x, Tensor bias, Tensor queries, Tensor keys, Tensor columns"
attend = _register("attend", f"{_INPUTS}, int heads, float rate", "(Tensor, Tensor)", _attend, _like_attend)
attend_backward = _register(
    "attend_backward",
    f"{_INPUTS}, Tensor out, Tensor sums, Tensor dout, int heads, float rate",
    "Tensor",
    _attend_backward,
    _like_attend_backward,
)
torch.library.register_autograd("adapterbank::attend", _gradient, setup_context=_save)
