"""The scene of a fault: a server, a client that watches its healthy tasks, and what must become true."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.frame import Case, Stage
from trials.server import KINDS, Server, TrialBank, until

NAMED_WITHIN = 20.0
"""Seconds within which a fault must be named, on however busy a machine; the documents promise five."""
HEALED_WITHIN = 30.0
"""Seconds within which all is well again."""
ANSWERED_WITHIN = 20.0
"""Seconds within which a healthy task must answer."""


class Watcher(threading.Thread):
    """Asks the healthy tasks again and again over one connection, and compares the answers."""

    def __init__(self, known: TrialBank, server: Server) -> None:
        super().__init__(daemon=True)
        self.known, self.server = known, server
        self.asked, self.slowest, self.problems = 0, 0.0, list[str]()
        self.over = threading.Event()

    def run(self) -> None:
        """Ask until it is over."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=ANSWERED_WITHIN)
        while not self.over.wait(0.01):
            kind = [*KINDS][self.asked % len(KINDS)]
            rows = self.known.common(kind, 1)
            row = rows[self.asked % len(rows)]
            body = {"text": row[0], **({"pair": row[1]} if row[1] is not None else {})}
            began = time.monotonic()
            try:
                connection.request(
                    "POST", f"/v1/tasks/healthy-{kind}/predict", json.dumps(body), {"Content-Type": "application/json"}
                )
                reply = connection.getresponse()
                found = json.loads(reply.read())
                right = reply.status == 200 and self.known.is_right(
                    f"healthy-{kind}", found["version"], row, found["predictions"][0]
                )
                if not right:
                    self.problems.append(f"healthy-{kind}: {reply.status} {found}")
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                if not self.over.is_set():
                    self.problems.append(f"healthy-{kind}: {error!r}")
                connection.close()
                time.sleep(0.2)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.asked += 1
        connection.close()

    def end(self) -> None:
        """Stop asking."""
        self.over.set()
        self.join(ANSWERED_WITHIN + 1)


@dataclass
class Scene:
    """A server with a fault, and what came of it."""

    stage: Stage
    case: Case
    fault: Fault
    known: TrialBank
    server: Server
    watcher: Watcher
    how: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bank(self) -> Path:
        """The bank as the server sees it, which may be on a file system of its own."""
        return self.fault.bank(self.known, self.server, self.how)

    @property
    def victim(self) -> Path:
        """The folder of the task that the fault hits."""
        return self.bank / "tasks" / "victim"

    def check(self, true: Callable[[], bool], what: str, seconds: float = NAMED_WITHIN) -> None:
        """Wait for something that must become true; else the fault breaks the promise."""
        began = time.monotonic()

        def happened() -> bool:
            with contextlib.suppress(OSError):
                return true()
            return False

        if until(happened, seconds):
            self.seconds[what] = round(time.monotonic() - began, 1)
        else:
            self.fail(f"not so within {seconds:.0f} s: {what}")

    def fail(self, what: str) -> None:
        """Record a failure with what the server says."""
        evidence: dict[str, Any] = {"log": list(self.server.tail), "how": self.how}
        for path in ("/readyz", "/v1/tasks"):
            with contextlib.suppress(OSError):
                evidence[path] = self.server.ask("GET", path, seconds=5)
        self.stage.fail(self.case, f"{self.fault.name}: {what}", **evidence)

    def listed(self, task: str) -> bool:
        """Whether a task is among the problems that the server lists."""
        return any(one["task"] == task for one in self.server.ask("GET", "/v1/tasks", seconds=5)[1]["problems"])

    def stalled(self) -> bool:
        """Whether readiness, metrics and the log name something that stands still."""
        ready = self.server.ask("GET", "/readyz", seconds=5)[1]
        counted = sum(n for name, n in self.server.metrics().items() if name.startswith("adapterbank_stalled"))
        return bool(ready.get("stalled")) and counted > 0 and any("stall" in line for line in self.server.tail)

    def serves(self, task: str, version: int | None = None) -> bool:
        """Whether a task answers, with this version, and rightly."""
        row = self.known.common("classification", 1)[0]
        status, found = self.server.ask("POST", f"/v1/tasks/{task}/predict", {"text": row[0]}, seconds=5)
        if status != 200 or (version is not None and found["version"] != version):
            return False
        return self.known.is_right(task, found["version"], row, found["predictions"][0])

    def status(self, method: str, path: str, body: Any = None) -> int:
        """Return the status of an answer."""
        return self.server.ask(method, path, body, seconds=ANSWERED_WITHIN)[0]


@dataclass(frozen=True)
class Fault:
    """A fault: how the server starts, and what happens then."""

    name: str
    happen: Callable[[Scene], None]
    way: Callable[[], str] = lambda: "on the files of the bank"
    """How the fault is made on this machine."""
    start: Callable[[TrialBank, str], Mapping[str, Any]] = lambda known, how: {}
    """Options of `Server`."""
    bank: Callable[[TrialBank, Server, str], Path] = lambda known, server, how: known.bank.path
