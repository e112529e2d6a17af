"""Runs a test file where Triton interprets its kernels, which needs a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

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


def _run(file):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)


def interpreted_or_skip(file, folder):
    """Run a file as a script and ask for its success; skip where Triton's interpreter does not work."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with CUDA builds of torch")
    probe = folder / "probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    tried = _run(probe)
    if tried.returncode:
        pytest.skip(f"Triton's interpreter does not work here: {tried.stderr.strip().splitlines()[-1]}")
    done = _run(file)
    assert done.returncode == 0, done.stderr[-3000:]
