"""How an encoder tells token positions apart: a table of schemes. Knows no families and no tasks.

A scheme may add to the embeddings, add a bias to the attention scores, or change query and key in every layer. What it
needs in a layer reaches that layer as tensors, so that all layers share one compiled form. A row of `families.FAMILIES`
names one scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.batch import PackedBatch, PaddedBatch
from adapterbank.encoder.protocol import Layer, Slots

if TYPE_CHECKING:
    from adapterbank.encoder.families import EncoderConfig

_FURTHEST = 128
"""MPNet: from this distance on all pairs of tokens share the last bucket (fixed in its public code)."""

ScoreFn = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor | None]]
"""(query, key, tensors of the layer) -> query, key, what is added to their scores; both `[B, heads, L, width]`."""


@dataclass(frozen=True)
class PositionScheme:
    """One way to tell positions apart. A hook that a scheme does not need is None."""

    tables: Callable[[EncoderConfig], dict[str, tuple[int, ...]]] = lambda config: {}
    """The tables it reads, by our names, with their shapes."""
    embed: Callable[[EncoderConfig, Layer, Tensor], Tensor] | None = None
    """(config, embeddings, positions `[T]`) -> what is added to the word embeddings, `[T, embedding]`."""
    bias: Callable[[EncoderConfig, Slots, PackedBatch | PaddedBatch], Tensor] | None = None
    """What is added to the attention scores of every layer, `[1, heads, L, L]`."""
    tensors: Callable[[EncoderConfig, Slots, PackedBatch | PaddedBatch, int], tuple[Tensor, ...]] | None = None
    """(…, layer) -> the tensors that `scores` reads in that layer, of equal shapes in all layers."""
    scores: ScoreFn | None = None
    """Changes query and key of a layer, and may add to their scores."""
    constants: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Fields of config.json -> the constants of its arithmetic, which are part of the backbone's identity.

    None for schemes that `first_position` and `buckets` describe."""
    after_padding: bool = False
    """Whether the first position is `pad_token_id + 1` and not 0."""
    buckets: int = 0
    """Rows of the table of relative distances, 0 without one."""

    @property
    def fusible(self) -> bool:
        """Whether a fused kernel that takes nothing but a mask computes this attention."""
        return self.bias is None and self.scores is None


def _position_table(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    return {"embeddings.position": (config.positions, config.embedding)}


def _look_up(config: EncoderConfig, layer: Layer, positions: Tensor) -> Tensor:
    return layer.embed(positions + config.first_position, "position")


def _with_buckets(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    return _position_table(config) | {"relative": (config.buckets, config.heads)}


def _relative_bias(config: EncoderConfig, slots: Slots, batch: PackedBatch | PaddedBatch) -> Tensor:
    """Return MPNet's attention bias: near distances have a bucket each, far ones share one."""
    places = torch.arange(batch.longest, device=batch.ids.device)
    distance = places[:, None] - places[None]
    half, exact = config.buckets // 2, config.buckets // 4
    near = distance.abs()
    far = torch.log(near.clamp(min=1).float() / exact) / math.log(_FURTHEST / exact) * (half - exact)
    bucket = torch.where(near < exact, near, (exact + far.long()).clamp(max=half - 1)) + (distance < 0) * half
    return F.embedding(bucket, slots.table("relative")).permute(2, 0, 1)[None]


POSITIONS: Mapping[str, PositionScheme] = {
    "learned": PositionScheme(_position_table, _look_up),
    "learned_after_padding": PositionScheme(_position_table, _look_up, after_padding=True),
    # The public code of MPNet has 32 buckets whatever its config says.
    "relative_buckets": PositionScheme(_with_buckets, _look_up, _relative_bias, after_padding=True, buckets=32),
}
