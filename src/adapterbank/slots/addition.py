"""What a slot can add to the pass: the protocol that each file in `additions/` keeps, and how one is found by name.

An addition acts at *sites* of a layer, each a point of the pass where a slot may change what was computed:

    attention, feedforward              the output of a sub-layer, before the residual sum
    attention.query … feedforward.down  the output of a linear layer
    feedforward.inner                   the activations between the two linear layers of the feed-forward

Its tensors are named `<site>.<key>.<part>`, where the key is the addition's name, and `<name>-2` for a second one of
that name. To add a new sort: one file in `additions/` that calls its class `ADDITION` at the end, and one row in
`methods.METHODS` that names the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from adapterbank.encoder.families import EncoderConfig
from adapterbank.errors import UnknownName
from adapterbank.methods import ADDITIONS, Options


class Addition(Protocol):
    """One thing that a slot adds, without its numbers: a frozen dataclass whose fields are JSON values."""

    name: ClassVar[str]
    """Its name in tensor names, manifests and `methods.METHODS`."""
    decays: ClassVar[bool]
    """Whether weight decay applies to its weights."""
    removable: ClassVar[bool]
    """Whether it can be left out layer by layer, as ablation and pruning do."""

    @property
    def in_place(self) -> bool:
        """Whether `apply` also takes tensors as `stacked.Each`, for rows of several slots end to end."""

    @property
    def size(self) -> int:
        """The width that users choose; 1 where there is none."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it acts in, from 0."""

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Self:
        """Build it from a user's choices."""

    def problems(self) -> list[str]:
        """List the values that the arithmetic cannot take; a manifest's checksum does not exclude them."""

    def resized(self, size: int) -> Self:
        """Return the same arithmetic at another size."""

    def placeless(self) -> Self:
        """Return what two additions must share to run in one product: the arithmetic, not where it is applied."""

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the shape of every tensor by (site, part), in the order in which they are drawn."""

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return a part's shape when it is padded with zeros to another size."""

    def fill(self, part: str, tensor: Tensor, sigma: float, generator: torch.Generator) -> None:
        """Write a part's initial values into a tensor of zeros."""

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return what a site's output `y` becomes; `x` is the input of what computed `y`.

        `[n, width]` with one slot's tensors, or `[slots, n, width]` with tensors stacked. `tensors` holds one mapping
        of parts for each site that stands in `y` side by side, empty where the slot adds nothing.
        """


@cache
def find_addition(name: str) -> type[Addition]:
    """Return the class of an addition by its name."""
    if name not in ADDITIONS:
        raise UnknownName(name, "an addition", ADDITIONS)
    found: type[Addition] = importlib.import_module(f"adapterbank.slots.additions.{name}").ADDITION
    return found
