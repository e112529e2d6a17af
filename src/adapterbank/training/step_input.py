"""The input of a training step: each run's rows, and what the runs of one group share. Knows no optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adapterbank.encoder.batch import cell_numbers
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.prefix_cache import PrefixCache
from adapterbank.encoder.recompute import Recomputing
from adapterbank.inference.rows import Rows
from adapterbank.slots.mixture import Mixture
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
    recomputing: Recomputing
    """Whether the backward pass computes outputs again."""


@dataclass(frozen=True)
class StepInput:
    """One run's input of a step."""

    slot: int
    mixture: Mixture
    """The run's plan, and the copies of its additions."""
    rows: Rows
    """All rows that the run trains on."""
    units: np.ndarray
    """The indices of the units of this step, each with one target: rows, or texts whose windows are pooled."""
    weights: np.ndarray
    """The weight of each unit's loss; they sum to 1."""
    seed: int
    step: int

    @property
    def plan(self) -> Plan:
        """The run's plan."""
        return self.mixture.plan

    @cached_property
    def starts(self) -> np.ndarray:
        """The place in `batch` of the first row of each unit, and the number of places."""
        starts = self.rows.starts
        return np.concatenate([[0], np.cumsum(starts[self.units + 1] - starts[self.units])])

    @cached_property
    def batch(self) -> np.ndarray:
        """The indices of the rows of this step, those of each unit together."""
        if not self.rows.pooling:
            return self.units
        return _rows_of(self.units, self.rows.starts)

    @cached_property
    def owners(self) -> np.ndarray:
        """The place in `units` of each row."""
        return np.repeat(np.arange(len(self.units)), np.diff(self.starts))

    def places(self, units: np.ndarray) -> np.ndarray:
        """Return the places in `batch` of the rows of some units, given by their places."""
        if not self.rows.pooling:
            return units
        return _rows_of(units, self.starts)

    def length(self, place: int) -> int:
        """Return the number of tokens of a row of the batch."""
        return len(self.rows.tokens[self.batch[place]])

    @cached_property
    def longest(self) -> int:
        """The length of the longest row of the batch."""
        return max(self.length(place) for place in range(len(self.batch)))


def _rows_of(units: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the rows of some units, one unit after the other."""
    return cell_numbers(starts[units + 1] - starts[units], starts[units])
