"""The kernels of heads, scales and biases against torch's own operations, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script

from adapterbank.encoder.kernels.forms import Places
from encoder.kernels.interpreter import interpreted_or_skip

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]
ROWS = [0, 2, 1, 2]


def placed(tensors, device, dtype=torch.float32):
    """Return one memory with all tensors, each from a multiple of 16, and where each begins."""
    starts, parts = [], []
    for tensor in tensors:
        starts.append(sum(len(part) for part in parts))
        parts += [tensor.flatten(), torch.zeros(-tensor.numel() % 16)]
    return torch.cat(parts).to(device, dtype), starts


@pytest.fixture
def device():
    return torch.device("cuda")


def heads(device):
    """Compare heads of several widths, for one token a row and for many."""
    from adapterbank.encoder.kernels.slots import project

    for hidden, length in ((40, 1), (300, 1), (40, 21)):
        random = torch.Generator().manual_seed(hidden)
        own = [(torch.randn(n, hidden, generator=random), torch.randn(n, generator=random)) for n in (3, 40, 1)]
        base, starts = placed([tensor for pair in own for tensor in pair], device)
        table = torch.tensor([[len(w), *starts[2 * k : 2 * k + 2]] for k, (w, _) in enumerate(own)], device=device)
        x = torch.randn(len(ROWS) * length, hidden, generator=random).to(device)
        out = project(x, Places(base, torch.tensor(ROWS, device=device), table), 64, 0).view(len(ROWS), length, 64)
        for row, slot in enumerate(ROWS):
            weight, bias = (tensor.to(device) for tensor in own[slot])
            expected = F.linear(x.view(len(ROWS), length, -1)[row], weight, bias)
            torch.testing.assert_close(out[row, :, : len(bias)], expected, rtol=1e-4, atol=1e-4)
            assert not out[row, :, len(bias) :].any()


def scales(device):
    """Compare scales and biases, applied in place to a part of wider rows."""
    from adapterbank.encoder.kernels.slots import vectors

    for width, length in ((48, 5), (130, 20)):
        random = torch.Generator().manual_seed(width)
        own = [torch.randn(width, generator=random) for _ in range(6)]
        base, starts = placed(own, device)
        table = torch.tensor([starts[2 * k : 2 * k + 2] for k in range(3)], device=device)
        places = Places(base, torch.tensor(ROWS, device=device), table)
        wide = torch.randn(len(ROWS) * length, 3 * width, generator=random).to(device)
        expected = wide.clone().view(len(ROWS), length, -1)
        for row, slot in enumerate(ROWS):
            part = expected[row, :, width : 2 * width]
            part.mul_(own[2 * slot].to(device)).add_(own[2 * slot + 1].to(device))
        vectors(wide[:, width : 2 * width], places, scale_at=0, shift_at=1)
        torch.testing.assert_close(wide.view(expected.shape), expected)


CHECKS = (heads, scales)


@pytest.mark.parametrize("check", CHECKS)
class TestOnAGpu:
    pytestmark = gpu

    def test_the_kernels_give_what_torch_gives(self, check, device):
        check(device)


def test_the_interpreted_kernels_give_what_torch_gives(tmp_path):
    interpreted_or_skip(Path(__file__), tmp_path)


if __name__ == "__main__":
    for compared in CHECKS:
        compared(torch.device("cpu"))
    print("all equal")
