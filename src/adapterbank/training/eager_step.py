"""The eager training step: packed rows of any runs, in as many parts as memory requires.

Knows no schedule and no epochs; the training loop chooses the rows. The alternative is a captured graph (`graph_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adapterbank.encoder.batch import PackedBatch, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import forward
from adapterbank.errors import TrainingError
from adapterbank.inference.rows import Rows
from adapterbank.inference.runner import segments
from adapterbank.kinds.table import KINDS
from adapterbank.runtime import total_memory
from adapterbank.slots import heads
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.training.optimizer import StackedAdam
from adapterbank.training.step_input import StepContext, StepInput

MicroBatch = list[tuple[int, np.ndarray]]
"""A micro-batch: indices of inputs, and for each the places of units within its step."""
PassSlots = Sequence[tuple[int, ...]]
"""The slot of each pass of each input."""


class EagerStep:
    """Eager steps of runs whose lowest trained layer is the same."""

    def __init__(self, context: StepContext, *, limit: int) -> None:
        """Create the step; `context` is what the runs share, `limit` the most padded tokens of a part."""
        self._context, self._limit = context, limit
        self._targets: dict[int, tuple[Rows, Tensor]] = {}  # by `id` of the rows, which are stored to keep them alive

    def step(self, stacks: Stacks, adam: StackedAdam, inputs: Sequence[StepInput]) -> Tensor:
        """Compute the gradients in as many parts as memory requires; return the loss of each input."""
        losses: Tensor | None = None
        with ExitStack() as stack:
            slots = [
                stack.enter_context(run.mixture.slots(stacks, run.slot, seed=run.seed, step=run.step)) for run in inputs
            ]
            while losses is None:
                adam.zero_grad()
                try:
                    losses = self._gradients(stacks, adam, inputs, slots)
                except RuntimeError as error:
                    self._need_less(error, inputs)
                if losses is None and torch.cuda.is_available():
                    torch.cuda.empty_cache()  # only here: until then the error keeps the activations alive
        return losses

    def _gradients(self, stacks: Stacks, adam: StackedAdam, inputs: Sequence[StepInput], slots: PassSlots) -> Tensor:
        """Add up the gradients of each input's mean loss over its batch; return the losses."""
        totals = torch.zeros(len(inputs), device=stacks.device)
        leaves = adam.leaves()
        for part in self._parts(inputs):
            losses = self._losses(stacks, inputs, part, slots)
            shares = np.concatenate([inputs[k].weights[units] for k, units in part])
            sizes = [len(units) for _, units in part]
            scaled = (torch.cat(losses) * torch.from_numpy(shares.astype(np.float32)).to(totals.device)).split(sizes)
            each = torch.stack([part_losses.sum() for part_losses in scaled])
            adam.add_gradients(torch.autograd.grad(each.sum(), leaves, allow_unused=True))
            totals[[k for k, _ in part]] += each.detach()
        return totals

    def _losses(self, stacks: Stacks, inputs: Sequence[StepInput], part: MicroBatch, slots: PassSlots) -> list[Tensor]:
        """Run one part; return the loss of each unit, for each input in the part.

        The second pass of a mixture adds how much its outputs differ from those of the first.
        """
        passes = [(k, units, number) for k, units in part for number in range(len(slots[k]))]
        places_of = [inputs[k].places(units) for k, units, _ in passes]
        lengths, rows, keys = [], [], []
        for (k, _, number), places in zip(passes, places_of, strict=True):
            run = inputs[k]
            rows += [run.rows.tokens[run.batch[place]] for place in places]
            lengths += [(slots[k][number], run.length(place)) for place in places]
            keys.append(row_keys(run.seed, run.step, torch.from_numpy(places + number * len(run.batch))))
        batch = pack(rows, stacks.device)
        drop = Dropout(
            torch.cat(keys).to(batch.rows.device),
            batch.rows,
            batch.positions,
            rate=self._context.rates[0],
            attention_rate=self._context.rates[1],
        )
        prefix, first = self._prefix(inputs, [(k, units) for k, units, _ in passes], batch), self._context.first
        with self._context.recomputing.of_a_pass() as recompute:
            route = Route(stacks, segments(lengths), recompute)
            hidden = forward(self._context.config, route, batch, drop, first, prefix)
        losses: list[Tensor] = []
        at, before = 0, None
        by_input = heads.outputs(hidden, batch, route, drop)
        for (k, units, _), places, out in zip(passes, places_of, by_input, strict=True):
            run, span = inputs[k], slice(at, at + len(places))
            at = span.stop
            head, kind = run.plan.head, KINDS[run.plan.head.kind]
            x = pad_sequence(out.split(batch.lengths[span]), batch_first=True) if kind.per_token else out
            if run.rows.pooling:
                owners = torch.from_numpy(np.searchsorted(units, run.owners[places])).to(x.device)
                x = heads.pool_windows(x, owners, len(units), weighs=head.weighs)
            targets = self._on_device(run, stacks.device)[run.units[units]]
            if before is None:
                losses.append(kind.loss(x, targets, head, batch.counts[span]))
            else:
                losses[-1] = losses[-1] + kind.consistency(before, x, targets, head, batch.counts[span])
            before = x if before is None and len(slots[k]) > 1 else None
        return losses

    def _on_device(self, run: StepInput, device: torch.device) -> Tensor:
        """Return the targets of all rows of a run; the first call copies them to the device."""
        if id(run.rows) not in self._targets:
            head = run.plan.head
            targets = KINDS[head.kind].targets(run.rows.targets or [], head).to(device)
            self._targets[id(run.rows)] = run.rows, targets
        return self._targets[id(run.rows)][1]

    def _prefix(self, inputs: Sequence[StepInput], part: MicroBatch, batch: PackedBatch) -> Tensor | None:
        """Return the outputs of the frozen lower layers for a part, None if there are none."""
        first, prefixes = self._context.first, self._context.prefixes
        if not first:
            return None
        if len({id(inputs[k].rows) for k, _ in part}) == 1:
            rows = [int(row) for k, units in part for row in inputs[k].batch[inputs[k].places(units)]]
            return prefixes.get(inputs[part[0][0]].rows.tokens, first).rows(rows, batch)
        outputs = []
        for k, units in part:
            tokens = inputs[k].rows.tokens
            rows = [int(row) for row in inputs[k].batch[inputs[k].places(units)]]
            run_batch = pack([tokens[row] for row in rows], batch.ids.device)
            outputs.append(prefixes.get(tokens, first).rows(rows, run_batch))
        return torch.cat(outputs)

    def _parts(self, inputs: Sequence[StepInput]) -> Iterator[MicroBatch]:
        """Split the step's units into parts of at most `limit` padded tokens; the rows of a unit stay together."""
        part: list[tuple[int, list[int]]] = []
        count = longest = 0
        for k, run in enumerate(inputs):
            for unit, (start, stop) in enumerate(pairwise(run.starts.tolist())):
                rows, length = (stop - start) * run.mixture.passes, max(map(run.length, range(start, stop)))
                full = part and (count + rows) * max(longest, length) > self._limit
                last = part[-1][0] if part else k
                if full or (last != k and (run.plan.alone or inputs[last].plan.alone)):
                    yield [(j, np.array(units)) for j, units in part]
                    part, count, longest = [], 0, 0
                if not part or part[-1][0] != k:
                    part.append((k, []))
                part[-1][1].append(unit)
                count, longest = count + rows, max(longest, length)
        if part:
            yield [(j, np.array(units)) for j, units in part]

    def _need_less(self, error: RuntimeError, inputs: Sequence[StepInput]) -> None:
        """After running out of memory, compute outputs again, then halve the parts; raise any other error.

        The error is raised, too, if one row is too large.
        """
        signs = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
        if not (isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)):
            raise error
        if self._context.recomputing.start():
            return
        longest, windows = max(run.longest for run in inputs), max(int(np.diff(run.starts).max()) for run in inputs)
        largest = longest * sum(len(run.batch) * run.mixture.passes for run in inputs)
        smallest = longest * windows * max(run.mixture.passes for run in inputs)
        if min(self._limit, largest) <= smallest:
            what = f"one row of {longest} tokens fits" if windows == 1 else f"the {windows} windows of one text fit"
            also = "" if windows == 1 else " or --max-windows"
            raise TrainingError(
                f"Not even {what} into memory; lower --max-length{also} or use a smaller backbone."
            ) from error
        self._limit = max(smallest, min(self._limit, largest) // 2)


def token_limit(config: EncoderConfig, device: torch.device) -> int:
    """Estimate the number of padded tokens whose activations fit into half of the memory, as a power of two.

    A layer keeps about 12 vectors of the hidden width and 3 of the feed-forward width for the backward pass, and the
    attention weights of a row. A step that still runs out of memory is split further.
    """
    attention = 4 * config.heads * min(config.max_length, 512)
    numbers = config.layers * (12 * config.hidden + 3 * config.feedforward + attention)
    fits = total_memory(device) // 2 // (4 * numbers)
    return max(config.max_length, 1 << max(0, fits.bit_length() - 1))
