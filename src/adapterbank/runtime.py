"""The machine: device, precision, memory, and the stamp of a result. Knows nothing else of the library."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from adapterbank import __version__
from adapterbank.errors import ConfigError

_TOKENISING = 6
"""Threads that tokenise beside a GPU; more of them slow down the thread that feeds it.

Measured on 16 cores: docs/performance.md.
"""
_PRIMITIVES = 64
"""Compiled primitives that oneDNN keeps in a server."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LAYOUTS = ("fp32", "bf16", "int8")
"""How a CPU keeps frozen matrices; all else is float32 there (`encoder.products`)."""
_COMPUTED = "packed"
"""How a CPU computes frozen products: part of the stamp, as another way rounds otherwise."""


def find_device(name: str = "auto") -> torch.device:
    """Return a device by name; `auto` is the first GPU, or the CPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError([f"device is {name!r}; it must be auto, cpu, cuda or cuda:N."]) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError([f"device is {name!r}, but torch finds {torch.cuda.device_count()} GPUs; use --device cpu."])
    return device


def find_layout(name: str, device: torch.device) -> str:
    """Return how the frozen matrices are kept on a CPU: `fp32`, also for `auto`, or `bf16` or `int8`."""
    return name if device.type == "cpu" and name in _LAYOUTS else "fp32"


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the forward pass: fp32 on a CPU, bf16 on a GPU; trained weights are always fp32."""
    if name == "auto":
        supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if supported else torch.float32
    if name not in _LAYOUTS:
        raise ConfigError([f"precision is {name!r}; it must be one of auto, {', '.join(_LAYOUTS)}."])
    if device.type == "cpu":
        if problem := _PROBLEMS[name]():
            raise ConfigError([f"precision is {name!r}, but {problem}; use fp32."])
        return torch.float32
    if name not in _DTYPES:
        raise ConfigError([f"precision is {name!r}, which only a CPU computes; use bf16 on a GPU."])
    return _DTYPES[name]


def _no_problem() -> str:
    return ""


@functools.cache
def _int8_problem() -> str:
    """Return why this machine cannot multiply int8 matrices; empty if it can."""
    found = {"fbgemm", "qnnpack"} & set(_supported_engines())
    return "" if found else "this build of torch has no int8 products for this CPU"


def _supported_engines() -> list[str]:
    return list(torch.backends.quantized.supported_engines)


_PROBE = """
import torch
x, w = torch.randn(33, 96).bfloat16(), torch.randn(64, 96).bfloat16()
packed = torch.ops.mkldnn._reorder_linear_weight(w)
found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "").float()
wrong = (found - x.float() @ w.float().t()).abs().max() > 0.5
print("" if wrong else "done")
raise SystemExit(3 if wrong else 0)
"""


@functools.cache
def _bf16_problem() -> str:
    """Return why this CPU cannot multiply bf16 matrices; empty if it can.

    Some CPUs report bf16 instructions that end the process when they are used, so another process tries a product.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bf16 products"
    if not sys.executable:
        return "its bf16 products could not be tried without a Python to start"
    command = [sys.executable, "-P", "-c", _PROBE]  # without the current folder, whose modules may have any names
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its bf16 products could not be tried ({error})"
    if done.returncode or b"done" not in done.stdout:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return f"a trial of its bf16 products failed (exit status {done.returncode}: {said})"
    return ""


_PROBLEMS: Mapping[str, Callable[[], str]] = {"fp32": _no_problem, "bf16": _bf16_problem, "int8": _int8_problem}


def use_one_thread() -> None:
    """Limit the CPU computation of the calling thread to one thread.

    Threads that have already computed keep their setting; torch uses one thread for those that start later.
    """
    torch.set_num_threads(1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_few_threads_for_texts() -> None:
    """Limit the tokenizer to a few threads instead of one for each core, if it has not started yet.

    `RAYON_NUM_THREADS`, which the tokenizer reads, takes precedence.
    """
    if cores() > _TOKENISING:
        os.environ.setdefault("RAYON_NUM_THREADS", str(_TOKENISING))


def keep_few_primitives() -> None:
    """Limit oneDNN's cache of compiled primitives, unless the user has; call it before anything is computed.

    It keeps one for every shape of a batch that it has met, by default a thousand. A server meets ever new shapes: its
    memory grew for half an hour, to twice as much. Compiling a primitive again costs less than can be measured.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_PRIMITIVES))


def total_memory(device: torch.device) -> int:
    """Return the device's memory in bytes, used or not, so that what depends on it is the same for every run."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    limits = [8 << 30]
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system reports it
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(ValueError, OSError):  # a container may have less than its machine
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def _packed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a product as `encoder.products` computes it in fp32."""
    if not torch.backends.mkldnn.is_available():
        return F.linear(x, weight)
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, torch.ops.mkldnn._reorder_linear_weight(weight), None, "none", [], ""
    )
    return found


@functools.cache
def arithmetic(threads: int) -> str:
    """Return a checksum of products, attention and activations as the CPU computes them with so many threads.

    The libraries below torch choose their code by the processor and by variables of their own: oneDNN computes GELU and
    MKL products. torch's CPU capability says nothing of either, so the last bits themselves are the only sure sign.
    """

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.arange(math.prod(shape)) * 7919 % 1009).float().reshape(shape) / 1009 - 0.5

    found = hashlib.sha256()
    with torch.no_grad():
        for rows, inputs, outputs in ((6, 16, 48), (6, 384, 64), (33, 64, 384), (33, 384, 1536), (6, 768, 768)):
            y = F.linear(numbers(rows, inputs), numbers(outputs, inputs), numbers(outputs))
            packed = _packed_product(numbers(rows, inputs), numbers(outputs, inputs))
            for part in (
                y,
                packed,
                F.gelu(y),
                F.gelu(y, approximate="tanh"),
                torch.tanh(y),
                F.layer_norm(y, y.shape[1:]),
            ):
                found.update(part.numpy().tobytes())
        x = numbers(4, 12, 17, 32)
        found.update((torch.softmax(x @ x.transpose(2, 3), -1) @ x).numpy().tobytes())
    return found.hexdigest()[:16]


def stamp(device: torch.device, dtype: torch.dtype, layout: str = "fp32") -> dict[str, Any]:
    """Return what decides the last bit of a result: library versions, device, CPU arithmetic, threads, precision."""
    own = {"products": _COMPUTED, "arithmetic": arithmetic(torch.get_num_threads())} if device.type == "cpu" else {}
    return {
        "library": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "precision": layout if layout != "fp32" else next(name for name, value in _DTYPES.items() if value == dtype),
        **own,
    }


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two stamps promise results that are equal to the bit; a CPU's without `arithmetic` does not."""
    keys = ("library", "torch", "device", "cpu", "threads", "precision", "products", "arithmetic")
    return all(a.get(key) == b.get(key) for key in keys)
