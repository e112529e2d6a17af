"""The quickest layout of the frozen matrices on this CPU, by a measurement of about a second. Knows no tasks."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens, pack
from adapterbank.encoder.forward import Frozen, forward
from adapterbank.encoder.products import LAYOUTS
from adapterbank.errors import ConfigError
from adapterbank.runtime import find_dtype

LOG = logging.getLogger("adapterbank.load")
_SECONDS = 1.0
"""What the measurement takes, beside laying the matrices out and the first call of each shape."""
_WORTH = 1.2
"""A coarser layout is chosen only if it is so many times as quick as fp32."""
_SHAPES = ((1, 16), (16, 16))
"""Rows and tokens of a row: one short text, and a small batch."""


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and what every candidate took."""

    layout: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        """Return the choice in a sentence."""
        times = ", ".join(f"{1000 * seconds:.1f} ms in {name}" for name, seconds in self.seconds.items())
        return f"precision {self.layout}, chosen by a measurement: {times}"


def choose_layout(backbone: Backbone, seconds: float = _SECONDS) -> LayoutChoice:
    """Measure the bare encoder with every layout that this CPU computes; keep the matrices of the chosen one."""
    passes = {name: _passes(backbone, name) for name in LAYOUTS if _works(name)}
    found: dict[str, list[float]] = {name: [] for name in passes}
    with torch.inference_mode(), _one_thread():
        for run in passes.values():
            run()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not found["fp32"]:
            for name, run in passes.items():
                began = time.perf_counter()
                run()
                found[name].append(time.perf_counter() - began)
    times = {name: statistics.median(each) for name, each in found.items()}
    best = min(times, key=lambda name: times[name] * (1.0 if name == "fp32" else _WORTH))
    backbone.keep_only(best)
    choice = LayoutChoice(best, times)
    LOG.debug("%s", choice)
    return choice


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as a server's lanes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _works(layout: str) -> bool:
    try:
        find_dtype(layout, torch.device("cpu"))
    except ConfigError as error:
        LOG.debug("%s", error)
        return False
    return True


def _passes(backbone: Backbone, layout: str) -> Callable[[], None]:
    """Return a function that runs the bare encoder once on each shape."""
    slots = Frozen(backbone.laid_out(layout))
    longest = backbone.config.max_length
    batches = [
        pack([_row(min(length, longest), backbone.config.vocabulary)] * rows, torch.device("cpu"))
        for rows, length in _SHAPES
    ]

    def run() -> None:
        for batch in batches:
            forward(backbone.config, slots, batch)

    return run


def _row(length: int, vocabulary: int) -> Tokens:
    ids = np.arange(length, dtype=np.int64) * 7919 % vocabulary
    return Tokens(ids, np.zeros(length, dtype=np.int64))
