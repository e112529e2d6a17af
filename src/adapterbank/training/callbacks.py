"""What a run reports while it goes on: three functions of the caller. Knows nothing of how runs work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapterbank.training.job import Progress


@dataclass(frozen=True)
class Callbacks:
    """The functions that a run calls; each does nothing unless it is given."""

    watch: Callable[[Progress], None] = lambda progress: None
    """Called after each step and epoch."""
    stage: Callable[[str, int, int], None] = lambda what, done, total: None
    """Called during the work before the first step: what is being done, how much of it is done, of how much."""
    note: Callable[[str], None] = lambda text: None
    """Called with sentences for the user."""
