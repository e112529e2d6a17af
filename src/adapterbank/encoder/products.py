"""Products with frozen matrices on a CPU: each matrix is laid out for its kernel once. Knows no layers and no slots.

A library that is given a plain matrix lays it out anew for every product, which takes longer than a product with a few
tokens. The rows of `LAYOUTS` say how a matrix is kept, in the order of precision:

    fp32    as oneDNN reads it; the same product to within rounding
    bf16    the same in half of the memory; inputs and outputs are rounded, sums are float32
    int8    one byte a number, quantised once for each output channel; inputs are quantised for each token

Everything else of the pass (adapters, LayerNorms, heads, attention) computes in float32, whatever the row.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Multiply = Callable[[Tensor, Tensor | None], Tensor]
"""(x `[T, in]`, bias `[out]`) -> `x W' + bias`, `[T, out]`, of one matrix."""

_ENGINES = ("fbgemm", "qnnpack")
"""torch's engines for int8 products with an input that is quantised here: of x86 and of ARM."""
_SMALLEST = 1e-12
"""The least width of a token's range: a token of equal numbers is not divided by zero."""
_ROWS_AS_THEY_ARE = 16
"""The most rows of a product that are not filled up: a single text costs no more than it must."""
_ENGINE_LOCK = threading.Lock()


class FrozenTensors(dict[str, Tensor]):
    """An encoder's tensors by name, and its matrices laid out for products."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: str) -> None:
        """Lay out the matrices of all linear layers; `tensors` are kept as they are."""
        super().__init__(tensors)
        lay_out = LAYOUTS[layout]
        self.products = {name: Product(tensors[name], lay_out) for name in _matrices(tensors)}


class Product:
    """One frozen matrix `[out, in]`, laid out once; its transpose too, when a gradient first needs it."""

    def __init__(self, weight: Tensor, lay_out: Callable[[Tensor], Multiply]) -> None:
        """Lay the matrix out."""
        self._weight, self._lay_out = weight, lay_out
        self._forward = lay_out(weight)
        self._backward: Multiply | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W' + bias`."""
        if not torch.is_grad_enabled():
            return self._forward(x, bias)
        if not x.requires_grad and (bias is None or not bias.requires_grad):
            return self._forward(x, bias)
        y: Tensor = _Multiplied.apply(x, bias, self)  # type: ignore[no-untyped-call]
        return y

    def gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of the input, `dy W`."""
        if self._backward is None:
            self._backward = self._lay_out(self._weight.t().contiguous())
        return self._backward(dy, None)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W' + bias` without a gradient."""
        return self._forward(x, bias)


class _Multiplied(torch.autograd.Function):
    """A product with a gradient for its input and its bias; the matrix is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.product = product
        return product.forward(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        dx = ctx.product.gradient(dy) if ctx.needs_input_grad[0] else None
        return dx, dy.sum(0) if ctx.needs_input_grad[1] else None, None


def multiply(tensors: Mapping[str, Tensor], x: Tensor, name: str, bias: Tensor | None) -> Tensor:
    """Return `x W' + bias` for the frozen matrix `name`, through its layout where it has one."""
    found = tensors.products.get(name) if isinstance(tensors, FrozenTensors) else None
    return found(x, bias) if found else F.linear(x, tensors[name], bias)


def frozen_linear(tensors: Mapping[str, Tensor], x: Tensor, name: str) -> Tensor:
    """Return `x W' + b` for the frozen linear layer `name`, which may lack a bias."""
    return multiply(tensors, x, f"{name}.weight", tensors.get(f"{name}.bias"))


def _matrices(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the matrices that are multiplied: no tables, and no parts of joined matrices."""
    linear = [name for name in tensors if name.startswith(("layers.", "pooler.", "embeddings.project."))]
    weights = [name for name in linear if name.endswith(".weight") and tensors[name].dim() == 2]
    return [name for name in weights if f"{name.rsplit('.', 2)[0]}.joined.weight" not in tensors or not _is_part(name)]


def _is_part(name: str) -> bool:
    return name.rsplit(".", 2)[1] in ("query", "key", "value")


def _plain(weight: Tensor) -> Multiply:
    return lambda x, bias: F.linear(x, weight, bias)


def _packed(weight: Tensor) -> Multiply:
    """Lay a matrix out as oneDNN reads it."""
    if not (weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()):
        return _plain(weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise.default
    return _filled(lambda x, bias: run(x, packed, bias, "none", [], ""))


def _packed_bf16(weight: Tensor) -> Multiply:
    """Round a matrix to bf16 and lay it out as oneDNN reads it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    run = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = run(x.bfloat16(), packed, None, "none", [], "").float()
        return y if bias is None else y.add_(bias)

    return _filled(product)


def filled_rows(count: int) -> int:
    """Return the number of rows that `count` rows are filled up to: above 16, eight numbers for each power of two.

    oneDNN compiles a product for each number of rows and never frees that code, about 0.4 MB: a server that meets
    batches of every length grew without end.
    """
    step = max(1, (1 << (count - 1).bit_length()) // 16) if count > _ROWS_AS_THEY_ARE else 1
    return -(-count // step) * step


def _filled(run: Multiply) -> Multiply:
    """Return a product that fills its rows up."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        count = len(x)
        missing = filled_rows(count) - count
        return run(F.pad(x, (0, 0, 0, missing)), bias)[:count] if missing else run(x, bias)

    return product


def _quantised(weight: Tensor) -> Multiply:
    """Quantise a matrix: `W = s q`, with a scale s for each output channel and q in -127..127.

    A token x is quantised to u = (x - low) / width in 0..1, in steps of 1 / levels, so that

        x W' + b = width (u W') + low (1 W') + b

    where the second term needs only the sum of each row of W. The answer for a row does not depend on the others.
    """
    scales = (weight.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    quantised = _quantise(weight, scales)
    sums = quantised.dequantize().double().sum(1).float()
    run, step = _int8_product(quantised), 1 / _levels()

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        low = x.amin(-1, True)
        width = x.amax(-1, True).sub_(low).clamp_min_(_SMALLEST)
        y = run(x.sub(low).div_(width), step)
        if bias is None:
            return y.mul_(width).addcmul_(low, sums)
        return torch.addcmul(bias, y, width).addcmul_(low, sums)

    return product


def _quantise(weight: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix as torch's quantised tensor, with a scale for each output channel.

    torch announces the end of such tensors, but its packed products still take no others.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor", category=UserWarning)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        return torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)


def _int8_product(quantised: Tensor) -> Callable[[Tensor, float], Tensor]:
    """Return the product of a quantised matrix with inputs in 0..1, which are rounded to multiples of a step."""
    engine = int8_engine()
    if engine is None:
        raise RuntimeError("this build of torch has no int8 products")
    with _ENGINE_LOCK:
        before, torch.backends.quantized.engine = torch.backends.quantized.engine, engine
        try:
            packed = torch.ops.quantized.linear_prepack(quantised, None)
        finally:
            torch.backends.quantized.engine = before
    if engine == "fbgemm":
        run = _bare(torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default)
        return lambda u, step: run(u, step, 0, packed)
    dynamic = _bare(torch.ops.quantized.linear_dynamic.default)
    return lambda u, step: dynamic(u, packed)


def _bare(operator: Any) -> Callable[..., Tensor]:
    """Return an operator without the search for Python objects that torch makes among arguments like packed matrices.

    The search takes as long as the operators around it; it concerns tracing alone.
    """
    found: Callable[..., Tensor] = getattr(operator, "_op", operator)
    return found


def int8_engine() -> str | None:
    """Return torch's engine for int8 products on this machine, None without one."""
    return next((name for name in _ENGINES if name in torch.backends.quantized.supported_engines), None)


@functools.cache
def _levels() -> int:
    """Return how many steps a token's range has: 255, or 127 where sums of pairs of products overflow 16 bits.

    CPUs without VNNI add two products in 16 bits. Two of 255 x 127 overflow there, so the product itself is asked.
    """
    largest = _quantise(torch.full((16, 64), 127.0), torch.ones(16))
    found = _int8_product(largest)(torch.ones(1, 64), 1 / 255)
    return 255 if torch.allclose(found, torch.full_like(found, 127.0 * 64), rtol=1e-3) else 127


LAYOUTS: Mapping[str, Callable[[Tensor], Multiply]] = {
    "fp32": _packed,
    "bf16": _packed_bf16,
    "int8": _quantised,
}
