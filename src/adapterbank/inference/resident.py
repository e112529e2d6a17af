"""What the engine knows of a task besides its tensors. Knows no device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from adapterbank.encoder.windows import STRIDE
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Plan
from adapterbank.tasks.spec import Task


@dataclass(frozen=True)
class Resident:
    """A task of the engine."""

    task: Task
    plan: Plan
    max_length: int
    stride: int = STRIDE
    windows: int = 0
    """The most windows of a text; see `make_rows`."""
    bases: tuple[str, ...] = ()
    """The names, in the engine, of what it stands on."""

    @property
    def in_windows(self) -> bool:
        """Whether a text may become several rows."""
        return KINDS[self.task.kind].windows or self.windows > 1

    @property
    def reading(self) -> Hashable:
        """What tasks must share to share the rows of their texts."""
        kind = KINDS[self.task.kind].windows
        return self.max_length, self.stride if kind else 0, self.windows, self.plan.head.weighs, kind
