"""Tells which part of a server stands still, and at what. Reads no files and waits for no other part.

A part says what it does (`with heartbeat.work("reading x")`) before it does it. Work that takes longer than its bound
stands still: it is in the body of /readyz and in /metrics from that moment, and in the log within a second. It stops
being so by itself as soon as the work goes on. Work that fails and is tried again (`retried`) stands still too, from
its first failure until it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

BOUND = 3.0
"""Seconds that one piece of work may take, unless the part knows better."""
_EVERY = 1.0
"""Seconds between two looks at all parts: what stands still is in the log within five seconds."""

log = logging.getLogger("adapterbank.serving")

Stalls = Mapping[str, Sequence[str]]
"""Every part of a server, with a phrase for each piece of work that stands still; empty for a part that works."""


@dataclass(frozen=True)
class _Work:
    what: str
    since: float
    bound: float


class Heartbeat:
    """One thread of a server: what it is doing, and since when."""

    def __init__(self, bound: float = BOUND) -> None:
        """Take the seconds after which a piece of work stands still."""
        self._bound = bound
        self._work: _Work | None = None
        self._failing: _Work | None = None

    @contextlib.contextmanager
    def work(self, what: str, bound: float | None = None, *, retried: bool = False) -> Iterator[None]:
        """Name a piece of work for as long as the `with` lasts; `bound` is for one that may rightly take longer.

        `retried` is for work that is tried again until it succeeds.
        """
        before, self._work = self._work, _Work(what, time.monotonic(), bound or self._bound)
        began = self._work
        try:
            yield
            self._failing = None if retried else self._failing
        except Exception:
            self._failing = (self._failing or began) if retried else self._failing
            raise
        finally:
            self._work = before and replace(before, since=time.monotonic())

    def beat(self, what: str = "", bound: float | None = None) -> None:
        """Note that the work in progress goes on; with a name, only if it is that work. `bound` is for its rest."""
        if self._work and what in ("", self._work.what):
            self._work = replace(self._work, since=time.monotonic(), bound=bound or self._work.bound)

    def stalled(self) -> list[str]:
        """Return what stands still, and for how long; empty if nothing does."""
        now = time.monotonic()
        found = [work for work in (self._failing or self._work,) if work and now - work.since > work.bound]
        return [standing(work.what, now - work.since) for work in found]


def standing(what: str, seconds: float) -> str:
    """Return the phrase for work that stands still."""
    return f"{what} for {seconds:.0f} s"


class Watchdog:
    """Looks at all parts once a second in a thread of its own; logs when one begins to stand still and when it ends."""

    def __init__(self, stalls: Callable[[], Stalls]) -> None:
        """Take a function that returns the parts; it must not wait."""
        self._stalls = stalls
        self._known: frozenset[str] = frozenset()
        self._stopped = threading.Event()
        self._echo = threading.Event()
        self._asked = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the parts, and the event loop that answers requests."""
        self._stopped.clear()
        self._ask(loop)
        threading.Thread(target=self._watch, args=(loop,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; waits for nothing."""
        self._stopped.set()

    def check(self, stalls: Stalls) -> None:
        """Log what has changed since the last look."""
        now = frozenset(part for part, what in stalls.items() if what)
        for part in sorted(now - self._known):
            log.error("stalled", extra={"fields": {"part": part, "work": "; ".join(stalls[part])}})
        for part in sorted(self._known - now):
            log.info("recovered", extra={"fields": {"part": part}})
        self._known = now

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(_EVERY):
            silent = time.monotonic() - self._asked
            if self._echo.is_set():
                self._ask(loop)
                silent = 0.0
            waiting = [standing("answering requests", silent)] if silent > BOUND else []
            self.check({**self._stalls(), "event loop": waiting})

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask the event loop for an echo, which it sends as soon as it runs something else."""
        self._echo.clear()
        self._asked = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._echo.set)
