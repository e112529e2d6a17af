"""Additions, which slots add to the pass: the protocol that each file in `additions/` implements, and its look-up.

An addition acts at *sites* of a layer. A site is a point of the pass where a slot may change the result:

    attention, feedforward              the output of a sub-layer, before the residual sum
    attention.query … feedforward.down  the output of a linear layer
    feedforward.inner                   the activations between the two linear layers of the feed-forward

Its tensors are named `<site>.<key>.<part>`. The key is the addition's name, or `<name>-2` for a second addition of that
name. To add a new type, write one file in `additions/` that assigns its class to `ADDITION` at the end, and name the
file in a row of `methods.METHODS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from adapterbank import schema
from adapterbank.draws import RandomStream
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.kernels.forms import Form, Scales
from adapterbank.errors import UnknownName
from adapterbank.methods import ADDITIONS, MAX_LAYERS, Options


def layer_numbers() -> Any:
    """Declare the field `layers` of an addition: numbers of layers, each once."""
    return schema.limited((), low=0, high=MAX_LAYERS - 1)


def size_class(size: int) -> int:
    """Return the size that an addition is padded to: the next power of two."""
    return 1 << (size - 1).bit_length()


class Addition(Protocol):
    """One addition of a slot, without its numbers: a frozen dataclass whose fields are JSON values.

    Its fields declare their ranges (`config.limited`, `schema.limited`), by which a manifest is checked.
    """

    name: ClassVar[str]
    """Its name in tensor names, manifests and `methods.METHODS`."""
    decays: ClassVar[bool]
    """Whether weight decay applies to its weights."""
    removable: ClassVar[bool]
    """Whether it can be left out layer by layer, as ablation and pruning do."""

    @property
    def in_place(self) -> bool:
        """Whether `apply` also accepts tensors as `stacked.Each`, for the rows of several slots end to end."""

    @property
    def size(self) -> int:
        """The width that the user chooses, at the widest site; 1 for additions without one."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it may act in, counted from 0."""

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """Those of `layers` in which it has tensors."""

    @classmethod
    def from_options(cls, options: Options, layers: tuple[int, ...]) -> Self:
        """Build the addition from a user's options."""

    def resized(self, size: int) -> Self:
        """Return the same arithmetic at another size, which is the same everywhere."""

    def rounded(self) -> Self:
        """Return the same with every width rounded up to its size class."""

    def without(self, layers: Collection[int]) -> Self:
        """Return the same, but not in some layers."""

    @property
    def form(self) -> Form | Scales | None:
        """How the kernels of a GPU compute it; None if they cannot, then it runs without them."""

    def parts(self) -> list[str]:
        """Return the parts of its tensors at a site, in the order of the arithmetic."""

    @property
    def by_site(self) -> bool:
        """Whether its width differs from site to site."""

    def at(self, site: str) -> Self:
        """Return its arithmetic at a site, as `layers.3.attention`, without where it is applied."""

    def shapes(self, config: EncoderConfig) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the shape of every tensor by (site, part)."""

    def padded(self, part: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return a part's shape when it is padded with zeros to another size."""

    def fill(self, part: str, tensor: Tensor, sigma: float, draws: RandomStream) -> None:
        """Write a part's initial values into a tensor of zeros; `draws` are numbers of this tensor alone."""

    def apply(self, y: Tensor, x: Tensor, tensors: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the new output of a site, given its output `y` and the input `x` of the module that computed `y`.

        Both are `[n, width]` with one slot's tensors, or `[slots, n, width]` with stacked tensors. `y` may hold several
        sites side by side; `tensors` has one mapping of parts for each, empty for a site without an addition.
        """


@runtime_checkable
class Fuses(Protocol):
    """An addition that fuses those of the slots that it stands on, which then do not act by themselves.

    Their tensors at its sites are further parts of it: `<k>.<part>` is the part of the addition of slot k, from 0.
    """

    def over(self, below: Sequence[Sequence[Addition]]) -> Addition:
        """Return the same, but with what it fuses: the additions of each slot."""

    def refuses(self, additions: Sequence[Addition]) -> str | None:
        """Return why it cannot fuse the additions of a slot, as the end of a sentence about that slot."""

    def acts_at(self, site: str) -> bool:
        """Return whether it acts at a site, as `layers.3.attention`."""


@cache
def find_addition(name: str) -> type[Addition]:
    """Return the class of an addition by its name."""
    if name not in ADDITIONS:
        raise UnknownName(name, "an addition", ADDITIONS)
    addition: type[Addition] = importlib.import_module(f"adapterbank.slots.additions.{name}").ADDITION
    return addition
