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
    """Adam over stacks of slots' tensors."""

    def __init__(self, stacks: Stacks, settings: Mapping[int, Settings]) -> None:
        """Make every stack trainable and start with zero moments; `settings` by slot."""
        self.parameters = stacks.trainable()
        self.settings = dict(settings)
        self.first = {key: torch.zeros_like(p) for key, p in self.parameters.items()}
        self.second = {key: torch.zeros_like(p) for key, p in self.parameters.items()}
        self.steps = dict.fromkeys(settings, 0)
        self._slots = list(settings)
        self._owner = {
            key: torch.tensor(
                [self._slots.index(s) if s is not None else 0 for s in stacks.owners(key)], device=p.device
            )
            for key, p in self.parameters.items()
        }

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, rates: Mapping[int, float]) -> dict[int, float]:
        """Take one step for the slots in `rates` (slot -> learning rate); the others stand still.

        Gives each slot's gradient norm before clipping.
        """
        norms = self._norms()
        table = torch.stack([self._row(slot, rates.get(slot), norms[i]) for i, slot in enumerate(self._slots)])
        for key, p in self.parameters.items():
            if p.grad is not None:
                self._update(key, p, table[self._owner[key]])
        for slot in rates:
            self.steps[slot] += 1
        return {slot: float(norms[self._slots.index(slot)]) for slot in rates}

    def _row(self, slot: int, rate: float | None, norm: Tensor) -> Tensor:
        """Give a slot's numbers of this step: active, clip factor, rate, decay, epsilon, corrections of m and v."""
        s, t = self.settings[slot], self.steps[slot] + 1
        fix = (1 - _FIRST**t, 1 - _SECOND**t) if s.bias_correction else (1.0, 1.0)
        numbers = [float(rate is not None), rate or 0.0, s.weight_decay, s.epsilon, *fix]
        row = torch.tensor(numbers, dtype=torch.float32, device=norm.device)
        clip = (s.clip / norm.clamp(min=1e-12)).clamp(max=1.0) if s.clip else torch.ones_like(norm)
        return torch.cat([row, clip[None]])

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
        """Give the norm of each slot's gradient over all its tensors."""
        some = next(iter(self.parameters.values()))
        total = torch.zeros(len(self._slots), device=some.device)
        for key, p in self.parameters.items():
            if p.grad is not None:
                total.index_add_(0, self._owner[key], p.grad.flatten(1).square().sum(1))
        return total.sqrt()
