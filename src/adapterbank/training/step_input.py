"""The input of a training step: each run's rows, and what the runs of one group share. Knows no optimiser."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.inference.rows import Rows
from adapterbank.slots.plan import Plan


def dropout_rates(config: EncoderConfig, dropout: float | None) -> tuple[float, float]:
    """Return the dropout rates of hidden states and of attention weights; by default the encoder's own."""
    return (config.dropout, config.attention_dropout) if dropout is None else (dropout, dropout)


@dataclass(frozen=True)
class StepContext:
    """What the runs of one group share at every step."""

    config: EncoderConfig
    prefixes: PrefixCache
    """The outputs of the frozen lower layers."""
    first: int
    """The lowest layer that trains."""
    rates: tuple[float, float]
    """Dropout rates of hidden states and of attention weights."""


@dataclass(frozen=True)
class StepInput:
    """One run's input of a step."""

    slot: int
    plan: Plan
    rows: Rows
    """All rows that the run trains on."""
    batch: np.ndarray
    """The indices of the rows of this step."""
    weights: np.ndarray
    """The weight of each row's loss; they sum to 1."""
    seed: int
    step: int

    def length(self, place: int) -> int:
        """Return the number of tokens of a row of the batch."""
        return len(self.rows.tokens[self.batch[place]])

    @property
    def longest(self) -> int:
        """The length of the longest row of the batch."""
        return max(self.length(place) for place in range(len(self.batch)))
