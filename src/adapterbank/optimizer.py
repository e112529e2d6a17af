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


@dataclass(frozen=True)
class _Group:
    """Stacks whose entries belong to the same slots, and which are updated together."""

    owner: Tensor  # [n] the slot of each entry, by its place in the settings
    dimensions: int
    decays: bool
    keys: list[Key]


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
        self._groups: list[_Group] = []
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
        groups: dict[tuple[tuple[int, ...], int, bool], list[Key]] = {}
        for key, p in self.parameters.items():
            for moments in (self.first, self.second):
                old = moments.get(key)
                if old is None or len(old) != len(p):
                    moments[key] = torch.zeros_like(p, requires_grad=False)
                    if old is not None:
                        moments[key][: len(old)] = old
            owners = [slots.index(s) if s in self.settings else len(slots) for s in self._stacks.owners(key)]
            groups.setdefault((tuple(owners), p.dim(), decays(key[0])), []).append(key)
        self._groups = [
            _Group(torch.tensor(owners, device=self._stacks.device), dimensions, decaying, keys)
            for (owners, dimensions, decaying), keys in groups.items()
        ]

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
        for group in self._groups:
            self._update(group, table)
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

    def _update(self, group: _Group, table: Tensor) -> None:
        """Update the tensors of a group all at once: `[n, ...]` each, with the numbers of each entry's slot."""
        columns = table[group.owner].view(len(group.owner), -1, *[1] * (group.dimensions - 1)).unbind(1)
        graded = {key: grad for key in group.keys if (grad := self.parameters[key].grad) is not None}
        if not (keys := list(graded)):
            return  # its slots have left, and no other has taken their place
        active, rate, decay, epsilon, fix_first, fix_second, clip = ([column] * len(keys) for column in columns)
        p, m, v = ([held[key] for key in keys] for held in (self.parameters, self.first, self.second))
        g = torch._foreach_mul(list(graded.values()), clip)
        self._approach(m, g, [(1 - _FIRST) * one for one in active])
        self._approach(v, torch._foreach_mul(g, g), [(1 - _SECOND) * one for one in active])
        below = torch._foreach_div(v, fix_second)
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, epsilon)
        torch._foreach_clamp_min_(below, 1e-30)  # where epsilon is 0 the padding's zero moments must not become 0 / 0
        change = torch._foreach_div(m, fix_first)
        torch._foreach_div_(change, below)
        if group.decays:
            torch._foreach_add_(change, torch._foreach_mul(p, decay))
        torch._foreach_mul_(change, rate)
        torch._foreach_sub_(p, change)

    @staticmethod
    def _approach(moments: list[Tensor], targets: tuple[Tensor, ...], shares: list[Tensor]) -> None:
        """Move moments towards targets by a share of the way."""
        way = torch._foreach_sub(targets, moments)
        torch._foreach_mul_(way, shares)
        torch._foreach_add_(moments, way)

    def _norms(self) -> Tensor:
        """Give the norm of each slot's gradient over all its tensors, and nobody's at the end."""
        total = torch.zeros(len(self.settings) + 1, device=self._stacks.device)
        for group in self._groups:
            grads = [self.parameters[key].grad for key in group.keys]
            found = [torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads if grad is not None]
            if found:
                total.index_add_(0, group.owner, torch.stack(found).square().sum(0))
        return total.sqrt()
