"""The middleware around every route: request ids, keys, JSON errors, log and metrics. Knows no service and no engine.

It is plain ASGI: it costs microseconds per request, and streamed responses pass through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterbank.errors import StorageError
from adapterbank.serving.http.access import ANY, OPEN, AccessTable, Address
from adapterbank.serving.http.auth import SCOPES
from adapterbank.serving.http.heads import check_head
from adapterbank.serving.http.origin import check_host, check_origin
from adapterbank.serving.http.routes_docs import HEADERS, closed_page
from adapterbank.serving.http.telemetry import LOG, Metrics, log_event
from adapterbank.serving.service.protocol import FAILED, REQUEST, STOPPING, AccessKey, KeyStore, Refusal, shown

NOT_FOUND = "There is no such address; see /docs."
CLIENT_LEFT = 499
"""The status, in the log and the metrics, of a request whose client left before the end of the response."""
_LONG_WORD = re.compile(r"(\S{112})\S{8,}")
_MESSAGE = 1200
"""Characters of a message: a name of any length in a request does not come back whole."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""No address contains these. A `$` in a route's pattern would match before a trailing line end."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(eq=False)
class RequestContext:
    """One request as the middleware sees it; routes find it in `request.state.context`."""

    id: str
    key: AccessKey | None = None
    rows: int = 0
    """Number of texts, for the log."""
    task: str = ""
    """The task that answered, for the log."""
    key_is_valid: Callable[[], bool] = lambda: True
    """Whether the key still exists, for long responses."""
    sees_all: Callable[[], bool] = lambda: True
    """Whether the client may see the names of all tasks, for routes that need no key."""

    @property
    def key_name(self) -> str | None:
        """The name of the key; None where the server has no keys."""
        return None if self.key is None else self.key.name

    def allows(self, scope: str, task: str | None) -> bool:
        """Whether the key allows this. Every key has the scope `any`; without keys all is allowed."""
        name = task.partition("@")[0] if task else None
        scopes = SCOPES if scope == ANY else (scope,)
        return self.key is None or any(self.key.allows(one, name) for one in scopes)

    def require(self, scope: str, task: str | None) -> None:
        """Refuse the request unless the key allows this."""
        if self.key is not None and not self.allows(scope, task):
            name = shown(task.partition("@")[0]) if task else ""
            action = f"{'reading' if scope == ANY else f'{scope} on'} {name!r}" if name else scope
            raise Refusal("forbidden", f"The key {self.key.name!r} does not allow {action}; use a key that does.")


class _Traffic:
    """What passes between a client and the app."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status = 0
        self.left = False
        """Whether the client disconnected before the end of the response."""
        self._complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._complete = True


class RequestMiddleware:
    """Wraps an app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessTable,
        metrics: Metrics,
        keys: KeyStore | None,
        rate_limit: Callable[[Any], float],
        draining: Callable[[], bool],
        local: bool = False,
    ) -> None:
        """Take the app and what the middleware asks.

        Args:
            app: The app to wrap.
            access: Who may call which address.
            metrics: Counts the requests.
            keys: The keys of the server; None for a server without keys.
            rate_limit: Returns the seconds that a key has to wait; 0 if the request may run.
            draining: Whether the server is stopping.
            local: Whether only this machine may connect; applies without keys.
        """
        self.app, self.access, self.metrics = app, access, metrics
        self.keys, self.rate_limit, self.draining, self.local = keys, rate_limit, draining, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        traffic = _Traffic(receive, send)
        context = RequestContext(_request_id(headers.get(b"x-request-id", b"")))
        scope.setdefault("state", {})["context"] = context
        REQUEST.set(context.id)
        address = self.access.find(scope["method"], scope["path"])
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", context.id.encode())]
            await traffic.send(message)

        try:
            try:
                check_head(scope)
                self._authorize(scope, headers, context, address)
                await self.app(scope, traffic.receive, send_with_id)
            except Refusal as refusal:
                shown = _shown_to(scope, headers, refusal)
                await send_refusal(refusal, context.id, send_with_id, shown)
            except Exception as error:
                if traffic.left:  # nobody waits for the response
                    return
                LOG.error("failed", exc_info=error, extra={"fields": {"request_id": context.id}})
                if traffic.status:  # the response has begun: end the connection
                    raise
                await send_refusal(Refusal("internal", FAILED), context.id, send_with_id)
        finally:
            status = CLIENT_LEFT if traffic.left else traffic.status
            self._record(scope, context, address, status, time.perf_counter() - started)

    def _authorize(self, scope: Scope, headers: dict[bytes, bytes], context: RequestContext, address: Address) -> None:
        path = scope["path"]
        if self.draining() and path.startswith("/v1/"):
            raise Refusal("not_ready", STOPPING, retry_after=1)
        if _CONTROL.search(path):
            raise Refusal("not_found", NOT_FOUND)
        if address.scope == OPEN:
            if self.keys is not None:
                context.sees_all = partial(_sees_all, self.keys, headers)
            return
        if self.keys is None:
            check_origin(scope["method"], headers)
            if self.local:
                check_host(headers)
            return
        self._authenticate(self.keys, headers, context)
        context.require(address.scope, address.task)

    def _authenticate(self, keys: KeyStore, headers: dict[bytes, bytes], context: RequestContext) -> None:
        secret = _secret(headers)
        try:
            context.key = None if secret is None else keys.check(secret)
        except StorageError as error:  # its message names the file and the remedy, and quotes no secret
            log_event("keys unreadable", level=logging.ERROR, request_id=context.id, problem=str(error))
            message = "The server cannot read its keys; the server's log has the reason."
            raise Refusal("not_ready", message, retry_after=30) from error
        context.key_is_valid = lambda: secret is not None and keys.check(secret) is not None
        if context.key is None:
            unknown = "The key is not known to this server; ask its operator for a new one."
            missing = "This server requires a key: send the header 'Authorization: Bearer KEY'."
            raise Refusal("unauthorized", missing if secret is None else unknown)
        if wait := self.rate_limit(context.key):
            message = f"The key {context.key.name!r} is over its rate limit; try again in {wait:.1f} s."
            raise Refusal("rate_limited", message, retry_after=wait)

    def _record(self, scope: Scope, context: RequestContext, address: Address, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or address.template or "none"
        self.metrics.request(route, status, seconds)
        if not address.logged:
            return
        fields: dict[str, Any] = {"request_id": context.id, "method": scope["method"], "route": route, "status": status}
        fields |= {"ms": round(1000 * seconds, 1)}
        fields |= {"rows": context.rows} if context.rows else {}
        fields |= {"task": context.task} if context.task else {}
        fields |= {"key": context.key_name} if context.key_name else {}
        log_event("request", **fields)


def _secret(headers: dict[bytes, bytes]) -> str | None:
    """Return the secret that a request sends; None if it sends none."""
    kind, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else None


def _sees_all(keys: KeyStore, headers: dict[bytes, bytes]) -> bool:
    """Return whether a request has a key for all tasks."""
    secret = _secret(headers)
    with contextlib.suppress(StorageError):
        key = None if secret is None else keys.check(secret)
        return key is not None and any(key.allows(scope, "?") for scope in SCOPES)
    return False


def _shown_to(scope: Scope, headers: dict[bytes, bytes], refusal: Refusal) -> bytes | None:
    """Return the page that asks for a key, for a browser that opens /docs without one."""
    asks = scope["method"] == "GET" and scope["path"] == "/docs" and b"text/html" in headers.get(b"accept", b"")
    return closed_page(refusal.message) if refusal.status == 401 and asks else None


async def send_refusal(refusal: Refusal, request_id: str, send: Send, page: bytes | None = None) -> None:
    """Send an error response: JSON, or a page for a browser."""
    body = page or error_body(refusal.code, refusal.message, request_id)
    kind = b"text/html; charset=utf-8" if page else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()] if page else []
    if refusal.retry_after is not None:
        headers.append((b"retry-after", refusal.seconds.encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(code: str, message: str, request_id: str) -> bytes:
    """Return an error as JSON; what a request makes too long is cut."""
    message = _LONG_WORD.sub(r"\1…", message)
    if len(message) > _MESSAGE:
        message = f"{message[: _MESSAGE // 2]} … {message[-_MESSAGE // 2 :]}"
    return json.dumps({"error": {"code": code, "message": message, "request_id": request_id}}).encode()


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid4().hex
