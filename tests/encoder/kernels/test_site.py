"""The kernels of a site, both ways, against the same arithmetic composed of torch's operations.

On a GPU in both types; without one, where Triton is installed, in Triton's interpreter, which needs a process of its
own: run as a script, this file does that.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script

from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.kernels.forms import Drop, Form, Into, Places, TrainedSite
from encoder.kernels.interpreter import interpreted_or_skip

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]

TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
SHAPES = [  # rows, tokens of a row, hidden width, bottleneck of each slot (0: none)
    (1, 1, 48, (16,)),
    (4, 17, 40, (5, 0, 8)),
    (3, 40, 64, (64, 64)),
    (5, 33, 312, (16, 3, 0, 24)),
    (2, 9, 32, (200, 20)),
    (2, 9, 32, (100, 20)),
]


class Slots:
    """Numbers of some slots, end to end in one memory as in a block, and the table that finds them."""

    def __init__(self, sizes, hidden, dtype, device, *, inner=False, depth=1, biases=True):
        random = torch.Generator().manual_seed(hidden + len(sizes))
        self.sizes, self.own = sizes, []
        parts, table = [torch.zeros(64)], []
        for size in sizes:
            m = 1 << (size - 1).bit_length() if size else 0
            shapes = {"gain": (hidden,), "shift": (hidden,)}
            if inner:
                shapes |= {"norm.weight": (hidden,), "norm.bias": (hidden,)}
            shapes |= {"down.weight": (m, hidden)} | ({"down.bias": (m,)} if biases else {})
            for layer in range(1, depth):
                shapes |= {f"middle.{layer}.weight": (m, m), f"middle.{layer}.bias": (m,)}
            shapes |= {"up.weight": (hidden, m)} | ({"up.bias": (hidden,)} if biases else {})
            mine, line = {}, []
            for name, shape in shapes.items():
                tensor = torch.randn(shape, generator=random) * (0.3 if len(shape) == 2 else 0.5)
                tensor += 1.0 if name in ("gain", "norm.weight") else 0.0
                if size and size < m:  # padding is zeros
                    for dim, n in enumerate(shape):
                        if n == m and (name.startswith(("middle", "down")) or dim):
                            tensor.narrow(dim, size, m - size).zero_()
                mine[name] = tensor.to(device, dtype)
                line.append(sum(len(part) for part in parts))
                parts += [tensor.flatten(), torch.zeros(-tensor.numel() % 16)]
                if name == "shift":
                    line.append(m)
            self.own.append(mine)
            table.append(line)
        self.base = torch.cat(parts).to(device, dtype)
        self.table = torch.tensor(table, device=device)
        self.widest = max(1 << (size - 1).bit_length() if size else 0 for size in sizes)
        self.equal = all(size == self.widest for size in sizes)


def plain(y, x, own, size, *, read=None, mask=None, form=None, norm=True, residual=True, scale=1.0):
    """Return what a site of one slot computes, composed of torch's operations, in float32."""
    form = form or {}
    own = {name: tensor.float() for name, tensor in own.items()}
    y = mask(y) if mask else y
    z = y
    if size:
        v = y if read is None else read
        if form.get("inner_norm"):
            v = F.layer_norm(v, v.shape[-1:], own["norm.weight"], own["norm.bias"])
        activate = ACTIVATIONS.get(form.get("activation", "gelu_tanh"), lambda v: v)
        modules = ["down", *(f"middle.{k}" for k in range(1, form.get("depth", 1)))]
        for module in modules:
            v = activate(F.linear(v, own[f"{module}.weight"], own.get(f"{module}.bias")))
        v = F.linear(v, own["up.weight"]) * scale + own.get("up.bias", 0.0)
        z = y * (1 + v) if form.get("multiply") else y + v
    z = z + x if residual else z
    return F.layer_norm(z, z.shape[-1:], own["gain"], own["shift"], 1e-6) if norm else z


class Case:
    """Rows of some slots, in the order of their numbers."""

    def __init__(self, shape, dtype, device, rate=0.0, **form):
        self.rows, self.length, self.hidden, sizes = shape
        biases = form.get("biases", True)
        self.slots = Slots(sizes, self.hidden, dtype, device, inner=form.get("inner_norm", False),
                           depth=form.get("depth", 1), biases=biases)  # fmt: skip
        self.form, self.dtype, self.device, self.rate = form, dtype, device, rate
        random = torch.Generator().manual_seed(self.rows)
        count = self.rows * self.length
        self.y, self.x, self.dout = (
            torch.randn(count, self.hidden, generator=random).to(device, dtype) for _ in range(3)
        )
        self.places = torch.tensor([i % len(sizes) for i in range(self.rows)], dtype=torch.int32, device=device)
        positions = torch.arange(self.length, device=device).repeat(self.rows)
        owners = torch.arange(self.rows, device=device).repeat_interleave(self.length)
        keys = row_keys(5, 77, torch.arange(self.rows, device=device))
        self.mask = Dropout(keys, owners, positions, rate=rate, attention_rate=rate).mask(self.hidden, 3)

    def kernel_places(self):
        return Places(self.slots.base, self.places, self.slots.table)

    def kernel_form(self):
        if not self.slots.widest:
            return None
        return Form(self.slots.widest, self.slots.equal, **{"activation": "gelu_tanh", **self.form})

    def drop(self):
        return Drop(self.mask.keys.flatten(), self.mask.columns, self.rate) if self.rate else None

    def by_row(self, tensor):
        return tensor.float().view(self.rows, self.length, -1)

    def wanted(self, *, norm, residual, read=None):
        """Return the output that torch's operations give, row by row."""
        whole = self.by_row(self.mask.drop(self.y.float()) if self.rate else self.y)
        found = []
        for row in range(self.rows):
            slot = int(self.places[row])
            found.append(plain(
                whole[row], self.by_row(self.x)[row], self.slots.own[slot], self.slots.sizes[slot], norm=norm,
                residual=residual, form=self.form, scale=self.form.get("scale", 1.0),
                read=None if read is None else self.by_row(read)[row],
            ))  # fmt: skip
        return torch.cat(found)


def check(mine, wanted, what):
    assert mine.shape == wanted.shape, what
    mine, wanted = mine.detach(), wanted.detach()  # torch warns if a number is read of a tensor with a gradient
    far = float((mine.float() - wanted.float()).abs().max()) / max(1.0, float(wanted.abs().max()))
    assert far <= TOLERANCES[mine.dtype], f"{what}: off by {far}"


FORMS = [
    {},
    {"activation": "gelu"},
    {"activation": "relu", "multiply": True},
    {"activation": "silu", "inner_norm": True},
    {"activation": "tanh", "depth": 3},
    {"activation": "gelu_tanh", "parallel": True, "inner_norm": True, "depth": 2},
    {"activation": "", "biases": False, "scale": 0.5, "parallel": True},
]


def forwards(dtype, device):
    """Compare the kernel of inference in all its forms."""
    from adapterbank.encoder.kernels.launch import Compilation, compiling
    from adapterbank.encoder.kernels.site import site

    def run(case, form, norm, residual):
        read = case.dout if form.get("parallel") else None
        out = site(case.y.clone(), case.x, case.kernel_places(), read=read, form=case.kernel_form(), adapter_at=2,
                   norm_at=0 if norm else None, epsilon=1e-6, residual=residual)  # fmt: skip
        return out, read

    cases = [
        (Case(shape, dtype, device, **form), form, norm, residual)
        for shape, form, norm, residual in itertools.product(SHAPES, FORMS, (True, False), (True, False))
    ]
    cases = [case for case in cases if case[0].kernel_form().fits]
    if device.type == "cuda":  # some of the 140 kernels take the compiler ten seconds
        threads = Compilation(device)
        with compiling(threads):
            for case in cases:
                run(*case)
        threads.wait()
    for case, form, norm, residual in cases:
        out, read = run(case, form, norm, residual)
        what = f"{case.rows, case.length, case.hidden}, {form}, {norm}, {residual}"
        check(out, case.wanted(norm=norm, residual=residual, read=read), what)


def norms(dtype, device):
    """Compare a LayerNorm alone, and a bottleneck on a part of wider rows, written in place."""
    from adapterbank.encoder.kernels.site import site

    for shape in SHAPES:
        case = Case(shape, dtype, device)
        out = site(None, case.x, case.kernel_places(), norm_at=0, epsilon=1e-6)
        sizes, case.slots.sizes, case.y = case.slots.sizes, [0] * len(case.slots.sizes), torch.zeros_like(case.y)
        check(out, case.wanted(norm=True, residual=True), f"norm {shape}")
        case = Case(shape, dtype, device, **FORMS[-1])
        wide = torch.cat([case.dout, case.y, case.dout], 1)
        part = wide[:, case.hidden : 2 * case.hidden]
        site(
            part,
            case.x,
            case.kernel_places(),
            read=case.x,
            out=part,
            form=case.kernel_form(),
            adapter_at=2,
            residual=False,
        )
        check(part, case.wanted(norm=False, residual=False, read=case.x), f"part {shape} {sizes}")
        assert torch.equal(wide[:, : case.hidden], case.dout)
        assert torch.equal(wide[:, 2 * case.hidden :], case.dout)


TRAINED = [  # slots, rows of each, tokens of a row, hidden, size
    (1, 1, 1, 32, 16),
    (1, 3, 20, 48, 8),
    (3, 2, 33, 64, 16),
    (2, 2, 16, 312, 32),
    (2, 1, 40, 64, 0),
]


def gradients(dtype, device):
    """Compare the output and all gradients of the kernels of training."""
    from adapterbank.encoder.kernels.site_gradient import trained_site

    for (slots, each, length, hidden, size), rate, norm in itertools.product(TRAINED, (0.0, 0.2), (True, False)):
        if not (norm or size):
            continue
        what = f"{slots, each, length, hidden, size}, {rate}, {norm}"
        case = Case((slots * each, length, hidden, (size,) * slots), dtype, device, rate)
        case.places = torch.arange(slots, dtype=torch.int32, device=device).repeat_interleave(each)
        names = [
            *(["gain", "shift"] if norm else []),
            *(["down.weight", "down.bias", "up.weight", "up.bias"] if size else []),
        ]
        leaves = {n: torch.stack([own[n] for own in case.slots.own]) for n in names}
        grads = {n: torch.full(tensor.shape, 0.5, device=device) for n, tensor in leaves.items()}
        inputs = [case.y.clone().requires_grad_(), case.x.clone().requires_grad_()]
        into = Into(
            (grads["gain"], grads["shift"]) if norm else None,
            tuple(grads[n] for n in names if "." in n) if size else None,
        )
        about = TrainedSite(case.kernel_places(), case.kernel_form(), 2, 0 if norm else None, 1e-6, case.drop(), into)
        anchor = torch.zeros(1, device=device, requires_grad=True)
        out, again = trained_site(anchor, *inputs, about)
        assert not norm or torch.equal(again(), out), what
        found = [out, *torch.autograd.grad(out, [*inputs, anchor], case.dout, allow_unused=True)[:2]]
        found += [(grads[n] - 0.5).to(dtype) for n in names]

        exact = {n: tensor.detach().float().requires_grad_() for n, tensor in leaves.items()}
        y, x = (tensor.detach().float().requires_grad_() for tensor in inputs)
        dropped = case.mask.drop(y) if rate else y
        parts = []
        for slot in range(slots):
            rows = slice(slot * each * length, (slot + 1) * each * length)
            own = {**case.slots.own[slot], **{n: tensor[slot] for n, tensor in exact.items()}}
            parts.append(plain(dropped[rows], x[rows], own, size, norm=norm))
        out = torch.cat(parts)
        wanted = [out, *torch.autograd.grad(out, [y, x, *exact.values()], case.dout.float())]
        for name, mine, theirs in zip(["out", "y", "x", *names], found, wanted, strict=True):
            check(mine, theirs, f"{what}: {name}")


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("compared", [forwards, norms, gradients])
    def test_the_kernels_give_what_torch_gives(self, compared, dtype):
        # torch warns if the first work of its thread for gradients is a matrix product.
        torch.ones(1, device="cuda", requires_grad=True).exp().backward()
        compared(dtype, torch.device("cuda"))


@pytest.mark.slow
def test_the_interpreted_kernels_give_what_torch_gives(tmp_path):
    interpreted_or_skip(Path(__file__), tmp_path)


if __name__ == "__main__":
    for compared in (forwards, norms, gradients):
        compared(torch.float32, torch.device("cpu"))
    print("all equal")
