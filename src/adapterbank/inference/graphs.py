"""Fixed sequences of GPU work: compiled, captured once, replayed. Knows nothing of what is computed.

A GPU runs a small encoder's kernels faster than Python can launch them. So the layer is compiled, which fuses many
kernels into few, and a whole step is captured in a CUDA graph, which launches all of them at once. Where either is
unavailable, the same work runs without it, slower, and one warning says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from adapterbank.encoder.kernels.launch import Compilation, kernel_cache
from adapterbank.errors import SlowerWarning

F = TypeVar("F", bound=Callable[..., Any])

DEVICES = ("cuda",)
"""Types of device on which training steps and mixed batches run as graphs."""

_COMPILED_FORMS = 64
"""Forms of one function that a process may compile; torch's default of 8 is too few for a sweep."""


def runs_graphs(device: torch.device) -> bool:
    """Return whether steps and batches run as graphs on this device."""
    return device.type in DEVICES


class GraphCompiler:
    """Compiles functions and captures graphs for one device; the graphs share memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is compiled or captured yet; on devices other than GPUs nothing ever is."""
        self.device = device
        self.kernels = Compilation(device)
        """Kernels of our own, which threads compile."""
        self._compiles = self._captures = device.type == "cuda"
        self._pool: Any = None
        self._first: Any = None
        self._ready: dict[Callable[..., Any], Callable[..., Any]] = {}

    def close(self) -> None:
        """Compile no further kernels."""
        self.kernels.close()

    def compiled(
        self,
        function: F,
        changing: Callable[..., Iterable[tuple[Any, int]]] | None = None,
        *,
        looped_reductions: bool = False,
    ) -> F:
        """Return a compiled form of a function, which falls back to the function itself.

        `changing` names, of its arguments, the tensors' dimensions that are not the same at every call. For every new
        size of another dimension the function is compiled again: if torch made such sizes variable once they change, a
        second encoder would make all sizes of all tensors variable, and each layer would be compiled by itself. With
        `looped_reductions` a reduction runs in a loop instead of in one block as wide as the longest row. That block's
        code is unrolled: for a softmax with computed dropout and rows of 16 to 512 tokens it grew to 5 MB, which takes
        minutes to compile.
        """
        if not self._compiles:
            return function
        if function not in self._ready:
            os.environ.setdefault("TRITON_CACHE_DIR", str(kernel_cache()))  # torch would choose another for ours, too
            torch._dynamo.config.recompile_limit = max(_COMPILED_FORMS, torch._dynamo.config.recompile_limit)
            options: dict[str, Any] | None = {"triton.persistent_reductions": False} if looped_reductions else None
            self._ready[function] = torch.compile(function, dynamic=False, options=options)

        def call(*arguments: Any, **options: Any) -> Any:
            if not self._compiles:
                return function(*arguments, **options)
            for tensor, dimension in changing(*arguments) if changing else ():
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
            return self._ready[function](*arguments, **options)

        return call  # type: ignore[return-value]

    def capture(self, body: Callable[[], None], *, warm: bool = True) -> Callable[[], None]:
        """Return a function that replays `body`. It is run a few times here, which must be harmless.

        `body` reads and writes tensors whose addresses never change, and does not synchronise with the host. One that
        has run before, and compiles nothing, need not run here: then `warm` is false.
        """
        if self.device.type != "cuda":
            return body
        if warm:
            self._warm(body)
        if not self._captures:
            return body
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captures = False
            self._warn("captured in a CUDA graph", error)
            return body
        self._first = self._first or graph  # the shared memory lives as long as one graph that uses it
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _warm(self, body: Callable[[], None]) -> None:
        """Run `body` on a side stream, as captures require: libraries allocate workspaces, and code is compiled."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                body()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise anything, and is optional
                if not self._compiles:
                    raise
                self._compiles = False
                self._warn("compiled", error)
                body()
            body()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    @staticmethod
    def _warn(what: str, error: Exception) -> None:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__}: {first}"
        warnings.warn(
            f"The forward pass could not be {what} on this machine and runs slower ({reason}).", SlowerWarning, 4
        )
