"""The one forward pass of the frozen encoder over packed tokens. Knows no tasks: what a slot changes comes in by name.

Why our own pass and not a library's modules: each tensor is looked up by name through `Slots`, so a row can bring its
own adapters, LayerNorms or whole layers; the arithmetic runs on real tokens only; and it can start in the middle.
Every family in `config.FAMILIES` is this post-LayerNorm encoder (Devlin et al. 2018), with two sites a layer where a
slot may add something (Houlsby et al. 2019, section 2.1):

    y = attention(x);    x = LN(x + add(y));    y = feedforward(x);    x = LN(x + add(y))
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import Fused, Grid, PackedBatch, PaddedBatch, PaddedLayout
from adapterbank.encoder.dropout import Dropout, LayerDropout, Mask
from adapterbank.encoder.families import EncoderConfig
from adapterbank.errors import SlowerWarning

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

_KERNEL_WIDTHS = (16, 32, 64, 128)
"""Widths of a head that `kernels` is made for."""

PROJECTIONS = ("query", "key", "value")

_FURTHEST = 128
"""MPNet: the distance from which on all pairs of tokens share the last bucket (fixed in its public code)."""


class Layer(Protocol):
    """What a part of the pass asks of whoever holds the tensors: frozen ones, or a batch's choice of slots."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Give `x W' + b` with the module `name`'s weight and bias."""

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Give query, key and value of the attention `name`, side by side: `[T, 3 hidden]`."""

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """Normalise the last dimension and scale by the module `name`'s gain and bias."""

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """Look rows up in the table `name`."""

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """Give what a slot makes of a sub-layer's output `y` with input `x`; `y` itself without an adapter there."""


class Slots(Layer, Protocol):
    """What the whole pass asks for."""

    def table(self, name: str) -> Tensor:
        """Give the whole table `name`, which all rows of the batch must share."""

    def layer(self, weights: str, site: str) -> Layer:
        """Give one part, which asks by short names: its tensors are under `weights`, its sites under `site`."""


@dataclass(frozen=True)
class Within:
    """One part of a pass, a layer or the embeddings: `Slots` by short names."""

    slots: Layer
    weights: str
    site: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.linear(x, f"{self.weights}.{name}")

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.attention(x, f"{self.weights}.{name}")

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `Layer`."""
        return self.slots.norm(x, f"{self.weights}.{name}", epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.embed(ids, f"{self.weights}.{name}")

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `Layer`."""
        return self.slots.add(y, x, f"{self.site}.{site}")


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

    def layer(self, weights: str, site: str) -> Layer:
        """See `Slots`."""
        return Within(self, weights, site)


def forward(
    config: EncoderConfig,
    slots: Slots,
    batch: PackedBatch | PaddedBatch,
    dropout: Dropout | None = None,
    first: int = 0,
    prefix: Tensor | None = None,
    runs: LayerFns | None = None,
) -> Tensor:
    """Give the last hidden states `[T, hidden]` of a packed batch.

    Below layer `first` nothing trains: that part runs without gradient and without dropout, so that what it gives for a
    text is always the same and need not be computed twice. `prefix` has it where it is known already. `runs` are
    other ways to run its parts: compiled ones.
    """
    runs = runs or LayerFns()
    if prefix is not None:
        x = prefix
    elif first > 0:
        with torch.no_grad():
            x = lower(config, slots, batch, first)
    else:
        x = _embed(config, slots, batch, dropout, runs)
    with torch.set_grad_enabled(torch.is_grad_enabled() and first == 0):  # its table is among the embeddings
        bias = _bias(config, slots, batch, x.dtype)
    sizes = {"hidden": config.hidden, "heads": config.heads, "longest": batch.longest}
    for i in range(first, config.layers):
        masks = dropout.layer(i, **sizes) if dropout else None
        layer = slots.layer(f"layers.{config.groups[i]}", f"layers.{i}")
        x = runs.layer(config, layer, batch.grid, x, bias, masks)
    return x


def lower(config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, first: int) -> Tensor:
    """Give the hidden states `[T, hidden]` that layer `first` reads, without dropout."""
    return between(config, slots, batch, _embed(config, slots, batch, None, LayerFns()), range(first))


def between(
    config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, x: Tensor, layers: Iterable[int]
) -> Tensor:
    """Run some layers, one after the other, on the hidden states `[T, hidden]` that the first reads; no dropout."""
    bias = _bias(config, slots, batch, x.dtype)
    for i in layers:
        layer = slots.layer(f"layers.{config.groups[i]}", f"layers.{i}")
        x = run_layer(config, layer, batch.grid, x, bias, None)
    return x


def _embed(
    config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, dropout: Dropout | None, runs: LayerFns
) -> Tensor:
    mask = dropout.mask(config.embedding, 0) if dropout else None
    layer = slots.layer("embeddings", "embeddings")
    return runs.embeddings(config, layer, batch.ids, batch.types, batch.positions, mask)


def run_embeddings(
    config: EncoderConfig, layer: Layer, ids: Tensor, types: Tensor, positions: Tensor, mask: Mask | None
) -> Tensor:
    """Give what the first layer reads."""
    x = layer.embed(ids, "word")
    if config.types:
        # A family with one token type has no second row to look up.
        x = x + layer.embed(types.clamp(max=config.types - 1), "type")
    x = x + layer.embed(positions + config.first_position, "position")
    x = layer.norm(x, "norm", config.epsilon)
    x = mask.drop(x) if mask else x
    return layer.linear(x, "project") if config.projected else x


def run_layer(
    config: EncoderConfig,
    layer: Layer,
    grid: Grid | PaddedLayout,
    x: Tensor,
    bias: Tensor | None,
    dropout: LayerDropout | None,
) -> Tensor:
    """Run one layer. Nothing in here differs from layer to layer but tensors, so that it is compiled once."""
    y = _attend(layer.attention(x, "attention"), grid, heads=config.heads, bias=bias, dropout=dropout)
    y = layer.linear(y, "attention.output")
    y = dropout.after_attention(y) if dropout else y
    x = layer.norm(x + layer.add(y, x, "attention"), "attention.norm", config.epsilon)
    y = ACTIVATIONS[config.activation](layer.linear(x, "feedforward.up"))
    y = layer.add(y, x, "feedforward.inner")
    y = layer.linear(y, "feedforward.down")
    y = dropout.after_feedforward(y) if dropout else y
    return layer.norm(x + layer.add(y, x, "feedforward"), "feedforward.norm", config.epsilon)


@dataclass(frozen=True)
class LayerFns:
    """How the parts of a pass are run."""

    layer: Callable[[EncoderConfig, Layer, Grid | PaddedLayout, Tensor, Tensor | None, LayerDropout | None], Tensor] = (
        run_layer
    )
    embeddings: Callable[[EncoderConfig, Layer, Tensor, Tensor, Tensor, Mask | None], Tensor] = run_embeddings


def compiled_runs(compiled: Callable[[Any, Any], Any]) -> LayerFns:
    """Give the parts compiled by `compiled`, for any number and length of rows."""

    def in_layer(_a: Any, _l: Any, _g: Any, x: Tensor, bias: Tensor, masks: LayerDropout | None) -> Any:
        found = [(x, 0), (bias, 0), (bias, 3)]
        return found + ([(masks.tokens, 0), (masks.queries, 0), (masks.queries, 2), (masks.keys, 0)] if masks else [])

    def in_embeddings(_a: Any, _l: Any, ids: Tensor, types: Tensor, positions: Tensor, mask: Mask | None) -> Any:
        return [(ids, 0), (types, 0), (positions, 0)] + ([(mask.keys, 0)] if mask else [])

    return LayerFns(compiled(run_layer, in_layer), compiled(run_embeddings, in_embeddings))


def _attend(
    x: Tensor, grid: Grid | PaddedLayout, *, heads: int, bias: Tensor | None, dropout: LayerDropout | None
) -> Tensor:
    """Scaled dot-product attention within each row; query, key and value `[T, 3 hidden]` in, `[T, hidden]` out."""
    if isinstance(grid, PaddedLayout) and grid.fused and bias is not None and bias.shape[1:3] == (1, 1):
        return _fuse(grid.fused, x, heads, bias, dropout)
    # Each [B, heads, L, width]; cut before they are turned, as the gradient of a cut is a plain concatenation.
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in grid.to_grid(x).chunk(3, -1))
    if dropout is None or dropout.attention_rate == 0.0:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        y = dropout.attention(scores.softmax(-1)) @ v
    return grid.to_packed(y.transpose(1, 2).flatten(2))


def _fuse(fused: Fused, x: Tensor, heads: int, bias: Tensor, dropout: LayerDropout | None) -> Tensor:
    """Attend with one kernel."""
    if dropout is None or dropout.attention_rate == 0.0:
        nothing = torch.zeros(1, dtype=torch.int32, device=x.device)
        return fused(x, bias, nothing, nothing, nothing, heads, 0.0)[0]
    keys = dropout.queries.flatten(), dropout.heads.flatten(), dropout.keys
    return fused(x, bias, *keys, heads, dropout.attention_rate)[0]


def fused_attention(config: EncoderConfig, device: torch.device) -> Fused | None:
    """Find the kernel that attends to filled-up rows, where there is one for this device and encoder."""
    if device.type != "cuda" or config.buckets or config.hidden // config.heads not in _KERNEL_WIDTHS:
        return None
    try:
        from adapterbank.encoder import attention_triton
    except ImportError as error:
        warnings.warn(f"Attention runs slower without Triton ({error}).", SlowerWarning, 2)
        return None
    found: Fused = attention_triton.attend
    return found


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lay each layer's query, key and value out as one tensor, so that one product gives all three.

    The separate ones become views of it, which costs no memory beyond the copy; and where they lie side by side
    already (`shared`) there is no copy either.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("attention.query.weight")]:
        prefix = name.removesuffix("query.weight")
        for leaf in ("weight", "bias"):
            joined = _joined([tensors[f"{prefix}{part}.{leaf}"] for part in PROJECTIONS])
            found[f"{prefix}joined.{leaf}"] = joined
            found |= {f"{prefix}{part}.{leaf}": t for part, t in zip(PROJECTIONS, joined.chunk(3), strict=True)}
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Give tensors one below the other: as a view of the memory they share, if they follow one another there."""
    first = parts[0]
    for before, after in itertools.pairwise(parts):
        one_memory = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        if not one_memory or before.data_ptr() + before.nbytes != after.data_ptr():
            return torch.cat([*parts])
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _bias(config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, dtype: torch.dtype) -> Tensor | None:
    """Give what is added to the attention scores: the mask of padding, and the family's position bias."""
    mask = batch.bias(dtype)
    if not config.buckets:
        return mask
    relative = _relative_bias(config, slots, batch).to(dtype)
    return relative if mask is None else relative + mask


def _relative_bias(config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch) -> Tensor:
    """Give MPNet's attention bias `[1, heads, L, L]`: near distances have a bucket each, far ones share."""
    places = torch.arange(batch.longest, device=batch.ids.device)
    distance = places[:, None] - places[None]
    half, exact = config.buckets // 2, config.buckets // 4
    near = distance.abs()
    far = torch.log(near.clamp(min=1).float() / exact) / math.log(_FURTHEST / exact) * (half - exact)
    bucket = torch.where(near < exact, near, (exact + far.long()).clamp(max=half - 1)) + (distance < 0) * half
    return F.embedding(bucket, slots.table("relative")).permute(2, 0, 1)[None]
