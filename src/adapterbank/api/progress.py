"""Progress of long work in a terminal or a notebook: stage, loss, score, speed, time left. Hidden elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from adapterbank.api.plain_text import escaped
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.job import Progress


@contextlib.contextmanager
def reporting(progress: bool | None, given: Mapping[str, Any]) -> Iterator[Callbacks]:
    """Yield the callbacks of a run: those that are given, and for the others a display.

    By default (None) there is a display in a terminal and in a notebook; True shows epochs and notes elsewhere too.
    """
    if not (is_watched() if progress is None else progress):
        yield Callbacks(**given)
        return
    with Display(lines=True) as display:
        yield Callbacks(**{"watch": display.watch, "stage": display.stage, "note": display.note, **given})


def is_watched() -> bool:
    """Return whether somebody sees what is printed: in a terminal, or in a notebook."""
    return sys.stderr.isatty() or Console(stderr=True).is_jupyter


class Stages:
    """Progress bar for work that is counted in rows."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        """Prepare the bar; it is hidden if `quiet`, and where there is neither a terminal nor a notebook."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        console = console or Console(stderr=True, highlight=False)
        # Without ipywidgets, rich draws no bar in a notebook and warns at each step instead.
        widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        self.shown = (sys.stderr.isatty() or widgets) and not quiet
        self._bar = Bar(*columns, console=console, disable=not self.shown, transient=True)
        self._task = self._bar.add_task("reading", total=None)

    def __enter__(self) -> Stages:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and restore the terminal."""
        self._bar.stop()

    def stage(self, what: str, done: int, total: int | None) -> None:
        """Draw the progress of a stage; without a total the bar only shows activity."""
        self._bar.update(self._task, description=what, completed=done, total=total)

    def watcher(self, what: str) -> Callable[[int, int], None]:
        """Return a callback that draws the progress of the stage `what`."""
        return lambda done, total: self.stage(what, done, total)


class Display:
    """Progress of a training run: a bar, one line per epoch, and notes, all on standard error."""

    def __init__(self, *, quiet: bool = False, lines: bool = False) -> None:
        """Prepare the display; `quiet` hides all but the notes, `lines` prints epochs even without a terminal."""
        self._console = Console(stderr=True, highlight=False)
        self._stages = Stages(quiet=quiet, console=self._console)
        self._lines = self._stages.shown or lines
        self._score = ""
        self.reached = "before the end of the first epoch"
        """Where the run is, for the message after Ctrl-C."""

    def __enter__(self) -> Display:
        """Start drawing."""
        self._stages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and restore the terminal."""
        self._stages.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Print a note for the user."""
        self._console.print(f"note: {escaped(text)}", markup=False, soft_wrap=True)

    def stage(self, what: str, done: int, total: int) -> None:
        """Draw the progress of the work before training, such as tokenising."""
        self._stages.stage(what, done, total)

    def watch(self, progress: Progress) -> None:
        """Draw a step; print a line for each epoch."""
        if progress.score is not None:
            self._score = f", dev {progress.score:.4f}"
            self.reached = f"after epoch {progress.epoch} of {progress.epochs}"
            if self._lines:
                self._console.print(
                    f"epoch {progress.epoch}/{progress.epochs}: loss {progress.loss:.4f}{self._score}", markup=False
                )
            return
        text = f"epoch {progress.epoch}/{progress.epochs} loss {progress.loss:.4f}{self._score}"
        text += f" {progress.rows_per_second:.0f} rows/s"
        self._stages.stage(text, progress.step, progress.steps)
