"""Stacked Adam: one optimiser over all slots, each with its own learning rate, clip and step count. Knows no data.

For each slot (Kingma & Ba 2014; decoupled decay as in the public code of the paper):

    g <- g * min(1, clip / |g|)                       |g| over all tensors of the slot
    m <- 0.9 m + 0.1 g;   v <- 0.999 v + 0.001 g²     without bias correction as in BERT, or with it
    p <- p - lr (m / (sqrt(v) + eps) + decay p)       no decay on LayerNorms and biases
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adapterbank.methods import decays
from adapterbank.slots.stack import Key, Stacks

_FIRST, _SECOND = 0.9, 0.999
"""Adam's decay rates, as in the paper."""


@dataclass(frozen=True)
class Settings:
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
        """Give the learning rate of a step, from 0."""
        rising = max(1, math.ceil(round(self.warmup * self.steps, 6))) if self.warmup > 0 else 0
        if step < rising:
            return self.peak * (step + 1) / rising
        return self.peak * max(0.0, (self.steps - step) / max(1, self.steps - rising))


class StackedAdam:
    """Adam over stacks of slots' tensors. Slots come (`admit`) and go while the others train on."""

    def __init__(self, stacks: Stacks, settings: Mapping[int, Settings] | None = None) -> None:
        """Take the stacks that hold the slots; `settings` by slot admits them at once."""
        self._stacks = stacks
        self.parameters: dict[Key, Tensor] = {}
        self.first: dict[Key, Tensor] = {}
        self.second: dict[Key, Tensor] = {}
        self.settings: dict[int, Settings] = {}
        self.steps: dict[int, int] = {}
        self._owner: dict[Key, Tensor] = {}
        for slot, mine in (settings or {}).items():
            self.settings[slot], self.steps[slot] = mine, 0
        if settings:
            self._follow()

    def admit(self, slot: int, settings: Settings) -> None:
        """Take a slot in, with zero moments; it must be in the stacks already."""
        self.settings[slot], self.steps[slot] = settings, 0
        self._follow()
        for moments in (self.first, self.second):
            for key, tensor in moments.items():
                for entry, owner in enumerate(self._stacks.owners(key)):
                    if owner == slot:
                        tensor[entry].zero_()

    def release(self, slot: int) -> None:
        """Let a slot go that has left the stacks."""
        del self.settings[slot], self.steps[slot]
        self._follow()

    def _follow(self) -> None:
        """Take over the stacks as they are now: new ones, longer ones, entries with other owners."""
        self.parameters = self._stacks.trainable()
        slots = list(self.settings)
        for key, p in self.parameters.items():
            for moments in (self.first, self.second):
                old = moments.get(key)
                if old is None or len(old) != len(p):
                    moments[key] = torch.zeros_like(p, requires_grad=False)
                    if old is not None:
                        moments[key][: len(old)] = old
            owners = [slots.index(s) if s in self.settings else len(slots) for s in self._stacks.owners(key)]
            self._owner[key] = torch.tensor(owners, device=p.device)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, rates: Mapping[int, float]) -> Tensor:
        """Take one step for the slots in `rates` (slot -> learning rate); the others stand still.

        Gives the norm of each slot's gradient before clipping, in the order of `settings`.
        """
        norms = self._norms()
        table = self._table(rates, norms)
        for key, p in self.parameters.items():
            if p.grad is not None:
                self._update(key, p, table[self._owner[key]])
        for slot in rates:
            self.steps[slot] += 1
        return norms[:-1]

    def _table(self, rates: Mapping[int, float], norms: Tensor) -> Tensor:
        """Give each slot's numbers of this step, and zeros for entries that are nobody's.

        Columns: active, rate, decay, epsilon, corrections of m and v, factor that clips the gradient.
        """
        rows = []
        for slot, s in self.settings.items():
            t, rate = self.steps[slot] + 1, rates.get(slot)
            fix = (1 - _FIRST**t, 1 - _SECOND**t) if s.bias_correction else (1.0, 1.0)
            rows.append([float(rate is not None), rate or 0.0, s.weight_decay, s.epsilon, *fix, s.clip or math.inf])
        rows.append([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
        table = torch.tensor(rows, dtype=torch.float32).to(norms.device)
        table[:, 6] = (table[:, 6] / norms.clamp(min=1e-12)).clamp(max=1.0)
        return table

    def _update(self, key: Key, p: Tensor, table: Tensor) -> None:
        assert p.grad is not None
        columns = table.view(len(table), -1, *[1] * (p.dim() - 1)).unbind(1)
        active, rate, decay, epsilon, fix_first, fix_second, clip = columns
        m, v, g = self.first[key], self.second[key], p.grad * clip
        m.add_((g - m) * ((1 - _FIRST) * active))
        v.add_((g * g - v) * ((1 - _SECOND) * active))
        # The clamp matters where epsilon is 0: the padding's moments are zero and must not become 0 / 0.
        change = (m / fix_first) / ((v / fix_second).sqrt_() + epsilon).clamp_(min=1e-30)
        if decays(key[0]):
            change += decay * p
        p.sub_(change * rate)

    def _norms(self) -> Tensor:
        """Give the norm of each slot's gradient over all its tensors, and nobody's at the end."""
        some = next(iter(self.parameters.values()))
        total = torch.zeros(len(self.settings) + 1, device=some.device)
        for key, p in self.parameters.items():
            if p.grad is not None:
                total.index_add_(0, self._owner[key], p.grad.flatten(1).square().sum(1))
        return total.sqrt()
