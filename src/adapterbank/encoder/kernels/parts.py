"""What several kernels compute: activations, computed dropout, the place of a slot's own numbers. Knows no layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Compute the hyperbolic tangent."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply an activation."""
    if ACTIVATION == 1:
        x = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == 5:
        x = tanh(x)
    return x


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the derivative of an activation."""
    y = tl.full(x.shape, 1.0, tl.float32)
    if ACTIVATION == 1:
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    elif ACTIVATION == 2:
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == 3:
        y = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == 4:
        s = 1 / (1 + tl.exp(-x))
        y = s * (1 + x * (1 - s))
    elif ACTIVATION == 5:
        t = tanh(x)
        y = 1 - t * t
    return y


@triton.jit
def keep(numbers, FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the hash of `dropout._drop`, to the bit."""
    numbers = numbers * FIRST
    numbers = (numbers ^ (numbers >> 15)) * SECOND
    return numbers >= THRESHOLD


@triton.jit
def own(tensor, table, column):  # type: ignore[no-untyped-def]
    """Return where a slot's tensor begins: the table has its offset from some tensor of its type."""
    return tensor + tl.multiple_of(tl.load(table + column), 16)


@triton.jit
def tiles(x, stride, t, here, D: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load all of the tokens `t` of `[T, D]`, STEP columns at a time.

    A store holds up the loads that follow it, so kernels load everything before their first store.
    """
    found = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        there = here[:, None] & (n < D)[None, :]
        found = found + (tl.load(x + t[:, None] * stride + n[None, :], mask=there, other=0.0),)
    return found


@triton.jit
def store_tiles(x, stride, t, here, values, D: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store what `tiles` loads."""
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        there = here[:, None] & (n < D)[None, :]
        tl.store(x + t[:, None] * stride + n[None, :], values[i].to(x.dtype.element_ty), mask=there)


@triton.jit
def drop_tiles(  # type: ignore[no-untyped-def]
    values, keys, columns, inverse, FIRST: tl.constexpr, SECOND: tl.constexpr, THRESHOLD: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Drop elements of tokens with these keys."""
    found = ()
    for i in tl.static_range((D + STEP - 1) // STEP):
        n = i * STEP + tl.arange(0, STEP)
        numbers = keys[:, None] ^ tl.load(columns + n, mask=n < D, other=0)[None, :]
        kept = tl.where(keep(numbers, FIRST, SECOND, THRESHOLD), values[i].to(tl.float32) * inverse, 0.0)
        found = found + (kept.to(values[i].dtype),)
    return found
