"""AdapterFusion: attention over the outputs of adapters of other tasks (Pfeiffer et al. 2021, section 3.2).

    y + sum_k s_k f_k        s = softmax_k((Q y) · (K f_k))        Q, K [r, d]

y is the output of the sub-layer, which the paper's query reads too, and f_k what the adapter of task k adds to it. The
paper's keys and values are of the adapter's output z_k = y + f_k, and its value matrix starts as the identity. Left
there, as here, both are the same: y adds the same number to every score, and the weights add up to one. A value matrix
would have d² numbers at each site; queries and keys have r d each instead of the paper's d².

Q starts at zero, so that a new fusion computes the mean of its adapters. These are not its own: in memory they are read
from the slots that it stands on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from adapterbank import schema
from adapterbank.config import limited
from adapterbank.draws import RandomStream
from adapterbank.encoder.families import EncoderConfig
from adapterbank.methods import SITES, Options
from adapterbank.slots.addition import Addition, layer_numbers, size_class
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.stacked import linear


@dataclass(frozen=True)
class Fusion:
    """A slot's attention over the adapters of other slots: 2rd numbers at each chosen site."""

    name: ClassVar[str] = "fusion"
    decays: ClassVar[bool] = True
    removable: ClassVar[bool] = True
    form: ClassVar[None] = None

    rank: int = limited("rank", 8)
    """r, the width of queries and keys."""
    layers: tuple[int, ...] = layer_numbers()
    """The layers with attention, counted from 0."""
    sites: tuple[str, ...] = schema.limited(SITES, choices=SITES)
    members: tuple[Adapter, ...] = ()
    """The adapters that it fuses; known only in memory (`over`)."""

    def __post_init__(self) -> None:
        """Refuse members from a file."""
        if not all(isinstance(member, Adapter) for member in self.members):
            raise ValueError("it has members of its own, but a package requires those that it fuses")

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Fusion:
        """See `Addition`."""
        chosen = options.sites.split(",")
        return cls(options.rank, layers, tuple(site for site in SITES if site in chosen))

    def over(self, below: Sequence[Sequence[Addition]]) -> Fusion:
        """See `Fuses`."""
        found = (one for additions in below for one in additions)
        return replace(self, members=tuple(one for one in found if isinstance(one, Adapter)))

    def refuses(self, additions: Sequence[Addition]) -> str | None:
        """See `Fuses`."""
        if len(additions) != 1 or not isinstance(additions[0], Adapter):
            return "adds something else than adapters, or nothing, and only adapters are fused"
        missing = [site for site in self._places if site not in additions[0].width_at]
        if missing:
            return f"has no adapter at {missing[0]}; choose layers and sites where all tasks have one, or another task"
        return None

    def acts_at(self, site: str) -> bool:
        """See `Fuses`."""
        return site in self._places

    @cached_property
    def _places(self) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{site}" for layer in self.layers for site in self.sites)

    @property
    def size(self) -> int:
        """See `Addition`."""
        return self.rank

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """See `Addition`."""
        return self.layers

    @property
    def in_place(self) -> bool:
        """See `Addition`."""
        return all(member.in_place for member in self.members)

    @property
    def by_site(self) -> bool:
        """See `Addition`."""
        return any(member.by_site for member in self.members)

    def parts(self) -> list[str]:
        """See `Addition`."""
        return ["query", "key"]

    def resized(self, size: int) -> Fusion:
        """See `Addition`."""
        return replace(self, rank=size, members=tuple(member.resized(size) for member in self.members))

    def rounded(self) -> Fusion:
        """See `Addition`."""
        return replace(self, rank=size_class(self.rank), members=tuple(member.rounded() for member in self.members))

    def without(self, layers: Collection[int]) -> Fusion:
        """See `Addition`."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer not in layers))

    def at(self, site: str) -> Fusion:
        """See `Addition`."""
        return replace(self, layers=(), sites=(), members=tuple(member.at(site) for member in self.members))

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """See `Addition`."""
        return {(site, part): (self.rank, config.hidden) for site in self._places for part in self.parts()}

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """See `Addition`."""
        return size, shape[1]

    def fill(self, part: str, tensor: Tensor, sigma: float, draws: RandomStream) -> None:
        """Draw K uniformly within 1 / sqrt(d); Q stays zero."""
        if part == "key":
            tensor += torch.from_numpy(draws.uniform(tensor.shape, 1.0 / math.sqrt(tensor.shape[1])))

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Any]]) -> Tensor:
        """See `Addition`. The part `<k>.<part>` is that of the adapter of member k."""
        (own,) = tensors
        query, changes, scores = linear(y, own["query"]), [], []
        for number, member in enumerate(self.members):
            changes.append(member.change(y, x, {part: own[f"{number}.{part}"] for part in member.parts()}))
            scores.append((query * linear(changes[-1], own["key"])).sum(-1, keepdim=True))
        weights = torch.cat(scores, -1).float().softmax(-1).to(y.dtype)
        for number, change in enumerate(changes):
            y = torch.addcmul(y, weights[..., number : number + 1], change)
        return y


ADDITION = Fusion
