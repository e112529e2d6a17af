"""The real app over a service of sample tasks and a queue whose runs follow a script, on a real socket.

`Faults` says what goes wrong before a request reaches the app, and records what was requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from adapterbank.inference.explain import Explainer, explained_json
from adapterbank.kinds.words import word_spans
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.middleware import error_body
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.service.protocol import Refusal, Reply
from adapterbank.storage.bank import Bank
from adapterbank.tasks.spec import Examples

ENCODER = 22_713_216
MARKUP = "<img src=x onerror=\"document.title='taken'\">"
"""A label that would run as a script if it were inserted as markup."""
STEPS, EPOCHS = 6, 2
"""What a scripted run does."""


@dataclass
class Faults:
    """What goes wrong, and what was requested."""

    refuse: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    """Responses (status, code, headers) to the next requests, in the place of the app's."""
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    """Method, path and body of every request below /v1."""
    paused: bool = False
    """Whether requests wait."""


class SampleService:
    """Answers for tasks of all kinds without computing anything."""

    def __init__(self, tasks: list[dict[str, Any]], problems: list[dict[str, str]] | None = None) -> None:
        self.table = {row["name"]: row for row in tasks}
        self.problems = problems or []
        self.ready = True
        self.hidden: set[str] = set()
        """Tasks that are not listed."""
        self.removed: set[str] = set()
        """Tasks that are listed, and refused."""

    def row(self, ref: str) -> dict[str, Any]:
        name = ref.partition("@")[0]
        if name not in self.table or name in self.removed:
            raise Refusal("unknown_task", f"{name!r} is not a task of this bank. Did you mean 'markup'?")
        return self.table[name]

    async def predict(self, asks):
        found = []
        for ask in asks:
            row = self.row(ask.task)
            pairs = ask.pairs or [None] * len(ask.texts)
            predictions = [prediction(row, *both) for both in zip(ask.texts, pairs, strict=True)]
            for one in predictions:
                if max(one.get("probabilities", {"": 1.0}).values()) < ask.abstain:
                    one["label"] = None
            if ask.explain:
                explainer = Explainer.of(Examples(ask.texts, ask.pairs))
                rows = explainer.to_examples()
                given = zip(rows.texts, rows.pairs or [None] * len(rows), strict=True)
                predictions = explained_json(explainer, [prediction(row, *both) for both in given])
            found.append(Reply(row["name"], row["version"], predictions))
        return found

    async def tasks(self):
        backbone = {"name": "minilm", "sha256": "ab" * 32, "parameters": ENCODER}
        listed = [row for row in self.table.values() if row["name"] not in self.hidden]
        return {"backbone": backbone, "tasks": listed, "problems": self.problems}

    async def task(self, ref):
        row = self.row(ref)
        spec = {"kind": row["kind"], "text": row["text"], "labels": row["labels"], "metric": row["metric"]}
        return {
            **{"name": row["name"], "version": 1, "task": spec, "method": {"name": "adapter", "adapter": {"size": 64}}},
            **{"metrics": {"dev": {row["metric"]: row["score"]}}, "params": row["params"], "bytes": row["bytes"]},
            **{"created": row["created"], "recipe": {"epochs": 3, "lr": 0.001}, "versions": [1], "default": 1},
            **{"ablation": ablation() if row["name"] == "task-00" else None},
            **{"notes": [f"No dev data given for {MARKUP}."] if row["name"] == "task-00" else []},
        }

    async def remove(self, ref):
        del self.table[self.row(ref)["name"]]

    async def rollback(self, ref):
        self.row(ref)
        return 1

    def stalled(self):
        return {}

    def numbers(self):
        return {"tasks": len(self.table)}

    def on_batch(self, callback):
        pass

    async def start(self):
        pass

    async def stop(self):
        pass


class ScriptedJobs(JobQueue):
    """A real queue; a thread takes its runs through six steps and two epochs, as far as `steps` allows."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        bank = Bank.open(folder, {"name": "tiny", "sha256": "a" * 64}, create=True)
        super().__init__(bank.path, threads=1)
        self.steps = steps
        """How many steps a run may have taken by now."""
        self._stop = threading.Event()

    async def start(self):
        self._script = threading.Thread(target=self._take_runs, daemon=True)
        self._script.start()

    async def stop(self):
        self._stop.set()
        await asyncio.to_thread(self._script.join)

    def _take_runs(self):
        while not self._stop.wait(0.01):
            if run := self.runs.begin():
                self._take(run.id)

    def _take(self, id):
        for step in range(1, STEPS + 1):
            while step > self.steps and not self.runs.cancelling(id):
                if self._stop.wait(0.01) or self.runs.get(id).over:
                    return
            if self.runs.cancelling(id):
                self.runs.end(id, "cancelled")
                return
            self.runs.update(id, **report(step))
        self.runs.end(id, "done", version=1, metrics={"dev": {"accuracy": 0.8, "rows": 120}})


def report(step: int) -> dict[str, Any]:
    """Return what a run reports after a step; every third one ends an epoch."""
    each = STEPS // EPOCHS
    progress = {"epoch": (step - 1) // each + 1, "epochs": EPOCHS, "step": step, "steps": STEPS}
    progress |= {"loss": 0.9 - step / 10, "rows_per_second": 95.0}
    if step % each:
        return {"progress": progress}
    row = {"epoch": step // each, "loss": progress["loss"], "score": 0.6 + step / 30, "seconds": 1.0}
    return {"progress": progress, "epochs": [row]}


def task(name: str, kind: str = "classification", **fields: Any) -> dict[str, Any]:
    """Make a row of the task list."""
    labels = {"classification": ["negative", "positive"], "multilabel": ["red", "big"]}.get(kind, [])
    metrics = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "pearson", "span": "f1"}
    metric = {**metrics, "tagging": "tag_f1"}[kind]
    params = {"trained": 605_954, "encoder": ENCODER, "total": ENCODER + 605_954, "percent": 2.67}
    return {
        **{"name": name, "version": 1, "kind": kind, "labels": labels, "metric": metric, "score": 0.8},
        **{"method": "adapter", "size": 64, "params": params, "bytes": 2_431_000},
        **{"created": "2026-11-14T10:00:00Z", "resident": True, "text": ["text"]},
        "rows": {"dev": 1200},
        **({"text": ["question", "context"]} if kind == "span" else {}),
        **fields,
    }


def sample_tasks(count: int = 50) -> list[dict[str, Any]]:
    """Make tasks of all kinds, one with a label that looks like markup."""
    kinds = ("classification", "multilabel", "regression", "span")
    found = [task(f"task-{i:02}", kinds[i % 4] if i % 5 == 0 else "classification", score=0.5 + i / 101)
             for i in range(count)]  # fmt: skip
    found[1] = task("markup", labels=[MARKUP, "plain"])
    found[2] = task("entailment", labels=["yes", "no"], text=["premise", "hypothesis"])
    return found


def ablation() -> dict[str, Any]:
    """Make a record as `adapterbank ablate` writes it, of six layers."""
    spans = [
        {"first": a, "last": b, "scores": {"accuracy": 0.8 - 0.02 * (b - a + 1)},
         "change": {"accuracy": -2.5 * (b - a + 1) * (b + 1) / 3}}
        for a in range(6) for b in range(a, 6)
    ]  # fmt: skip
    return {"package": "task-00@1", "metric": "accuracy", "layers": list(range(6)), "whole": {"accuracy": 0.8},
            "spans": spans, "data": {"rows": 100}, "created": "2026-11-14T11:00:00Z"}  # fmt: skip


def prediction(row: dict[str, Any], text: str, pair: str | None) -> dict[str, Any]:
    """Predict by the text's length, so that a test can tell predictions apart."""
    if row["kind"] == "regression":
        return {"value": len(text) / 10} | ({"windows": 8, "truncated": True} if len(text) > 1000 else {})
    if row["kind"] == "span":
        return {"answer": (pair or "")[:5], "start": 0, "end": 5}
    if row["kind"] == "tagging":
        return tagged(row["labels"], text)
    first = 0.6 + (len(row["name"]) + len(text)) % 40 / 100
    rest = (1 - first) / (len(row["labels"]) - 1)
    probabilities = dict(zip(row["labels"], [first, *[rest] * 99], strict=False))
    if row["kind"] == "multilabel":
        return {"labels": [row["labels"][0]], "probabilities": probabilities}
    return {"label": row["labels"][0], "probabilities": probabilities}


def tagged(labels: list[str], text: str) -> dict[str, Any]:
    """Tag words that begin with a capital as entities of each type in turn, or every word with each tag in turn."""
    types = list(dict.fromkeys(label[2:] for label in labels if label[:2] == "B-"))
    spans = [span for span in word_spans(text) if text[span[0]].isupper() or not types]
    found = [
        {"text": text[a:b], "label": (types or labels)[i % len(types or labels)], "start": a, "end": b,
         "probability": 0.9 - i / 50}
        for i, (a, b) in enumerate(spans)
    ]  # fmt: skip
    return {"entities" if types else "words": found}


def make_app(service: SampleService, faults: Faults, **options: Any) -> Any:
    """Return the real app behind its faults; `options` are those of `create_app`."""
    app = create_app(service, **options)

    async def with_faults(scope, receive, send):
        if scope["type"] != "http" or not scope["path"].startswith("/v1"):
            await app(scope, receive, send)
            return
        while faults.paused:
            await asyncio.sleep(0.01)
        body = await _read(receive)
        faults.requests.append((scope["method"], scope["path"], body))
        if faults.refuse:
            await _respond(send, *faults.refuse.pop(0))
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay():
            return next(messages, None) or await receive()

        await app(scope, replay, send)

    return with_faults


async def _read(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _respond(send: Any, status: int, code: str, headers: dict[str, str]) -> None:
    given = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": error_body(code, f"Refused with {code}.", "r-1")})


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Run an app on a free port of this machine; yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)
        assert not thread.is_alive()
