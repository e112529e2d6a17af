"""Description of the machine that a figure was measured on: versions, driver, matrix rate."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from adapterbank.runtime import find_dtype, stamp, total_memory


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine."""
    found = {"stamp": stamp(device, find_dtype("auto", device)), "cuda": torch.version.cuda}
    found["clock"] = os.environ.get("BENCH_CLOCK", "wall")
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            found["driver"] = "unknown"
    return found


def matrix_rate(device: torch.device) -> float:
    """Measure the matrix rate in TFLOP/s: ten products of random bf16 matrices of 8192 x 8192 (CPU: 1024, fp32)."""
    gpu = device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if gpu else lambda: None
    began = 0.0
    for i in range(13):
        if i == 3:
            wait()
            began = time.perf_counter()
        a @ b
    wait()
    return 10 * 2 * n**3 / (time.perf_counter() - began) / 1e12


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that are still available to a process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    total, known = total_memory(device), Path("/proc/meminfo")
    if not known.exists():
        return total
    lines = dict(line.split(":") for line in known.read_text().splitlines())
    return min(total, 1024 * int(lines["MemAvailable"].split()[0]))
