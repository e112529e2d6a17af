"""The app: routes over a service. Knows no engine and no torch; the service is passed in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from adapterbank import __version__
from adapterbank.errors import AdapterbankError
from adapterbank.serving.heartbeat import Stalls, Watchdog
from adapterbank.serving.http import routes_page, routes_train
from adapterbank.serving.http.access import ANY, Access, AccessTable, RouteAccess, declared
from adapterbank.serving.http.auth import RateLimiter
from adapterbank.serving.http.middleware import NOT_FOUND, RequestMiddleware, error_body
from adapterbank.serving.http.openapi import complete_document
from adapterbank.serving.http.routes_docs import docs_router
from adapterbank.serving.http.routes_health import health_router
from adapterbank.serving.http.routes_predict import predict_router
from adapterbank.serving.http.routes_tasks import tasks_router
from adapterbank.serving.http.telemetry import Metrics
from adapterbank.serving.service.protocol import CODES, KeyStore, Limits, Refusal, Service

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

DEFAULT_LIMITS = Limits()
_BY_STATUS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_MESSAGES = {
    "not_found": NOT_FOUND,
    "method_not_allowed": "This address does not accept that method; see /docs.",
}
_UNKNOWN_TASK = "There is no such task in the bank; see GET /v1/tasks."
_OPENAPI = RouteAccess("/openapi.json", frozenset({"GET"}), Access(ANY), documented=False)
"""The framework's own route."""


def create_app(
    service: Service,
    *,
    jobs: Any = None,
    keys: KeyStore | None = None,
    limits: Limits = DEFAULT_LIMITS,
    page: bool = True,
    local: bool = False,
    replica: str = "",
    untrained: str = "",
) -> FastAPI:
    """Create the app. Setting `app.state.draining` makes it refuse new requests while it answers the others.

    Args:
        service: What answers; `BankService` for a bank.
        jobs: The queue of training runs (`JobQueue`); without it the server does not train.
        keys: The API keys; without them every request is allowed.
        limits: What one request may contain.
        page: Whether to serve the web page at `/`.
        local: Without keys, answer only to the names of this machine, so that pages of other sites learn nothing.
        replica: The name of this server where several share an address.
        untrained: Why this server does not train, for those who try; without it the address is not found.
    """

    def stalls() -> Stalls:
        return {**service.stalled(), **(jobs.stalled() if jobs is not None else {})}

    metrics = Metrics(service.numbers if jobs is None else lambda: _numbers(service, jobs), stalls, replica)
    service.on_batch(metrics.batch)

    plain: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    lifespan = _lifespan(service, jobs, Watchdog(stalls))
    app = FastAPI(title="adapterbank", version=__version__, lifespan=lifespan, **plain)
    app.state.draining = False
    access = _include(
        app,
        [
            (predict_router(service, limits), True),
            (tasks_router(service), True),
            (health_router(service, metrics, lambda: bool(app.state.draining), stalls), True),
            (docs_router(lambda: app.openapi()), True),
            (routes_train.train_router(jobs, per_key=limits.runs), jobs is not None),
            (routes_train.untrained_router(untrained), jobs is None and bool(untrained)),
            (routes_page.page_router(), page),
        ],
    )
    app.state.access = access
    app.add_middleware(
        RequestMiddleware,
        access=access,
        metrics=metrics,
        keys=keys,
        rate_limit=RateLimiter().wait,
        draining=lambda: bool(app.state.draining),
        local=local,
    )
    complete_document(app, access, locked=keys is not None)
    _handle_errors(app, access)
    return app


def _lifespan(service: Service, jobs: Any, watchdog: Watchdog) -> Lifespan:
    """Return what starts and stops a server's parts together with its app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.draining = False
        await service.start()
        if jobs is not None:
            await jobs.start()
        watchdog.start(asyncio.get_running_loop())
        yield
        app.state.draining = True
        stopping = [service.stop()] if jobs is None else [jobs.stop(), service.stop()]
        await asyncio.gather(*stopping)  # neither waits for the other
        watchdog.stop()

    return lifespan


def _include(app: FastAPI, routers: Iterable[tuple[APIRouter, bool]]) -> AccessTable:
    """Add the routers that this server has; the others still declare who may learn that they are missing."""
    routes = [_OPENAPI]
    for router, included in routers:
        routes += declared(router, included=included)
        if included:
            app.include_router(router)
    return AccessTable(routes, {**routes_train.RESERVED, **routes_page.RESERVED})


def _numbers(service: Service, jobs: Any) -> Mapping[str, float]:
    """Return the numbers of both; those of runs are missing while their table cannot be read."""
    with contextlib.suppress(AdapterbankError):
        return {**service.numbers(), **jobs.numbers()}
    return service.numbers()


def _handle_errors(app: FastAPI, access: AccessTable) -> None:
    """Return every error of the framework the same shape."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        headers = {} if error.retry_after is None else {"Retry-After": error.seconds}
        # A key for some tasks must not learn the names of the others.
        hidden = error.code == "unknown_task" and not request.state.context.allows(ANY, "?")
        return _error(request, error.code, _UNKNOWN_TASK if hidden else error.message, headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        code = _BY_STATUS.get(error.status_code, "bad_request" if error.status_code < 500 else "internal")
        headers = dict(error.headers or {})
        if error.status_code == 405 and (allowed := access.methods(request.url.path)):
            headers["Allow"] = allowed  # the framework names those of one route only
        return _error(request, code, _MESSAGES.get(code, f"{error.detail}."), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(request, "bad_request", f"{'.'.join(map(str, first['loc']))}: {first['msg']}.", {})


def _error(request: Request, code: str, message: str, headers: dict[str, str]) -> Response:
    body = error_body(code, message, request.state.context.id)
    return Response(body, CODES[code], headers, media_type="application/json")
