"""Adds to the OpenAPI document what the framework cannot know: names of tasks and runs, and how a key is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from adapterbank.serving.http.access import OPEN, AccessTable

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_PATTERNS = {"task": f"^{_NAME}(@[1-9][0-9]{{0,8}})?$", "id": "^[0-9a-f]{16}$"}
"""What the parameters of a path look like."""
_UNVERSIONED = ("/train",)
"""Ends of paths whose task has no version."""


def complete_document(app: FastAPI, access: AccessTable, *, locked: bool) -> None:
    """Complete the document of an app; `locked` if requests need a key."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        found = plain()
        for path, parameter in _path_parameters(found):
            bare = parameter["name"] == "task" and path.endswith(_UNVERSIONED)
            parameter["schema"]["pattern"] = f"^{_NAME}$" if bare else _PATTERNS[parameter["name"]]
        if locked:
            _add_keys(found, access)
        return found

    app.openapi = document  # type: ignore[method-assign]


def _path_parameters(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for about in methods.values():
            yield from ((path, one) for one in about.get("parameters", ()) if one["in"] == "path")


def _add_keys(document: dict[str, Any], access: AccessTable) -> None:
    """State how a key is sent, so that generated clients can send one."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for route in access.routes:
        if route.documented and route.access.scope == OPEN:
            for method in route.methods:
                document["paths"][route.path][method.lower()]["security"] = []
