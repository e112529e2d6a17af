"""The one forward pass of the frozen encoder over packed tokens. Knows no tasks: what a slot changes comes in by name.

Why our own pass and not a library's modules: each tensor is looked up by name through `Slots`, so a row can bring its
own adapters, LayerNorms or whole layers; the arithmetic runs on real tokens only; and it can start in the middle.
Every family in `anatomy.FAMILIES` is this post-LayerNorm encoder (Devlin et al. 2018), with two sites a layer where a
slot may add something (Houlsby et al. 2019, section 2.1):

    y = attention(x);    x = LN(x + add(y));    y = feedforward(x);    x = LN(x + add(y))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.anatomy import Anatomy
from adapterbank.encoder.dropout import Dropout
from adapterbank.encoder.packed import Packed

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

PROJECTIONS = ("query", "key", "value")

_FURTHEST = 128
"""MPNet: the distance from which on all pairs of tokens share the last bucket (fixed in its public code)."""


class Slots(Protocol):
    """What the pass asks of whoever holds the tensors: frozen ones, or a batch's choice of slots."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Give `x W' + b` with the module `name`'s weight and bias."""

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Give query, key and value of the attention `name`, side by side: `[T, 3 hidden]`."""

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """Normalise the last dimension and scale by the module `name`'s gain and bias."""

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """Look rows up in the table `name`."""

    def table(self, name: str) -> Tensor:
        """Give the whole table `name`, which all rows of the batch must share."""

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """Give what a slot makes of a sub-layer's output `y` with input `x`; `y` itself without an adapter there."""


class Frozen:
    """The bare encoder: every tensor is the frozen one and nothing is added."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the encoder's tensors by our names."""
        self.tensors = tensors

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Slots`."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `Slots`."""
        if f"{name}.joined.weight" in self.tensors:
            return self.linear(x, f"{name}.joined")
        return torch.cat([self.linear(x, f"{name}.{part}") for part in PROJECTIONS], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `Slots`."""
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `Slots`."""
        return F.embedding(ids, self.tensors[f"{name}.weight"])

    def table(self, name: str) -> Tensor:
        """See `Slots`."""
        return self.tensors[f"{name}.weight"]

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `Slots`."""
        return y


def forward(
    anatomy: Anatomy,
    slots: Slots,
    batch: Packed,
    dropout: Dropout | None = None,
    first: int = 0,
    prefix: Tensor | None = None,
) -> Tensor:
    """Give the last hidden states `[T, hidden]` of a packed batch.

    Below layer `first` nothing trains: that part runs without gradient and without dropout, so that what it gives for a
    text is always the same and need not be computed twice. `prefix` has it where it is known already.
    """
    if prefix is not None:
        x = prefix
    elif first > 0:
        with torch.no_grad():
            x = lower(anatomy, slots, batch, first)
    else:
        x = _embed(anatomy, slots, batch, dropout)
    with torch.set_grad_enabled(torch.is_grad_enabled() and first == 0):  # its table is among the embeddings
        bias = _relative_bias(anatomy, slots, batch) if anatomy.buckets else None
    for i in range(first, anatomy.layers):
        x = _layer(anatomy, slots, batch, i, x, bias, dropout)
    return x


def lower(anatomy: Anatomy, slots: Slots, batch: Packed, first: int) -> Tensor:
    """Give the hidden states `[T, hidden]` that layer `first` reads, without dropout."""
    x = _embed(anatomy, slots, batch, None)
    bias = _relative_bias(anatomy, slots, batch) if anatomy.buckets else None
    for i in range(first):
        x = _layer(anatomy, slots, batch, i, x, bias, None)
    return x


def _embed(anatomy: Anatomy, slots: Slots, batch: Packed, dropout: Dropout | None) -> Tensor:
    x = slots.embed(batch.ids, "embeddings.word")
    if anatomy.types:
        # A family with one token type has no second row to look up.
        x = x + slots.embed(batch.types.clamp(max=anatomy.types - 1), "embeddings.type")
    x = x + slots.embed(batch.positions + anatomy.first_position, "embeddings.position")
    x = slots.norm(x, "embeddings.norm", anatomy.epsilon)
    x = dropout.hidden(x, 0) if dropout else x
    projected = "embeddings.project.weight" in anatomy.shapes(pooler=False)
    return slots.linear(x, "embeddings.project") if projected else x


def _layer(
    anatomy: Anatomy, slots: Slots, batch: Packed, i: int, x: Tensor, bias: Tensor | None, dropout: Dropout | None
) -> Tensor:
    """Run layer `i`. Its weights are those of its group; its sites are its own even where weights are shared."""
    w, site = f"layers.{anatomy.groups[i]}", f"layers.{i}"
    y = slots.attention(x, f"{w}.attention")
    y = _attend(y, batch, heads=anatomy.heads, bias=bias, dropout=dropout, place=3 * i + 1)
    y = slots.linear(y, f"{w}.attention.output")
    y = dropout.hidden(y, 3 * i + 2) if dropout else y
    x = slots.norm(x + slots.add(y, x, f"{site}.attention"), f"{w}.attention.norm", anatomy.epsilon)
    y = ACTIVATIONS[anatomy.activation](slots.linear(x, f"{w}.feedforward.up"))
    y = slots.linear(y, f"{w}.feedforward.down")
    y = dropout.hidden(y, 3 * i + 3) if dropout else y
    return slots.norm(x + slots.add(y, x, f"{site}.feedforward"), f"{w}.feedforward.norm", anatomy.epsilon)


def _attend(
    x: Tensor, batch: Packed, *, heads: int, bias: Tensor | None, dropout: Dropout | None, place: int
) -> Tensor:
    """Scaled dot-product attention within each row; query, key and value `[T, 3 hidden]` in, `[T, hidden]` out."""
    q, k, v = batch.to_grid(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, L, width]
    mask = batch.bias(q.dtype)
    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype) + mask
    if dropout is None or dropout.attention_rate == 0.0:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
        scores = scores if mask is None else scores + mask
        y = dropout.attention(scores.softmax(-1), place) @ v
    return batch.to_packed(y.transpose(1, 2).flatten(2))


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lay each layer's query, key and value out as one tensor, so that one product gives all three.

    The separate ones become views of it, which costs no memory beyond the copy.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("attention.query.weight")]:
        prefix = name.removesuffix("query.weight")
        for leaf in ("weight", "bias"):
            joined = torch.cat([tensors[f"{prefix}{part}.{leaf}"] for part in PROJECTIONS])
            found[f"{prefix}joined.{leaf}"] = joined
            found |= {f"{prefix}{part}.{leaf}": t for part, t in zip(PROJECTIONS, joined.chunk(3), strict=True)}
    return found


def _relative_bias(anatomy: Anatomy, slots: Slots, batch: Packed) -> Tensor:
    """Give MPNet's attention bias `[1, heads, L, L]`: near distances have a bucket each, far ones share."""
    places = torch.arange(batch.longest, device=batch.ids.device)
    distance = places[:, None] - places[None]
    half, exact = anatomy.buckets // 2, anatomy.buckets // 4
    near = distance.abs()
    far = torch.log(near.clamp(min=1).float() / exact) / math.log(_FURTHEST / exact) * (half - exact)
    bucket = torch.where(near < exact, near, (exact + far.long()).clamp(max=half - 1)) + (distance < 0) * half
    return F.embedding(bucket, slots.table("relative")).permute(2, 0, 1)[None]
