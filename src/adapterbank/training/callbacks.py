"""Callbacks: how a run reports its progress to the caller. Knows nothing of how runs work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapterbank.training.job import Progress


@dataclass(frozen=True)
class Callbacks:
    """The functions that a run calls; each does nothing by default."""

    watch: Callable[[Progress], None] = lambda progress: None
    """Called after each step and epoch."""
    stage: Callable[[str, int, int], None] = lambda what, done, total: None
    """Called before the first step with the current stage, how much of it is done, and the total."""
    note: Callable[[str], None] = lambda text: None
    """Called with messages for the user."""
