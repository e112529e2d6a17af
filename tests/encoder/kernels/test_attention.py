"""The attention kernel against the same attention composed of torch's operations, with the same elements dropped.

On a GPU in every type and width it is made for; without one, where Triton is installed, in Triton's interpreter, which
needs a process of its own: run as a script, this file does that.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adapterbank.encoder.batch import PaddedLayout
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import KERNEL_WIDTHS, AttentionInputs, attend

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]

SHAPES = [  # rows, longest, heads, width
    (1, 1, 1, 16),
    (3, 8, 4, 32),
    (5, 24, 2, 16),
    (4, 65, 3, 64),
    (3, 200, 4, 32),
    (2, 128, 1, 128),
]
RATES = [0.0, 0.1, 0.5]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PROBE = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, y, length, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(y + n, 2 * tl.load(x + n, mask=n < length, other=0.0), mask=n < length)

x, y = torch.ones(20), torch.zeros(20)
double[(1,)](x, y, 20, BLOCK=16)
assert (y == 2).all()
"""


class Case:
    """Projections of some rows, of which all but the first are shorter than the longest."""

    def __init__(self, shape, rate, dtype, device):
        rows, longest, heads, width = shape
        numbers = torch.Generator().manual_seed(rows * longest + width)
        lengths = [longest, *(1 + (7 * i * longest // 10) % longest for i in range(1, rows))]
        self.heads, self.real = heads, (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(device)
        mask = self.real[:, None, None]
        self.bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -torch.inf)
        hidden = heads * width
        self.x = torch.randn(rows * longest, 3 * hidden, generator=numbers).to(device, dtype)
        self.dy = torch.randn(rows * longest, hidden, generator=numbers).to(device, dtype)
        self.dy[~self.real.flatten()] = 0.0  # the output at padding is not read
        places = torch.arange(longest, device=device).repeat(rows)
        owners = torch.arange(rows, device=device).repeat_interleave(longest)
        keys = row_keys(5, 2**20 + 3, torch.arange(rows, device=device))
        drop = Dropout(keys, owners, places, rate=rate, attention_rate=rate)
        self.dropout = drop.layer(3, hidden=hidden, heads=heads, longest=longest)

    def run(self, fused=None, dtype=None):
        """Return the output of real tokens and the gradient of all projections, in float32."""
        x = self.x.to(dtype or self.x.dtype, copy=True).requires_grad_()
        bias = self.bias.to(x.dtype)
        y = attend(x, PaddedLayout(bias, fused), AttentionInputs(bias), self.dropout, heads=self.heads)
        assert y.dtype == x.dtype
        (dx,) = torch.autograd.grad(y, x, self.dy.to(x.dtype))
        return y.detach()[self.real.flatten()].float(), dx.float()


def compare(shape, rate, dtype, device):
    """Ask the kernel for what the composed attention gives in float32; rounding is relative to the largest number."""
    from adapterbank.encoder.kernels.attention import attend

    case = Case(shape, rate, dtype, device)
    for mine, wanted in zip(case.run(attend), case.run(dtype=torch.float32), strict=True):
        assert mine.shape == wanted.shape
        far = float((mine - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
        assert far <= TOLERANCES[dtype], f"{shape}, dropout {rate}, {dtype}: off by {far}"


def registered(device):
    """Ask torch whether it may trust what the operation says of itself: shapes, gradient, no hidden writes."""
    from adapterbank.encoder.kernels.attention import attend

    case = Case((3, 24, 2, 16), 0.1, torch.float32, device)
    drop = case.dropout
    keys = drop.queries.flatten(), drop.heads.flatten(), drop.columns
    torch.library.opcheck(attend, (case.x.requires_grad_(), case.bias, *keys, case.heads, 0.1))


def test_every_width_that_the_kernel_supports_is_tested():
    assert {width for *_, width in SHAPES} == set(KERNEL_WIDTHS)


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("rate", RATES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_kernel_gives_what_the_composed_attention_gives(self, shape, rate, dtype):
        compare(shape, rate, dtype, torch.device("cuda"))

    def test_the_same_call_gives_the_same_bits(self):
        from adapterbank.encoder.kernels.attention import attend

        case = Case((4, 65, 2, 64), 0.1, torch.bfloat16, torch.device("cuda"))
        first = case.run(attend)
        for _ in range(5):
            assert all(torch.equal(mine, wanted) for mine, wanted in zip(case.run(attend), first, strict=True))

    def test_torch_may_trust_what_the_operation_says_of_itself(self):
        registered(torch.device("cuda"))


def interpreted(file):
    """Run a file where Triton interprets its kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)


def test_the_interpreted_kernel_equals_the_composed_attention_without_a_gpu(tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with CUDA builds of torch")
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    tried = interpreted(probe)
    if tried.returncode:
        pytest.skip(f"Triton's interpreter does not work here: {tried.stderr.strip().splitlines()[-1]}")
    done = interpreted(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["9", "cases", "are", "right"]


if __name__ == "__main__":
    tried = [(shape, rate) for shape in ((3, 8, 4, 32), (2, 65, 2, 16), (2, 80, 1, 64)) for rate in RATES]
    for chosen in tried:
        compare(*chosen, torch.float32, torch.device("cpu"))
    registered(torch.device("cpu"))
    print(len(tried), "cases are right")
