"""A service of thirty lines that computes nothing, for tests of every route; and a way to call an app in-process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx

from adapterbank.serving.service.protocol import CODES, Refusal, Reply


class Dummy:
    """Predicts the length of each text; the task `slow` waits to be released, `broken` fails."""

    def __init__(self, names=("length", "other", "slow", "broken")):
        self.names, self.ready, self.asked, self.cancelled = list(names), True, [], 0
        self.release = None
        self.standing = []

    async def predict(self, asks):
        self.asked += asks
        for ask in asks:
            name = ask.task.partition("@")[0]
            if name not in self.names:
                raise Refusal("unknown_task", f"{name!r} is not a task of this bank.")
            if name == "broken":
                raise RuntimeError(f"cannot do {ask.texts}")
            if name == "slow":
                try:
                    self.release = asyncio.Event()
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return [Reply(*_named(ask.task), [{"value": float(len(text))} for text in ask.texts]) for ask in asks]

    async def tasks(self):
        backbone = {"name": "tiny", "sha256": "a" * 64, "parameters": 10}
        params = {"trained": 1, "encoder": 10, "total": 11, "percent": 10.0}
        line = {"version": 1, "kind": "regression", "text": ["text"], "labels": [], "metric": "spearman", "score": 0.5}
        line |= {
            "test_score": None,
            "rows": {"dev": 9},
            "method": "adapter",
            "size": 64,
            "params": params,
            "bytes": 4,
            "created": "",
        }
        listed = [{"name": name, **line, "resident": True} for name in self.names]
        return {"backbone": backbone, "tasks": listed, "problems": []}

    async def task(self, ref):
        await self.predict([_Ask(ref)] if ref != "broken" else [])
        return {"name": ref, "version": 1, "versions": [1], "default": 1, "ablation": None}

    async def remove(self, ref):
        await self.task(ref)

    async def rollback(self, name):
        raise Refusal("conflict" if name in self.names else "unknown_task", "There is no earlier version.")

    def stalled(self):
        return {"bank": self.standing}

    def numbers(self):
        return {"batches": 3, "queue_tokens": 7, "resident": 2, "evictions": 1, "loads": 1, "tasks": len(self.names)}

    def on_batch(self, callback):
        callback(8, 64, 0.5, 0.01)

    async def start(self):
        pass

    async def stop(self):
        pass


def _named(ref):
    name, _, version = ref.partition("@")
    return name, int(version or 1)


class _Ask:
    def __init__(self, task):
        self.task, self.texts = task, []


@asynccontextmanager
async def calling(app):
    """Run the app's lifespan, and yield a client that calls it without a socket."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            yield client


def ask(app, method, path, **options):
    """Send one request and return the response."""

    async def run():
        async with calling(app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def post(app, path, value, **options):
    """Send JSON and return the response."""
    return ask(app, "POST", path, json=value, **options)


def code(answer):
    """Return an error's code, after checking its shape."""
    error = answer.json()["error"]
    assert answer.json().keys() == {"error"}
    assert error.keys() == {"code", "message", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["message"].endswith((".", "/docs"))
    assert "Traceback" not in answer.text
    assert CODES[error["code"]] == answer.status_code
    return error["code"]
