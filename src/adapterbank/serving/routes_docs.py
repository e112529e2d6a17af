"""The page at /docs: every address of the server in a table, from its own OpenAPI document. Fetches nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>adapterbank: HTTP interface</title>
</head>
<body>
<h1>adapterbank {version}: HTTP interface</h1>
<p>Bodies, answers and errors in full: <a href="openapi.json">openapi.json</a>, which OpenAPI tools read.</p>
<table>
<thead><tr><th scope="col">address</th><th scope="col">what</th><th scope="col">options in the query</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def docs_router(document: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """Make the route; `document` gives the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> Response:
        return Response(write(document()), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router


def write(document: Mapping[str, Any]) -> str:
    """Write the table of a document's addresses."""
    rows = [
        _row(f"{method.upper()} {path}", about)
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    return _PAGE.format(version=escape(document["info"]["version"]), rows="\n".join(rows))


def _row(address: str, about: Mapping[str, Any]) -> str:
    options = ", ".join(one["name"] for one in about.get("parameters", ()) if one["in"] == "query")
    what = about.get("description") or about.get("summary", "")
    return f"<tr><td><code>{escape(address)}</code></td><td>{escape(what)}</td><td>{escape(options)}</td></tr>"
