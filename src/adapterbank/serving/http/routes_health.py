"""The routes for operators: health, readiness and metrics. Knows no tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response

from adapterbank.serving.http.access import ANY, OPEN, access
from adapterbank.serving.http.bodies import json_response
from adapterbank.serving.http.schemas import Status, responses
from adapterbank.serving.http.telemetry import Metrics
from adapterbank.serving.service.protocol import Refusal, Service


def health_router(service: Service, metrics: Metrics, draining: Callable[[], bool]) -> APIRouter:
    """Return the routes; `draining` tells whether the server is stopping."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", responses=responses(Status))
    @access(OPEN, logged=False)
    async def healthz() -> Response:
        """Report that the server is alive."""
        return json_response({"status": "alive"})

    @router.get("/readyz", responses=responses(Status))
    @access(OPEN, logged=False)
    async def readyz() -> Response:
        """Report whether the bank's tasks are loaded."""
        if draining() or not service.ready:
            message = "The server is loading the bank's tasks, or is stopping; try again soon."
            raise Refusal("not_ready", message, retry_after=1)
        return json_response({"status": "ready"})

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz)):  # some probes ask for no body
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @router.get("/metrics", responses={**responses(Status), **text}, response_class=Response)
    @access(ANY, logged=False)
    async def numbers() -> Response:
        """Return metrics for Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type="text/plain; version=0.0.4")

    return router
