"""The page at /docs: every address of the server, from its OpenAPI document, with a form that tries it.

The page loads nothing else. Its one script, `docs.js`, stands in the page and may call this server only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib import resources
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
label { display: block; margin: .3rem 0; }
input, textarea { font: inherit; box-sizing: border-box; max-width: 100%; }
textarea { width: 100%; font-family: monospace; }
output { display: block; white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; }
"""
_SCRIPT = resources.files("adapterbank.serving.http").joinpath("docs.js").read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_OWN = f"style-src 'sha256-{_digest(_STYLE)}'; script-src 'sha256-{_digest(_SCRIPT)}'; connect-src 'self'"
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; {_OWN}; {_CLOSED}",
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
<script>{script}</script>
</head>
<body>
<h1>adapterbank{version}: HTTP interface</h1>
{key}{sections}
</body>
</html>
"""
_KEY = """<form{closed}>
<label>API key <input name="key" type="password" autocomplete="off" required></label>
<button>Use this key</button>
<output></output>
</form>
"""


def docs_router(document: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """Return the route; `document` returns the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    @access(ANY)
    async def docs() -> Response:
        return Response(render(document()), media_type="text/html; charset=utf-8", headers=HEADERS)

    return router


def render(document: Mapping[str, Any]) -> str:
    """Return the page of a document as HTML."""
    models = document.get("components", {}).get("schemas", {})
    sections = [
        _section(f"{method.upper()} {path}", about, models)
        for path, methods in document["paths"].items()
        for method, about in methods.items()
    ]
    intro = '<p>The full description for OpenAPI tools is in <a href="openapi.json">openapi.json</a>.</p>\n'
    return _PAGE.format(
        version=f" {escape(document['info']['version'])}",
        style=_STYLE,
        script=_SCRIPT,
        key=intro + (_KEY.format(closed="") if "security" in document else ""),
        sections="\n".join(sections),
    )


def closed_page(message: str) -> bytes:
    """Return the page for a browser that sends no key: it asks for one, and tells nothing else."""
    form = _KEY.format(closed=' data-closed="yes"')
    asked = f"<p>{escape(message)}</p>\n{form}"
    return _PAGE.format(version="", style=_STYLE, script=_SCRIPT, key=asked, sections="").encode()


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
        _form(address, about),
    )
    return "\n".join(["<section>", *(part for part in parts if part), "</section>"])


def _form(address: str, about: Mapping[str, Any]) -> str:
    """Return a form that sends a request to this address; `docs.js` shows the answer."""
    method, _, path = address.partition(" ")
    content = about.get("requestBody", {}).get("content", {})
    example = next((one["example"] for one in content.values() if "example" in one), None)
    fields = [
        f'<label>{escape(name)} <input data-part name="{escape(name)}" required></label>'
        for name in re.findall(r"{(\w+)}", path)
    ]
    if any(one["in"] == "query" for one in about.get("parameters", ())):
        fields.append('<label>query <input name="query" placeholder="name=value&amp;name=value"></label>')
    if example is not None:
        text = escape(json.dumps(example, indent=2))
        fields.append(f'<label>body <textarea name="body" rows="6" spellcheck="false">{text}</textarea></label>')
    elif content:
        fields.append('<label>body <input name="file" type="file" required></label>')
    inside = "".join([*fields, "<button>Send</button>", "<output></output>"])
    form = f'<form data-method="{escape(method)}" data-path="{escape(path)}">{inside}</form>'
    return f"<details><summary>Try it</summary>{form}</details>"


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
