"""The kernel that quantises activations for `fp8.py`: the largest number of each row, then the row in e4m3."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0


@triton.jit
def _quantise(x, out, scales, D, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    v = tl.load(x + row * D + n, mask=n < D, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(v), 0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    v = tl.minimum(tl.maximum(v / scale, -LARGEST), LARGEST)
    tl.store(out + row * D + n, v.to(out.dtype.element_ty), mask=n < D)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of `x` `[n, width]` in e4m3 and the scale of each row `[n, 1]`, float32."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _quantise[(len(x),)](x, out, scales, x.shape[1], LARGEST=LARGEST, BLOCK=block, num_warps=4 if block <= 1024 else 8)
    return out, scales
