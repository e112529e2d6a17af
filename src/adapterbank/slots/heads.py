"""Heads: from the last hidden states to a task's outputs. Knows no losses, files or training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.draws import RandomStream
from adapterbank.encoder.batch import PackedBatch, PaddedBatch
from adapterbank.encoder.dropout import Dropout
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Head
from adapterbank.slots.routing import Route
from adapterbank.slots.stacked import linear

_SIGMA = 0.02
"""Standard deviation of a new head's weights, as in BERT and in the public code of the paper."""
_PLACE = 1_000_000
"""The head's place in the dropout keys, above the places of any number of layers."""
BARE = Head("classification", 1, "mean")
"""The head for rows without a task: the mean of their hidden states."""


def shapes(head: Head, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a head."""
    hidden_layer: dict[str, tuple[int, ...]] = {}
    if head.hidden:
        hidden_layer = {"head.hidden.weight": (head.hidden, hidden), "head.hidden.bias": (head.hidden,)}
    return hidden_layer | {"head.weight": (head.width, head.hidden or hidden), "head.bias": (head.width,)}


def initial(head: Head, hidden: int, seed: int) -> dict[str, Tensor]:
    """Return the tensors of a new head."""
    tensors = {name: torch.zeros(shape) for name, shape in shapes(head, hidden).items()}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            tensor += torch.from_numpy(RandomStream(seed, name).truncated_normal(tensor.shape, _SIGMA))
    if head.weighs:
        tensors["head.weight"][-1] = 0.0  # at first all windows count the same
    return tensors


def outputs(hidden: Tensor, batch: PackedBatch, route: Route, dropout: Dropout | None = None) -> list[Tensor]:
    """Return the head outputs of each segment, float32: `[rows, outputs]`, or `[tokens, outputs]` with `per_token`.

    The output for a row of the bare backbone is its mean hidden state, `[rows, hidden]`.
    """
    inputs: dict[str, Tensor] = {}  # by pooling; "" for heads with an output for each token
    results = []
    row = token = 0
    for segment, slot_head in zip(route.segments, route.heads(), strict=True):
        rows, tokens = slice(row, row + segment.rows), slice(token, token + segment.tokens)
        row, token = rows.stop, tokens.stop
        head = slot_head[0].head if slot_head else BARE
        per_token = KINDS[head.kind].per_token
        pooling = "" if per_token else head.pooling
        if pooling not in inputs:
            inputs[pooling] = reads(hidden, batch, head, route.rows().linear, dropout)
        x = inputs[pooling][tokens if per_token else rows]
        results.append(apply(x, head, slot_head[1]) if slot_head else x.float())
    return results


def reads(
    hidden: Tensor,
    batch: PackedBatch | PaddedBatch,
    head: Head,
    look_up: Callable[[Tensor, str], Tensor],
    dropout: Dropout | None = None,
) -> Tensor:
    """Return a head's input, after dropout: one vector for each row, or for each token with `per_token`."""
    if KINDS[head.kind].per_token:
        return dropout.hidden(hidden, _PLACE) if dropout else hidden
    if head.pooling == "mean":
        # Sum over a grid: a scatter-add of tokens to rows has no fixed order on a GPU, so the last bits would vary.
        x = (batch.by_row(hidden).sum(1, dtype=torch.float32) / batch.counts[:, None]).to(hidden.dtype)
    else:
        x = batch.first(hidden)
        x = torch.tanh(look_up(x, "pooler")) if head.pooling == "pooler" else x
    return dropout.pooled(x, _PLACE) if dropout else x


def apply(x: Tensor, head: Head, tensors: Mapping[str, Tensor]) -> Tensor:
    """Run a head on `[n, hidden]`, or several on `[heads, n, hidden]` with their tensors stacked.

    It always computes in float32, whatever the encoder's precision, because users and metrics compare its outputs.
    """
    x = raw(x, head, lambda x, name: linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    if not KINDS[head.kind].standardize:
        return x
    if not head.weighs:
        return x * head.scale + head.shift
    return torch.cat([x[..., : head.outputs] * head.scale + head.shift, x[..., head.outputs :]], -1)


def raw(x: Tensor, head: Head, layer: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return a head's outputs before its scale and shift; `layer` runs a linear layer by its name."""
    x = x.float()
    if head.unit:
        x = F.normalize(x, dim=-1)
    if head.hidden:
        x = torch.tanh(layer(x, "head.hidden"))
    return layer(x, "head")


def pool_windows(x: Tensor, owners: Tensor, units: int, *, weighs: bool) -> Tensor:
    """Return the output of each text, `[..., units, outputs]`, from those of its windows, `[..., rows, outputs]`.

    `owners` `[..., rows]` has the text of each row. The mean of the windows, or with `weighs` their mean by the softmax
    of the last output; for a linear head this is the head of the pooled vectors' mean.
    """
    mine = owners[..., None, :] == torch.arange(units, device=x.device)[:, None]
    scores, values = (x[..., -1], x[..., :-1]) if weighs else (torch.zeros_like(x[..., 0]), x)
    # Not -inf: a place without rows has numbers that nobody reads, and these must be finite.
    shares = scores[..., None, :].masked_fill(~mine, torch.finfo(x.dtype).min).softmax(-1)
    return shares @ values
