"""A training step as a captured graph: runs of one form, with the same number of rows each, in a fixed kernel sequence.

Knows no schedule and no epochs; the training loop chooses the rows. A step copies only row numbers, seeds and the
optimiser's table to the device: the data is there already, dropout follows from the seeds, and losses are read later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import TokenStore, padded_length
from adapterbank.encoder.dropout import Dropout, mix, step_keys
from adapterbank.encoder.forward import LayerFns, compiled_layer_fns, forward, fused_attention
from adapterbank.encoder.kernels import Kernels, find_kernels
from adapterbank.encoder.kernels.launch import compiling
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.encoder.prefix_cache import Prefix
from adapterbank.encoder.recompute import Recompute
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import Rows
from adapterbank.kinds.table import KINDS
from adapterbank.runtime import total_memory
from adapterbank.slots import heads
from adapterbank.slots.in_place import TableColumns, Widths
from adapterbank.slots.plan import Head, Plan
from adapterbank.slots.stack import Stacks
from adapterbank.slots.static_routing import StaticRoute, without_places
from adapterbank.slots.trained_route import Trained, TrainedRoute
from adapterbank.training.optimizer import FIRST, SECOND, StackedAdam, UpdateFn, update_rows
from adapterbank.training.step_input import StepContext, StepInput

USES_WORTH_A_GRAPH = 3
"""Steps of one shape after which it is captured, which takes about as long as three of them."""


@dataclass(frozen=True)
class DeviceRows:
    """All rows of some runs on the device; rows that several runs share are stored once."""

    tokens: TokenStore
    targets: Tensor
    first: Mapping[int, tuple[int, int]]
    """Index of the first row and of the first unit of each set of rows, by `id`."""
    pooling: str
    """How the outputs of a unit's windows become one, the same for all sets."""
    most_windows: int

    @classmethod
    def of(cls, sets: Sequence[Rows], head: Head, device: torch.device) -> DeviceRows:
        """Copy sets of rows, with their targets for one head, to the device."""
        once = {id(rows): rows for rows in sets}
        tokens = [row for rows in once.values() for row in rows.tokens]
        targets = KINDS[head.kind].targets([target for rows in once.values() for target in rows.targets or []], head)
        starts = np.cumsum([(0, 0), *((len(rows), rows.units) for rows in once.values())], axis=0)
        first = dict(zip(once, ((int(row), int(unit)) for row, unit in starts), strict=False))
        most = max(rows.most_windows if rows.pooling else 1 for rows in sets)
        return cls(TokenStore.of(tokens, device), targets.to(device), first, sets[0].pooling, most)


@dataclass(frozen=True)
class _InPlace:
    """What steps need that run through our own kernels."""

    kernels: Kernels
    columns: TableColumns
    widths: Widths
    table: Tensor
    """Where the tensors of each place are; blocks do not move while runs train."""
    trained: Trained

    def update(self, *rows: Tensor) -> None:
        """See `optimizer.update_rows`."""
        self.kernels.update(*rows, first=FIRST, second=SECOND)


class GraphStep:
    """The steps of several runs at once, `batch` units each, as programs: one for each length rows are filled up to.

    Where windows are pooled, also one for each number of rows, a multiple of `batch`. What the kernels cover runs
    through them, and is captured when a shape recurs; nothing else is compiled. The rest runs through torch's compiler.
    """

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
        numbers = self.places * (batch * (1 + 2 * data.most_windows) + 2)
        self._whole = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._real = torch.zeros(self.places * batch + (self.places + 1) * 7, device=device)
        self._losses = torch.zeros(self.places, device=device)
        self._layer_fns: LayerFns | None = None
        self._fused = fused_attention(context.config, device)
        self._uses: Counter[Hashable] = Counter()
        self._steps: dict[Hashable, Callable[[], None]] = {}
        self._traced: set[Hashable] = set()
        self._in_place = self._make_in_place()
        self._update: UpdateFn = self._in_place.update if self._in_place else self._compile()

    def _make_in_place(self) -> _InPlace | None:
        """Return what our own kernels need; None if they do not cover these runs."""
        kernels = find_kernels(self._stacks.device)
        slots = [self._stacks.slot(number) for number in self._stacks.numbers]
        if not kernels or slots[0].alone:
            return None
        columns = TableColumns(self._stacks, slots[0])
        table = np.zeros((self.places, len(columns)), np.int64)
        for slot in slots:
            table[slot.rows[0][1]] = columns.line(slot)
        device = self._stacks.device
        anchor = torch.zeros(1, device=device, requires_grad=True)
        trained = Trained(self._own, self._adam.gradient_views(), anchor)
        return _InPlace(kernels, columns, Widths.of(slots), torch.from_numpy(table).to(device), trained)

    def _compile(self) -> UpdateFn:
        # Without the kernel, attention's softmax and its dropout are compiled too.
        compiled = self._programs.compiled
        self._layer_fns = compiled_layer_fns(partial(compiled, looped_reductions=self._fused is None))
        return compiled(update_rows, lambda *rows: [(row, i) for row in rows[:4] for i in (0, 1)] + [(rows[4], 0)])

    @property
    def in_place(self) -> bool:
        """Whether steps run through our own kernels."""
        return self._in_place is not None

    def ready(self, inputs: Sequence[StepInput], table: np.ndarray, *, wait: bool = False) -> bool:
        """Return whether the kernels of such a step are compiled; if not, threads compile them, and `wait` waits.

        A shape that is new runs once without its kernels, which says what has to be compiled.
        """
        shape, kernels = self._shape(inputs), self._programs.kernels
        if self.in_place and self._form(shape) not in self._traced:
            self._fill(inputs, shape, _still(table))
            with compiling(kernels):
                self._body(*shape)
            self._traced.add(self._form(shape))
        if wait:
            kernels.wait()
        return kernels.done

    def step(self, inputs: Sequence[StepInput], table: np.ndarray) -> Tensor:
        """Take one step for some runs; return the loss of each place, on the device."""
        shape = self._shape(inputs)
        if not self.in_place and self._form(shape) not in self._steps:
            self._fill(inputs, shape, _still(table))
            self._steps[self._form(shape)] = self._programs.capture(lambda: self._body(*shape))
        self._fill(inputs, shape, table)
        self._program(shape)()
        return self._losses.clone()

    def _shape(self, inputs: Sequence[StepInput]) -> tuple[int, int]:
        """Return the length that the rows of a step are filled up to, and the number of rows of a place."""
        longest = padded_length(max(run.longest for run in inputs), self._context.config.max_length)
        return longest, self._batch * -(-max(len(run.batch) for run in inputs) // self._batch)

    def _form(self, shape: tuple[int, int]) -> Hashable:
        """Return what a program is made for: a shape, and whether it computes outputs again."""
        return *shape, self._context.recomputing.on

    def _fill(self, inputs: Sequence[StepInput], shape: tuple[int, int], table: np.ndarray) -> None:
        """Send what a step reads to the device."""
        numbers, weights = self._numbers(inputs, shape[1])
        self._send(self._whole[: len(numbers)], numbers)
        self._send(self._real, np.concatenate([weights, table.ravel()]))

    def _program(self, shape: tuple[int, int]) -> Callable[[], None]:
        """Return what runs a step: its kernels one by one, or their graph where the shape recurs."""
        form = self._form(shape)
        self._uses[form] += 1
        if form not in self._steps:
            if self._uses[form] <= USES_WORTH_A_GRAPH:
                return partial(self._body, *shape)
            self._steps[form] = self._programs.capture(partial(self._body, *shape), warm=False)
        return self._steps[form]

    def _numbers(self, inputs: Sequence[StepInput], width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row numbers, units, owners and clocks of a step of `width` rows a place, and the units' weights.

        Places without a row repeat one that fits into this step's length; those without a unit have weight 0.
        """
        first_row, first_unit = self._data.first[id(inputs[0].rows)]
        rows = np.full((self.places, width), inputs[0].batch[0] + first_row)
        units = np.full((self.places, self._batch), inputs[0].units[0] + first_unit)
        owners = np.full((self.places, width), self._batch)  # no unit
        weights, clocks = np.zeros((self.places, self._batch), np.float32), np.zeros((self.places, 2), np.int64)
        for run in inputs:
            place, (first_row, first_unit) = self.place(run.slot), self._data.first[id(run.rows)]
            rows[place, : len(run.batch)] = run.batch + first_row
            units[place, : len(run.units)] = run.units + first_unit
            owners[place, : len(run.batch)] = run.owners
            weights[place, : len(run.units)] = run.weights
            clocks[place] = run.seed & 0x7FFFFFFF, run.step & 0x7FFFFFFF
        return np.concatenate([one.ravel() for one in (clocks, units, rows, owners)]), weights.ravel()

    def place(self, slot: int) -> int:
        """Return a slot's row in the blocks, which is also the index of its loss."""
        return self._stacks.slot(slot).rows[0][1]

    @staticmethod
    def _send(into: Tensor, numbers: np.ndarray) -> None:
        host = torch.from_numpy(numbers.astype(np.float32) if into.is_floating_point() else numbers)
        into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)

    def _route(self, width: int, recompute: Recompute | None) -> TrainedRoute | StaticRoute:
        own = self._in_place
        if not own:
            return StaticRoute(self._stacks.frozen, self._own, self._plan)
        rows = torch.arange(self.places, device=own.table.device).repeat_interleave(width)
        form = own.columns, own.kernels, own.widths
        return TrainedRoute(self._stacks.frozen, *form, own.table, rows, own.trained, recompute)

    def _recomputed(self) -> AbstractContextManager[Recompute | None]:
        """Yield what remembers the outputs of layers, if they are not kept; torch's compiler decides for itself."""
        return self._context.recomputing.of_a_pass() if self._in_place else nullcontext()

    def _body(self, longest: int, width: int) -> None:
        """Run one step on the tensors that `step` has filled."""
        places, count, rates = self.places, self.places * self._batch, self._context.rates
        sizes = (2 * places, count, places * width, places * width)
        clocks, units, rows, owners = self._whole[: sum(sizes)].split(sizes)
        weights, table = self._real[:count], self._real[count:].view(places + 1, 7)
        batch, where = self._data.tokens.batch(rows, longest, self._fused)
        faster = self._in_place.kernels if self._in_place else None
        hashed = faster.mix if faster else mix
        keys = step_keys(clocks.view(places, 2), torch.arange(width, device=rows.device), hashed)
        drop = Dropout(keys, batch.rows, batch.positions, rate=rates[0], attention_rate=rates[1], faster=faster)
        prefix = None
        if self._prefix is not None and self._prefix.store is not None:
            prefix = self._prefix.store[where]
        with self._recomputed() as recompute:
            route = self._route(width, recompute)
            hidden = forward(self._context.config, route, batch, drop, self._context.first, prefix, self._layer_fns)
        head = self._plan.head
        x = heads.reads(hidden, batch, head, route.linear, drop)
        x = heads.apply(x.view(places, -1, x.shape[-1]).squeeze(0), head, without_places(self._own))
        if self._data.pooling:
            x = heads.pool_windows(
                x.view(places, width, -1), owners.view(places, width), self._batch, weighs=head.weighs
            )
        kind = KINDS[head.kind]
        x = x.view(count, longest, -1) if kind.per_token else x.reshape(count, -1)
        losses = kind.loss(x, self._data.targets[units], head, batch.counts)
        by_place = torch.where(weights > 0, losses * weights, 0.0).view(places, -1).sum(1)
        self._adam.zero_grad()
        anchor = [self._in_place.trained.anchor] if self._in_place else []
        gradients = torch.autograd.grad(by_place.sum(), [*self._leaves, *anchor], allow_unused=True)
        self._adam.add_gradients(gradients[: len(self._leaves)])
        self._adam.apply(table, self._update)
        self._losses.copy_(by_place.detach())


def _still(table: np.ndarray) -> np.ndarray:
    """Return the optimiser's table for a step that changes no weight, as before a capture."""
    still = table.copy()
    still[:, 0] = still[:, 1] = 0.0
    return still


def captured_limit(encoder: PlacedEncoder, plan: Plan) -> int:
    """Estimate the number of padded tokens of a captured step whose outputs fit into half of the memory.

    A layer keeps about 12 vectors of the hidden width, and 3 of the feed-forward width unless these may be computed
    again; 0 where no kernel spares it the attention weights (`eager_step.token_limit`).
    """
    config = encoder.config
    if not fused_attention(config, encoder.device):
        return 0
    keeps = plan.alone or encoder.recompute == "never"
    kept = 12 * config.hidden + (3 * config.feedforward if keeps else 0)
    return total_memory(encoder.device) // 2 // (config.layers * kept * encoder.dtype.itemsize)
