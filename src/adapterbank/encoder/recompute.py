"""Outputs that the backward pass computes again instead of keeping them, as memory requires. Knows no layers.

A step keeps what its gradients read. Most of that are outputs of products that are wider than their inputs: query, key
and value, and what the activation of the feed-forward reads, seven vectors of the hidden width for each token of a
layer. Here they are dropped and computed again from the input of the product (Chen et al. 2016), and where that input
is the output of a LayerNorm, it is computed again from what the LayerNorm's own gradient keeps. The operations and
their order are the same, and so are the gradients, to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adapterbank.errors import ConfigError

RECOMPUTE = ("auto", "always", "never")

Again = Callable[[], Tensor]
"""Computes an output again."""


def check_recompute(when: str) -> None:
    """Refuse what is none of `RECOMPUTE`."""
    if when not in RECOMPUTE:
        raise ConfigError([f"recompute is {when!r}; it must be one of {', '.join(RECOMPUTE)}."])


class Recompute:
    """What can be computed again of one pass."""

    def __init__(self) -> None:
        """Nothing can, before it is computed for the first time."""
        self._known: dict[int, tuple[weakref.ref[Tensor], Again]] = {}
        """By the address of its memory; an output that is gone is removed before its memory can be used again."""

    def widened(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `run(x)`, which is computed again from `x` if it is wider than `x`."""
        out = run(x)
        if out.shape[-1] > x.shape[-1]:
            self.remember(out, self.run_again(run, x))
        return out

    def run_again(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Again:
        """Return what computes `run(x)` again: from `x`, or from what `x` can be computed from."""
        return partial(_run_again, run, self._find(x) or partial(_same, x.detach()))

    def remember(self, out: Tensor, again: Again) -> None:
        """Let `again` compute an output that its gradients need not keep."""
        storage = out.untyped_storage()
        if not torch.is_grad_enabled() or storage.nbytes() != out.nbytes or not out.is_contiguous():
            return
        address = storage.data_ptr()

        def forget(mine: weakref.ref[Tensor]) -> None:
            if self._known.get(address, (None,))[0] is mine:
                del self._known[address]

        self._known[address] = weakref.ref(out, forget), again

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Keep nothing, in this context, that can be computed again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | Again:
        return self._find(tensor) or tensor

    def _find(self, tensor: Tensor) -> Again | None:
        """Return what computes a tensor, or the output that it is a view of."""
        own = self._known.get(tensor.untyped_storage().data_ptr())
        if own is None or own[0]() is None or not tensor.numel():
            return None
        return partial(_part, own[1], tensor.shape, tensor.stride(), tensor.storage_offset())


class Recomputing:
    """Whether the steps of a training compute outputs again: always, never, or from when memory runs out."""

    def __init__(self, when: str = "auto") -> None:
        """Take one of `RECOMPUTE`."""
        check_recompute(when)
        self.on, self._may_start = when == "always", when == "auto"

    def start(self) -> bool:
        """Begin to compute outputs again; return whether that is new."""
        new = self._may_start and not self.on
        self.on = self.on or new
        return new

    @contextmanager
    def of_a_pass(self) -> Iterator[Recompute | None]:
        """Yield what remembers the outputs of the pass in this context; None if they are kept."""
        if not self.on:
            yield None
            return
        recompute = Recompute()
        with recompute.dropping():
            yield recompute


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def _same(x: Tensor) -> Tensor:
    return x


def _run_again(run: Callable[[Tensor], Tensor], x: Again) -> Tensor:
    with torch.enable_grad():  # as the first time: some operations are others where there are no gradients
        return run(x()).detach()


def _part(again: Again, shape: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt) -> Tensor:
    return again().as_strided(shape, stride, offset)
