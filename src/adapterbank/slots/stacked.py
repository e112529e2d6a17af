"""Linear layers of several slots at once, with stacked weights or slot by slot. Knows no additions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Each:
    """One tensor for each of several groups of rows, which are laid out end to end."""

    tensors: Sequence[Tensor]
    sizes: Sequence[int]


def linear(v: Tensor, weight: Tensor | Each, bias: Tensor | Each | None = None) -> Tensor:
    """Return `v W' + b` for `[n, in]`, or for each part of `[parts, n, in]` with stacked weights and biases."""
    if isinstance(weight, Each) or isinstance(bias, Each):
        return _each(v, weight, bias)  # type: ignore[arg-type]
    if weight.dim() == 2:
        return F.linear(v, weight, bias)
    if bias is None:
        return torch.bmm(v, weight.transpose(1, 2))
    if not v.is_cuda:
        return torch.baddbmm(bias.unsqueeze(1), v, weight.transpose(1, 2))
    if not torch.is_grad_enabled():
        return torch.bmm(v, weight.transpose(1, 2)) + bias.unsqueeze(1)
    y: Tensor = _Linears.apply(v, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linears(torch.autograd.Function):
    """Stacked linear layers on a GPU. Gradients have the layout of their tensors; sums are products with ones.

    Plain autograd returns transposed gradients and sums the gradients of biases on few of the GPU's processors.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(v, weight)
        return torch.bmm(v, weight.transpose(1, 2)) + bias[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, weight = ctx.saved_tensors
        ones = v.new_ones(v.shape[0], 1, v.shape[1])
        dv = torch.bmm(grads[0], weight)
        return dv, torch.bmm(grads[0].transpose(1, 2), v), torch.bmm(ones, grads[0]).squeeze(1)


def _each(v: Tensor, weight: Each, bias: Each | None) -> Tensor:
    """Multiply each group of rows by its own weight, without copying weights or rows."""
    out = v.new_empty(len(v), len(weight.tensors[0]))
    biases = bias.tensors if bias else [None] * len(weight.tensors)  # which are divided as the weights are
    for rows, into, w, b in zip(v.split(weight.sizes), out.split(weight.sizes), weight.tensors, biases, strict=True):
        if b is None:
            torch.mm(rows, w.t(), out=into)
        else:
            torch.addmm(b, rows, w.t(), out=into)
    return out
