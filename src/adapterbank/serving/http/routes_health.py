"""The routes for operators: health, readiness and metrics. Knows no tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from adapterbank.serving.daemon_pool import DaemonPool
from adapterbank.serving.heartbeat import Stalls
from adapterbank.serving.http.access import ANY, OPEN, access
from adapterbank.serving.http.bodies import json_response
from adapterbank.serving.http.schemas import Readiness, Status, responses
from adapterbank.serving.http.telemetry import Metrics
from adapterbank.serving.service.protocol import STOPPING, Refusal, Service


def health_router(
    service: Service, metrics: Metrics, draining: Callable[[], bool], stalls: Callable[[], Stalls]
) -> APIRouter:
    """Return the routes; `draining` tells whether the server is stopping, `stalls` which parts stand still."""
    router = APIRouter(tags=["health"])
    threads = DaemonPool(2, "metrics")  # the table of runs may wait for the disk

    @router.get("/healthz", responses=responses(Status))
    @access(OPEN, logged=False)
    async def healthz() -> Response:
        """Report that the server is alive."""
        return json_response({"status": "alive"})

    @router.get("/readyz", responses=responses(Readiness))
    @access(OPEN, logged=False)
    async def readyz(request: Request) -> Response:
        """Report whether requests are answered, and which parts of the server stand still.

        What they stand still at names tasks and runs: a server with keys tells it only to a key for all tasks.
        """
        parts = {part: found for part, found in stalls().items() if found}
        stalled = [*parts]
        if parts and request.state.context.sees_all():
            stalled = [f"{part}: {work}" for part, found in parts.items() for work in found]
        if draining() or not service.ready:
            why = f"parts of it stand still ({'; '.join(stalled)})" if stalled else "it is loading the bank's tasks"
            message = STOPPING if draining() else f"The server answers no requests, because {why}; try again soon."
            raise Refusal("not_ready", message, retry_after=1)
        return json_response({"status": "ready", "stalled": stalled})

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz)):  # some probes ask for no body
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @router.get("/metrics", responses={**responses(Status), **text}, response_class=Response)
    @access(ANY, logged=False)
    async def numbers() -> Response:
        """Return metrics for Prometheus."""
        text = await asyncio.get_running_loop().run_in_executor(threads, metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")

    return router
