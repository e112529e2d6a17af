"""The routes of the web page: its files. Knows no tasks, keys or runs; the page calls the other routes.

The files are read once, so that a request cannot name any others. The page loads from its own server only, runs no
script except its own files, and cannot be put into a frame.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from adapterbank.serving.http.access import OPEN, access

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
RESERVED = {"/page/{file:path}": OPEN, "/favicon.ico": OPEN}
"""Addresses that browsers request without a key; a missing file is not found, with or without one."""


def page_router() -> APIRouter:
    """Return the routes: `/`, and one for each file under `/page/`."""
    router = APIRouter(include_in_schema=False)
    for file in resources.files("adapterbank.serving.http").joinpath("page").iterdir():
        kind = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if kind:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            _add(router, path, file.read_bytes(), kind)
    return router


def _add(router: APIRouter, path: str, body: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    headers = {**HEADERS, "ETag": tag}

    @access(OPEN)
    def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    router.add_api_route(path, send, methods=["GET", "HEAD"], name=f"page {path}")
