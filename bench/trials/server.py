"""A real server of a bank of small tasks: the process, what it holds, and the right answer of every version.

The encoder is random and tiny, so that a second holds many requests; the server is `adapterbank serve` as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import random_bank
import shapes

from adapterbank.encoder.backbone import load
from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, Manifest, count_params
from adapterbank.tasks.spec import Examples, Task
from adapterbank.training.builder import initial_tensors

KINDS: Mapping[str, tuple[tuple[str, ...], str, int]] = {
    "classification": (("north", "east", "south"), "accuracy", 3),
    "multilabel": (("red", "big"), "micro_f1", 2),
    "regression": ((), "spearman", 1),
    "span": ((), "span_f1", 2),
}
"""Labels, metric and number of outputs."""
TOLERANCE = 2e-5
"""Largest difference of a number of an answer: rows of other requests share its batch, and sums are rounded."""
MARGIN = 1e-3
"""Texts whose decision is closer than this are not asked: rounding could turn it."""
START_SECONDS = 120.0
"""Seconds after which a server that is not ready has failed to start."""
STOP_SECONDS = 35.0
"""Seconds after which a server that was asked to stop has failed to: the documents promise 30."""
_MAIN = "from adapterbank.cli.entry import main; main()"

Drawn = tuple[Any, ...]
"""The kind of a task, the number that its weights are drawn from, and options of its adapters."""
Row = tuple[str, str | None]
"""A text, and its pair where the task reads pairs."""


class TrialBank:
    """A bank whose packages are drawn by number, and the answers that each must give."""

    def __init__(self, folder: Path, *, texts: int = 24, seed: int = 0) -> None:
        self.folder = folder
        self.backbone = load(shapes.save(shapes.SHAPES["tiny"], folder / "encoder"))
        self.bank = Bank.open(folder / "bank", self.backbone.reference, create=True)
        draw = random.Random(f"texts {seed}")
        self._pool = [
            " ".join(f"word{draw.randrange(104, 2000)}" for _ in range(draw.randint(3, 24))) for _ in range(texts)
        ]
        self.drawn: dict[tuple[str, int], Drawn] = {}
        """(task, version) -> what its weights were drawn from."""
        self._last: dict[str, int] = {}
        self._known: dict[Drawn, dict[Row, dict[str, Any]]] = {}
        self._common: dict[tuple[str, int], list[Row]] = {}

    def put(self, name: str, number: int, kind: str = "classification", **sizes: int) -> int:
        """Put a new version of a task; its answers are known before a server can give them."""
        return self.put_into(self.bank, name, number, kind, **sizes)

    def put_into(self, bank: Bank, name: str, number: int, kind: str = "classification", **sizes: int) -> int:
        """The same into a copy of the bank; `sizes` are options of the adapters (size, depth)."""
        drawn = kind, number, *sorted(sizes.items())
        self.answers(*drawn)
        metric = KINDS[kind][1]
        plan, tensors = self._weights(*drawn)
        version = self._last.get(name, 0) + 1
        self.drawn[name, version] = drawn
        trained = sum(array.size for array in tensors.values())
        draft = Manifest(
            format=FORMAT,
            name=name,
            version=0,
            task=_task(name, kind).to_json(),
            method=plan.to_json(),
            backbone=self.backbone.reference,
            recipe={"max_length": 64},
            seed=number,
            data={},
            metrics={"dev": {metric: 0.5}},
            params=count_params(trained, encoder=self.backbone.parameters, new=trained),
            bytes=0,
            weights_sha256="",
            library="trial",
            created="",
            fingerprint={},
        )
        assert bank.put(draft, tensors).manifest.version == version
        self._last[name] = version
        return version

    def answers(self, kind: str, number: int, *sizes: tuple[str, int]) -> dict[Row, dict[str, Any]]:
        """Return the rows to ask and the right answers, computed by an engine that holds nothing else."""
        drawn = kind, number, *sizes
        if drawn not in self._known:
            engine = Engine(self.backbone, device="cpu", precision="fp32")
            plan, tensors = self._weights(*drawn)
            engine.put("one", _task("one", kind), plan, tensors, 64)
            pairs = [*self._pool[1:], self._pool[0]] if kind == "span" else None
            found = engine.predict([("one", Examples(self._pool, pairs))])[0]
            rows = list(zip(self._pool, pairs or [None] * len(self._pool), strict=True))
            made = zip(rows, (json.loads(json.dumps(one.to_json())) for one in found), strict=True)
            self._known[drawn] = {row: one for row, one in made if _is_clear(one)}
        return self._known[drawn]

    def common(self, kind: str, count: int) -> list[Row]:
        """Return the rows that all of the first numbers of a kind answer clearly."""
        if (kind, count) not in self._common:
            every = [self.answers(kind, number) for number in range(count)]
            self._common[kind, count] = [row for row in every[0] if all(row in one for one in every)]
        return self._common[kind, count]

    def is_right(self, task: str, version: int, row: Row, found: Mapping[str, Any]) -> bool:
        """Whether an answer is that of the version that gave it."""
        drawn = self.drawn.get((task, version))
        return drawn is not None and same(found, self.answers(*drawn)[row])

    def _weights(self, kind: str, number: int, *sizes: tuple[str, int]) -> tuple[Plan, dict[str, Any]]:
        head = Head(kind, KINDS[kind][2])
        options = Options(**{"size": 4 + 4 * (number % 3), **dict(sizes)})
        plan = make_plan(options, depth=self.backbone.config.layers, head=head)
        first = initial_tensors(plan, self.backbone, sigma=random_bank.SPREAD, seed=number)
        draw = np.random.default_rng(number)
        return plan, {
            name: t.numpy() + draw.standard_normal(t.shape, dtype=np.float32) * np.float32(0.2)
            for name, t in sorted(first.items())
        }


def _task(name: str, kind: str) -> Task:
    labels, metric, _ = KINDS[kind]
    return Task(name, kind, ("text", "other") if kind == "span" else ("text",), "label", labels, metric)


def _is_clear(answer: Mapping[str, Any]) -> bool:
    """Whether no rounding could turn the decision."""
    chances = sorted((answer.get("probabilities") or {}).values())
    if "labels" in answer:
        return all(abs(chance - 0.5) > MARGIN for chance in chances)
    return len(chances) < 2 or chances[-1] - chances[-2] > MARGIN


def same(found: Any, wanted: Any) -> bool:
    """Whether two answers are equal up to rounding."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(name in found and same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and not isinstance(found, bool):
        return isinstance(found, int | float) and abs(found - wanted) <= TOLERANCE * max(1.0, abs(wanted))
    return bool(found == wanted)


class Server:
    """`adapterbank serve` in a process of its own, on a free port of this machine."""

    def __init__(
        self,
        bank: Path,
        *,
        words: Sequence[str] = (),
        prelude: str = "",
        limits: Mapping[int, int] | None = None,
        environment: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        wait: bool = True,
    ) -> None:
        """Start a server.

        Args:
            bank: The bank's folder.
            words: Further words of the command line.
            prelude: Code that the process runs first, to inject a fault.
            limits: Resource limits of the process (`resource.RLIMIT_…`).
            environment: Further environment variables.
            wrap: Words before the command: a program that prepares something and then becomes the server.
            wait: Whether to wait until it is ready.
        """
        code = f"{prelude}\n{_MAIN}" if prelude else _MAIN
        plain = [sys.executable, "-c", code, "serve", "--bank", str(bank), "--port", "0", "--device", "cpu", *words]

        def prepare() -> None:
            for name, value in (limits or {}).items():
                resource.setrlimit(name, (value, value))

        source = str(Path(__file__).resolve().parents[2] / "src")
        self.process = subprocess.Popen(
            [*wrap, *plain],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **(environment or {})},
            preexec_fn=prepare,
            start_new_session=True,
        )
        self.errors: deque[dict[str, Any]] = deque(maxlen=200)
        """The newest log lines about errors."""
        self.tail: deque[str] = deque(maxlen=50)
        self.failed = 0
        """Log lines with a trace: bugs."""
        self._found: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = 0
        if wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.kill()
                raise

    def _read(self) -> None:
        """Read the log, so that the pipe never fills; keep the errors and the last lines."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if '"event": "request"' in line:
                continue
            self.tail.append(line)
            if address := re.search(r"http://[^:]+:(\d+)", line):
                self._found.put(int(address[1]))
            if '"level": "error"' in line:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    self.failed += told.get("event") == "failed"
                    self.errors.append(told)
        self._found.put(0)

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server has loaded the bank."""
        ends = time.monotonic() + seconds
        self.find_port(seconds)
        while time.monotonic() < ends:
            with contextlib.suppress(OSError, ValueError):
                if self.ask("GET", "/readyz", seconds=5)[0] == 200:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"the server is not ready: {''.join(self.tail)[-2000:]}")

    def find_port(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server says where it listens."""
        with contextlib.suppress(queue.Empty):
            self.port = self.port or self._found.get(timeout=seconds)
        if not self.port:
            raise RuntimeError(f"the server did not start: {''.join(self.tail)[-2000:]}")

    def ask(self, method: str, path: str, body: Any = None, *, key: str = "", seconds: float = 30.0) -> tuple[int, Any]:
        """Send one request; return the status and the JSON, or the text, of the answer."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if body is not None and not isinstance(body, bytes):
            body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        elif body is not None:
            headers["Content-Type"] = "text/csv"
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            text = reply.read().decode()
            kind = reply.headers.get_content_type()
            return reply.status, json.loads(text) if kind == "application/json" else text
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP answer: {error!r}") from error
        finally:
            connection.close()

    def metrics(self, key: str = "") -> dict[str, float]:
        """Return the server's own numbers by name and labels."""
        lines = str(self.ask("GET", "/metrics", key=key)[1]).splitlines()
        found = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in found}

    def broken(self, key: str = "") -> float:
        """Return how many answers the server itself counts as 5xx; 503 of /readyz is what that address is for."""
        counts = self.metrics(key).items()
        return sum(n for name, n in counts if re.search(r'requests_total{.*status="5', name) and "/readyz" not in name)

    def figures(self) -> dict[str, float]:
        """Return resident memory in MB, open files and threads of the process."""
        here = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
        megabytes = int(status["VmRSS"].split()[0]) / 1000
        return {"megabytes": megabytes, "files": len(os.listdir(here / "fd")), "threads": int(status["Threads"])}

    def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Ask the server to stop; return whether it did so in time. Afterwards it has ended in any case."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the server and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    close = kill


@contextlib.contextmanager
def serving(bank: Path, **options: Any) -> Iterator[Server]:
    """Start a server for a `with`."""
    server = Server(bank, **options)
    try:
        yield server
    finally:
        server.kill()


def until(true: Callable[[], bool], seconds: float, every: float = 0.05) -> bool:
    """Wait for something; return whether it happened in time."""
    ends = time.monotonic() + seconds
    for _ in itertools.count():
        if true():
            return True
        if time.monotonic() > ends:
            return False
        time.sleep(every)
    raise AssertionError
