"""Heads: pooling, outputs, loss and prediction of each kind of task. Knows nothing of files and training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.dropout import Dropout
from adapterbank.encoder.packed import Packed
from adapterbank.methods import Head, Plan
from adapterbank.slots.route import Route

_SIGMA = 0.02
"""Of a new head's weights: BERT's own, and the public code's."""
_PLACE = 1_000_000
"""Dropout place of the head, after those of any number of layers."""
_LONGEST_ANSWER = 30
"""Tokens of the longest answer a span head may give, as in BERT's SQuAD code."""


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


def outputs(hidden: Tensor, batch: Packed, route: Route, dropout: Dropout | None = None) -> list[Tensor]:
    """Give each segment's head outputs, float32: `[rows, outputs]`, or `[tokens, 2]` for spans.

    Rows of the bare backbone give their mean hidden state, `[rows, hidden]`.
    """
    pooled: dict[str, Tensor] = {}
    spans = any(mine and mine[0].head.kind == "span" for mine in route.heads())
    dropped = dropout.hidden(hidden, _PLACE) if dropout and spans else hidden
    found = []
    row = token = 0
    for segment, mine in zip(route.segments, route.heads(), strict=True):
        rows, tokens = slice(row, row + segment.rows), slice(token, token + segment.tokens)
        row, token = rows.stop, tokens.stop
        pooling = mine[0].head.pooling if mine else "mean"
        if mine and mine[0].head.kind == "span":
            x = dropped[tokens]
        else:
            if pooling not in pooled:
                x = _pool(hidden, batch, pooling, route)
                everyone = torch.arange(len(batch.lengths), device=x.device)
                pooled[pooling] = dropout.pooled(x, everyone, _PLACE) if dropout else x
            x = pooled[pooling][rows]
        found.append(_apply(x, *mine) if mine else x.float())
    return found


def _pool(hidden: Tensor, batch: Packed, pooling: str, route: Route) -> Tensor:
    """Make one vector a row of its tokens."""
    if pooling == "mean":
        # Summed over a grid: adding tokens to their rows one by one has no fixed order on a GPU, hence no fixed bits.
        lengths = torch.tensor(batch.lengths, dtype=torch.float32, device=hidden.device)  # bf16 has no 257
        return (batch.to_grid(hidden).sum(1, dtype=torch.float32) / lengths[:, None]).to(hidden.dtype)
    first = hidden.index_select(0, batch.starts)
    return torch.tanh(route.rows().linear(first, "pooler")) if pooling == "pooler" else first


def _apply(x: Tensor, plan: Plan, tensors: Mapping[str, Tensor]) -> Tensor:
    """Run a head, in float32 whatever the encoder computed in: its outputs are what people and metrics compare."""
    x = x.float()
    if plan.head.hidden:
        x = torch.tanh(F.linear(x, tensors["head.hidden.weight"], tensors["head.hidden.bias"]))
    x = F.linear(x, tensors["head.weight"], tensors["head.bias"])
    return x * plan.head.scale + plan.head.shift if plan.head.kind == "regression" else x


@dataclass(frozen=True)
class Kind:
    """What a kind of task makes of its head's outputs."""

    loss: Callable[[Tensor, Sequence[Any], Head, Sequence[int]], Tensor]
    """(outputs, targets, head, row lengths) -> one loss a row."""
    decide: Callable[[np.ndarray], Any]
    """One row's outputs -> what the metric compares."""


def _classification_loss(x: Tensor, targets: Sequence[Any], head: Head, lengths: Sequence[int]) -> Tensor:
    return F.cross_entropy(x, torch.tensor(targets, device=x.device), reduction="none")


def _multilabel_loss(x: Tensor, targets: Sequence[Any], head: Head, lengths: Sequence[int]) -> Tensor:
    wanted = torch.zeros_like(x)
    for row, labels in enumerate(targets):
        wanted[row, list(labels)] = 1.0
    return F.binary_cross_entropy_with_logits(x, wanted, reduction="none").mean(1)


def _regression_loss(x: Tensor, targets: Sequence[Any], head: Head, lengths: Sequence[int]) -> Tensor:
    """Squared error in units of the labels' spread, so that the learning rate means the same on every scale."""
    wanted = torch.tensor(targets, dtype=torch.float32, device=x.device)
    return ((x[:, 0] - wanted) / head.scale) ** 2


def _span_loss(x: Tensor, targets: Sequence[Any], head: Head, lengths: Sequence[int]) -> Tensor:
    """Mean of the start's and the end's cross-entropy over the tokens of the row."""
    wanted = torch.tensor(targets, device=x.device)  # [rows, 2] token numbers
    rows = torch.nn.utils.rnn.pad_sequence(x.split(list(lengths)), batch_first=True, padding_value=-torch.inf)
    both = F.cross_entropy(rows.transpose(1, 2).flatten(0, 1), wanted.flatten(), reduction="none")
    return both.view(-1, 2).mean(1)


def _best_span(x: np.ndarray) -> tuple[int, int]:
    """Choose first and last token of the best answer: the highest start + end that is in order and not too long."""
    sums = x[:, 0][:, None] + x[:, 1][None]
    allowed = np.triu(np.ones_like(sums, dtype=bool)) & ~np.triu(np.ones_like(sums, dtype=bool), _LONGEST_ANSWER)
    start, end = np.unravel_index(np.where(allowed, sums, -np.inf).argmax(), sums.shape)
    return int(start), int(end)


KINDS: Mapping[str, Kind] = {
    "classification": Kind(_classification_loss, lambda x: int(x.argmax())),
    "multilabel": Kind(_multilabel_loss, lambda x: tuple(int(i) for i in np.flatnonzero(x > 0))),
    "regression": Kind(_regression_loss, lambda x: float(x[0])),
    "span": Kind(_span_loss, _best_span),
}
