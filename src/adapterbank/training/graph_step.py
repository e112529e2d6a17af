"""A training step as a captured graph: runs of one form, with the same number of rows each, in a fixed kernel sequence.

Knows no schedule and no epochs; the training loop chooses the rows. A step copies only row numbers, seeds and the
optimiser's table to the device: the data is there already, dropout follows from the seeds, and losses are read later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import TokenStore, padded_length
from adapterbank.encoder.dropout import Dropout, step_keys
from adapterbank.encoder.forward import compiled_layer_fns, forward, fused_attention
from adapterbank.encoder.prefix_cache import Prefix
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import Rows
from adapterbank.kinds.table import KINDS
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, Plan
from adapterbank.slots.stack import Stacks
from adapterbank.slots.static_routing import StaticRoute
from adapterbank.training.optimizer import StackedAdam
from adapterbank.training.step_input import StepContext, StepInput


@dataclass(frozen=True)
class DeviceRows:
    """All rows of some runs on the device; rows that several runs share are stored once."""

    tokens: TokenStore
    targets: Tensor
    first: Mapping[int, int]
    """Index of the first row of each set of rows, by `id`."""

    @classmethod
    def of(cls, sets: Sequence[Rows], head: Head, device: torch.device) -> DeviceRows:
        """Copy sets of rows, with their targets for one head, to the device."""
        once = {id(rows): rows for rows in sets}
        tokens = [row for rows in once.values() for row in rows.tokens]
        targets = KINDS[head.kind].targets([target for rows in once.values() for target in rows.targets or []], head)
        starts = np.cumsum([0, *(len(rows) for rows in once.values())])
        first = dict(zip(once, (int(start) for start in starts), strict=False))
        return cls(TokenStore.of(tokens, device), targets.to(device), first)


class GraphStep:
    """The steps of several runs at once, `batch` rows each, as programs: one for each length rows are filled up to."""

    def __init__(
        self,
        context: StepContext,
        stacks: Stacks,
        adam: StackedAdam,
        data: DeviceRows,
        plan: Plan,
        *,
        batch: int,
        programs: GraphCompiler,
        prefix: Prefix | None = None,
    ) -> None:
        """Take stacks whose blocks hold one row a run, in the same order, and the optimiser that updates them."""
        self._context, self._stacks, self._adam, self._data, self._plan = context, stacks, adam, data, plan
        self._batch, self._prefix, self._programs = batch, prefix, programs
        self._own = {name: view for block in stacks.blocks for name, view in block.views.items()}
        self._leaves = adam.leaves()
        self.places = max(len(block.owners) for block in stacks.blocks)
        device = stacks.device
        self._whole = torch.zeros(self.places * (batch + 2), dtype=torch.int64, device=device)
        self._real = torch.zeros(self.places * batch + (self.places + 1) * 7, device=device)
        self._losses = torch.zeros(self.places, device=device)
        self._fused = fused_attention(context.config, device)
        # Without the kernel, attention's softmax and its dropout are compiled too.
        self._layer_fns = compiled_layer_fns(partial(programs.compiled, looped_reductions=self._fused is None))
        self._steps: dict[int, Callable[[], None]] = {}
        adam.update = programs.compiled(
            adam.update, lambda *rows: [(row, i) for row in rows[:4] for i in (0, 1)] + [(rows[4], 0)]
        )

    def step(self, inputs: Sequence[StepInput], table: np.ndarray) -> Tensor:
        """Take one step for some runs; return the loss of each place, on the device."""
        longest = padded_length(max(run.longest for run in inputs), self._context.config.max_length)
        count = self.places * self._batch
        # Places without a run repeat a row that fits into this step's length, with weight 0.
        rows = np.full(count, inputs[0].batch[0] + self._data.first[id(inputs[0].rows)])
        weights, clocks = np.zeros(count, np.float32), np.zeros((self.places, 2), np.int64)
        for run in inputs:
            place = self.place(run.slot)
            own = slice(place * self._batch, place * self._batch + len(run.batch))
            rows[own], weights[own] = run.batch + self._data.first[id(run.rows)], run.weights
            clocks[place] = run.seed & 0x7FFFFFFF, run.step & 0x7FFFFFFF
        self._send(self._whole, np.concatenate([rows, clocks.ravel()]))
        if longest not in self._steps:
            still = table.copy()
            still[:, 0] = still[:, 1] = 0.0  # no weight changes during warm-up and capture
            self._send(self._real, np.concatenate([weights, still.ravel()]))
            self._steps[longest] = self._programs.capture(lambda: self._body(longest))
        self._send(self._real, np.concatenate([weights, table.ravel()]))
        self._steps[longest]()
        return self._losses.clone()

    def place(self, slot: int) -> int:
        """Return a slot's row in the blocks, which is also the index of its loss."""
        return self._stacks.slot(slot).rows[0][1]

    @staticmethod
    def _send(into: Tensor, numbers: np.ndarray) -> None:
        host = torch.from_numpy(numbers.astype(np.float32) if into.is_floating_point() else numbers)
        into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)

    def _body(self, longest: int) -> None:
        """Run one step on the tensors that `step` has filled."""
        count, rates = self.places * self._batch, self._context.rates
        rows, clocks = self._whole[:count], self._whole[count:].view(self.places, 2)
        weights, table = self._real[:count], self._real[count:].view(self.places + 1, 7)
        batch, where = self._data.tokens.batch(rows, longest, self._fused)
        keys = step_keys(clocks, torch.arange(self._batch, device=rows.device))
        drop = Dropout(keys, batch.rows, batch.positions, rate=rates[0], attention_rate=rates[1])
        prefix = None
        if self._prefix is not None and self._prefix.store is not None:
            prefix = self._prefix.store[where]
        route = StaticRoute(self._stacks.frozen, self._own, self._plan)
        hidden = forward(self._context.config, route, batch, drop, self._context.first, prefix, self._layer_fns)
        head = self._plan.head
        x = heads.reads(hidden, batch, head, route.linear, drop)
        x = heads.apply(x.view(self.places, -1, x.shape[-1]).squeeze(0), head, route.own)
        kind = KINDS[head.kind]
        x = x.view(count, longest, -1) if kind.per_token else x.view(count, -1)
        losses = kind.loss(x, self._data.targets[rows], head, batch.counts)
        by_place = torch.where(weights > 0, losses * weights, 0.0).view(self.places, -1).sum(1)
        self._adam.zero_grad()
        self._adam.add_gradients(torch.autograd.grad(by_place.sum(), self._leaves, allow_unused=True))
        self._adam.apply(table)
        self._losses.copy_(by_place.detach())
