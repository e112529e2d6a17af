"""The elementwise kernels against torch's own operations, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script

from adapterbank.encoder import dropout
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.training import optimizer
from encoder.kernels.interpreter import interpreted_or_skip

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]
SHAPES = [(1, 1), (7, 33), (64, 40)]


def dropped(device):
    """Compare dropout and its gradient with a mask's own, to the bit in float32."""
    from adapterbank.encoder.kernels.elementwise import drop

    for count, width in SHAPES:
        keys = row_keys(3, 9, torch.arange(count, device=device))
        rows, places = torch.arange(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
        mask = Dropout(keys, rows, places, rate=0.3, attention_rate=0.3).mask(width, 5)
        x = torch.randn(count, width, device=device).requires_grad_()
        dy, found = torch.randn_like(x), drop(x, mask.keys.flatten(), mask.columns, 0.3)
        torch.testing.assert_close(found, mask.drop(x), rtol=1e-6, atol=0)
        assert torch.equal(found == 0, mask.drop(x) == 0)
        expected = torch.autograd.grad(mask.drop(x), x, dy)[0]
        torch.testing.assert_close(torch.autograd.grad(found, x, dy)[0], expected, rtol=1e-6, atol=0)


def hashed(device):
    """Compare the hash with the one composed of torch's operations, to the bit."""
    from adapterbank.encoder.kernels.elementwise import mix

    numbers = torch.randint(-(2**31), 2**31, (37, 129), device=device).to(torch.int32)
    for x in (numbers, numbers.t(), numbers[:1, :1], torch.tensor([-(2**31), -1, 0, 1, 2**31 - 1], dtype=torch.int32)):
        assert torch.equal(mix(x.to(device)), dropout.mix(x.to(device)))


def activated(device):
    """Compare GELU and its gradient with torch's, within the rounding of bfloat16."""
    from adapterbank.encoder.kernels.elementwise import _launch_gelu, gelu

    x = torch.cat([torch.linspace(-12, 12, 4099, device=device), torch.zeros(2, device=device)]).requires_grad_()
    dy = torch.randn_like(x)
    torch.testing.assert_close(_launch_gelu(x, None), F.gelu(x), rtol=0, atol=2e-6)
    wanted = torch.autograd.grad(F.gelu(x), x, dy)[0]
    torch.testing.assert_close(_launch_gelu(x, dy), wanted, rtol=0, atol=4e-6)
    short = x.detach().to(torch.bfloat16).requires_grad_()
    found, plain = gelu(short), F.gelu(short)
    torch.testing.assert_close(found.float(), plain.float(), rtol=1e-2, atol=1e-6)
    dy = dy.to(torch.bfloat16)
    mine, theirs = (torch.autograd.grad(y, short, dy.clone())[0].float() for y in (found, plain))  # ours reuses `dy`
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-5)
    assert torch.equal(gelu(x), F.gelu(x))  # of 32 bits, torch's own


def updated(device):
    """Compare Adam's update of rows with different numbers with the one composed of torch's operations."""
    from adapterbank.encoder.kernels.elementwise import update

    random = torch.Generator().manual_seed(0)
    p, m, g = (torch.randn(3, 1500, generator=random).to(device) for _ in range(3))
    v = torch.rand(3, 1500, generator=random).to(device)
    numbers = torch.tensor(
        [[1, 1e-2, 0.1, 1e-6, 0.1, 0.01, 0.5], [0, 0, 0, 1, 1, 1, 1], [1, 1e-3, 0, 0, 1, 1, 1]], device=device
    )
    m[2, 0] = v[2, 0] = g[2, 0] = 0.0  # with epsilon 0
    expected = [tensor.clone() for tensor in (p, m, v)]
    optimizer.update_rows(*expected, g, numbers)
    update(p, m, v, g, numbers, first=optimizer.FIRST, second=optimizer.SECOND)
    for mine, wanted in zip((p, m, v), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-7)


CHECKS = (dropped, hashed, activated, updated)


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("check", CHECKS)
    def test_the_kernels_give_what_torch_gives(self, check):
        check(torch.device("cuda"))


def test_the_interpreted_kernels_give_what_torch_gives(tmp_path):
    interpreted_or_skip(Path(__file__), tmp_path)


if __name__ == "__main__":
    for check in CHECKS:
        check(torch.device("cpu"))
    print("all equal")
