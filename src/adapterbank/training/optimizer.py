"""Stacked Adam: one optimiser over all slots, each with its own learning rate, clip and step count. Knows no data.

For each slot (Kingma & Ba 2014; decoupled decay as in the public code of the paper):

    g <- g * min(1, clip / |g|)                       |g| over all tensors of the slot
    m <- 0.9 m + 0.1 g;   v <- 0.999 v + 0.001 g²     without bias correction as in BERT, or with it
    p <- p - lr (m / (sqrt(v) + eps) + decay p)       no decay on LayerNorms and biases
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adapterbank.slots.stack import Block, Stacks

_FIRST, _SECOND = 0.9, 0.999
"""Adam's decay rates, as in the paper."""


@dataclass(frozen=True)
class AdamSettings:
    """One slot's optimiser."""

    epsilon: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = False
    clip: float = 1.0
    """Largest norm of a step's gradient; 0 for no limit."""


@dataclass(frozen=True)
class Schedule:
    """Linear warmup, then linear decay to zero (section 3.1 of the paper)."""

    peak: float
    steps: int
    warmup: float = 0.1
    """Share of the steps that the learning rate rises over."""

    def at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        rising = max(1, math.ceil(round(self.warmup * self.steps, 6))) if self.warmup > 0 else 0
        if step < rising:
            return self.peak * (step + 1) / rising
        return self.peak * max(0.0, (self.steps - step) / max(1, self.steps - rising))


class StackedAdam:
    """Adam over the blocks of slots that train. Slots come (`admit`) and go while the others train on.

    A step is `zero_grad`, any number of `add_gradients`, `step`. What `step` does on the device (`apply`) depends on no
    number of the host but its table, so that it can be captured once and replayed.
    """

    def __init__(
        self, stacks: Stacks, settings: Mapping[int, AdamSettings] | None = None, compute: torch.dtype | None = None
    ) -> None:
        """Take the stacks that hold the slots; `settings` by slot admits them at once. `compute` is the pass's type."""
        self._stacks, self._compute = stacks, compute or stacks.dtype
        self.first: dict[Block, Tensor] = {}
        self.second: dict[Block, Tensor] = {}
        self.gradients: dict[Block, Tensor] = {}
        self.settings: dict[int, AdamSettings] = {}
        self.steps: dict[int, int] = {}
        self.update: Callable[..., None] = _update
        self._seats: list[int | None] = []
        self._seat_of_row: dict[Block, Tensor] = {}
        self._into: list[Tensor] = []  # the gradients again, tensor by tensor, in the order of `leaves`
        self._fresh = True
        for slot, mine in (settings or {}).items():
            self._seat(slot, mine)
        if settings:
            self._follow()

    def admit(self, slot: int, settings: AdamSettings) -> None:
        """Take a slot in, with zero moments; it must be in the stacks already."""
        self._seat(slot, settings)
        self._follow()
        for block, row in self._stacks.slot(slot).rows:
            self.first[block][row].zero_()
            self.second[block][row].zero_()

    def release(self, slot: int) -> None:
        """Let a slot go that has left the stacks; its seat stays for the next one."""
        del self.settings[slot], self.steps[slot]
        self._seats[self._seats.index(slot)] = None

    def leaves(self) -> list[Tensor]:
        """Return the tensors that take gradients."""
        return [leaf for block in self.first for leaf in block.views.values()]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for gradient in self.gradients.values():
            gradient.zero_()
        self._fresh = True

    @torch.no_grad()
    def add_gradients(self, found: Sequence[Tensor | None]) -> None:
        """Add gradients of `leaves`, in their order; None where a leaf had no part in the loss."""
        merge = torch._foreach_copy_ if self._fresh else torch._foreach_add_
        self._fresh = False
        # Whole rows of one type: on a GPU, one kernel for many.
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for into, gradient in zip(self._into, found, strict=True):
            if gradient is not None:
                views, given = by_type.setdefault(gradient.dtype, ([], []))
                views += into.unbind(0)
                given += gradient.unbind(0)
        for views, given in by_type.values():
            merge(views, given)

    def step(self, rates: Mapping[int, float]) -> Tensor:
        """Take one step for the slots in `rates` (slot -> learning rate); the others stand still.

        Gives the norm of each slot's gradient before clipping, in the order of `settings`.
        """
        norms = self.apply(torch.from_numpy(self.table(rates)).to(self._stacks.device))
        self.count(rates)
        return norms[[self._seats.index(slot) for slot in self.settings]]

    def count(self, slots: Iterable[int]) -> None:
        """Note that these slots took a step."""
        for slot in slots:
            self.steps[slot] += 1

    def table(self, rates: Mapping[int, float]) -> np.ndarray:
        """Return each seat's numbers of this step, and nobody's at the end.

        Columns: active, rate, decay, epsilon, corrections of m and v, largest norm of the gradient.
        """
        found = np.tile(np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], np.float32), (len(self._seats) + 1, 1))
        for slot, rate in rates.items():
            s, t = self.settings[slot], self.steps[slot] + 1
            fix = (1 - _FIRST**t, 1 - _SECOND**t) if s.bias_correction else (1.0, 1.0)
            found[self._seats.index(slot)] = [1.0, rate, s.weight_decay, s.epsilon, *fix, s.clip or math.inf]
        return found

    @torch.no_grad()
    def apply(self, table: Tensor) -> Tensor:
        """Clip, update all blocks, and let the pass read the new numbers; gives each seat's norm, and nobody's."""
        squares = torch.zeros(len(table), device=table.device)
        for block, gradient in self.gradients.items():
            mine = torch.linalg.vector_norm(gradient, dim=1).square()
            squares = squares.index_add(0, self._seat_of_row[block], mine)
        norms = squares.sqrt()
        clip = (table[:, 6:] / norms[:, None].clamp(min=1e-12)).clamp(max=1.0)
        table = torch.cat([table[:, :6], clip], 1)
        spared = table.clone()
        spared[:, 2] = 0.0  # no weight decay
        for block, gradient in self.gradients.items():
            numbers = (table if block.layout.decays else spared).index_select(0, self._seat_of_row[block])
            moments = self.first[block], self.second[block]
            self.update(block.tensor, *moments, gradient, numbers)
            block.refresh()
        return norms

    def _seat(self, slot: int, settings: AdamSettings) -> None:
        self.settings[slot], self.steps[slot] = settings, 0
        if None in self._seats:
            self._seats[self._seats.index(None)] = slot
        else:
            self._seats.append(slot)

    def _follow(self) -> None:
        """Take over the stacks as they are now: new blocks, longer ones, rows with other owners."""
        self._stacks.require_gradients(self._compute)
        for block in self._stacks.blocks:
            for held in (self.first, self.second, self.gradients):
                old = held.get(block)
                if old is None or len(old) != len(block.tensor):
                    held[block] = torch.zeros_like(block.tensor)
                    if old is not None:
                        held[block][: len(old)] = old
            seats = [self._seats.index(o) if o in self.settings else len(self._seats) for o in block.owners]
            numbers = torch.tensor(seats, device=self._stacks.device)
            known = self._seat_of_row.setdefault(block, numbers)
            if len(known) == len(numbers):
                known.copy_(numbers)  # in place: a captured step reads it
            else:
                self._seat_of_row[block] = numbers
        self._into = [view for block, rows in self.gradients.items() for view in block.layout.views(rows).values()]


def _update(p: Tensor, m: Tensor, v: Tensor, g: Tensor, numbers: Tensor) -> None:
    """Update rows `[n, width]` in place, each with its own numbers (`StackedAdam.table`, the last of them the clip)."""
    active, rate, decay, epsilon, fix_first, fix_second, clip = numbers[:, :, None].unbind(1)
    g = g * clip
    m.lerp_(g, (1 - _FIRST) * active)
    v.lerp_(g * g, (1 - _SECOND) * active)
    # Where epsilon is 0, the padding's zero moments must not become 0 / 0.
    change = (m / fix_first) / ((v / fix_second).sqrt_() + epsilon).clamp_min_(1e-30)
    p.sub_(rate * (change + decay * p))
