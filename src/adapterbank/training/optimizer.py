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

FIRST, SECOND = 0.9, 0.999
"""Adam's decay rates, as in the paper."""
UpdateFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""See `update_rows`."""


@dataclass(frozen=True)
class AdamSettings:
    """The optimiser settings of one slot."""

    epsilon: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = False
    clip: float = 1.0
    """The largest gradient norm of a step; 0 for no limit."""


@dataclass(frozen=True)
class Schedule:
    """Linear warmup, then linear decay to zero (section 3.1 of the paper)."""

    peak: float
    steps: int
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = max(1, math.ceil(round(self.warmup * self.steps, 6))) if self.warmup > 0 else 0
        if step < rising:
            return self.peak * (step + 1) / rising
        return self.peak * max(0.0, (self.steps - step) / max(1, self.steps - rising))


class StackedAdam:
    """Adam over the blocks of slots that train. Slots can be admitted and released while others train.

    A step is `zero_grad`, any number of `add_gradients`, then `step`. The device's part of it (`apply`) depends on the
    host only through its table, so that it can be captured once and replayed. The table has one row for each slot, and
    a last row for block rows without a slot that trains.
    """

    def __init__(
        self, stacks: Stacks, settings: Mapping[int, AdamSettings] | None = None, compute: torch.dtype | None = None
    ) -> None:
        """Create an optimiser for slots in `stacks`; it admits those in `settings`. `compute` is the pass's dtype."""
        self._stacks, self._compute = stacks, compute or stacks.dtype
        self.first: dict[Block, Tensor] = {}
        self.second: dict[Block, Tensor] = {}
        self.gradients: dict[Block, Tensor] = {}
        self.settings: dict[int, AdamSettings] = {}
        self.steps: dict[int, int] = {}
        self._table_slots: list[int | None] = []  # the slot of each row of the table
        self._table_rows: dict[Block, Tensor] = {}  # the row of the table for each row of a block
        self._into: list[Tensor] = []  # views of the gradients, in the order of `leaves`
        self._fresh = True
        for slot, slot_settings in (settings or {}).items():
            self._assign_row(slot, slot_settings)
        if settings:
            self._sync()

    def admit(self, slot: int, settings: AdamSettings) -> None:
        """Add a slot, with zero moments; it must be in the stacks already."""
        self._assign_row(slot, settings)
        self._sync()
        for block, row in self._stacks.slot(slot).rows:
            self.first[block][row].zero_()
            self.second[block][row].zero_()

    def release(self, slot: int) -> None:
        """Remove a slot that has left the stacks; the next one reuses its row of the table."""
        del self.settings[slot], self.steps[slot]
        self._table_slots[self._table_slots.index(slot)] = None

    def leaves(self) -> list[Tensor]:
        """Return the tensors that need gradients."""
        return [leaf for block in self.first for leaf in block.views.values()]

    def gradient_views(self) -> dict[str, Tensor]:
        """Return the gradient of each tensor by name, `[rows, *shape]`, where there is one block of each layout."""
        return {name: view for block, rows in self.gradients.items() for name, view in block.layout.views(rows).items()}

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        for gradient in self.gradients.values():
            gradient.zero_()
        self._fresh = True

    @torch.no_grad()
    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of `leaves`, in their order; None for a leaf that does not affect the loss."""
        merge = torch._foreach_copy_ if self._fresh else torch._foreach_add_
        self._fresh = False
        # Group whole rows by dtype: on a GPU one kernel then handles many.
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for into, gradient in zip(self._into, gradients, strict=True):
            if gradient is not None:
                targets, sources = by_type.setdefault(gradient.dtype, ([], []))
                targets += into.unbind(0)
                sources += gradient.unbind(0)
        for targets, sources in by_type.values():
            merge(targets, sources)

    def step(self, rates: Mapping[int, float]) -> Tensor:
        """Take one step for the slots in `rates`, which maps slots to learning rates; the others do not change.

        Return the norm of each slot's gradient before clipping, in the order of `settings`.
        """
        norms = self.apply(torch.from_numpy(self.table(rates)).to(self._stacks.device))
        self.count(rates)
        return norms[[self._table_slots.index(slot) for slot in self.settings]]

    def count(self, slots: Iterable[int]) -> None:
        """Count one step for these slots."""
        for slot in slots:
            self.steps[slot] += 1

    def table(self, rates: Mapping[int, float]) -> np.ndarray:
        """Return the numbers of this step for each slot, and a last row for no slot.

        Columns: active, rate, decay, epsilon, bias corrections of m and v, largest gradient norm.
        """
        table = np.tile(np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], np.float32), (len(self._table_slots) + 1, 1))
        for slot, rate in rates.items():
            s, t = self.settings[slot], self.steps[slot] + 1
            fix = (1 - FIRST**t, 1 - SECOND**t) if s.bias_correction else (1.0, 1.0)
            table[self._table_slots.index(slot)] = [1.0, rate, s.weight_decay, s.epsilon, *fix, s.clip or math.inf]
        return table

    @torch.no_grad()
    def apply(self, table: Tensor, update: UpdateFn | None = None) -> Tensor:
        """Clip, update all blocks and what the pass reads; return the gradient norm for each row of the table.

        `update` is another form of `update_rows`.
        """
        squares = torch.zeros(len(table), device=table.device)
        for block, gradient in self.gradients.items():
            row_squares = torch.linalg.vector_norm(gradient, dim=1).square()
            squares = squares.index_add(0, self._table_rows[block], row_squares)
        norms = squares.sqrt()
        clip = (table[:, 6:] / norms[:, None].clamp(min=1e-12)).clamp(max=1.0)
        table = torch.cat([table[:, :6], clip], 1)
        without_decay = table.clone()
        without_decay[:, 2] = 0.0
        for block, gradient in self.gradients.items():
            numbers = (table if block.layout.decays else without_decay).index_select(0, self._table_rows[block])
            moments = self.first[block], self.second[block]
            (update or update_rows)(block.tensor, *moments, gradient, numbers)
            block.refresh()
        return norms

    def _assign_row(self, slot: int, settings: AdamSettings) -> None:
        self.settings[slot], self.steps[slot] = settings, 0
        if None in self._table_slots:
            self._table_slots[self._table_slots.index(None)] = slot
        else:
            self._table_slots.append(slot)

    def _sync(self) -> None:
        """Adapt to changes of the stacks: new blocks, longer blocks, rows with new owners."""
        self._stacks.require_gradients(self._compute)
        for block in self._stacks.blocks:
            if block.layout.frozen:
                continue
            for tensors in (self.first, self.second, self.gradients):
                old = tensors.get(block)
                if old is None or len(old) != len(block.tensor):
                    tensors[block] = torch.zeros_like(block.tensor)
                    if old is not None:
                        tensors[block][: len(old)] = old
            unused = len(self._table_slots)
            rows = [self._table_slots.index(slot) if slot in self.settings else unused for slot in block.owners]
            new = torch.tensor(rows, device=self._stacks.device)
            current = self._table_rows.setdefault(block, new)
            if len(current) == len(new):
                current.copy_(new)  # in place: a captured graph reads it
            else:
                self._table_rows[block] = new
        self._into = [view for block, rows in self.gradients.items() for view in block.layout.views(rows).values()]


def update_rows(p: Tensor, m: Tensor, v: Tensor, g: Tensor, numbers: Tensor) -> None:
    """Update rows `[n, width]` in place, each with its own numbers (`StackedAdam.table`, the last of them the clip)."""
    active, rate, decay, epsilon, fix_first, fix_second, clip = numbers[:, :, None].unbind(1)
    g = g * clip
    m.lerp_(g, (1 - FIRST) * active)
    v.lerp_(g * g, (1 - SECOND) * active)
    # With epsilon 0, the zero moments of the padding must not become 0 / 0.
    change = (m / fix_first) / ((v / fix_second).sqrt_() + epsilon).clamp_min_(1e-30)
    p.sub_(rate * (change + decay * p))
