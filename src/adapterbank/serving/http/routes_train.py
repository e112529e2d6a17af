"""The HTTP face of training runs: send a data file, look at runs, follow or cancel one. Knows no process."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from adapterbank.config import Config
from adapterbank.errors import InputError, StorageError
from adapterbank.methods import METHODS, PROJECTIONS, SITES
from adapterbank.serving.http.concurrency import ConcurrencyLimit
from adapterbank.serving.http.routes_predict import ClientGone, check_unpacked, reply
from adapterbank.serving.http.schemas import answers
from adapterbank.serving.http.telemetry import LOG
from adapterbank.serving.jobs.options import OPTIONS, check
from adapterbank.serving.jobs.queue import JobQueue, JobQueueFull, KeyFull
from adapterbank.serving.jobs.run_store import TrainingRun, UnknownRun
from adapterbank.serving.jobs.uploads import FORMATS, TooLarge, check_size
from adapterbank.serving.service.protocol import REQUEST, Refusal

Found = TypeVar("Found")

TYPES = {
    "text/csv": "csv",
    "application/csv": "csv",
    "text/tab-separated-values": "tsv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/vnd.apache.parquet": "parquet",
    "application/x-parquet": "parquet",
}
"""What a body's Content-Type says of its format; `?format=` wins over it."""
_STATED: Mapping[str, dict[str, Any]] = {
    "lr": {"exclusiveMinimum": 0},
    **{
        name: {"pattern": f"^({part})(,({part}))*$"}
        for name, part in (("sites", "|".join(SITES)), ("targets", "|".join(PROJECTIONS)))
    },
}
"""What the OpenAPI document states of options beyond their kind and limits."""
_LOOK = 0.25
"""Seconds between two looks at a run that is followed."""
LISTED = 100
"""So many runs are told of in a list."""
SENDING, FOLLOWING = 8, 100
"""So many files may be on their way in at once, so many runs be followed; half of them by one key."""
PATIENCE = 30.0
"""Seconds that a data file may stand still."""
PACE = 4096
"""Bytes a second that must come of it on the whole, beyond the first seconds."""
SPARED = 256 << 20
"""Bytes of the disk that data files leave to packages, records and the table of runs."""
HEARTBEAT = 10.0
"""Seconds of silence after which a stream says that it is alive; proxies cut those that say nothing for long."""


class RunAnswer(BaseModel):
    """A training run."""

    id: str
    task: str
    state: str
    options: dict[str, Any]
    data: dict[str, Any]
    created: str
    started: str | None
    ended: str | None
    progress: dict[str, Any]
    history: list[dict[str, Any]]
    notes: list[str]
    version: int | None = None
    metrics: dict[str, Any] | None = None
    failure: str | None = None


class RunsAnswer(BaseModel):
    """Training runs, newest first."""

    runs: list[RunAnswer]


def train_router(jobs: JobQueue, *, each: int | None = None, heartbeat: float = HEARTBEAT) -> APIRouter:
    """Make the routes that train; `each` is how many runs of a key may wait, unless it is an admin's."""
    router = APIRouter(tags=["train"])
    codes = ("not_found", "too_large", "too_slow", "unsupported", "overloaded", "too_many_runs")
    sending, following = (
        ConcurrencyLimit(SENDING, "data files are sent"),
        ConcurrencyLimit(FOLLOWING, "runs are followed"),
    )
    queued = {**answers(RunAnswer, *codes), 202: {"model": RunAnswer}}
    del queued[200]

    @router.post("/v1/tasks/{task}/train", status_code=202, responses=queued, openapi_extra=_described())
    async def train(task: str, request: Request) -> Response:
        """Queue a run on the data file that is the body; its options are in the query."""
        check_unpacked(request)
        options = _options(request)
        format = _format(request.headers.get("content-type", ""), options.pop("format", ""))
        visit = request.state.visit
        sending.check(visit.name)
        bound = None if visit.may("admin", None) else each
        with sending.held(visit.name):
            run = await _take(jobs, request, task, options, format, (visit.name, bound))
        return reply(run.to_json(), 202)

    @router.get("/v1/runs", responses=answers(RunsAnswer))
    async def runs(request: Request) -> Response:
        """List the newest runs, of the tasks that the key is for."""
        visit = request.state.visit
        found = await asked(jobs.list, LISTED, lambda task: visit.may("train", task))
        return reply({"runs": [run.to_json() for run in found]})

    @router.get("/v1/runs/{id}", responses=answers(RunAnswer, "unknown_run"))
    async def run(id: str, request: Request) -> Response:
        """Tell how a run stands."""
        return reply((await _known(jobs, id, request)).to_json())

    @router.delete("/v1/runs/{id}", responses=answers(RunAnswer, "unknown_run"))
    async def cancel(id: str, request: Request) -> Response:
        """Stop a run; one that has ended stays as it is."""
        await _known(jobs, id, request)
        return reply((await asked(jobs.cancel, id)).to_json())

    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Until the run ends."}

    @router.get(
        "/v1/runs/{id}/events",
        responses={**answers(RunAnswer, "unknown_run", "overloaded"), 200: stream},
        response_class=StreamingResponse,
    )
    async def events(id: str, request: Request) -> Response:
        """Follow a run: its finished epochs first, then every change, until it has ended or the key is revoked."""
        await _known(jobs, id, request)
        visit, state = request.state.visit, request.app.state
        following.check(visit.name)

        def leaving() -> bool:
            return bool(state.draining) or not visit.holds()

        told = following.around(follow(lambda after: asked(jobs.get, id, after), heartbeat, leaving), visit.name)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(told, media_type="text/event-stream", headers=headers)

    return router


def untrained_router(why: str) -> APIRouter:
    """Make the one route that says why nothing can be trained here."""
    router = APIRouter(tags=["train"])

    @router.post("/v1/tasks/{task}/train", responses=answers(RunAnswer, "not_found", "conflict"))
    async def train(task: str) -> Response:
        """Refuse to train."""
        raise Refusal("conflict", why)

    return router


async def asked(work: Callable[..., Found], *given: Any) -> Found:
    """Do what may wait for the disk, in a thread; what goes wrong becomes the refusal of its kind."""
    try:
        return await asyncio.to_thread(work, *given)
    except TooLarge as error:
        raise Refusal("too_large", str(error)) from error
    except UnknownRun as error:
        raise Refusal("unknown_run", str(error)) from error
    except KeyFull as error:
        raise Refusal("too_many_runs", str(error), retry_after=60) from error
    except JobQueueFull as error:
        raise Refusal("overloaded", str(error), retry_after=30) from error
    except InputError as error:
        raise Refusal("bad_request", " ".join(str(error).split())) from error
    except StorageError as error:
        LOG.error("hindered", exc_info=error, extra={"fields": {"request_id": REQUEST.get()}})
        raise Refusal(
            "not_ready", "The server cannot write to its disk now; its log says more.", retry_after=30
        ) from error


async def follow(
    look: Callable[[int], Any], heartbeat: float, leaving: Callable[[], bool]
) -> AsyncGenerator[str, None]:
    """Tell what has become of a run, then what becomes of it, as server-sent events, until it ends or we leave.

    `look` gives the run with its epochs after a number.
    """
    seen, state, epochs, last = -1, "", 0, time.monotonic()
    while True:
        run: TrainingRun = await look(epochs)
        if run.changes != seen:
            if run.state != state and epochs:
                run = await look(0)  # with its state all of it is told
            rows = [row for row in run.history if row["epoch"] > epochs]
            epochs = max([epochs, *(row["epoch"] for row in rows)])
            for row in rows:
                yield event("progress", _of_epoch(run, row))
            if run.progress and not (rows and rows[-1]["epoch"] == run.progress["epoch"]):
                yield event("progress", run.progress)
            if run.state != state:
                yield event("state", run.to_json())
            seen, state, last = run.changes, run.state, time.monotonic()
        if run.over or leaving():
            return
        if time.monotonic() - last >= heartbeat:
            yield ": the run goes on\n\n"
            last = time.monotonic()
        await asyncio.sleep(_LOOK)


def event(name: str, value: Mapping[str, Any]) -> str:
    """Write one server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def _of_epoch(run: TrainingRun, row: Mapping[str, Any]) -> dict[str, Any]:
    """Give a finished epoch as progress, with its score."""
    now = run.to_json()["progress"]
    each = now["steps"] // now["epochs"] if now["epochs"] else 0
    return {**now, "step": row["epoch"] * each, **row}


async def _known(jobs: JobQueue, id: str, request: Request) -> TrainingRun:
    """Give a run that the key is for."""
    found = await asked(jobs.get, id)
    request.state.visit.need("train", found.task)
    return found


async def _take(
    jobs: JobQueue,
    request: Request,
    task: str,
    options: Mapping[str, str],
    format: str,
    by: tuple[str | None, int | None],
) -> TrainingRun:
    """Stream the body to disk and queue a run on it; one that breaks off leaves nothing.

    `by` is who asks, and how many runs of theirs may wait.
    """
    await asked(check, task, options, format)
    said = request.headers.get("content-length", "")
    size = int(said) if said.isdecimal() else jobs.largest
    await asked(check_size, size, jobs.largest)
    if await asked(lambda: shutil.disk_usage(jobs.bank).free) < size + SPARED:
        raise Refusal("overloaded", "The server's disk is nearly full; try again when runs have ended.", retry_after=60)
    upload = await asked(jobs.upload, format, *by)
    with upload:
        try:
            async for part in steadily(request.stream()):
                if part:
                    await asked(upload.write, part)
        except ClientDisconnect as error:
            raise ClientGone from error
        return await asked(jobs.submit, task, options, upload, *by)


async def steadily(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass a body on as it comes; one that stands still is given up, and so is one that trickles."""
    began, size = time.monotonic(), 0
    while True:
        allowed = began + PATIENCE + size / PACE - time.monotonic()
        try:
            async with asyncio.timeout(min(allowed, PATIENCE)):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refusal("too_slow", "The data file comes too slowly; send it over a better line.") from None
        size += len(part)
        yield part


def _options(request: Request) -> dict[str, str]:
    given = [(name.replace("-", "_"), value) for name, value in request.query_params.multi_items()]
    found = dict(given)
    if len(found) < len(given):
        twice = next(name for name, _ in given if sum(name == other for other, _ in given) > 1)
        raise Refusal("bad_request", f"{twice!r} is given more than once; give it once.")
    return found


def _format(content_type: str, chosen: str) -> str:
    said = content_type.partition(";")[0].strip().lower()
    if said.startswith("multipart/"):
        remedy = "send the file itself as the body (curl: --data-binary @FILE instead of -F)"
        raise Refusal("unsupported", f"The body is {said!r}, a form; {remedy}.")
    if said not in TYPES and not chosen:
        choices = ", ".join(FORMATS)
        raise Refusal(
            "unsupported",
            f"The body is {repr(said) if said else 'of no stated type'}; add ?format= with one of {choices}.",
        )
    return chosen or TYPES[said]


def _described() -> dict[str, Any]:
    """State the options and the body for the OpenAPI document."""
    held = {f.name: f for f in fields(Config)}
    options = [_parameter(name, held[name].metadata["help"], _schema(held[name])) for name in OPTIONS]
    choices = {"type": "string", "enum": [*FORMATS]}
    format = _parameter("format", "Format of the data file, where its Content-Type does not say.", choices)
    file = {"schema": {"type": "string", "format": "binary"}}
    body = {"required": True, "content": dict.fromkeys((*TYPES, "application/octet-stream"), file)}
    return {"parameters": [*options, format], "requestBody": body}


def _parameter(name: str, help: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": help, "schema": schema}


def _schema(f: Field[Any]) -> dict[str, Any]:
    names = {"int": "integer", "float": "number", "bool": "boolean"}
    found: dict[str, Any] = {"type": names.get(str(f.type).partition(" ")[0], "string")}
    if f.metadata["choices"]:
        found["enum"] = [choice for choice in f.metadata["choices"] if f.name != "method" or METHODS[choice].slot]
    limits = {"minimum": f.metadata["low"], "maximum": f.metadata["high"]}
    return found | {name: value for name, value in limits.items() if value is not None} | _STATED.get(f.name, {})
