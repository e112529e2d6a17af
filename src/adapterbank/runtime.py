"""The machine: device, precision, memory, and the stamp that says on what a number was made. Knows nothing else."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from adapterbank import __version__
from adapterbank.errors import ConfigError

_TOKENISING = 6
"""Threads that tokenise beside a GPU: more, with little to do for each, are in the way of the thread that feeds it.

Measured on 16 cores: docs/performance.md.
"""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find_device(name: str = "auto") -> torch.device:
    """Choose a device: the first GPU where there is one, else the CPU; `cuda:1` names another GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError([f"device is {name!r}; it must be auto, cpu, cuda or cuda:N."]) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            [f"device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs here. Use --device cpu."]
        )
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Choose what the pass computes in: fp32 on CPU, bf16 on a GPU; what trains is kept in fp32 either way."""
    if name == "auto":
        able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if able else torch.float32
    if name not in _DTYPES:
        raise ConfigError([f"precision is {name!r}; it must be one of auto, {', '.join(_DTYPES)}."])
    if name == "bf16" and device.type == "cpu":
        # Some machines announce bf16 instructions that end the process when they are used.
        raise ConfigError(["precision is 'bf16', which is for GPUs; use fp32 on the CPU."])
    return _DTYPES[name]


def use_one_thread() -> None:
    """Let what the calling thread computes on the CPU be computed by it alone.

    Threads that have computed before go on as they are; torch begins those that come later with one thread too.
    """
    torch.set_num_threads(1)


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_few_threads_for_texts() -> None:
    """Let the tokenizer take a few threads instead of one for each core, if it has not begun yet.

    `RAYON_NUM_THREADS`, which the tokenizer reads, goes before where it is set.
    """
    if cores() > _TOKENISING:
        os.environ.setdefault("RAYON_NUM_THREADS", str(_TOKENISING))


def total_memory(device: torch.device) -> int:
    """Return the bytes the device has, used or not: what follows from it must not change from run to run."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    found = [8 << 30]
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system tells
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(ValueError, OSError):  # a container may have less than its machine
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def stamp(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Say what decides the last bit of a result: library versions, device, CPU capability, threads, precision."""
    return {
        "library": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "precision": next(name for name, known in _DTYPES.items() if known == dtype),
    }


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Say whether two stamps promise results that agree to the bit."""
    keys = ("library", "torch", "device", "cpu", "threads", "precision")
    return all(a.get(key) == b.get(key) for key in keys)
