"""Shared by the tests of training as a service: a bank for a tiny encoder, data files, waiting for a run."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.jobs.run_row import TrainingRun
from adapterbank.storage.bank import Bank
from small_data import reviews

FAST: dict[str, Any] = {"epochs": 2, "size": 4, "lr": 0.01, "batch": 8, "max_length": 32}
DATA: dict[str, Any] = {"format": "csv", "bytes": 3, "sha256": "0" * 64}
"""What a run's row says of its data file."""
linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks for processes in /proc")
LONG: dict[str, Any] = {**FAST, "epochs": 2000, "patience": 0}
"""More epochs than any test waits for."""


def new_bank(folder: Path, backbone: Any) -> Path:
    """Make an empty bank for a backbone."""
    return Bank.open(folder, {"name": str(backbone.folder), "sha256": backbone.sha256}, create=True).path


def send(jobs: JobQueue, task: str = "sentiment", data: bytes | None = None, **options: Any) -> TrainingRun:
    """Queue a run as a request does."""
    with jobs.upload("csv") as upload:
        upload.write(data or table())
        return jobs.submit(task, {**FAST, **options}, upload)


def left(jobs: JobQueue) -> list[str]:
    """Return the names in the folder of data files."""
    return sorted(path.name for path in (jobs.bank / "serving" / "data").iterdir())


def table(count: int = 24) -> bytes:
    """Return the bytes of a CSV file of reviews."""
    lines = ["text,label", *(f"{text},{label}" for text, label in reviews(count))]
    return "\n".join(lines).encode()


def until(jobs: JobQueue, id: str, found: Any = lambda run: run.over, seconds: float = 900) -> TrainingRun:
    """Wait for a state of a run; its process has the lowest priority, so it takes long on a busy machine."""
    end = time.monotonic() + seconds
    while not found(run := jobs.get(id)):
        assert time.monotonic() < end, run
        assert not run.over, run
        time.sleep(0.02)
    return run


def children(pid: int | None = None) -> list[int]:
    """Return the worker processes that a process, or this one, has started."""
    found = glob.glob(f"/proc/{pid or os.getpid()}/task/*/children")
    started = [one for path in found for one in _read(path).split()]
    return [int(one) for one in started if "serving.jobs.worker" in _read(f"/proc/{one}/cmdline")]


def _read(path: str) -> str:
    """Read a file of /proc; empty once the process has ended."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def events(text: str) -> list[tuple[str, Any]]:
    """Read server-sent events as pairs of name and value."""
    parts = [part.split("\n") for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(len(part) == 2 for part in parts)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
