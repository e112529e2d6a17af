"""The frame of the trial campaign: trials, their cases, the time that each has, and what reproduces a failure.

A trial is a promise and a function that tries to break it. Each case follows from (seed, trial, number) alone, so
that one case can be repeated without the others.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials import children

SMALL = 64 * 1024
"""Bytes of evidence that a failure's file holds; what is longer is cut."""


@dataclass(frozen=True)
class Trial:
    """A promise, and the function that tries to break it."""

    name: str
    promise: str
    """A plain sentence; SECURITY.md has the same."""
    full: int
    """Number of cases after which the trial is complete; 0: it ends with its time."""
    run: Callable[[Stage], None]
    weight: float = 1.0
    """Share of the campaign's time."""


@dataclass(frozen=True)
class Case:
    """One try."""

    trial: str
    seed: int
    number: int
    random: random.Random
    """Draws everything that is particular to this case."""


@dataclass
class Stage:
    """What a trial gets, and what comes of it."""

    trial: Trial
    seed: int
    seconds: float
    """Time for the cases; what the trial prepares before its first case adds to it."""
    folder: Path
    """A scratch folder, removed afterwards."""
    failures_to: Path
    only: int | None = None
    """The number of the one case to repeat."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """The evidence of the failure to repeat: what a trial drew beyond `case.random`."""
    show: Callable[[Stage], None] = lambda stage: None
    tries: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    prepared: float = 0.0
    """Seconds before the first case."""
    took: float = 0.0
    closing: ExitStack = field(default_factory=ExitStack)
    """What ends with the trial, also with Ctrl-C: `stage.closing.callback(server.stop)`."""

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self.seconds + self.prepared - (time.monotonic() - self.began))

    def cases(self, count: int | None = None) -> Iterator[Case]:
        """Yield the cases until the time or the full count (or `count`) is used up; at least one, in any case."""
        most = count or self.trial.full
        gc.collect()
        gc.freeze()  # or every child would copy what its collector looks at
        self.prepared = self.prepared or time.monotonic() - self.began
        for number in itertools.count() if self.only is None else (self.only,):
            if self.tries and (not self.left or (most and self.tries >= most)):
                return
            self.show(self)
            yield self.case(number)
            self.tries += 1

    def case(self, number: int) -> Case:
        """Return a case by its number."""
        return Case(self.trial.name, self.seed, number, random.Random(f"{self.seed} {self.trial.name} {number}"))

    def fail(self, case: Case, what: str, **evidence: Any) -> None:
        """Record that a case broke the promise; `evidence` says what was expected and found, with the input itself."""
        told = {"trial": case.trial, "seed": case.seed, "case": case.number, "what": what}
        told["promise"] = self.trial.promise
        told["evidence"] = {key: readable(value) for key, value in evidence.items()}
        self.failures_to.mkdir(parents=True, exist_ok=True)
        same = sum(failure["case"] == case.number for failure in self.failures)
        path = self.failures_to / f"{case.trial}-{case.seed}-{case.number}{f'-{same + 1}' if same else ''}.json"
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        self.failures.append({"case": case.number, "what": what, "file": path.name})
        self.show(self)

    def note(self, name: str, value: Any) -> None:
        """Keep a figure: it stands in the JSON and below the table."""
        self.notes[name] = value


def readable(value: Any) -> Any:
    """Return a value as JSON can hold it: bytes as text, as hexadecimal where they are none, everything short."""
    if isinstance(value, bytes):
        cut = value[:SMALL]
        try:
            return {"text": cut.decode(), "bytes": len(value)}
        except UnicodeDecodeError:
            return {"hex": cut.hex(), "bytes": len(value)}
    if isinstance(value, dict):
        return {str(key): readable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [readable(one) for one in value[:1000]]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:SMALL]


def run_all(
    trials: Sequence[Trial],
    *,
    minutes: float,
    seed: int,
    failures_to: Path,
    repeat: Mapping[str, Any] | None = None,
    show: Callable[[Stage], None] = lambda stage: None,
) -> Iterator[Stage]:
    """Run trials one after the other and yield each stage as it begins; its numbers are final when the next begins.

    The time that is left is divided by the weights of the trials that are left, so a trial that is complete early
    passes its time on; the time to prepare a trial is not counted. An exception of a trial itself counts as its
    failure. `repeat` is the content of a failure's file.
    """
    only, evidence = (int(repeat["case"]), repeat["evidence"]) if repeat else (None, {})
    ends = time.monotonic() + 60 * minutes
    for place, trial in enumerate(trials):
        share = trial.weight / sum(one.weight for one in trials[place:])
        folder = Path(tempfile.mkdtemp(prefix=f"trial-{trial.name}-"))
        seconds = max(0.0, ends - time.monotonic()) * share
        stage = Stage(trial, seed, seconds, folder, failures_to, only, evidence, show)
        yield stage
        try:
            with stage.closing:
                trial.run(stage)
        except Exception as error:
            case = stage.case(only if only is not None else stage.tries)
            stage.fail(
                case, f"The trial itself ended with {type(error).__name__}: {error}", trace=traceback.format_exc()
            )
        finally:
            stage.took = time.monotonic() - stage.began
            ends += stage.prepared
            children.end_all()
            for _ in range(3):  # a child may have written meanwhile
                with suppress(OSError):
                    remove(folder)
                    break


def remove(folder: Path) -> None:
    """Remove a scratch folder, also where a case has left something in it unreadable."""

    def allow(_function: Any, path: str, _error: Any) -> None:
        for one in (Path(path).parent, Path(path)):
            if one.exists() and not one.is_symlink():
                one.chmod(0o700)
        shutil.rmtree(path) if Path(path).is_dir() and not Path(path).is_symlink() else Path(path).unlink()

    shutil.rmtree(folder, onerror=allow)
