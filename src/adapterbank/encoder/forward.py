"""The one forward pass of the frozen encoder over packed tokens. Knows no tasks and no families.

Why our own pass and not a library's modules: each tensor is looked up by name through `protocol.Slots`, so a row can
bring its own adapters, LayerNorms or whole layers; the arithmetic runs on real tokens only; and the pass can start in
the middle. A layer has two sub-layers, each with a site where a slot may add something (Houlsby et al. 2019, section
2.1), here with the LayerNorms of BERT (Devlin et al. 2018):

    y = attention(x);    x = LN(x + add(y));    y = feedforward(x);    x = LN(x + add(y))

What differs between families are entries of small tables, which `EncoderConfig` names: `blocks`, `positions`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import FusedAttention, Grid, PackedBatch, PaddedBatch, PaddedLayout
from adapterbank.encoder.blocks import BLOCKS, FEEDFORWARDS, SubLayer, activated, finish
from adapterbank.encoder.dropout import Dropout, LayerDropout, Mask
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.positions import POSITIONS, ScoreFn
from adapterbank.encoder.products import frozen_linear
from adapterbank.encoder.protocol import Ending, Layer, Modules, Slots
from adapterbank.errors import SlowerWarning

KERNEL_WIDTHS = (16, 32, 64, 128)
"""Widths of a head that `kernels.attention` supports."""

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Within:
    """One part of the encoder, a layer or the embeddings: `Slots` by short names."""

    slots: Modules
    weights: str
    site: str

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.linear(x, f"{self.weights}.{name}")

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.attention(x, f"{self.weights}.{name}")

    def activated(self, x: Tensor, name: str, activation: str) -> Tensor:
        """See `Layer`."""
        return activated(self, x, name, activation)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `Layer`."""
        return self.slots.norm(x, f"{self.weights}.{name}", epsilon)

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `Layer`."""
        return self.slots.embed(ids, f"{self.weights}.{name}")

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `Layer`."""
        return self.slots.add(y, x, f"{self.site}.{site}")

    def finish(self, y: Tensor, x: Tensor, site: str, ending: Ending) -> Tensor:
        """See `Layer`."""
        return finish(self, y, x, site, ending)


class Frozen:
    """The bare encoder: every tensor is the frozen one and nothing is added."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the encoder's tensors by our names."""
        self.tensors = tensors

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `Slots`."""
        return frozen_linear(self.tensors, x, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `Slots`."""
        if f"{name}.joined.weight" in self.tensors:
            return self.linear(x, f"{name}.joined")
        return torch.cat([self.linear(x, f"{name}.{part}") for part in QKV], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `Slots`."""
        gain = self.tensors.get(f"{name}.weight")
        return x if gain is None else F.layer_norm(x, x.shape[-1:], gain, self.tensors.get(f"{name}.bias"), epsilon)

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


@dataclass(frozen=True)
class AttentionInputs:
    """What the attention of one layer reads beside hidden states: tensors, so that layers share one compiled form."""

    bias: Tensor | None
    """Added to the scores, `[B or 1, heads or 1, L or 1, L]`: masks, and what all layers add for positions."""
    positions: tuple[Tensor, ...] = ()
    """What `PositionScheme.scores` reads."""


def forward(
    config: EncoderConfig,
    slots: Slots,
    batch: PackedBatch | PaddedBatch,
    dropout: Dropout | None = None,
    first: int = 0,
    prefix: Tensor | None = None,
    layer_fns: LayerFns | None = None,
) -> Tensor:
    """Return the last hidden states `[T, hidden]` of a batch.

    Nothing trains below layer `first`. That part runs without gradient and without dropout, so its result for a text
    is always the same; `prefix` is that result where it is known already. `layer_fns` are other functions to run the
    parts with, such as compiled ones.
    """
    layer_fns = layer_fns or LayerFns()
    if prefix is not None:
        x = prefix
    elif first > 0:
        with torch.no_grad():
            x = hidden_below(config, slots, batch, first)
    else:
        x = _embed(config, slots, batch, dropout, layer_fns)
    with torch.set_grad_enabled(torch.is_grad_enabled() and first == 0):  # position tables belong to the embeddings
        inputs = _attention_inputs(config, slots, batch, x.dtype)
    return _run_layers(config, slots, batch, x, range(first, config.layers), inputs, dropout, layer_fns)


def hidden_below(config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, first: int) -> Tensor:
    """Return the hidden states `[T, hidden]` that layer `first` reads, without dropout."""
    return run_layers(config, slots, batch, _embed(config, slots, batch, None, LayerFns()), range(first))


def run_layers(
    config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, x: Tensor, layers: Iterable[int]
) -> Tensor:
    """Run some layers in turn on the hidden states `[T, hidden]` that the first of them reads, without dropout."""
    inputs = _attention_inputs(config, slots, batch, x.dtype)
    return _run_layers(config, slots, batch, x, layers, inputs, None, LayerFns())


def _run_layers(
    config: EncoderConfig,
    slots: Slots,
    batch: PackedBatch | PaddedBatch,
    x: Tensor,
    layers: Iterable[int],
    inputs: Mapping[int, AttentionInputs],
    dropout: Dropout | None,
    layer_fns: LayerFns,
) -> Tensor:
    """Run some layers in turn. A LayerNorm after the last layer belongs to it: it is named, run and trained with it."""
    tensors = POSITIONS[config.position_scheme].tensors
    sizes = {"hidden": config.hidden, "heads": config.heads, "longest": batch.longest}
    for i in layers:
        masks = dropout.layer(i, **sizes) if dropout else None
        layer = slots.layer(f"layers.{config.groups[i]}", f"layers.{i}")
        mine = inputs[config.attention_spans[i]]
        mine = replace(mine, positions=tensors(config, slots, batch, i)) if tensors else mine
        x = layer_fns.layer(config, layer, batch.grid, x, mine, masks)
        if config.final_norm and i == config.layers - 1:
            x = layer.norm(x, "final.norm", config.epsilon)
    return x


def _embed(
    config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, dropout: Dropout | None, layer_fns: LayerFns
) -> Tensor:
    mask = dropout.mask(config.embedding, 0) if dropout else None
    layer = slots.layer("embeddings", "embeddings")
    return layer_fns.embeddings(config, layer, batch.ids, batch.types, batch.positions, mask)


def run_embeddings(
    config: EncoderConfig, layer: Layer, ids: Tensor, types: Tensor, positions: Tensor, mask: Mask | None
) -> Tensor:
    """Return the hidden states that the first layer reads."""
    x = layer.embed(ids, "word")
    if config.types:
        # A family with one token type has no second row to look up.
        x = x + layer.embed(types.clamp(max=config.types - 1), "type")
    scheme = POSITIONS[config.position_scheme]
    x = x + scheme.embed(config, layer, positions) if scheme.embed else x
    x = layer.norm(x, "norm", config.epsilon)
    x = mask.drop(x) if mask else x
    return layer.linear(x, "project") if config.projected else x


def run_layer(
    config: EncoderConfig,
    layer: Layer,
    grid: Grid | PaddedLayout,
    x: Tensor,
    inputs: AttentionInputs,
    dropout: LayerDropout | None,
) -> Tensor:
    """Run one layer. Layers differ in tensors alone, so that one compiled form serves all of them."""

    def attention(x: Tensor) -> Tensor:
        scores = POSITIONS[config.position_scheme].scores
        y = attend(layer.attention(x, "attention"), grid, inputs, dropout, heads=config.heads, scores=scores)
        return layer.linear(y, "attention.output")

    def feedforward(x: Tensor) -> Tensor:
        form = FEEDFORWARDS[config.feedforward_form]
        y = layer.add(form.inner(layer, x, config.activation), x, "feedforward.inner")
        return layer.linear(y, "feedforward.down")

    block = BLOCKS[config.block]
    masks = (dropout.after_attention, dropout.after_feedforward) if dropout else (None, None)
    x = block(layer, x, SubLayer("attention", attention, masks[0]), config.epsilon)
    return block(layer, x, SubLayer("feedforward", feedforward, masks[1]), config.epsilon)


@dataclass(frozen=True)
class LayerFns:
    """The functions that run the parts of a pass."""

    layer: Callable[
        [EncoderConfig, Layer, Grid | PaddedLayout, Tensor, AttentionInputs, LayerDropout | None], Tensor
    ] = run_layer
    embeddings: Callable[[EncoderConfig, Layer, Tensor, Tensor, Tensor, Mask | None], Tensor] = run_embeddings


def compiled_layer_fns(compiled: Callable[[Any, Any], Any]) -> LayerFns:
    """Return the parts compiled by `compiled`, for any number and length of rows."""

    def in_layer(
        _config: Any, _layer: Any, grid: PaddedLayout, x: Tensor, inputs: AttentionInputs, masks: LayerDropout | None
    ) -> list[tuple[Tensor, int]]:
        longest = grid.like.shape[3]
        found = [(x, 0), (grid.like, 0), (grid.like, 3)]
        if inputs.bias is not None:
            found += [(inputs.bias, 0), (inputs.bias, 3)]
            found += [(inputs.bias, 2)] if inputs.bias.shape[2] == longest else []
        found += [(tensor, i) for tensor in inputs.positions for i, n in enumerate(tensor.shape) if n == longest]
        if masks:
            found += [(masks.tokens, 0), (masks.queries, 0), (masks.queries, 2), (masks.columns, 0)]
        return found

    def in_embeddings(
        _config: Any, _layer: Any, ids: Tensor, types: Tensor, positions: Tensor, mask: Mask | None
    ) -> list[tuple[Tensor, int]]:
        return [(ids, 0), (types, 0), (positions, 0)] + ([(mask.keys, 0)] if mask else [])

    return LayerFns(compiled(run_layer, in_layer), compiled(run_embeddings, in_embeddings))


def attend(
    x: Tensor,
    grid: Grid | PaddedLayout,
    inputs: AttentionInputs,
    dropout: LayerDropout | None,
    *,
    heads: int,
    scores: ScoreFn | None = None,
) -> Tensor:
    """Scaled dot-product attention within each row; query, key and value `[T, 3 hidden]` in, `[T, hidden]` out."""
    bias = inputs.bias
    if isinstance(grid, PaddedLayout) and grid.fused and bias is not None and bias.shape[1:3] == (1, 1):
        return _attend_fused(grid.fused, x, heads, bias, dropout)
    # Each [B, heads, L, width]; cut before they are transposed, as the gradient of a cut is a plain concatenation.
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in grid.to_grid(x).chunk(3, -1))
    if scores:
        q, k, added = scores(q, k, inputs.positions)
        bias = _sum(bias, added)
    if dropout is None or dropout.attention_rate == 0.0:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        products = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
        products = products if bias is None else products + bias
        y = dropout.attention(products.softmax(-1)) @ v
    return grid.to_packed(y.transpose(1, 2).flatten(2))


def _attend_fused(fused: FusedAttention, x: Tensor, heads: int, bias: Tensor, dropout: LayerDropout | None) -> Tensor:
    if dropout is None or dropout.attention_rate == 0.0:
        return fused(x, bias, bias, bias, bias, heads, 0.0)[0]  # without dropout, no keys are read
    keys = dropout.queries.flatten(), dropout.heads.flatten(), dropout.columns
    return fused(x, bias, *keys, heads, dropout.attention_rate)[0]


def fused_attention(config: EncoderConfig, device: torch.device) -> FusedAttention | None:
    """Return the kernel for attention within padded rows, or None where there is none for this device and encoder."""
    fits = POSITIONS[config.position_scheme].fusible and config.hidden // config.heads in KERNEL_WIDTHS
    if device.type != "cuda" or not fits:
        return None
    try:
        from adapterbank.encoder.kernels import attention
    except ImportError as error:
        warnings.warn(f"Attention runs slower without Triton ({error}).", SlowerWarning, 2)
        return None
    found: FusedAttention = attention.attend
    return found


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join each layer's query, key and value into one tensor, so that one product computes all three.

    The separate ones become views of it, which takes no memory beyond the copy; where they are adjacent in memory
    already (`shared_memory`) there is no copy either.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("attention.query.weight")]:
        prefix = name.removesuffix("query.weight")
        for leaf in [leaf for leaf in ("weight", "bias") if f"{prefix}query.{leaf}" in tensors]:
            joined = _joined([tensors[f"{prefix}{part}.{leaf}"] for part in QKV])
            found[f"{prefix}joined.{leaf}"] = joined
            found |= {f"{prefix}{part}.{leaf}": t for part, t in zip(QKV, joined.chunk(3), strict=True)}
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors by rows: as a view where they follow one another in one memory, else as a copy."""
    first = parts[0]
    for before, after in itertools.pairwise(parts):
        one_memory = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        if not one_memory or before.data_ptr() + before.nbytes != after.data_ptr():
            return torch.cat([*parts])
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _attention_inputs(
    config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch, dtype: torch.dtype
) -> dict[int, AttentionInputs]:
    """Return, by span, what all layers of that span read alike."""
    scheme = POSITIONS[config.position_scheme]
    bias = batch.bias(dtype)
    if scheme.bias:
        bias = _sum(scheme.bias(config, slots, batch).to(dtype), bias)
    if not any(config.attention_spans):
        return {0: AttentionInputs(bias)}
    return {span: AttentionInputs(_within(span, batch, bias, dtype)) for span in set(config.attention_spans)}


def _within(span: int, batch: PackedBatch | PaddedBatch, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a bias `[B or 1, heads or 1, L, L]` that also masks all beyond the distance `span`, if that is not 0.

    A token always sees itself. Padding that sees nothing would become NaN, and so would gradients through it.
    """
    places = torch.arange(batch.longest, device=batch.ids.device)
    distance = (places[:, None] - places[None]).abs()
    total = torch.zeros(1, 1, *distance.shape, dtype=dtype, device=distance.device)
    if span:
        total = total.masked_fill(distance > span, -torch.inf)
    total = total if bias is None else total + bias
    return total.masked_fill((distance == 0) & total.isneginf(), 0.0)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b
