"""The process of one training run as the server sees it: started, listened to, stopped. Knows no table and no bank."""

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

_GRACE = 10.0
"""Seconds that a run has to stop when asked; then it is killed."""
_LOOK = 0.2
"""Seconds between two looks at whether a run is to be stopped."""

Child = subprocess.Popen[bytes]


@contextlib.contextmanager
def trained(order: Mapping[str, Any], surroundings: Mapping[str, str], weights: int | None) -> Iterator[Child]:
    """Have an order done by a process (`trainee`), to which `weights` is open; it does not outlast the `with`."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "adapterbank.serving.jobs.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **surroundings},
        pass_fds=() if weights is None else (weights,),
        start_new_session=True,  # Ctrl-C in a terminal is for the server, which stops its runs itself
    ) as child:
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(order).encode() + b"\n")
                child.stdin.flush()
            yield child
        finally:
            child.kill()  # nothing, if it has ended


def listen(child: Child, hear: Callable[[Mapping[str, Any]], None], wanted: Callable[[], str]) -> str:
    """Hear all that a process says until it has ended; `wanted` is asked for a reason to stop it, which is given."""
    assert child.stdout is not None
    asked, deadline, rest = "", 0.0, b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None
            if ready.select(_LOOK):
                part = os.read(child.stdout.fileno(), 1 << 16)
                if not part:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_GRACE)
                    return asked
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    hear(_message(line))
            elif ended:  # though what it has started may still hold the other end
                return asked
            if not asked:
                asked, deadline = wanted(), time.monotonic() + _GRACE
                if asked:
                    child.terminate()
            elif time.monotonic() > deadline:
                child.kill()


def _message(line: bytes) -> dict[str, Any]:
    """Read what a run says; what a library prints before the run has the pipe for itself says nothing."""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        return said if isinstance(said, dict) else {}
    return {}
