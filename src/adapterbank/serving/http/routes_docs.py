"""The page at /docs: every address of the server, from its OpenAPI document. Loads nothing else and runs no script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from adapterbank.serving.http.access import ANY, access

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
section { border-top: 1px solid #8888; padding-bottom: 1rem; }
h2 { font-size: 1.1rem; margin-bottom: 0; overflow-wrap: anywhere; }
p { margin: .25rem 0; }
pre { padding: .5rem; border: 1px solid #8888; border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .1rem 1rem; margin: .5rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .2rem 0; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; {_CLOSED}",
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
<style>{style}</style>
</head>
<body>
<h1>adapterbank {version}: HTTP interface</h1>
<p>The full description for OpenAPI tools is in <a href="openapi.json">openapi.json</a>.</p>
{sections}
</body>
</html>
"""


def docs_router(document: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """Return the route; `document` returns the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    @access(ANY)
    async def docs() -> Response:
        return Response(render(document()), media_type="text/html; charset=utf-8", headers=_HEADERS)

    return router


def render(document: Mapping[str, Any]) -> str:
    """Return the page of a document as HTML."""
    models = document.get("components", {}).get("schemas", {})
    sections = [
        _section(f"{method.upper()} {path}", about, models)
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    version = escape(document["info"]["version"])
    return _PAGE.format(version=version, style=_STYLE, sections="\n".join(sections))


def _section(address: str, about: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the section of one address: its request, responses and errors."""
    options = {one["name"]: one.get("description", "") for one in about.get("parameters", ()) if one["in"] == "query"}
    good = {status: response for status, response in about["responses"].items() if status.startswith("2")}
    bad = {
        status: response.get("description", "") for status, response in about["responses"].items() if status not in good
    }
    parts = (
        f"<h2><code>{escape(address)}</code></h2>",
        f"<p>{escape(about.get('description') or about.get('summary', ''))}</p>",
        _body(about.get("requestBody", {}).get("content", {})),
        *(f"<p>{status}: {_response(response, models)}</p>" for status, response in good.items()),
        _folded(f"{len(options)} options in the query", options),
        _folded("Errors", bad),
    )
    return "\n".join(["<section>", *(part for part in parts if part), "</section>"])


def _body(content: Mapping[str, Any]) -> str:
    """Return an example of the request body, or its types if it is a file."""
    for one in content.values():
        if "example" in one:
            shapes = one["schema"].get("oneOf", [one["schema"]])
            takes = " or ".join(_codes(_given(shape["properties"])) for shape in shapes)
            return f"<p>A JSON body with {takes}:</p>\n<pre>{escape(json.dumps(one['example']))}</pre>"
    return f"<p>The body is a file: {escape(', '.join(content))}.</p>" if content else ""


def _given(properties: Mapping[str, Any]) -> list[str]:
    """Return the fields that may have a value."""
    return [name for name, schema in properties.items() if schema.get("type") != "null"]


def _response(response: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """List the fields of a JSON response; otherwise its type."""
    found = []
    for kind, one in response.get("content", {}).items():
        model = models.get(one.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
        found.append(_codes(model.get("properties", ())) or escape(kind))
    return "; ".join(found)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"<code>{escape(name)}</code>" for name in names)


def _folded(title: str, lines: Mapping[str, str]) -> str:
    """Return a list that the reader can unfold."""
    rows = "".join(f"<dt><code>{escape(name)}</code></dt><dd>{escape(what)}</dd>" for name, what in lines.items())
    return f"<details><summary>{escape(title)}</summary><dl>{rows}</dl></details>" if lines else ""
