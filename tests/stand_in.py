"""A stand-in for the server: the routes of the HTTP interface with canned answers, on a real socket.

It knows no bank and no engine. What a test wants to see refused, lost or delayed is put into `Trouble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

ENCODER = 22_713_216
NASTY = "<img src=x onerror=\"document.title='taken'\">"
"""A label that would run, were it ever taken for markup."""


@dataclass
class Trouble:
    """What goes wrong, and what was asked."""

    refuse: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    """Answers (status, code, headers) to the next requests, before any is served."""
    key: str = ""
    """The only key that is let in, if any."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path and body of every request."""
    held: bool = False
    """Whether requests wait until they are let go."""
    late: set[str] = field(default_factory=set)
    """Tasks that are not listed yet."""
    steps: int = 6
    """How many of its six steps a run may take by now."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Answer as the server does when it refuses."""
    body = {"error": {"code": code, "message": message, "request_id": "r-1"}}
    return JSONResponse(body, status, headers=headers)


def task(name: str, kind: str = "classification", **fields: Any) -> dict[str, Any]:
    """Make a row of the task list."""
    labels = {"classification": ["negative", "positive"], "multilabel": ["red", "big"]}.get(kind, [])
    metric = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "pearson", "span": "f1"}[kind]
    params = {"trained": 605_954, "encoder": ENCODER, "total": ENCODER + 605_954, "percent": 2.67}
    return {
        **{"name": name, "version": 1, "kind": kind, "labels": labels, "metric": metric, "score": 0.8},
        **{"method": "adapter", "size": 64, "params": params, "bytes": 2_431_000},
        **{"created": "2026-11-14T10:00:00Z", "resident": True, "text": ["text"]},
        **({"text": ["question", "context"]} if kind == "span" else {}),
        **fields,
    }


def many(count: int = 50) -> list[dict[str, Any]]:
    """Make tasks of all kinds, one with a label that looks like markup."""
    kinds = ("classification", "multilabel", "regression", "span")
    found = [task(f"task-{i:02}", kinds[i % 4] if i % 5 == 0 else "classification", score=0.5 + i / 101)
             for i in range(count)]  # fmt: skip
    found[1] = task("markup", labels=[NASTY, "plain"])
    found[2] = task("entailment", labels=["yes", "no"], text=["premise", "hypothesis"])
    return found


def ablation() -> dict[str, Any]:
    """Make a record as `adapterbank ablate` leaves it, of six layers."""
    spans = [
        {"first": a, "last": b, "scores": {"accuracy": 0.8 - 0.02 * (b - a + 1)},
         "change": {"accuracy": -2.5 * (b - a + 1) * (b + 1) / 3}}
        for a in range(6) for b in range(a, 6)
    ]  # fmt: skip
    return {"package": "task-00@1", "metric": "accuracy", "layers": list(range(6)), "whole": {"accuracy": 0.8},
            "spans": spans, "data": {"rows": 100}, "created": "2026-11-14T11:00:00Z"}  # fmt: skip


def said(row: dict[str, Any], text: str, pair: str | None) -> dict[str, Any]:
    """Answer by the text's length, so that a test can tell answers apart."""
    if row["kind"] == "regression":
        return {"value": len(text) / 10}
    if row["kind"] == "span":
        return {"answer": (pair or "")[:5], "start": 0, "end": 5}
    first = 0.6 + (len(row["name"]) + len(text)) % 40 / 100
    rest = (1 - first) / (len(row["labels"]) - 1)
    odds = dict(zip(row["labels"], [first, *[rest] * 99], strict=False))
    if row["kind"] == "multilabel":
        return {"labels": [row["labels"][0]], "probabilities": odds}
    return {"label": row["labels"][0], "probabilities": odds}


def make(tasks: list[dict[str, Any]], trouble: Trouble, problems: list[dict[str, str]] | None = None) -> FastAPI:
    """Make the app: every route of the interface over these tasks."""
    app = FastAPI(openapi_url=None)
    table = {row["name"]: row for row in tasks}

    @app.middleware("http")
    async def watch(request: Request, call_next: Any) -> Response:
        path, body = request.url.path, await request.body()
        if path.startswith("/v1"):
            while trouble.held:
                await asyncio.sleep(0.01)
            trouble.asked.append((request.method, path, body))
            if trouble.key and request.headers.get("authorization") != f"Bearer {trouble.key}":
                return error(401, "unauthorized", "This server wants a key; send 'Authorization: Bearer KEY'.")
        if path.startswith("/v1") and trouble.refuse:
            status, code, headers = trouble.refuse.pop(0)
            return error(status, code, f"Refused with {code}.", headers)
        return await call_next(request)

    add_predict(app, table)
    add_bank(app, table, problems or [], trouble)
    add_runs(app, trouble)
    return app


def add_predict(app: FastAPI, table: dict[str, dict[str, Any]]) -> None:
    """Add what answers texts."""

    @app.post("/v1/tasks/{name}/predict")
    async def predict(name: str, request: Request) -> Response:
        body = await request.json()
        bare = name.partition("@")[0]
        if bare not in table:
            return error(404, "unknown_task", f"'{name}' is not a task here. Did you mean 'markup'?")
        texts = body.get("texts") or [body["text"]]
        pairs = body.get("pairs") or [body.get("pair")] * len(texts)
        found = [said(table[bare], text, pair) for text, pair in zip(texts, pairs, strict=True)]
        return JSONResponse({"task": bare, "version": table[bare]["version"], "predictions": found})

    @app.post("/v1/predict")
    async def predict_rows(request: Request) -> Response:
        rows = (await request.json())["rows"]
        if len(rows) > 64:
            return error(422, "too_many_texts", f"{len(rows)} rows are more than 64; send fewer at once.")
        if unknown := [row["task"] for row in rows if row["task"] not in table or table[row["task"]].get("gone")]:
            return error(404, "unknown_task", f"'{unknown[0]}' is not a task here.")
        found = [
            {"task": row["task"], "version": 1, **said(table[row["task"]], row["text"], row.get("pair"))}
            for row in rows
        ]
        return JSONResponse({"predictions": found})


def add_bank(app: FastAPI, table: dict[str, dict[str, Any]], problems: list[dict[str, str]], trouble: Trouble) -> None:
    """Add what tells of tasks."""

    @app.get("/v1/tasks")
    async def tasks() -> Any:
        backbone = {"name": "minilm", "sha256": "ab" * 32, "parameters": ENCODER}
        served = [row for row in table.values() if row["name"] not in trouble.late]
        return {"backbone": backbone, "tasks": served, "problems": problems}

    @app.get("/v1/tasks/{name}")
    async def one(name: str) -> Any:
        if name not in table:
            return error(404, "unknown_task", f"'{name}' is not a task here.")
        row = table[name]
        spec = {"kind": row["kind"], "text": row["text"], "labels": row["labels"], "metric": row["metric"]}
        return {
            **{"name": name, "version": 1, "task": spec, "method": {"name": "adapter", "adapter": {"size": 64}}},
            **{"metrics": {"dev": {row["metric"]: row["score"]}}, "params": row["params"], "bytes": row["bytes"]},
            **{"created": row["created"], "recipe": {"epochs": 3, "lr": 0.001}, "versions": [1], "default": 1},
            **{"ablation": ablation() if name == "task-00" else None},
        }

    @app.delete("/v1/tasks/{name}")
    async def remove(name: str) -> Any:
        return {"removed": name}

    @app.post("/v1/tasks/{name}/rollback")
    async def rollback(name: str) -> Any:
        return {"task": name, "default": 1}

    @app.get("/healthz")
    async def health() -> Any:
        return {"status": "alive"}

    @app.get("/readyz")
    async def ready() -> Response:
        return PlainTextResponse("no", 503)


def add_runs(app: FastAPI, trouble: Trouble) -> None:
    """Add training: a run of two epochs that goes as fast as its events are read."""

    @app.post("/v1/tasks/{name}/train")
    async def train(name: str, request: Request) -> Response:
        id = f"run{len(trouble.runs) + 1}"
        progress = {"epoch": 0, "epochs": 2, "step": 0, "steps": 6, "loss": None, "rows_per_second": None}
        trouble.runs[id] = {
            **{"id": id, "task": name, "state": "queued", "options": dict(request.query_params)},
            **{"created": "2026-11-15T10:00:00Z", "started": None, "ended": None},
            **{"progress": progress, "history": []},
        }
        return JSONResponse(trouble.runs[id], 202)

    @app.get("/v1/runs")
    async def runs() -> Any:
        return {"runs": list(trouble.runs.values())}

    @app.get("/v1/runs/{id}")
    async def run(id: str) -> Any:
        return trouble.runs.get(id) or error(404, "unknown_run", f"There is no run '{id}'.")

    @app.delete("/v1/runs/{id}")
    async def cancel(id: str) -> Any:
        trouble.runs[id]["state"] = "cancelled"
        return trouble.runs[id]

    @app.get("/v1/runs/{id}/events")
    async def events(id: str) -> Response:
        if id not in trouble.runs:
            return error(404, "unknown_run", f"There is no run '{id}'.")
        return StreamingResponse(story(trouble.runs[id], trouble), media_type="text/event-stream")


async def story(run: dict[str, Any], trouble: Trouble) -> Any:
    """Go through a run's six steps and two epochs, telling each; a cancel ends it."""
    yield ": here comes a run\n\n"
    run["state"] = "running" if run["state"] == "queued" else run["state"]
    yield event("state", run)
    for step in range(1, 7):
        while step > trouble.steps and run["state"] == "running":
            await asyncio.sleep(0.01)
        if run["state"] != "running":
            break
        now = {"epoch": (step - 1) // 3 + 1, "epochs": 2, "step": step, "steps": 6, "loss": 0.9 - step / 10}
        run["progress"] = {**now, "rows_per_second": 95.0}
        if step % 3 == 0:
            run["history"].append({"epoch": step // 3, "loss": now["loss"], "score": 0.6 + step / 30, "seconds": 1.0})
        yield event("progress", run["progress"] | ({"score": 0.6 + step / 30} if step % 3 == 0 else {}))
    if run["state"] == "running":
        run |= {"state": "done", "version": 1, "metrics": {"dev": {"accuracy": 0.8}}}
    yield event("state", run)


def event(kind: str, data: Any) -> str:
    """Write one event as the stream has it."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Run an app on a free port of this machine, and give its address."""
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
