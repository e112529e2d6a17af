"""The bottleneck adapter and its variants: initial numbers and arithmetic. Knows nothing of tasks or batches.

    f(v) = up(act(down(v)))                                    Houlsby et al. 2019, figure 2
    sequential:  y + f(y)          parallel:  y + f(x)         x, y: input and output of the sub-layer
    multiply:    y * (1 + f(.))                                the paper's multiplicative interaction

All are near the identity at the start, and exactly the identity with `up` at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import ACTIVATIONS
from adapterbank.methods import Adapter

_EPSILON = 1e-5
"""In the adapter's own LayerNorm: torch's default."""


def site_names(adapter: Adapter) -> list[str]:
    """Name the sites that get an adapter."""
    return [f"layers.{i}.{site}" for i in adapter.layers for site in adapter.sites]


def parts(adapter: Adapter) -> list[str]:
    """Name the tensors of one adapter, in the order of the arithmetic."""
    modules = ["norm"] if adapter.inner_norm else []
    modules += ["down", *(f"middle.{k}" for k in range(1, adapter.depth)), "up"]
    return [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]


def shapes(adapter: Adapter, hidden: int) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a slot's adapters, with its shape."""
    m, found = adapter.size, {}
    modules = {"norm": (hidden,), "down": (m, hidden), "up": (hidden, m)}
    for site in site_names(adapter):
        for part in parts(adapter):
            module, leaf = part.rsplit(".", 1)
            shape: tuple[int, ...] = modules.get(module, (m, m))
            found[f"{site}.adapter.{part}"] = shape if leaf == "weight" else shape[:1]
    return found


def initial(adapter: Adapter, hidden: int, sigma: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Give new adapters for every site: Gaussian weights of width `sigma` cut at two sigma, biases zero."""
    found = {name: torch.zeros(shape) for name, shape in shapes(adapter, hidden).items()}
    for name, tensor in found.items():
        if name.endswith(".norm.weight"):
            tensor += 1.0
        elif name.endswith(".weight") and sigma > 0:
            torch.nn.init.trunc_normal_(tensor, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
    return found


@dataclass(frozen=True)
class Each:
    """One tensor for each of several runs of rows, which stand end to end."""

    tensors: Sequence[Tensor]
    sizes: Sequence[int]


def bottleneck(y: Tensor, x: Tensor, adapter: Adapter, tensors: Mapping[str, Any]) -> Tensor:
    """Apply an adapter to `[n, hidden]`, or one to each part of `[parts, n, hidden]`; `tensors` by part, stacked alike.

    Without gradients and norms inside, tensors may also be `Each`, for rows of several adapters end to end.

    Widths may be padded with zeros, which stay zero through the arithmetic.
    """
    v = x if adapter.placement == "parallel" else y
    if adapter.inner_norm:
        gain, shift = (tensors[f"norm.{leaf}"].unsqueeze(-2) for leaf in ("weight", "bias"))
        v = F.layer_norm(v, v.shape[-1:], None, None, _EPSILON) * gain + shift
    activate = ACTIVATIONS[adapter.activation]
    v = activate(linear(v, *_module(tensors, "down")))
    for k in range(1, adapter.depth):
        v = activate(linear(v, *_module(tensors, f"middle.{k}")))
    v = linear(v, *_module(tensors, "up"))
    return y + v if adapter.combine == "add" else y + y * v


def linear(v: Tensor, weight: Tensor | Each, bias: Tensor | Each) -> Tensor:
    """Give `v W' + b` for `[n, in]`, or for each part of `[parts, n, in]` with weights and biases stacked."""
    if isinstance(weight, Each) or isinstance(bias, Each):
        return _each(v, weight, bias)  # type: ignore[arg-type]
    if weight.dim() == 2:
        return F.linear(v, weight, bias)
    if not v.is_cuda:
        return torch.baddbmm(bias.unsqueeze(1), v, weight.transpose(1, 2))
    if not torch.is_grad_enabled():
        return torch.bmm(v, weight.transpose(1, 2)) + bias.unsqueeze(1)
    found: Tensor = _Linears.apply(v, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _Linears(torch.autograd.Function):
    """Stacked linear layers on a GPU, with gradients laid out like their tensors and sums as products with ones.

    Left to itself, autograd would give transposed gradients and sum biases with few of the device's processors.
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


def _each(v: Tensor, weight: Each, bias: Each) -> Tensor:
    """Multiply each run of rows by its own weight where it stands: no copy of weights, none of rows."""
    out = v.new_empty(len(v), len(weight.tensors[0]))
    parts = zip(v.split(weight.sizes), out.split(weight.sizes), weight.tensors, bias.tensors, strict=True)
    for rows, into, w, b in parts:
        torch.addmm(b, rows, w.t(), out=into)
    return out


def _module(tensors: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]
