"""The routes of training runs: send a data file, list runs, follow or cancel one. Knows no processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from adapterbank.config import FRESH, LONGEST_SEPARATOR, Config, resolve
from adapterbank.errors import InputError, StorageError
from adapterbank.methods import METHODS, PROJECTIONS, SITES
from adapterbank.serving.daemon_pool import DaemonPool
from adapterbank.serving.http.access import access
from adapterbank.serving.http.bodies import ClientDisconnected, check_encoding, json_response
from adapterbank.serving.http.concurrency import ConcurrencyLimit
from adapterbank.serving.http.middleware import RequestContext
from adapterbank.serving.http.schemas import RunAnswer, RunsAnswer, responses
from adapterbank.serving.http.telemetry import LOG
from adapterbank.serving.jobs.options import OPTIONS, check
from adapterbank.serving.jobs.queue import JobQueue, JobQueueFull, KeyQueueFull
from adapterbank.serving.jobs.run_row import FORMATS, TrainingRun
from adapterbank.serving.jobs.run_store import UnknownRun
from adapterbank.serving.jobs.uploads import OTHERS, TooLarge, check_size
from adapterbank.serving.service.protocol import REQUEST, Refusal, shown
from adapterbank.tasks.dialects import STATED

ThreadResult = TypeVar("ThreadResult")

TYPES = {
    "text/csv": "csv",
    "application/csv": "csv",
    "text/tab-separated-values": "tsv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/json": "json",
    "application/vnd.apache.parquet": "parquet",
    "application/x-parquet": "parquet",
}
"""The data format of each Content-Type; `?format=` takes precedence."""
RESERVED = {"/v1/runs": "train", "/v1/runs/{rest:path}": "train"}
"""Addresses that need this scope for every method, also on a server that does not train."""
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "lr": {"exclusiveMinimum": 0},
    "separator": {"enum": [*STATED]},
    "label_separator": {"minLength": 1, "maxLength": LONGEST_SEPARATOR},
    **{
        name: {"pattern": f"^({part})(,({part}))*$"}
        for name, part in (("sites", "|".join(SITES)), ("targets", "|".join(PROJECTIONS)))
    },
}
"""What the OpenAPI document states about options besides their type and limits."""
_SIZES = {
    "dev": "Size of the dev data, which follows the training data in the body, in the same format.",
    "test": "Size of the test data, which is the last in the body, in the same format.",
}
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["progress", "state"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}
"""One server-sent event, for the OpenAPI document."""
_DEFAULTS = resolve(Config())
"""What a run gets that states nothing; some depend on the method, and these are the default method's."""
_THREADS = DaemonPool(16, "runs")
"""For what may wait for the disk; a disk that hangs must not keep the server from ending."""
_POLL = 0.25
"""Seconds between two reads of a run that is followed."""
LIST_LIMIT = 100
"""Number of runs in a list."""
MAX_UPLOADS, MAX_STREAMS = 8, 100
"""How many files may be uploaded, and runs followed, at once; half of them with one key."""
STALL_TIMEOUT = 30.0
"""Seconds that an upload may pause."""
MIN_RATE = 4096
"""Bytes per second that an upload must reach on average, after the first seconds."""
RESERVED_DISK = 256 << 20
"""Bytes of disk space that uploads leave for packages, records and the table of runs."""
HEARTBEAT = 10.0
"""Seconds without an event after which a stream sends a comment, because proxies close silent connections."""


def train_router(jobs: JobQueue, *, per_key: int | None = None, heartbeat: float = HEARTBEAT) -> APIRouter:
    """Return the routes; `per_key` limits the queued runs of each key that is not an admin's."""
    router = APIRouter(tags=["train"])
    codes = ("not_found", "too_large", "too_slow", "unsupported", "overloaded", "too_many_runs")
    uploads = ConcurrencyLimit(MAX_UPLOADS, "uploads")
    queued = {**responses(RunAnswer, *codes), 202: {"model": RunAnswer}}
    del queued[200]

    @router.post("/v1/tasks/{task}/train", status_code=202, responses=queued, openapi_extra=_request_schema())
    @access("train")
    async def train(task: str, request: Request) -> Response:
        """Queue a training run on the data file in the body; the query holds its options."""
        check_encoding(request)
        options = _options(request)
        sizes = _sizes(options, request.headers.get("content-length", ""))
        format = _format(request.headers.get("content-type", ""), options.pop("format", ""))
        context: RequestContext = request.state.context
        fused = [name.strip() for name in options.get("fuse", "").split(",")]
        for used in (options.get("start_from") or options.get("start-from"), options.get("on"), *fused):
            if used and used != FRESH:
                context.require("train", used)  # the weights of a task are as private as its answers
        uploads.check(context.key_name)
        limit = None if context.allows("admin", None) else per_key
        with uploads.acquire(context.key_name):
            run = await _receive(jobs, request, _Order(task, options, format, context.key_name, limit, sizes))
        return json_response(run.to_json(), 202)

    @router.get("/v1/runs", responses=responses(RunsAnswer))
    @access("train")
    async def runs(request: Request) -> Response:
        """List the newest runs of the tasks that the key may train."""
        context: RequestContext = request.state.context
        found = await in_thread(jobs.list, LIST_LIMIT, lambda task: context.allows("train", task))
        return json_response({"runs": [run.to_json() for run in found]})

    @router.get("/v1/runs/{id}", responses=responses(RunAnswer, "unknown_run"))
    @access("train")
    async def run(id: str, request: Request) -> Response:
        """Return the state of a run."""
        return json_response((await _find(jobs, id, request)).to_json())

    @router.delete("/v1/runs/{id}", responses=responses(RunAnswer, "unknown_run"))
    @access("train")
    async def cancel(id: str, request: Request) -> Response:
        """Cancel a run; a run that has ended does not change."""
        await _find(jobs, id, request)
        return json_response((await in_thread(jobs.cancel, id)).to_json())

    _add_events(router, jobs, heartbeat)
    return router


def _add_events(router: APIRouter, jobs: JobQueue, heartbeat: float) -> None:
    """Add the route that follows a run."""
    streams = ConcurrencyLimit(MAX_STREAMS, "event streams")
    stream = {"content": {"text/event-stream": {"schema": _EVENT}}, "description": "Events, until the run ends."}

    @router.get(
        "/v1/runs/{id}/events",
        responses={**responses(RunAnswer, "unknown_run", "overloaded"), 200: stream},
        response_class=StreamingResponse,
    )
    @access("train")
    async def events(id: str, request: Request) -> Response:
        """Follow a run: first its finished epochs, then every change, until it ends or the key is revoked."""
        await _find(jobs, id, request)
        context, state = request.state.context, request.app.state
        streams.check(context.key_name)

        def stopping() -> bool:
            return bool(state.draining) or not context.key_is_valid()

        changes = follow(lambda after: in_thread(jobs.get, id, after), heartbeat, stopping)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            streams.wrap(changes, context.key_name), media_type="text/event-stream", headers=headers
        )


def untrained_router(reason: str) -> APIRouter:
    """Return the route of a server that does not train, which answers with the reason."""
    router = APIRouter(tags=["train"])

    @router.post("/v1/tasks/{task}/train", responses=responses(RunAnswer, "not_found", "conflict"))
    @access("train")
    async def train(task: str) -> Response:
        """Refuse to train."""
        raise Refusal("conflict", reason)

    return router


async def in_thread(work: Callable[..., ThreadResult], *args: Any) -> ThreadResult:
    """Run in a thread what may wait for the disk; turn its errors into refusals."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)
    except TooLarge as error:
        raise Refusal("too_large", str(error)) from error
    except UnknownRun as error:
        raise Refusal("unknown_run", str(error)) from error
    except KeyQueueFull as error:
        raise Refusal("too_many_runs", str(error), retry_after=60) from error
    except JobQueueFull as error:
        raise Refusal("overloaded", str(error), retry_after=30) from error
    except InputError as error:
        raise Refusal("bad_request", " ".join(str(error).split())) from error
    except StorageError as error:
        LOG.error("storage error", exc_info=error, extra={"fields": {"request_id": REQUEST.get()}})
        message = "The server cannot write to its disk; the server's log has the reason."
        raise Refusal("not_ready", message, retry_after=30) from error


async def follow(
    read: Callable[[int], Any], heartbeat: float, stopping: Callable[[], bool]
) -> AsyncGenerator[str, None]:
    """Yield a run's past and further changes as server-sent events, until it ends or `stopping` returns true.

    `read` returns the run with its epochs after a number.
    """
    seen, state, epochs, last = -1, "", 0, time.monotonic()
    while True:
        run: TrainingRun = await read(epochs)
        if run.changes != seen:
            if run.state != state and epochs:
                run = await read(0)  # an event of the state holds the whole run
            rows = [row for row in run.history if row["epoch"] > epochs]
            epochs = max([epochs, *(row["epoch"] for row in rows)])
            for row in rows:
                yield event("progress", _epoch_progress(run, row))
            if run.progress and not (rows and rows[-1]["epoch"] == run.progress["epoch"]):
                yield event("progress", run.progress)
            if run.state != state:
                yield event("state", run.to_json())
            seen, state, last = run.changes, run.state, time.monotonic()
        if run.over or stopping():
            return
        if time.monotonic() - last >= heartbeat:
            yield ": still running\n\n"
            last = time.monotonic()
        await asyncio.sleep(_POLL)


def event(name: str, value: Mapping[str, Any]) -> str:
    """Return one server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def _epoch_progress(run: TrainingRun, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finished epoch as progress, with its score."""
    now = run.to_json()["progress"]
    each = now["steps"] // now["epochs"] if now["epochs"] else 0
    return {**now, "step": row["epoch"] * each, **row}


async def _find(jobs: JobQueue, id: str, request: Request) -> TrainingRun:
    """Return a run of a task that the key may train."""
    found = await in_thread(jobs.get, id)
    request.state.context.require("train", found.task)
    return found


@dataclass(frozen=True)
class _Order:
    """A training run as it was requested."""

    task: str
    options: Mapping[str, str]
    format: str
    key: str | None
    limit: int | None
    """How many runs of the key may be queued."""
    sizes: Mapping[str, int]
    """The bytes of each file in the body, if it holds dev or test data too."""


async def _receive(jobs: JobQueue, request: Request, order: _Order) -> TrainingRun:
    """Stream the body to disk and queue a run on it; an upload that fails leaves nothing behind."""
    await in_thread(check, order.task, order.options, order.format)
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else jobs.limits.upload
    await in_thread(check_size, size, jobs.limits.upload)
    if await in_thread(lambda: shutil.disk_usage(jobs.bank).free) < size + RESERVED_DISK:
        message = "The server's disk is nearly full; try again when other runs have ended."
        raise Refusal("overloaded", message, retry_after=60)
    upload = await in_thread(partial(jobs.upload, order.format, order.key, order.limit, **order.sizes))
    with upload:
        try:
            async for part in with_timeouts(request.stream()):
                if part:
                    await in_thread(upload.write, part)
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        return await in_thread(jobs.submit, order.task, order.options, upload, order.key, order.limit)


async def with_timeouts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body; refuse one that stalls or is too slow on average."""
    started, size = time.monotonic(), 0
    while True:
        allowed = started + STALL_TIMEOUT + size / MIN_RATE - time.monotonic()
        try:
            async with asyncio.timeout(min(allowed, STALL_TIMEOUT)):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refusal("too_slow", "The data file arrives too slowly; send it over a faster connection.") from None
        size += len(part)
        yield part


def _options(request: Request) -> dict[str, str]:
    given = [(name.replace("-", "_"), value) for name, value in request.query_params.multi_items()]
    found = dict(given)
    if len(found) < len(given):
        repeated = next(name for name, _ in given if sum(name == other for other, _ in given) > 1)
        raise Refusal("bad_request", f"{repeated!r} is given more than once; give it once.")
    return found


def _sizes(options: dict[str, str], length: str) -> dict[str, int]:
    """Take the sizes of dev and test data out of the options; return the size of each file in the body, or nothing."""
    given = {name: options.pop(f"{name}_bytes") for name in OTHERS if f"{name}_bytes" in options}
    for name, value in given.items():
        if not (value.isascii() and value.isdecimal() and len(value) <= 12 and int(value)):
            raise Refusal("bad_request", f"{name}_bytes is {shown(repr(value))}; give the bytes of the {name} file.")
    sizes = {name: int(value) for name, value in given.items()}
    if not sizes:
        return {}
    train = int(length) - sum(sizes.values()) if length.isdecimal() else 0
    if train <= 0:
        problem = f"The body must hold the training file and, after it, the {' and '.join(sizes)} file"
        raise Refusal("bad_request", f"{problem}, and its Content-Length must say so; send all files, end to end.")
    return {"train": train, **sizes}


def _format(content_type: str, chosen: str) -> str:
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("multipart/"):
        remedy = "send the file itself as the body (curl: --data-binary @FILE instead of -F)"
        raise Refusal("unsupported", f"The body is a form ({kind}); {remedy}.")
    if kind not in TYPES and not chosen:
        problem = f"Content-Type is {kind!r}, which is not a data format" if kind else "The body has no Content-Type"
        raise Refusal("unsupported", f"{problem}; add ?format= with one of {', '.join(FORMATS)}.")
    return chosen or TYPES[kind]


def _request_schema() -> dict[str, Any]:
    """Return the options and the body for the OpenAPI document."""
    known = {f.name: f for f in fields(Config)}
    options = [_parameter(name, known[name].metadata["help"], _schema(known[name])) for name in OPTIONS]
    choices = {"type": "string", "enum": [*FORMATS]}
    format = _parameter("format", "Format of the data file, if its Content-Type does not state it.", choices)
    sizes = [
        _parameter(f"{name}_bytes", _SIZES[name], {"type": "integer", "minimum": 1, "maximum": 10**12 - 1})
        for name in OTHERS
    ]
    file = {"schema": {"type": "string", "format": "binary", "minLength": 1}}
    # The body is a file of bytes, which OpenAPI cannot say of JSON: there, any value is one.
    content: dict[str, Any] = {kind: {"schema": {}} if kind == "application/json" else file for kind in TYPES}
    body = {"required": True, "content": content}
    return {"parameters": [*options, format, *sizes], "requestBody": body}


def _parameter(name: str, help: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": help, "schema": schema}


def _schema(f: Field[Any]) -> dict[str, Any]:
    names = {"int": "integer", "float": "number", "bool": "boolean"}
    found: dict[str, Any] = {"type": names.get(str(f.type).partition(" ")[0], "string")}
    if str(f.type) == "int | str":
        found["type"] = ["integer", "string"]
    if f.metadata["choices"]:
        found["enum"] = [choice for choice in f.metadata["choices"] if f.name != "method" or METHODS[choice].slot]
    stated = {"minimum": f.metadata["low"], "maximum": f.metadata["high"], "default": getattr(_DEFAULTS, f.name)}
    return found | {name: value for name, value in stated.items() if value is not None} | _SCHEMAS.get(f.name, {})
