"""What the kernels are told: forms of bottlenecks, where slots have their numbers, what is dropped. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ACTIVATIONS = ("", "gelu_tanh", "gelu", "relu", "silu", "tanh")
"""The activations by the numbers that the kernels know them by; the first is none."""
_WIDEST = 256
"""The widest bottleneck whose activations fit into a program, unrolled."""
_WIDEST_DEEP = 128
"""The widest bottleneck of which a layer between projections fits, in fp32 and on small GPUs too."""


@dataclass(frozen=True)
class Form:
    """The arithmetic of a bottleneck: what programs are specialised on."""

    widest: int
    """The widest of the batch's slots, padded to a power of two."""
    equal: bool
    """Whether all of them are as wide as that."""
    activation: str = ""
    parallel: bool = False
    multiply: bool = False
    inner_norm: bool = False
    depth: int = 1
    biases: bool = True
    scale: float = 1.0

    @property
    def fits(self) -> bool:
        """Whether it is narrow enough for the kernels."""
        return self.widest <= (_WIDEST if self.depth == 1 else _WIDEST_DEEP)

    @property
    def trains(self) -> bool:
        """Whether there is a kernel for its gradient."""
        return self.fits and self.biases and self.depth == 1 and not (self.parallel or self.multiply or self.inner_norm)


@dataclass(frozen=True)
class Scales:
    """A vector by which an output is multiplied."""


@dataclass(frozen=True)
class Places:
    """Where the numbers of each row's slot are."""

    base: Tensor
    """Any tensor of the slots' type: offsets count from it."""
    rows: Tensor
    """[rows] the row of the table for each row of the batch, int32."""
    table: Tensor
    """[places, columns] int64: offsets of tensors, in numbers, and widths of bottlenecks."""


@dataclass(frozen=True)
class Drop:
    """Dropout of a sub-layer's output."""

    tokens: Tensor
    """[T] key of each token."""
    columns: Tensor
    """[hidden] key of each unit."""
    rate: float


@dataclass(frozen=True)
class Saved:
    """What the backward pass reads."""

    z: Tensor
    """[T, hidden] what is normalised."""
    inner: Tensor
    """[T, M] the bottleneck before its activation."""
    stats: Tensor
    """[T, 2] mean and inverse deviation of `z`, float32."""


@dataclass(frozen=True)
class Into:
    """Where the gradients of slots' numbers are added, float32 `[places, ...]` each; None for what does not train."""

    norm: tuple[Tensor, Tensor] | None = None
    """Of gain and shift."""
    adapter: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """Of the weight and the bias of the down-projection, then of the up-projection."""


@dataclass(frozen=True)
class TrainedSite:
    """A site of slots that train, each with the same number of rows, in the order of the table."""

    places: Places
    form: Form | None
    adapter_at: int
    norm_at: int | None
    epsilon: float
    drop: Drop | None
    into: Into
