"""Comparison of worker processes that take turns on one machine, and the statistics of their times.

A worker reads JSON lines and answers each with one: first a setup, then any number of orders. Its standard error is
kept in a file. A worker that dies or stops responding is reported and left out, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE = 240
"""Longest time in seconds for one answer of a worker; the first call of a compiled step takes longest."""

SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
"""Environment of every worker; several compile at the same time, so none may use all cores for it."""


_KEPT = ("peak_mb", "reserved_mb", "resident_mb", "first_step_s")
"""What is kept of a worker's last answer."""


class Contestant:
    """One worker process."""

    def __init__(self, name: str, command: list[str], setup: dict[str, Any], extra: dict[str, str]) -> None:
        """Start the process; it is ready when it has answered (`receive`).

        `setup["always"]` goes with every order; `extra` are environment variables of its own.
        """
        self.name, self.setup = name, setup
        self.failure = ""
        self.about: dict[str, Any] = {}  # its first answer: what it trains, versions
        self.last: dict[str, Any] = {}  # its last answer
        self.seconds: list[float] = []
        self._errors = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**SURROUNDINGS, **os.environ, **extra},
        )
        self._orders: queue.Queue[str] = queue.Queue()
        self._answers: queue.Queue[str] = queue.Queue()
        for work in (self._speak, self._listen):
            threading.Thread(target=work, daemon=True).start()
        self.send({"setup": setup})

    def _speak(self) -> None:
        """Write orders in a thread: a large setup fills the pipe, and the caller must not wait for the imports."""
        assert self._process.stdin is not None
        try:
            while True:
                self._process.stdin.write(self._orders.get() + "\n")
                self._process.stdin.flush()
        except OSError:  # the worker is gone, which `_listen` notices
            return

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print too
                self._answers.put(line)
        self._answers.put("")

    def send(self, order: dict[str, Any]) -> None:
        """Send an order; if the worker has ended, `receive` reports it."""
        self._orders.put(json.dumps({**order, **self.setup.get("always", {})}))

    def receive(self) -> dict[str, Any]:
        """Wait for the answer; if there is none, return an empty one and drop the contestant."""
        try:
            line = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            line = ""
        if not line:
            self._give_up()
            return {}
        self.last = json.loads(line)
        self.about = self.about or self.last
        return self.last

    def _give_up(self) -> None:
        try:
            code: int | None = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        self.failure = f"{'silent' if code is None else f'exit {code}'}: " + " | ".join(said[-3:])[-600:]
        print(f"  left out: {self.name} ({self.failure})", flush=True)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Field:
    """All contestants of one comparison."""

    def __init__(self, contestants: Iterable[Contestant]) -> None:
        """Wait until all are ready; they prepare in parallel. Those of another field have been waited for."""
        self.all = list(contestants)
        for contestant in self.all:
            if not contestant.about and not contestant.failure:
                contestant.receive()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *error: object) -> None:
        for contestant in self.all:
            contestant.stop()

    @property
    def racing(self) -> list[Contestant]:
        """The contestants that were not dropped."""
        return [contestant for contestant in self.all if not contestant.failure]

    def warm_up(self, order: dict[str, Any], *, one_by_one: bool = False) -> None:
        """Run an order whose times are discarded, in parallel, because most of it is compilation on the CPU."""
        racing = self.racing
        for group in [[contestant] for contestant in racing] if one_by_one else [racing]:
            for contestant in group:
                contestant.send(order)
            for contestant in group:
                contestant.receive()

    def take_turns(self, order: dict[str, Any], rounds: int) -> None:
        """Run an order on one contestant after the other, several rounds."""
        for _ in range(rounds):
            for contestant in self.racing:
                contestant.send(order)
                contestant.seconds += contestant.receive().get("seconds", [])

    def results(self, own: str) -> dict[str, Any]:
        """Return each contestant's figures, its time as a multiple of `own`'s, and the reasons of those left out.

        Without `own`, the first of adapterbank's contestants takes its place.
        """
        timed = {c.name: c for c in self.racing if c.seconds}
        if own not in timed:
            own = next((name for name in timed if name.startswith("adapterbank")), own)
        base = statistics.median(timed[own].seconds) if own in timed else None
        found = {
            name: {
                **spread(c.seconds),
                "times_adapterbank": statistics.median(c.seconds) / base if base else None,
                **{key: c.about[key] for key in ("trained", "versions") if key in c.about},
                **{key: c.last[key] for key in _KEPT if key in c.last},
            }
            for name, c in timed.items()
        }
        return {"contestants": found, "failed": {c.name: c.failure for c in self.all if c.failure}}


def spread(seconds: list[float]) -> dict[str, Any]:
    """Return median, quartiles and count, in milliseconds."""
    several = len(seconds) > 1
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")[::2] if several else [seconds[0], seconds[0]]
    return {
        "median_ms": 1000 * statistics.median(seconds),
        "quartiles_ms": [1000 * q for q in quartiles],
        "samples": len(seconds),
    }


def print_table(title: str, found: dict[str, Any]) -> None:
    """Print a comparison."""
    print(f"\n{title}")
    for name, r in found["contestants"].items():
        low, high = r["quartiles_ms"]
        times = f"{r['median_ms']:9.2f} ms ({low:.2f}-{high:.2f})"
        ratio = f"{r['times_adapterbank']:6.2f}x" if r["times_adapterbank"] else "      -"
        print(f"  {name:<46} {times:<32} {ratio}  {r.get('peak_mb', 0):8.0f} MB", flush=True)


def write(path: Path, found: dict[str, Any]) -> None:
    """Write JSON; called after each part, so that no measurement is lost if a later part fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


class Peers:
    """How the peers' workers are started: with their own environment's Python, or this one and a folder of packages."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read the options of `add_arguments`."""
        self.python, self.path = options.peers, options.peers_path
        self.there = bool(self.python or self.path)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options that locate the peers."""
        parser.add_argument("--peers", help="Python of an environment with bench/requirements.txt")
        parser.add_argument("--peers-path", help="folder with the peers' packages (pack_peers.py), for this Python")

    def command(self, script: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs a script of this folder beside the peers, and its environment variables."""
        extra = {"PYTHONPATH": str(Path(self.path).resolve())} if self.path else {}
        return [self.python or sys.executable, str(HERE / script)], extra

    def start(self, name: str, setup: dict[str, Any]) -> Contestant:
        """Start a peer's worker."""
        command, extra = self.command("worker_peers.py")
        return Contestant(name, command, setup, extra)


def start_own(name: str, setup: dict[str, Any]) -> Contestant:
    """Start adapterbank's worker, from the source tree if it is not installed."""
    source = str(HERE.parent / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return Contestant(name, [sys.executable, str(HERE / "worker_own.py")], setup, {"PYTHONPATH": path})
