"""Launches kernels, or has those that would be launched compiled by threads. Knows no kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_THREADS = 8


class CompilerError(RuntimeError):
    """A kernel does not compile on this machine."""


class Compilation:
    """Kernels that threads compile: the compiler lets other threads run most of the time."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Nothing is compiled yet; threads compile for a device, by default the current one."""
        begin = None
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            with torch.cuda.device(device):  # one without a number is the current one
                begin = partial(torch.cuda.set_device, torch.cuda.current_device())
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "compile", begin)
        self._jobs: dict[Hashable, Future[Any]] = {}

    def add(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Begin to compile a kernel for such arguments, unless that has begun."""
        key = kernel, tuple(map(_form, arguments)), tuple(constants.items())
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(_compile, kernel, grid, tuple(map(_like, arguments)), constants)

    @property
    def done(self) -> bool:
        """Whether everything is compiled; raise what the compiler raised."""
        if not all(job.done() for job in self._jobs.values()):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until everything is compiled; raise what the compiler raised."""
        try:
            for job in self._jobs.values():
                job.result()
        except Exception as error:  # a compiler may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            raise CompilerError(f"{type(error).__name__}: {first}") from error

    def close(self) -> None:
        """Compile nothing further; what is being compiled is finished by its thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


_CURRENT: ContextVar[Compilation | None] = ContextVar("compilation", default=None)


def _compile(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Compile a kernel and load it, which fails if it needs more shared memory than the GPU has."""
    _ = kernel.warmup(*arguments, grid=grid, **constants).run


def _form(argument: Any) -> Hashable:
    """Return what a kernel is specialised on: types, and of a number whether it is 1 or divisible by 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return type(argument).__name__


def _like(argument: Any) -> Any:
    """Return a small tensor in place of one that would stay in memory until a kernel is compiled for its form."""
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty(32, dtype=argument.dtype, device=argument.device)[int(argument.data_ptr() % 16 > 0) :]


def kernel_cache() -> Path:
    """Return the folder in which compiled kernels are kept between processes."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, or have it compiled within `compiling`."""
    if compilation := _CURRENT.get():
        compilation.add(kernel, grid, arguments, constants)
    else:
        kernel[grid](*arguments, **constants)


@contextlib.contextmanager
def compiling(compilation: Compilation) -> Iterator[None]:
    """Within this, launch no kernel but begin to compile it; what kernels should write stays arbitrary."""
    token = _CURRENT.set(compilation)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # gradients are computed by this thread, too
            yield
    finally:
        _CURRENT.reset(token)
