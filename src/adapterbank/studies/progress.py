"""The progress of a sweep: done, failed, running and left, the best run per task, the time left. Knows no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank.config import Config


@dataclass(frozen=True)
class RunEvent:
    """A change in one run: it has made progress, ended, failed, or already had a record."""

    config: Config
    kind: str
    """`running`, `done`, `failed` or `known`."""
    share: float = 0.0
    """The completed share of a running run."""
    score: float | None = None
    failure: str = ""
    notes: tuple[str, ...] = ()
    """What the run told about its data and its result."""


@dataclass
class SweepProgress:
    """The state of a sweep, which `update` maintains."""

    total: int = 0
    known: int = 0
    """Runs that already had a record."""
    new: int = 0
    """Runs that had no record at the start and are to be run now; the estimate of the time left is based on them."""
    done: int = 0
    failed: int = 0
    running: dict[Config, float] = field(default_factory=dict)
    """Active runs with their completed share."""
    best: dict[str, tuple[float, Config]] = field(default_factory=dict)
    """The best dev score of each task, and the run that has it."""
    failures: list[tuple[Config, str]] = field(default_factory=list)
    """Failed runs with the reason, including those that failed in an earlier sweep."""
    notes: dict[str, list[Config]] = field(default_factory=dict)
    """What runs told, each sentence once, with the runs that told it, including those of an earlier sweep."""
    last: RunEvent | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> int:
        """The number of runs that have not started."""
        return max(0, self.total - self.known - self.done - self.failed - len(self.running))

    def better(self, task: str, score: float) -> bool:
        """Return whether a score is above all earlier ones of the task."""
        return not math.isnan(score) and (task not in self.best or score > self.best[task][0])

    def update(self, event: RunEvent) -> None:
        """Apply an event."""
        self.last = event
        if event.kind == "running":
            self.running[event.config] = event.share
            return
        self.running.pop(event.config, None)
        if event.kind == "known":
            self.known += 1
        elif event.kind == "failed":
            self.failed += 1
        else:
            self.done += 1
        for note in event.notes:
            self.notes.setdefault(note, []).append(event.config)
        if event.failure:
            self.failures.append((event.config, event.failure))
        if event.score is not None and self.better(event.config.task, event.score):
            self.best[event.config.task] = event.score, event.config

    def seconds_left(self) -> float | None:
        """Estimate the time left from the completed share of the work; None before there is any."""
        begun = self.done + self.failed + len(self.running)
        new = max(begun, self.new or self.total - self.known)  # more runs start if data has changed since
        share = (self.done + self.failed + sum(self.running.values())) / new if new else 0.0
        return (time.perf_counter() - self.began) * (1 - share) / share if share > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return the counts, the best scores and the failures as JSON values."""
        best = {task: {"dev": score, "seed": config.seed} for task, (score, config) in self.best.items()}
        counts: Mapping[str, Any] = {name: getattr(self, name) for name in ("total", "known", "done", "failed", "left")}
        failures = [{"task": config.task, "failure": failure} for config, failure in self.failures]
        notes = [{"note": note, "runs": len(configs)} for note, configs in self.notes.items()]
        return {**counts, "best": best, "failures": failures, "notes": notes}
