"""The routes for tasks: list, show, remove, roll back. Knows no engine; a service answers."""

from __future__ import annotations

import gzip
import re

from fastapi import APIRouter, Request, Response

from adapterbank.serving.http.access import ADMIN, ANY, access
from adapterbank.serving.http.bodies import json_response
from adapterbank.serving.http.middleware import RequestContext
from adapterbank.serving.http.schemas import RemovedReply, RolledBackReply, TaskAnswer, TasksAnswer, responses
from adapterbank.serving.service.protocol import Service

_COMPRESS_FROM = 4096
"""Bytes of a response from which compression pays."""
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:;\s*q=(?!0(?:\.0*)?\s*(?:,|$))[^,]*)?(?:,|$)", re.IGNORECASE)
"""An Accept-Encoding header that names gzip with a weight other than 0."""
_CODES = ("unknown_task", "unknown_version", "damaged")


def tasks_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["tasks"])

    @router.get("/v1/tasks", responses=responses(TasksAnswer))
    @access(ANY)
    async def tasks(request: Request) -> Response:
        """List the tasks that are served and those that cannot be, as far as the key may see them."""
        context: RequestContext = request.state.context
        listing = await service.tasks()
        visible = {
            name: [row for row in listing[name] if context.allows(ANY, row[field])]
            for name, field in (("tasks", "name"), ("problems", "task"))
        }
        return _compressed(json_response({**listing, **visible}), request)

    @router.get("/v1/tasks/{task}", responses=responses(TaskAnswer, *_CODES))
    @access(ANY)
    async def task(task: str) -> Response:
        """Return everything about a task."""
        return json_response(await service.task(task))

    @router.delete("/v1/tasks/{task}", responses=responses(RemovedReply, *_CODES, "conflict"))
    @access(ADMIN)
    async def remove(task: str) -> Response:
        """Remove a task, or one version of it, from the bank."""
        await service.remove(task)
        return json_response({"removed": task})

    @router.post("/v1/tasks/{task}/rollback", responses=responses(RolledBackReply, *_CODES, "conflict"))
    @access(ADMIN)
    async def rollback(task: str) -> Response:
        """Serve the previous version again."""
        return json_response({"task": task, "version": await service.rollback(task)})

    return router


def _compressed(response: Response, request: Request) -> Response:
    """Compress a large response if the client accepts it: a list of a thousand tasks shrinks to a tenth."""
    if len(response.body) >= _COMPRESS_FROM and _GZIP.search(request.headers.get("accept-encoding", "")):
        response.body = gzip.compress(bytes(response.body), compresslevel=1)
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(response.body))
    response.headers["Vary"] = "Accept-Encoding"
    return response
