"""One try in a forked child, under a deadline and a memory limit: a bad case ends its child and nothing else.

The parent imports torch once; a fork takes milliseconds where a new interpreter takes seconds. Needs Linux.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
TAIL = 4000
"""Characters of a child's output that an outcome keeps."""
GRACE = 30
"""Seconds after the deadline at which a child ends itself, in case its parent no longer exists."""

_running: set[int] = set()


@dataclass(frozen=True)
class Outcome:
    """How a try ended."""

    ended: str
    """returned, raised (an exception), killed (as asked), hung (past its deadline) or died (of a signal or exit)."""
    value: Any = None
    """What the function returned."""
    error: str = ""
    """The type of what it raised, or the signal that ended it."""
    message: str = ""
    trace: str = ""
    output: str = ""
    """The end of what it wrote to its standard output and error."""
    seconds: float = 0.0
    cpu: float = 0.0
    """Seconds of CPU time, which do not depend on what else the machine does."""
    megabytes: float = 0.0
    """Resident memory at its peak, above the parent's at the start."""

    @property
    def unfinished(self) -> list[str]:
        """Return a sentence with the last thing it said if it did not return; none if it did."""
        last = self.output.strip().splitlines()[-1:] or ["the start"]
        return [] if self.ended == "returned" else [f"{last[0]}: {self.summary}"]

    @property
    def summary(self) -> str:
        """Return one line on how the try ended."""
        return f"{self.ended} {self.error} {self.message}".strip()


def in_child(
    function: Callable[[], Any], *, seconds: float = 30, megabytes: int = 1024, kill_after: float | None = None
) -> Outcome:
    """Call a function in a forked child and wait for its end; `kill_after` sends it SIGKILL after as many seconds.

    A child that has not ended after `seconds` hangs. `megabytes` is what it may allocate beyond what it starts with;
    an allocation above it is a MemoryError in the child.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _run(function, answer.fileno(), output.fileno(), seconds, megabytes)
        _running.add(pid)
        try:
            status, asked = _wait(pid, seconds, kill_after)
        finally:
            end(pid)
        took = time.monotonic() - began
        output.seek(0)
        text = output.read()[-TAIL:].decode(errors="replace")
        answer.seek(0)
        told = answer.read()
    if status is None:
        return Outcome("hung", error=f"no end after {seconds:g} s", output=text, seconds=took)
    if told:
        with suppress(EOFError, pickle.UnpicklingError):  # killed while it was writing
            return Outcome(**pickle.loads(told), output=text, seconds=took)
    if asked and status == -signal.SIGKILL:
        return Outcome("killed", output=text, seconds=took)
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return Outcome("died", error=name, output=text, seconds=took)


def end(pid: int) -> None:
    """Kill a child and whatever it started, and collect it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if pid in _running:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        _running.discard(pid)


def end_all() -> None:
    """Kill every child that is still running."""
    for pid in list(_running):
        end(pid)


def _wait(pid: int, seconds: float, kill_after: float | None) -> tuple[int | None, bool]:
    """Wait for a child: its exit code (None: past the deadline; negative: a signal), and whether it was killed here."""
    first = seconds if kill_after is None else min(seconds, kill_after)
    handle = os.pidfd_open(pid)
    try:
        done = bool(select.select([handle], [], [], first)[0])
        asked = not done and kill_after is not None
        if asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            done = bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
    if not done:
        return None, asked
    _, status = os.waitpid(pid, 0)
    _running.discard(pid)
    return os.waitstatus_to_exitcode(status), asked


def _run(function: Callable[[], Any], answer: int, output: int, seconds: float, megabytes: int) -> None:
    """Be the child: call the function, write what came of it, end without any clean-up of the parent's."""
    try:
        os.setsid()  # what it starts dies with it, and Ctrl-C reaches the parent alone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(int(seconds) + GRACE)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        limit_memory(megabytes)
        before = _resident()
        try:
            told: dict[str, Any] = {"ended": "returned", "value": function()}
        except BaseException as error:
            told = {"ended": "raised", "error": type(error).__name__, "message": str(error)[:TAIL]}
            told["trace"] = traceback.format_exc()[-TAIL:]
        used = resource.getrusage(resource.RUSAGE_SELF)
        told["cpu"] = used.ru_utime + used.ru_stime
        told["megabytes"] = max(0.0, used.ru_maxrss / 1024 - before)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(answer, pickle.dumps(told))
        os._exit(0)
    finally:
        os._exit(70)


def limit_memory(megabytes: int) -> None:
    """Limit the address space of this process to as much more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + megabytes * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
