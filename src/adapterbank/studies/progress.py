"""Where a sweep stands: done, failed, running, left, the best by task, the time left. Knows no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank.config import Config


@dataclass(frozen=True)
class RunEvent:
    """What is heard of a run: it goes on, has ended, has failed, or had a record already."""

    config: Config
    kind: str
    """`running`, `done`, `failed` or `known`."""
    share: float = 0.0
    """Of a running run: how much of it is done."""
    score: float | None = None
    failure: str = ""


@dataclass
class SweepProgress:
    """A sweep's standing; `hear` keeps it."""

    total: int = 0
    known: int = 0
    """Runs that had a record when the sweep came to them."""
    new: int = 0
    """Runs that had none when it began, as far as they are to be run now: the work of which the time left is told."""
    done: int = 0
    failed: int = 0
    running: dict[Config, float] = field(default_factory=dict)
    """Runs on their way, and how much of each is done."""
    best: dict[str, tuple[float, Config]] = field(default_factory=dict)
    """The best dev score of each task, and whose it is."""
    failures: list[tuple[Config, str]] = field(default_factory=list)
    """Runs that failed and why, now or as the records say that they have."""
    last: RunEvent | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> int:
        """How many runs have neither ended nor begun."""
        return max(0, self.total - self.known - self.done - self.failed - len(self.running))

    def better(self, task: str, score: float) -> bool:
        """Say whether a score is above all that the task has had so far."""
        return not math.isnan(score) and (task not in self.best or score > self.best[task][0])

    def hear(self, news: RunEvent) -> None:
        """Take note of a run."""
        self.last = news
        if news.kind == "running":
            self.running[news.config] = news.share
            return
        self.running.pop(news.config, None)
        if news.kind == "known":
            self.known += 1
        elif news.kind == "failed":
            self.failed += 1
        else:
            self.done += 1
        if news.failure:
            self.failures.append((news.config, news.failure))
        if news.score is not None and self.better(news.config.task, news.score):
            self.best[news.config.task] = news.score, news.config

    def seconds_left(self) -> float | None:
        """Estimate from the share of the work that is done; None before there is any."""
        begun = self.done + self.failed + len(self.running)
        new = max(begun, self.new or self.total - self.known)  # more are begun where data have changed since
        share = (self.done + self.failed + sum(self.running.values())) / new if new else 0.0
        return (time.perf_counter() - self.began) * (1 - share) / share if share > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Give the counts, the best and the failures."""
        best = {task: {"dev": score, "seed": config.seed} for task, (score, config) in self.best.items()}
        counts: Mapping[str, Any] = {name: getattr(self, name) for name in ("total", "known", "done", "failed", "left")}
        failures = [{"task": config.task, "failure": failure} for config, failure in self.failures]
        return {**counts, "best": best, "failures": failures}
