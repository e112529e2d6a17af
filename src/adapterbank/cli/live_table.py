"""Live table of a running sweep: what is done, running, failed and left. Without a terminal, one line per run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adapterbank.api.plain_text import escaped
from adapterbank.cli.console import format_duration
from adapterbank.config import Config
from adapterbank.studies.grid import describe, differing
from adapterbank.studies.progress import SweepProgress

_ROWS = 8
"""Largest number of running runs that are listed."""
_INTERVAL = 0.25
"""Seconds between two drawings, at least."""


class LiveTable:
    """Draws the progress of a sweep."""

    def __init__(self, runs: Sequence[Config], *, quiet: bool = False, console: Console | None = None) -> None:
        """Prepare a table of these runs; each is named by the options in which they differ. `quiet` draws nothing."""
        self._differs, self._quiet = differing(runs), quiet
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown = self._console.file.isatty() and not quiet
        self._progress, self._drawn, self._stage = SweepProgress(total=len(runs)), float("-inf"), ""

    def __enter__(self) -> LiveTable:
        """Start drawing."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and restore the terminal."""
        if self._shown:
            self._live.stop()

    def watch(self, progress: SweepProgress) -> None:
        """Draw the sweep's progress."""
        self._progress, self._stage = progress, ""
        self._draw()
        if not self._shown and not self._quiet:
            self._print_last(progress)

    def stage(self, what: str, done: int, total: int) -> None:
        """Draw the progress of the work before a training, such as tokenising."""
        self._stage = f"; {what}, {done} of {total}"
        self._draw()

    def counts(self) -> str:
        """Return the numbers of runs by state, such as `2 done, 1 running, 0 failed, 5 left`."""
        progress = self._progress
        counts = {"done": progress.known + progress.done, "running": len(progress.running), "failed": progress.failed}
        return ", ".join(f"{count} {name}" for name, count in {**counts, "left": progress.left}.items())

    def _draw(self) -> None:
        if self._shown and time.monotonic() - self._drawn > _INTERVAL:
            self._drawn = time.monotonic()
            self._live.update(self._table(self._progress), refresh=True)

    def _print_last(self, progress: SweepProgress) -> None:
        """Print a line for the run that ended last."""
        event = progress.last
        if event is None or event.kind in ("running", "known"):
            return
        what = f"dev {event.score:.4f}" if event.score is not None else f"failed: {event.failure}"
        ended = progress.known + progress.done + progress.failed
        left = f"{format_duration(progress.seconds_left())} left"
        text = f"{ended}/{progress.total} {describe(event.config, self._differs)}: {what} ({left})"
        self._console.print(escaped(text), markup=False, soft_wrap=True)

    def _table(self, progress: SweepProgress) -> Group:
        best = Table("task", "best on dev", "run", box=None, pad_edge=False)
        for task, (score, config) in sorted(progress.best.items()):
            best.add_row(Text(escaped(task)), f"{score:.4f}", Text(escaped(describe(config, self._differs))))
        running = Table("running", "", box=None, pad_edge=False)
        for config, share in list(progress.running.items())[:_ROWS]:
            running.add_row(Text(escaped(describe(config, self._differs))), f"{100 * share:.0f} %")
        left = format_duration(progress.seconds_left())
        head = Text(f"{self.counts()}, of {progress.total}; {left} left{self._stage}")
        return Group(head, *([best] if progress.best else []), running)
