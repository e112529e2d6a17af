"""The process of one training run as the server sees it: started, listened to, stopped. Knows no table, no bank."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GRACE = 10.0
"""Seconds that a worker has to stop when asked; then it is killed."""
_POLL = 0.2
"""Seconds between two checks whether a run has to stop."""

Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def start_worker(job: Mapping[str, Any], environment: Mapping[str, str], weights: int | None) -> Iterator[Process]:
    """Start a process that does a job (`worker`); it inherits `weights`, and is killed when the `with` ends."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "adapterbank.serving.jobs.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        pass_fds=() if weights is None else (weights,),
        start_new_session=True,  # Ctrl-C in a terminal is for the server, which stops its runs itself
    ) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            yield process
        finally:
            process.kill()  # no effect if it has ended


def listen(process: Process, on_message: Callable[[Mapping[str, Any]], None], stop_reason: Callable[[], str]) -> str:
    """Pass on the messages of a process until it has ended; return why it was asked to stop, or nothing.

    `stop_reason` is called repeatedly; the process is stopped as soon as it returns a reason.
    """
    assert process.stdout is not None
    reason, deadline, rest = "", 0.0, b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None
            if ready.select(_POLL):
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE)
                    return reason
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    on_message(_message(line))
            elif ended:  # though a process that it started may still hold the other end
                return reason
            asked = stop_reason()
            if not reason:
                reason, deadline = asked, time.monotonic() + GRACE
                if reason:
                    process.terminate()
            elif time.monotonic() > deadline:
                process.kill()


def _message(line: bytes) -> dict[str, Any]:
    """Parse a report; what a library prints before the worker takes over the pipe is an empty report."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}
