"""BERT in plain torch, one row at a time, with whatever acts at its sites: an oracle without code of the pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens


def plain_bert(
    backbone: Backbone,
    row: Tokens,
    adapted: Callable[[Tensor, str], Tensor],
    norms: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
) -> Tensor:
    """Return the outputs of a linear head on the mean; `adapted` gives a site's new output from its output."""
    frozen, config = backbone.tensors | norms, backbone.config

    def linear(x, name):
        return F.linear(x, frozen[f"{name}.weight"], frozen[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], frozen[f"{name}.norm.weight"], frozen[f"{name}.norm.bias"], 1e-12)

    ids, types = torch.from_numpy(row.ids), torch.from_numpy(row.types)
    x = frozen["embeddings.word.weight"][ids] + frozen["embeddings.position.weight"][: len(ids)]
    x = norm(x + frozen["embeddings.type.weight"][types], "embeddings")
    for layer in (f"layers.{i}" for i in range(config.layers)):
        query, key, value = (
            linear(x, f"{layer}.attention.{part}").view(len(ids), config.heads, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        weights = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(-1)
        y = linear((weights @ value).transpose(0, 1).flatten(1), f"{layer}.attention.output")
        x = norm(x + adapted(y, f"{layer}.attention"), f"{layer}.attention")
        y = linear(F.gelu(linear(x, f"{layer}.feedforward.up")), f"{layer}.feedforward.down")
        x = norm(x + adapted(y, f"{layer}.feedforward"), f"{layer}.feedforward")
    return F.linear(x.mean(0), head["head.weight"], head["head.bias"])


def bottleneck(y: Tensor, tensors: Mapping[str, Tensor], site: str) -> Tensor:
    """Return what a plain adapter adds to `y`."""
    parts = {part: tensors[f"{site}.adapter.{part}"] for part in ("down.weight", "down.bias", "up.weight", "up.bias")}
    inner = F.gelu(F.linear(y, parts["down.weight"], parts["down.bias"]), approximate="tanh")
    return F.linear(inner, parts["up.weight"], parts["up.bias"])
