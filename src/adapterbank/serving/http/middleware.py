"""What stands around every route: request ids, keys, errors as JSON, the log, the count. Knows no service, no engine.

The frame is plain ASGI: it costs microseconds a request, and streams pass through it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterbank.errors import StorageError
from adapterbank.serving.http.auth import SCOPES
from adapterbank.serving.http.origin import check_host, check_origin
from adapterbank.serving.http.telemetry import LOG, Metrics, say
from adapterbank.serving.service.protocol import FAILED, REQUEST, Key, Keys, Refusal

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""No address has these. A line end would pass for the end of one where routes are looked up, and not below."""
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_OPEN = re.compile(r"/(?:healthz|readyz|favicon\.ico|page/.*)?")
"""Paths that need no key: they tell nothing but that the server is there."""
_NEEDS = (
    ("POST", re.compile(r"/v1/tasks/([^/]+)/train"), "train"),
    ("POST", re.compile(r"/v1/tasks/([^/]+)/rollback"), "admin"),
    ("DELETE", re.compile(r"/v1/tasks/([^/]+)"), "admin"),
    ("POST", re.compile(r"/v1/tasks/([^/]+)/predict"), "predict"),
    (None, re.compile(r"/v1/runs(?:/.*)?"), "train"),
    ("POST", re.compile(r"/v1/predict"), "predict"),
    ("GET", re.compile(r"/v1/tasks/([^/]+)"), "any"),
    ("GET", re.compile(r".*"), "any"),
    (None, re.compile(r".*"), "admin"),
)
"""Method, path, scope; a task in the path must be one of the key's. What is not listed is for `admin`."""


@dataclass(eq=False)
class RequestContext:
    """One request, as the frame sees it; routes find it in the request's state."""

    id: str
    key: Key | None = None
    rows: int = 0
    """Texts it asks about, for the log."""
    task: str = ""
    """What answered, for the log."""
    holds: Callable[[], bool] = lambda: True
    """Whether its key is still one, for answers that take long."""

    @property
    def name(self) -> str | None:
        """What its key is called, where there are keys."""
        return None if self.key is None else self.key.name

    def may(self, scope: str, task: str | None) -> bool:
        """Whether the key, if keys are in use, allows this; the scope `any` is every key's."""
        name = task.partition("@")[0] if task else None
        scopes = SCOPES if scope == "any" else (scope,)
        return self.key is None or any(self.key.allows(one, name) for one in scopes)

    def need(self, scope: str, task: str | None) -> None:
        """Refuse unless the key, if keys are in use, allows this."""
        if self.key is not None and not self.may(scope, task):
            name = task.partition("@")[0] if task else ""
            what = f"{'a look at' if scope == 'any' else f'{scope} on'} {name!r}" if name else scope
            raise Refusal("forbidden", f"The key {self.key.name!r} does not allow {what}; ask for one that does.")


class RequestMiddleware:
    """An app with the frame around it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        keys: Keys | None,
        pace: Callable[[Any], float],
        draining: Callable[[], bool],
        local: bool = False,
        template: Callable[[str], str] = lambda path: "",
    ) -> None:
        """Take the app; `pace` says how long a key must wait, `draining` whether the server is about to stop.

        `local` says that only this machine is meant to ask. `template` gives the route of a path whose request was
        refused before its route was looked for; empty where there is none.
        """
        self.app, self.metrics, self.keys, self.pace, self.draining = app, metrics, keys, pace, draining
        self.local, self.template = local, template

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        visit = RequestContext(_request_id(headers.get(b"x-request-id", b"")))
        scope.setdefault("state", {})["visit"] = visit
        REQUEST.set(visit.id)
        began, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", visit.id.encode())]
            await send(message)

        try:
            try:
                self._let_in(scope, headers, visit)
                await self.app(scope, receive, sending)
            except Refusal as refusal:
                await refuse(refusal, visit.id, sending)
            except Exception as error:
                LOG.error("failed", exc_info=error, extra={"fields": {"request_id": visit.id}})
                if status:  # the answer has begun: break it off
                    raise
                await refuse(Refusal("internal", FAILED), visit.id, sending)
        finally:
            self._note(scope, visit, status, time.perf_counter() - began)

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes], visit: RequestContext) -> None:
        path, method = scope["path"], scope["method"]
        if self.draining() and path.startswith("/v1/"):
            raise Refusal("not_ready", "The server is stopping; ask another, or again soon.", retry_after=1)
        if _CONTROL.search(path):
            raise Refusal("not_found", "There is nothing at this address; see /docs.")
        if _OPEN.fullmatch(path):
            return
        if self.keys is None:
            check_origin(method, headers)
            if self.local:
                check_host(headers)
            return
        self._let_key_in(self.keys, headers, visit)
        for wanted, pattern, need in _NEEDS:
            if (wanted in (None, method)) and (found := pattern.fullmatch(path)):
                visit.need(need, found[1] if pattern.groups else None)
                return

    def _let_key_in(self, keys: Keys, headers: dict[bytes, bytes], visit: RequestContext) -> None:
        kind, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        bearer = kind.lower() == "bearer"
        try:
            visit.key = keys.check(secret.strip()) if bearer else None
        except StorageError as error:  # its message names the file and the way out, and quotes nobody
            say("hindered", level=logging.ERROR, request_id=visit.id, problem=str(error))
            raise Refusal("not_ready", "The server cannot read its keys; its log says more.", retry_after=30) from error
        visit.holds = lambda: keys.check(secret.strip()) is not None
        if visit.key is None:
            wrong = "The key is none of this server's; ask for another."
            missing = "This server needs a key: send 'Authorization: Bearer KEY'."
            raise Refusal("unauthorized", wrong if bearer else missing)
        if wait := self.pace(visit.key):
            said = f"The key {visit.key.name!r} asks more often than it may; come again in {wait:.1f} s."
            raise Refusal("rate_limited", said, retry_after=wait)

    def _note(self, scope: Scope, visit: RequestContext, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or self.template(scope["path"]) or "none"
        self.metrics.request(route, status, seconds)
        if route in ("/healthz", "/readyz", "/metrics"):
            return
        fields: dict[str, Any] = {"request_id": visit.id, "method": scope["method"], "route": route, "status": status}
        fields |= {"ms": round(1000 * seconds, 1)}
        fields |= {"rows": visit.rows} if visit.rows else {}
        fields |= {"task": visit.task} if visit.task else {}
        fields |= {"key": visit.name} if visit.name else {}
        say("request", **fields)


async def refuse(refusal: Refusal, request_id: str, send: Send) -> None:
    """Answer with an error."""
    body = error_body(refusal.code, refusal.message, request_id)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", refusal.seconds.encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(code: str, message: str, request_id: str) -> bytes:
    """Write an error as JSON."""
    return json.dumps({"error": {"code": code, "message": message, "request_id": request_id}}).encode()


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if _SANE.fullmatch(text) else uuid4().hex
