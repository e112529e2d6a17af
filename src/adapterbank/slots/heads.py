"""Heads: from the last hidden states to a task's outputs. They know no losses, files or training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adapterbank.encoder.batch import PackedBatch, PaddedBatch
from adapterbank.encoder.dropout import Dropout
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Head
from adapterbank.slots.routing import Route
from adapterbank.slots.stacked import linear

_SIGMA = 0.02
"""Standard deviation of a new head's weights: BERT's own, and the public code's."""
_PLACE = 1_000_000
"""Dropout place of the head, after those of any number of layers."""
BARE = Head("classification", 1, "mean")
"""How rows without a task are read: by the mean of their hidden states."""


def shapes(head: Head, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a head."""
    found: dict[str, tuple[int, ...]] = {}
    if head.hidden:
        found = {"head.hidden.weight": (head.hidden, hidden), "head.hidden.bias": (head.hidden,)}
    return found | {"head.weight": (head.outputs, head.hidden or hidden), "head.bias": (head.outputs,)}


def initial(head: Head, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a new head."""
    found = {name: torch.zeros(shape) for name, shape in shapes(head, hidden).items()}
    for name, tensor in found.items():
        if name.endswith(".weight"):
            torch.nn.init.trunc_normal_(tensor, std=_SIGMA, a=-2 * _SIGMA, b=2 * _SIGMA, generator=generator)
    return found


def outputs(hidden: Tensor, batch: PackedBatch, route: Route, dropout: Dropout | None = None) -> list[Tensor]:
    """Return the head outputs of each segment, float32: `[rows, outputs]`, or `[tokens, outputs]` with `per_token`.

    Rows of the bare backbone return their mean hidden state, `[rows, hidden]`.
    """
    inputs: dict[str, Tensor] = {}  # by pooling; heads with an output for each token share ""
    found = []
    row = token = 0
    for segment, mine in zip(route.segments, route.heads(), strict=True):
        rows, tokens = slice(row, row + segment.rows), slice(token, token + segment.tokens)
        row, token = rows.stop, tokens.stop
        head = mine[0].head if mine else BARE
        per_token = KINDS[head.kind].per_token
        pooling = "" if per_token else head.pooling
        if pooling not in inputs:
            inputs[pooling] = reads(hidden, batch, head, route.rows().linear, dropout)
        x = inputs[pooling][tokens if per_token else rows]
        found.append(apply(x, mine[0].head, mine[1]) if mine else x.float())
    return found


def reads(
    hidden: Tensor,
    batch: PackedBatch | PaddedBatch,
    head: Head,
    look_up: Callable[[Tensor, str], Tensor],
    dropout: Dropout | None = None,
) -> Tensor:
    """Return what a head reads, after dropout: one vector for each row, or for each token with `per_token`."""
    if KINDS[head.kind].per_token:
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

    It computes in float32 whatever the encoder computed in, because users and metrics compare its outputs.
    """
    x = x.float()
    if head.hidden:
        x = torch.tanh(linear(x, tensors["head.hidden.weight"], tensors["head.hidden.bias"]))
    x = linear(x, tensors["head.weight"], tensors["head.bias"])
    return x * head.scale + head.shift if KINDS[head.kind].standardize else x
