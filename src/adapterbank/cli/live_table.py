"""A sweep on the terminal: a live table of what is done, running, failed and left. Lines where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adapterbank.config import Config
from adapterbank.studies.grid import describe, differing
from adapterbank.studies.progress import SweepProgress

_ROWS = 8
"""Running runs that are listed at most."""


class LiveTable:
    """Draws a tally when it changes, four times a second at most."""

    def __init__(self, runs: Sequence[Config], *, quiet: bool = False) -> None:
        """Take all runs, to name each by what it differs in; `quiet` draws nothing."""
        self._differs, self._quiet = differing(runs), quiet
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = sys.stderr.isatty() and not quiet
        self._tally, self._drawn, self._stage = SweepProgress(total=len(runs)), 0.0, ""  # until another is heard of

    def __enter__(self) -> LiveTable:
        """Start drawing."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and leave the terminal as it was."""
        if self._shown:
            self._live.stop()

    def watch(self, progress: SweepProgress) -> None:
        """Draw where the sweep stands."""
        self._tally, self._stage = progress, ""
        self._draw()
        if not self._shown and not self._quiet:
            self._line(progress)

    def stage(self, what: str, done: int, total: int) -> None:
        """Draw how far the work before a training is."""
        self._stage = f"; {what}, {done} of {total}"
        self._draw()

    def _draw(self) -> None:
        if self._shown and time.monotonic() - self._drawn > 0.25:
            self._drawn = time.monotonic()
            self._live.update(self._table(self._tally), refresh=True)

    def standing(self) -> str:
        """Tell the counts in words."""
        progress = self._tally
        counts = {"done": progress.known + progress.done, "running": len(progress.running), "failed": progress.failed}
        return ", ".join(f"{count} {name}" for name, count in {**counts, "left": progress.left}.items())

    def _line(self, progress: SweepProgress) -> None:
        """Print a line for each run that has ended."""
        news = progress.last
        if news is None or news.kind in ("running", "known"):
            return
        what = f"dev {news.score:.4f}" if news.score is not None else f"failed: {news.failure}"
        ended = progress.known + progress.done + progress.failed
        left = f"{_time(progress.seconds_left())} left"
        text = f"{ended}/{progress.total} {describe(news.config, self._differs)}: {what} ({left})"
        self._console.print(text, markup=False, soft_wrap=True)

    def _table(self, progress: SweepProgress) -> Group:
        best = Table("task", "best on dev", "by", box=None, pad_edge=False)
        for task, (score, config) in sorted(progress.best.items()):
            best.add_row(task, f"{score:.4f}", describe(config, self._differs))
        running = Table("running", "", box=None, pad_edge=False)
        for config, share in list(progress.running.items())[:_ROWS]:
            running.add_row(describe(config, self._differs), f"{100 * share:.0f} %")
        head = Text(f"{self.standing()}, of {progress.total}; {_time(progress.seconds_left())} left{self._stage}")
        return Group(head, *([best] if progress.best else []), running)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown time"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
