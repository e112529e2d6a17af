"""A simulated GPU engine: does the host's work for a GPU without one, so that a service can be measured anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.inference.engine import AHEAD, Engine
from adapterbank.inference.graph_runner import ROWS, Wait
from adapterbank.inference.runner import tokens_at_once
from adapterbank.inference.slot_cache import TaskHandle

CALLS = 6
"""Calls that a batch makes to a GPU: copies in both directions, the graph's run, and what surrounds them."""


class Pretended(Engine):
    """The host's side of a GPU: a few calls for every batch, and made-up outputs later."""

    def __init__(self, backbone: Backbone, milliseconds: float, **options: Any) -> None:
        """Set the time of a full batch."""
        super().__init__(backbone, **options)
        self._milliseconds = milliseconds
        self._busy = 0.0  # until then

    @property
    def tokens_at_once(self) -> int:
        """Same as for a GPU."""
        return tokens_at_once(torch.device("cuda"))

    @property
    def lanes(self) -> int:
        """Same as for a GPU."""
        return 1

    @property
    def ahead(self) -> int:
        """Same as for a GPU."""
        return AHEAD

    def launch(self, tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> Wait:
        """Return made-up outputs after the given time."""
        source, target = torch.ones(64), torch.zeros(64)
        with self.slots.using([known for known in dict.fromkeys(tasks) if known]):
            for start in range(0, len(tokens), ROWS):
                for _ in range(CALLS):
                    target.copy_(source)
                seconds = self._milliseconds / 1000 * min(1.0, (len(tokens) - start) / ROWS)
                self._busy = max(self._busy, time.perf_counter()) + seconds
        ends = self._busy

        def wait() -> list[np.ndarray]:
            time.sleep(max(0.0, ends - time.perf_counter()))
            return [np.array([0.3, -0.2], np.float32)] * len(tokens)

        return wait
