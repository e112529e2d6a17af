"""What FP8 would save of a training step's frozen products on one GPU, before it is built: milliseconds and errors.

    PYTHONPATH=src python bench/fp8.py --out bench/results/fp8.json
    PYTHONPATH=src python bench/fp8.py --tiny --out rehearsal.json

The frozen products of a layer are joined query, key and value; the output of attention; up; down: forward, and backward
by their inputs, on 32 x 128 tokens. They are computed in bf16 as the step does, and in e4m3 with a scale for each token
of the activations and one for each output of the weights, which are quantised ahead for both directions. One kernel
quantises the activations (`fp8_kernel.py`), once for each product, as no two of them read the same; a step might let
the kernel before do it, so `product alone` is the bound of what is possible. Two of the products backward are added to
the gradient of the residual, which only those in bf16 do by themselves.

Each variant runs in a CUDA graph, over all layers. Its errors are relative: the largest difference from the product in
float32 to that product's largest number, and the norm of the difference to the norm. A variant that raises is reported
with its message. On a CPU, FP8 is emulated and nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from contest import write
from machine import machine
from shapes import SHAPES, Shape
from torch import Tensor

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
BF16, FP8, ALONE = "bf16", "fp8", "fp8, product alone"
EXACT = "fp8, product alone, exact sums"
REPLAYS = 20

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


class Product(NamedTuple):
    """A product of a layer, `[tokens, inputs]` by a weight."""

    name: str
    inputs: int
    outputs: int
    forward: bool
    adds: bool
    """Whether it is added to the gradient of the residual."""


def products(shape: Shape) -> Iterator[Product]:
    """Yield the frozen products of a layer, each forward and backward."""
    d, f = shape.hidden, shape.feedforward
    for name, inputs, outputs in (("query, key, value", d, 3 * d), ("output", d, d), ("up", d, f), ("down", f, d)):
        yield Product(f"{name}, forward", inputs, outputs, True, False)
        yield Product(f"{name}, backward", outputs, inputs, False, outputs > inputs)


def quantise_plainly(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of `x` in e4m3 and the scale of each row `[n, 1]`, float32."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def quantiser(device: torch.device) -> Quantise:
    """Return the kernel that does the same, on a CPU itself."""
    if device.type != "cuda":
        return quantise_plainly
    import fp8_kernel

    return fp8_kernel.quantise


class Case:
    """The tensors of one product; each layer has weights of its own, so that they come from memory as in a step."""

    def __init__(self, product: Product, tokens: int, layers: int, device: torch.device) -> None:
        """Draw activations and weights."""
        self.product, self.gpu = product, device.type == "cuda"
        dtype = torch.bfloat16 if self.gpu else torch.float32
        self.x = torch.randn(tokens, product.inputs, device=device).to(dtype)
        by_output = [0.02 * torch.randn(product.outputs, product.inputs, device=device) for _ in range(layers)]
        # As a module stores it: `[outputs, inputs]` of the product forward.
        self.weights = [(w if product.forward else w.t().contiguous()).to(dtype) for w in by_output]
        self.quantised = [(w, scale.t().contiguous()) for w, scale in map(quantise_plainly, by_output)]
        self.exact = self.x.float() @ by_output[0].t()
        self.bias = torch.zeros(product.outputs, device=device, dtype=dtype)
        self.residual = torch.zeros(tokens, product.outputs, device=device, dtype=dtype)

    def plain(self, layer: int) -> Tensor:
        """Compute the product as the step does."""
        if self.product.forward:
            return F.linear(self.x, self.weights[layer], self.bias)
        if self.product.adds:
            return torch.addmm(self.residual, self.x, self.weights[layer])
        return self.x @ self.weights[layer]

    def fp8(self, layer: int, x: Tensor, scale: Tensor, *, fast: bool = True, whole: bool = False) -> Tensor:
        """Compute the product of quantised tensors, if `whole` with one scale for each tensor."""
        weight, own = self.quantised[layer]
        scales = (scale[:1], own[:, :1]) if whole else (scale, own)
        if not self.gpu:
            y = (x.float() * scales[0]) @ (weight.float().t() * scales[1])
        else:
            bias = self.bias if self.product.forward else None
            y = torch._scaled_mm(
                x, weight.t(), *map(Tensor.contiguous, scales), bias, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
        return y.add_(self.residual) if self.product.adds else y


def variants(case: Case, quantise: Quantise) -> dict[str, Callable[[int], Tensor]]:
    """Return the ways to compute a product, as functions of the layer."""
    ready, scale = quantise_plainly(case.x)
    return {
        BF16: case.plain,
        FP8: lambda layer: case.fp8(layer, *quantise(case.x)),
        ALONE: lambda layer: case.fp8(layer, ready, scale),
        EXACT: lambda layer: case.fp8(layer, ready, scale, fast=False),
        "fp8, product alone, a scale for each tensor": lambda layer: case.fp8(layer, ready, scale, whole=True),
        "quantise": lambda layer: quantise(case.x)[0],
    }


def errors(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the relative errors of a product."""
    off = found.float() - exact
    return {"largest": float(off.abs().max() / exact.abs().max()), "norm": float(off.norm() / exact.norm())}


def milliseconds(run: Callable[[int], Tensor], layers: int) -> float:
    """Return the median time of a graph that runs all layers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate workspaces, and Triton compiles
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)[REPLAYS // 2]


def measure_one(name: str, run: Callable[[int], Tensor], case: Case) -> dict[str, Any]:
    """Measure one variant, or report what it raises."""
    try:
        found: dict[str, Any] = {"errors": errors(run(0), case.exact)} if name in (BF16, FP8, EXACT) else {}
        if case.gpu:
            found["ms"] = milliseconds(run, len(case.weights))
    except Exception as problem:  # what torch refuses is a result, too
        return {"raised": f"{type(problem).__name__}: {str(problem).strip()[:300]}"}
    return found


def measure(shape: Shape, tokens: int, device: torch.device) -> dict[str, Any]:
    """Measure all products of a shape; return each, and the sums of a step."""
    found, quantise = {}, quantiser(device)
    for product in products(shape):
        case = Case(product, tokens, shape.layers, device)
        each = {name: measure_one(name, run, case) for name, run in variants(case, quantise).items()}
        found[product.name] = each
        shown = {name: one.get("raised") or round(one.get("ms", 0.0), 4) for name, one in each.items()}
        print(f"  {product.name:<28} {shown}  error {each[FP8].get('errors')}", flush=True)
    return {"products": found, "step": sums(found)}


def sums(found: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of all products of a step: in bf16, in FP8, and what the faster one of each saves."""
    times = [{name: each[name].get("ms") for name in (BF16, FP8, ALONE)} for each in found.values()]
    total = {f"{way}_ms": sum(one[way] or 0.0 for one in times) for way in (BF16, FP8, ALONE)}
    if not all(one[BF16] for one in times):
        return {}
    saved = {way: sum(max(0.0, one[BF16] - (one[way] or one[BF16])) for one in times) for way in (FP8, ALONE)}
    return {**total, "saved_ms": saved[FP8], "saved_at_most_ms": saved[ALONE]}


def main() -> None:
    """Measure both shapes, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU: emulated, and not timed")
    options = parser.parse_args()
    device, tokens = torch.device("cpu" if options.tiny else "cuda"), 32 if options.tiny else 32 * 128
    torch.manual_seed(0)
    found: dict[str, Any] = {**machine(device), "tokens": tokens, "shapes": {}}
    for name in ("tiny",) if options.tiny else ("base", "minilm"):
        print(name, flush=True)
        found["shapes"][name] = measure(SHAPES[name], tokens, device)
        print(f"  of a step: {found['shapes'][name]['step']}", flush=True)
        write(options.out, found)


if __name__ == "__main__":
    main()
