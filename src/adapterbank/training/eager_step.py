"""A training step operation by operation: packed rows of any runs, in as many parts as memory asks for.

Knows no schedule and no epochs; `train` says which rows. The other way to take a step is a program (`steady`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adapterbank.encoder.batch import PackedBatch, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import forward
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.errors import TrainingError
from adapterbank.inference.rows import Rows
from adapterbank.inference.runner import segments
from adapterbank.kinds.table import KINDS
from adapterbank.methods import Plan
from adapterbank.runtime import total_memory
from adapterbank.slots import heads
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.training.optimizer import StackedAdam

Part = list[tuple[int, np.ndarray]]
"""A micro-batch: numbers of works, and places within the batch of each."""


@dataclass(frozen=True)
class Work:
    """What one run does in a step."""

    slot: int
    plan: Plan
    rows: Rows
    """All that it trains on."""
    batch: np.ndarray
    """Row numbers of this step."""
    weights: np.ndarray
    """Weight of each row's loss; they sum to 1."""
    targets: Tensor
    """Of all rows, on the device."""
    seed: int
    step: int

    def length(self, place: int) -> int:
        """Give the tokens of a row of the batch."""
        return len(self.rows.tokens[self.batch[place]])


class EagerStep:
    """The steps of runs that start at one layer."""

    def __init__(
        self, config: EncoderConfig, prefixes: PrefixCache, *, first: int, rates: tuple[float, float], limit: int
    ) -> None:
        """Take the encoder's anatomy and frozen lower layers; `limit` is how many padded tokens a part may have."""
        self._config, self._prefixes, self._first, self._rates = config, prefixes, first, rates
        self._limit = limit

    def step(self, stacks: Stacks, adam: StackedAdam, works: Sequence[Work]) -> Tensor:
        """Compute the gradients in as many parts as memory asks for; give each work's loss."""
        losses: Tensor | None = None
        while losses is None:
            adam.zero_grad()
            try:
                losses = self._gradients(stacks, adam, works)
            except RuntimeError as error:
                self._halve(error, works)
            if losses is None and torch.cuda.is_available():
                torch.cuda.empty_cache()  # only here: while the error lives it holds on to the activations
        return losses

    def _gradients(self, stacks: Stacks, adam: StackedAdam, works: Sequence[Work]) -> Tensor:
        """Add up the gradients of each work's mean loss over its batch; give the losses."""
        totals = torch.zeros(len(works), device=stacks.device)
        leaves = adam.leaves()
        for part in self._parts(works):
            losses = self._losses(stacks, works, part)
            shares = np.concatenate([works[k].weights[places] for k, places in part])
            sizes = [len(places) for _, places in part]
            scaled = (torch.cat(losses) * torch.from_numpy(shares.astype(np.float32)).to(totals.device)).split(sizes)
            each = torch.stack([mine.sum() for mine in scaled])
            adam.add_gradients(torch.autograd.grad(each.sum(), leaves, allow_unused=True))
            totals[[k for k, _ in part]] += each.detach()
        return totals

    def _losses(self, stacks: Stacks, works: Sequence[Work], part: Part) -> list[Tensor]:
        """Run one part: for each work in it, the loss of each of its rows."""
        rows = [(works[k], place) for k, places in part for place in places]
        batch = pack([work.rows.tokens[work.batch[place]] for work, place in rows], stacks.device)
        route = Route(stacks, segments([(work.slot, work.length(place)) for work, place in rows]))
        keys = [row_keys(works[k].seed, works[k].step, torch.from_numpy(places)) for k, places in part]
        drop = Dropout(
            torch.cat(keys).to(batch.rows.device),
            batch.rows,
            batch.positions,
            rate=self._rates[0],
            attention_rate=self._rates[1],
        )
        hidden = forward(self._config, route, batch, drop, self._first, self._prefix(works, part, batch))
        found, at = [], 0
        for (k, places), out in zip(part, heads.outputs(hidden, batch, route, drop), strict=True):
            work, mine = works[k], slice(at, at + len(places))
            at = mine.stop
            head, kind = work.plan.head, KINDS[work.plan.head.kind]
            x = pad_sequence(out.split(batch.lengths[mine]), batch_first=True) if kind.per_token else out
            found.append(kind.loss(x, work.targets[work.batch[places]], head, batch.counts[mine]))
        return found

    def _prefix(self, works: Sequence[Work], part: Part, batch: PackedBatch) -> Tensor | None:
        """Look up what the frozen lower layers give for a part."""
        if not self._first:
            return None
        if len({id(works[k].rows) for k, _ in part}) == 1:
            rows = [int(row) for k, places in part for row in works[k].batch[places]]
            return self._prefixes.get(works[part[0][0]].rows.tokens, self._first).rows(rows, batch)
        found = []
        for k, places in part:
            tokens = works[k].rows.tokens
            rows = [int(row) for row in works[k].batch[places]]
            mine = pack([tokens[row] for row in rows], batch.ids.device)
            found.append(self._prefixes.get(tokens, self._first).rows(rows, mine))
        return torch.cat(found)

    def _parts(self, works: Sequence[Work]) -> Iterator[Part]:
        """Cut the step's rows into parts of at most `limit` padded tokens."""
        part: list[tuple[int, list[int]]] = []
        count = longest = 0
        for k, work in enumerate(works):
            for place in range(len(work.batch)):
                length = work.length(place)
                full = part and (count + 1) * max(longest, length) > self._limit
                last = part[-1][0] if part else k
                if full or (last != k and (work.plan.alone or works[last].plan.alone)):
                    yield [(j, np.array(places)) for j, places in part]
                    part, count, longest = [], 0, 0
                if not part or part[-1][0] != k:
                    part.append((k, []))
                part[-1][1].append(place)
                count, longest = count + 1, max(longest, length)
        if part:
            yield [(j, np.array(places)) for j, places in part]

    def _halve(self, error: RuntimeError, works: Sequence[Work]) -> None:
        """Make parts smaller after running out of memory; raise what is another error, or past help."""
        signs = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
        if not (isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)):
            raise error
        longest = max(work.length(place) for work in works for place in range(len(work.batch)))
        largest = longest * sum(len(work.batch) for work in works)
        if min(self._limit, largest) <= longest:
            raise TrainingError(
                f"Not even one row of {longest} tokens fits into memory. Lower --max-length or use a smaller backbone."
            ) from error
        self._limit = max(longest, min(self._limit, largest) // 2)


def token_limit(config: EncoderConfig, device: torch.device) -> int:
    """Estimate how many padded tokens' activations fit into half of the memory, as a power of two.

    A layer keeps about 12 vectors of the hidden width and 3 of the feed-forward width for the backward pass, and the
    attention weights of a row. A step that runs out of memory all the same is cut further.
    """
    attention = 4 * config.heads * min(config.max_length, 512)
    numbers = config.layers * (12 * config.hidden + 3 * config.feedforward + attention)
    fits = total_memory(device) // 2 // (4 * numbers)
    return max(config.max_length, 1 << max(0, fits.bit_length() - 1))
