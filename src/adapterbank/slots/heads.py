"""Heads: pooling, outputs, loss and prediction of each kind of task. Knows nothing of files and training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import PackedBatch, PaddedBatch
from adapterbank.encoder.dropout import Dropout
from adapterbank.slots.plan import Head
from adapterbank.slots.routing import Route
from adapterbank.slots.stacked import linear

_SIGMA = 0.02
"""Of a new head's weights: BERT's own, and the public code's."""
_PLACE = 1_000_000
"""Dropout place of the head, after those of any number of layers."""
BARE = Head("classification", 1, "mean")
"""How rows of no task are read: by their mean."""


def shapes(head: Head, hidden: int) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a head, with its shape."""
    found: dict[str, tuple[int, ...]] = {}
    if head.hidden:
        found = {"head.hidden.weight": (head.hidden, hidden), "head.hidden.bias": (head.hidden,)}
    return found | {"head.weight": (head.outputs, head.hidden or hidden), "head.bias": (head.outputs,)}


def initial(head: Head, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Give a new head's tensors."""
    found = {name: torch.zeros(shape) for name, shape in shapes(head, hidden).items()}
    for name, tensor in found.items():
        if name.endswith(".weight"):
            torch.nn.init.trunc_normal_(tensor, std=_SIGMA, a=-2 * _SIGMA, b=2 * _SIGMA, generator=generator)
    return found


def outputs(hidden: Tensor, batch: PackedBatch, route: Route, dropout: Dropout | None = None) -> list[Tensor]:
    """Give each segment's head outputs, float32: `[rows, outputs]`, or `[tokens, 2]` for spans.

    Rows of the bare backbone give their mean hidden state, `[rows, hidden]`.
    """
    read: dict[str, Tensor] = {}  # what heads of each sort read
    found = []
    row = token = 0
    for segment, mine in zip(route.segments, route.heads(), strict=True):
        rows, tokens = slice(row, row + segment.rows), slice(token, token + segment.tokens)
        row, token = rows.stop, tokens.stop
        head = mine[0].head if mine else BARE
        sort = "span" if head.kind == "span" else head.pooling
        if sort not in read:
            read[sort] = reads(hidden, batch, head, route.rows().linear, dropout)
        x = read[sort][tokens if head.kind == "span" else rows]
        found.append(apply(x, mine[0].head, mine[1]) if mine else x.float())
    return found


def reads(
    hidden: Tensor,
    batch: PackedBatch | PaddedBatch,
    head: Head,
    look_up: Callable[[Tensor, str], Tensor],
    dropout: Dropout | None = None,
) -> Tensor:
    """Give what a head reads, after dropout: one vector a row, or for spans one a token."""
    if head.kind == "span":
        return dropout.hidden(hidden, _PLACE) if dropout else hidden
    if head.pooling == "mean":
        # Summed over a grid: adding tokens to their rows one by one has no fixed order on a GPU, hence no fixed bits.
        x = (batch.by_row(hidden).sum(1, dtype=torch.float32) / batch.counts[:, None]).to(hidden.dtype)
    else:
        x = batch.first(hidden)
        x = torch.tanh(look_up(x, "pooler")) if head.pooling == "pooler" else x
    return dropout.pooled(x, _PLACE) if dropout else x


def apply(x: Tensor, head: Head, tensors: Mapping[str, Tensor]) -> Tensor:
    """Run a head on `[n, hidden]`, or several on `[heads, n, hidden]` with their tensors stacked.

    In float32 whatever the encoder computed in: its outputs are what people and metrics compare.
    """
    x = x.float()
    if head.hidden:
        x = torch.tanh(linear(x, tensors["head.hidden.weight"], tensors["head.hidden.bias"]))
    x = linear(x, tensors["head.weight"], tensors["head.bias"])
    return x * head.scale + head.shift if head.kind == "regression" else x


@dataclass(frozen=True)
class Kind:
    """What a kind of task trains its head with."""

    targets: Callable[[Sequence[Any], Head], Tensor]
    """What rows are labelled with -> a tensor, one entry a row."""
    loss: Callable[[Tensor, Tensor, Head, Tensor], Tensor]
    """(outputs of rows, for spans side by side; their targets; head; their numbers of tokens) -> one loss a row."""


def _whole_numbers(targets: Sequence[Any], head: Head) -> Tensor:
    return torch.tensor(targets, dtype=torch.int64)


def _numbers(targets: Sequence[Any], head: Head) -> Tensor:
    return torch.tensor(targets, dtype=torch.float32)


def _classification_loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    return F.cross_entropy(x, targets, reduction="none")


def _many_hot(targets: Sequence[Any], head: Head) -> Tensor:
    wanted = torch.zeros(len(targets), head.outputs)
    for row, labels in enumerate(targets):
        wanted[row, list(labels)] = 1.0
    return wanted


def _multilabel_loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, targets, reduction="none").mean(1)


def _regression_loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Squared error in units of the labels' spread, so that the learning rate means the same on every scale."""
    return ((x[:, 0] - targets) / head.scale) ** 2


def _span_loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Mean of the start's and the end's cross-entropy over the tokens of the row; targets are token numbers."""
    places = torch.arange(x.shape[1], device=x.device)
    rows = x.masked_fill((places >= counts[:, None])[:, :, None], -torch.inf)  # [rows, longest, 2]
    both = F.cross_entropy(rows.transpose(1, 2).flatten(0, 1), targets.flatten(), reduction="none")
    return both.view(-1, 2).mean(1)


KINDS: Mapping[str, Kind] = {
    "classification": Kind(_whole_numbers, _classification_loss),
    "multilabel": Kind(_many_hot, _multilabel_loss),
    "regression": Kind(_numbers, _regression_loss),
    "span": Kind(_whole_numbers, _span_loss),
}

DECIDE: Mapping[str, Callable[[np.ndarray], list[Any]]] = {
    "classification": lambda x: x.argmax(1).tolist(),
    "multilabel": lambda x: [tuple(np.flatnonzero(row).tolist()) for row in x > 0],
    "regression": lambda x: x[:, 0].tolist(),
}
"""Rows' outputs -> what the metric compares. Answers are read off all windows of a document: see `spans`."""
