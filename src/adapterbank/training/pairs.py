"""Contrastive training of one slot: rows of one class move together, rows of different classes apart. Knows no files.

A step takes rows of a few classes, and every two of them are a pair; so the cost grows with rows, not with their
square. If a batch holds all classes, the loss of a pair is (1 - cos)² for rows of one class and cos² for others, each
half of the mean, as in SetFit (Tunstall et al. 2022), whose pairs are drawn one by one. With more classes there is no
need to make them all orthogonal: a row must only be nearer to its own class than to the others of the batch, which is
the supervised contrastive loss of Khosla et al. (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import forward
from adapterbank.encoder.placed import PlacedEncoder
from adapterbank.errors import TrainingError
from adapterbank.inference.rows import Rows
from adapterbank.inference.runner import segments, tokens_at_once
from adapterbank.slots import heads
from adapterbank.slots.plan import Plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.training.bases import Base, Members
from adapterbank.training.eager_step import token_limit
from adapterbank.training.optimizer import AdamSettings, Schedule, StackedAdam
from adapterbank.training.step_input import dropout_rates

_OF_A_CLASS = 4
"""Rows of one class in a batch of many classes."""
_FEWEST, _MOST = 30, 120
"""Steps for the smallest data sets, and for larger ones up to where three passes take more."""
_STEPS_PER_ROW = 0.8
_PASSES = 3
_TEMPERATURE = 0.1
"""Of the contrastive loss: cosines are divided by it."""


def count_steps(rows: int, batch: int) -> int:
    """Return how many steps a data set of so many rows takes.

    The steps were chosen by dev experiments with 4 to 32 rows a class: see docs/methods.md.
    """
    return max(_FEWEST, min(_MOST, round(_STEPS_PER_ROW * rows)), -(-_PASSES * rows // batch))


class SlotEncoder:
    """One slot of an encoder that gives a vector, the pooled hidden states, for each row."""

    def __init__(
        self,
        encoder: PlacedEncoder,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        settings: AdamSettings,
        dropout: float | None = None,
        base: Base | Members | None = None,
    ) -> None:
        """Place a slot's tensors and their optimiser on its base; `dropout` is by default the encoder's own."""
        self.encoder, self.plan = encoder, plan
        self.stacks = Stacks(encoder.tensors)
        self.slot = self.stacks.put(plan, tensors, *(base.put(self.stacks, {}) if base else ()))
        self.adam = StackedAdam(self.stacks, compute=encoder.dtype)
        self.adam.admit(self.slot, settings)
        self._rates = dropout_rates(encoder.config, dropout)

    def vectors(self, tokens: Sequence[Tokens]) -> np.ndarray:
        """Return the vectors of all rows, `[rows, width]`, each of length 1."""
        found = np.zeros((len(tokens), self.encoder.config.hidden), np.float32)
        with torch.inference_mode():
            for chosen in by_length(tokens, tokens_at_once(self.stacks.device)):
                pooled = F.normalize(self.pooled([tokens[i] for i in chosen]), dim=1)
                found[chosen] = pooled.cpu().numpy()
        return found

    def pooled(self, tokens: Sequence[Tokens], keys: Tensor | None = None) -> Tensor:
        """Return the pooled vectors of some rows, with dropout where `keys` are given."""
        batch = pack(tokens, self.stacks.device)
        route = Route(self.stacks, segments([(self.slot, len(row)) for row in tokens]))
        drop = None
        if keys is not None:
            hidden_rate, attention_rate = self._rates
            drop = Dropout(
                keys.to(batch.rows.device),
                batch.rows,
                batch.positions,
                rate=hidden_rate,
                attention_rate=attention_rate,
            )
        hidden = forward(self.encoder.config, route, batch, drop)
        return heads.reads(hidden, batch, self.plan.head, route.rows().linear).float()


def train_pairs(
    slot: SlotEncoder,
    rows: Rows,
    *,
    rate: float,
    batch: int,
    warmup: float,
    seed: int,
    watch: Callable[[int, int, float], None],
) -> int:
    """Train a slot on pairs of rows; return the number of steps. `watch` gets steps done, all steps, the loss.

    Windows of one text are no pair.
    """
    tokens, sizes = rows.tokens, np.diff(rows.starts)
    texts, targets = np.repeat(np.arange(rows.units), sizes), np.repeat(np.asarray(rows.targets), sizes)
    steps, classes = count_steps(rows.units, batch), targets.tolist()
    loss_of = pair_loss if len(set(classes)) <= _together(batch) else contrastive_loss
    schedule, limit = Schedule(rate, steps, warmup), token_limit(slot.encoder.config, slot.stacks.device)
    for step, chosen in zip(range(steps), batches(classes, batch, seed), strict=False):
        slot.adam.zero_grad()
        keys = row_keys(seed, step, torch.arange(len(chosen)))
        mine = [tokens[row] for row in chosen]
        loss = _gradients(slot, mine, keys, texts[chosen], targets[chosen], limit, loss_of)
        if not np.isfinite(loss):
            raise TrainingError(
                f"At step {step + 1} the loss became {loss}. The learning rate {rate:g} is probably too high: "
                f"try --lr {rate / 10:g}. Nothing was written to the bank."
            )
        slot.adam.step({slot.slot: schedule.at(step)})
        watch(step + 1, steps, loss)
    return steps


def _gradients(
    slot: SlotEncoder,
    tokens: Sequence[Tokens],
    keys: Tensor,
    rows: np.ndarray,
    classes: np.ndarray,
    limit: int,
    loss_of: Callable[[Tensor, np.ndarray, np.ndarray], Tensor],
) -> float:
    """Add the gradients of a batch's pairs, in parts of at most `limit` padded tokens; return the loss.

    With several parts the vectors come first, then the loss, then each part again with its share of the gradient:
    dropout is computed from keys, so both passes are the same.
    """
    adam, parts = slot.adam, list(by_length(tokens, limit))
    leaves = adam.leaves()
    if len(parts) == 1:
        loss = loss_of(slot.pooled(tokens, keys), classes, rows)
        adam.add_gradients(torch.autograd.grad(loss, leaves, allow_unused=True))
        return loss.item()
    with torch.no_grad():
        whole = torch.cat([slot.pooled([tokens[i] for i in part], keys[part]) for part in parts])
    order = [i for part in parts for i in part]
    whole.requires_grad_()
    loss = loss_of(whole, classes[order], rows[order])
    shares = torch.autograd.grad(loss, whole)[0].split([len(part) for part in parts])
    for part, share in zip(parts, shares, strict=True):
        pooled = slot.pooled([tokens[i] for i in part], keys[part])
        adam.add_gradients(torch.autograd.grad(pooled, leaves, grad_outputs=share, allow_unused=True))
    return loss.item()


def pair_loss(vectors: Tensor, classes: np.ndarray, rows: np.ndarray) -> Tensor:
    """Return the loss of all pairs of vectors; a row that stands in the batch twice is no pair with itself."""
    cosines, alike, same_row = _compared(vectors, classes, rows)
    near, far = (alike & ~same_row).float(), (~alike).float()
    pull = ((1 - cosines).square() * near).sum() / near.sum().clamp(min=1)
    push = (cosines.square() * far).sum() / far.sum().clamp(min=1)
    return (pull + push) / 2


def contrastive_loss(vectors: Tensor, classes: np.ndarray, rows: np.ndarray) -> Tensor:
    """Return how unlikely, by their cosines, rows are to be matched with others of their class; means over rows."""
    cosines, alike, same_row = _compared(vectors, classes, rows)
    near = (alike & ~same_row).float()
    likely = (cosines / _TEMPERATURE).masked_fill(same_row, -torch.inf).log_softmax(1).masked_fill(same_row, 0.0)
    matched = near.sum(1) > 0  # a class may have one row
    return -((likely * near).sum(1) / near.sum(1).clamp(min=1)).sum() / matched.sum().clamp(min=1)


def _compared(vectors: Tensor, classes: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosine of every two vectors, whether they are of one class, and whether they are of one row."""
    unit = F.normalize(vectors, dim=1)
    alike, same_row = (torch.from_numpy(one[:, None] == one).to(vectors.device) for one in (classes, rows))
    return unit @ unit.T, alike, same_row


def _together(batch: int) -> int:
    """Return how many classes a batch holds."""
    return max(2, batch // _OF_A_CLASS)


def batches(classes: Sequence[int], size: int, seed: int) -> Iterator[np.ndarray]:
    """Yield batches of row numbers without end: the same number of rows of some classes, each row in its turn."""
    members = {one: np.flatnonzero(np.asarray(classes) == one) for one in sorted(set(classes))}
    together = min(len(members), _together(size))
    order = _turns(np.array(list(members)), seed, "classes")
    turns = {one: _turns(rows, seed, "rows", one) for one, rows in members.items()}
    while True:
        chosen: list[int] = []
        while len(chosen) < together:
            one = int(next(order))
            chosen += [] if one in chosen else [one]
        yield np.array([next(turns[chosen[place % together]]) for place in range(size)])


def _turns(values: np.ndarray, *key: int | str) -> Iterator[np.integer]:
    """Yield all values in random order, again and again."""
    turn = 0
    while True:
        yield from values[RandomStream(*key, turn).permutation(len(values))]
        turn += 1
