"""The app: routes over a service. Knows no engine and no torch; what answers is given to it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from adapterbank import __version__
from adapterbank.errors import AdapterbankError
from adapterbank.serving.http.auth import Pace
from adapterbank.serving.http.middleware import RequestContext, RequestMiddleware, error_body
from adapterbank.serving.http.routes_docs import docs_router
from adapterbank.serving.http.routes_predict import ClientGone, predict_router, reply
from adapterbank.serving.http.schemas import RemovedReply, RolledBackReply, Status, TaskAnswer, TasksAnswer, answers
from adapterbank.serving.http.telemetry import Metrics
from adapterbank.serving.service.protocol import CODES, Keys, Limits, Refusal, Service

DEFAULT_LIMITS = Limits()
_BY_STATUS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_LARGE = 4096
"""Bytes of an answer from which on it is worth packing."""
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:;\s*q=(?!0(?:\.0*)?\s*(?:,|$))[^,]*)?(?:,|$)", re.IGNORECASE)
"""A client that takes gzip: it names it, and not with the weight 0."""
_SAID = {
    "not_found": "There is nothing at this address; see /docs.",
    "held": "There is no such task in the bank; see GET /v1/tasks.",
    "method_not_allowed": "This address does not take that method; see /docs.",
}


def create_app(
    service: Service,
    *,
    jobs: Any = None,
    keys: Keys | None = None,
    limits: Limits = DEFAULT_LIMITS,
    page: bool = True,
    local: bool = False,
    replica: str = "",
) -> FastAPI:
    """Make the app; with `jobs` it trains, with `keys` it asks for them, with `page` it shows one at /.

    With `local`, and no keys, it answers to the names of this machine alone: a page of elsewhere whose name leads here
    learns nothing. `replica` is its name where several answer at one address. `app.state.draining` set to true lets it
    refuse what is new while it answers the rest.
    """
    metrics = Metrics(service.numbers if jobs is None else lambda: _counted(service, jobs), replica)
    service.on_batch(metrics.batch)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.draining = False
        await service.start()
        if jobs is not None:
            await jobs.start()
        yield
        app.state.draining = True
        if jobs is not None:
            await jobs.stop()
        await service.stop()

    plain: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="adapterbank", version=__version__, lifespan=life, **plain)
    app.state.draining = False
    frame: dict[str, Any] = {"keys": keys, "pace": Pace().wait, "draining": lambda: bool(app.state.draining)}
    app.add_middleware(
        RequestMiddleware, metrics=metrics, local=local, template=lambda path: _template(app, path), **frame
    )
    if keys is not None:
        _say_that_keys_are_needed(app)
    _errors(app)
    app.include_router(predict_router(service, limits))
    _tasks(app, service)
    _health(app, service, metrics)
    app.include_router(docs_router(lambda: app.openapi()))
    if jobs is not None:
        from adapterbank.serving.http.routes_train import train_router

        app.include_router(train_router(jobs, each=limits.runs))
    if page and importlib.util.find_spec("adapterbank.serving.http.routes_page"):
        from adapterbank.serving.http.routes_page import page_router

        app.include_router(page_router())
    return app


def _tasks(app: FastAPI, service: Service) -> None:
    @app.get("/v1/tasks", tags=["tasks"], responses=answers(TasksAnswer))
    async def tasks(request: Request) -> Response:
        """List the tasks that are served, and those that are refused, as far as the key is for them."""
        visit: RequestContext = request.state.visit
        told = await service.tasks()
        shown = {
            name: [one for one in told[name] if visit.may("any", one[called])]
            for name, called in (("tasks", "name"), ("problems", "task"))
        }
        return _packed(reply({**told, **shown}), request)

    known = ("unknown_task", "unknown_version", "damaged")

    @app.get("/v1/tasks/{task}", tags=["tasks"], responses=answers(TaskAnswer, *known))
    async def task(task: str) -> Response:
        """Tell all that is known of a task."""
        return reply(await service.task(task))

    @app.delete("/v1/tasks/{task}", tags=["tasks"], responses=answers(RemovedReply, *known, "conflict"))
    async def remove(task: str) -> Response:
        """Remove a task, or one version of it, from the bank."""
        await service.remove(task)
        return reply({"removed": task})

    @app.post("/v1/tasks/{task}/rollback", tags=["tasks"], responses=answers(RolledBackReply, *known, "conflict"))
    async def rollback(task: str) -> Response:
        """Serve the version before this one again."""
        return reply({"task": task, "version": await service.rollback(task)})


def _packed(response: Response, request: Request) -> Response:
    """Pack a large answer, where the client takes that: a list of a thousand tasks is a tenth so."""
    if len(response.body) >= _LARGE and _GZIP.search(request.headers.get("accept-encoding", "")):
        response.body = gzip.compress(bytes(response.body), compresslevel=1)
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(response.body))
    response.headers["Vary"] = "Accept-Encoding"
    return response


def _health(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/healthz", tags=["health"], responses=answers(Status))
    async def healthz() -> Response:
        """Say that the server is alive."""
        return reply({"status": "alive"})

    @app.get("/readyz", tags=["health"], responses=answers(Status))
    async def readyz() -> Response:
        """Say whether the bank's tasks are loaded."""
        if app.state.draining or not service.ready:
            why = "The bank's tasks are still being loaded, or the server is stopping; ask again soon."
            raise Refusal("not_ready", why, retry_after=1)
        return reply({"status": "ready"})

    for path, say in (("/healthz", healthz), ("/readyz", readyz)):  # what looks after servers may ask for no body
        app.add_api_route(path, say, methods=["HEAD"], include_in_schema=False)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", tags=["health"], responses={**answers(Status), **text}, response_class=Response)
    async def numbers() -> Response:
        """Give numbers for Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4")


def _counted(service: Service, jobs: Any) -> Mapping[str, float]:
    """Give the numbers of both; of runs none while their table cannot be read."""
    with contextlib.suppress(AdapterbankError):
        return {**service.numbers(), **jobs.numbers()}
    return service.numbers()


def _errors(app: FastAPI) -> None:
    """Let every error of the framework have the one shape."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        headers = {} if error.retry_after is None else {"Retry-After": error.seconds}
        held = error.code == "unknown_task" and not request.state.visit.may("any", "?")  # a key for some tasks only
        return _told(request, error.code, _SAID["held"] if held else error.message, headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code = _BY_STATUS.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
        headers = dict(error.headers or {})
        if error.status_code == 405 and (allowed := _allowed(app, request.url.path)):
            headers["Allow"] = allowed  # the framework names those of one route only
        return _told(request, code, _SAID.get(code, f"{error.detail}."), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _told(request, "bad_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}.", {})

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # for the log; nobody reads it


def _say_that_keys_are_needed(app: FastAPI) -> None:
    """Let the document say how a key is sent, so that clients made from it can."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        found = plain()
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        for path in ("/healthz", "/readyz"):
            found["paths"][path]["get"]["security"] = []
        return found

    app.openapi = document  # type: ignore[method-assign]


def _template(app: FastAPI, path: str) -> str:
    """Give an address as the document has it, with {task} for a task's name; empty where it has none such."""
    return next((t for t in app.openapi()["paths"] if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", t), path)), "")


def _allowed(app: FastAPI, path: str) -> str:
    """Name the methods that an address takes, by the document."""
    return ", ".join(sorted(method.upper() for method in app.openapi()["paths"].get(_template(app, path), ())))


def _told(request: Request, code: str, message: str, headers: dict[str, str]) -> Response:
    body = error_body(code, message, request.state.visit.id)
    return Response(body, CODES[code], headers, media_type="application/json")
