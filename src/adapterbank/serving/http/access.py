"""The scope of each route: declared with the route, read before the route runs. Knows no keys and no middleware.

    @router.post("/v1/tasks/{task}/predict")
    @access("predict")
    async def predict(task: str, request: Request) -> Response: ...

A route without a scope cannot be added to the app. The same table gives the label of a request in metrics and logs, and
the methods that an address takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.routing import compile_path

OPEN, ANY, ADMIN = "open", "any", "admin"
"""No key, any key, a key with the scope `admin`. The other scopes are those of `auth.SCOPES`."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Access:
    """Who may call a route."""

    scope: str
    """`open`, `any` or one of `auth.SCOPES`. Where the path has `{task}`, the key must be for that task."""
    logged: bool = True
    """Whether its requests are logged; probes would fill the log."""


def access(scope: str, *, logged: bool = True) -> Callable[[Endpoint], Endpoint]:
    """Declare the scope of the route that a function answers."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__access__ = Access(scope, logged)  # type: ignore[attr-defined]
        return endpoint

    return declare


@dataclass(frozen=True)
class RouteAccess:
    """One route: an address, its methods and who may call it."""

    path: str
    methods: frozenset[str]
    access: Access
    documented: bool = True
    """Whether the app has it and the OpenAPI document lists it."""


@dataclass(frozen=True)
class Address:
    """What is known of a requested address before its route runs."""

    scope: str
    task: str | None = None
    """The task that the path names, if the route has one."""
    template: str = ""
    """The path as the OpenAPI document has it, with {task} for a task's name; empty if it is not listed."""
    logged: bool = True


def declared(router: APIRouter, *, included: bool = True) -> list[RouteAccess]:
    """Return the access of every route of a router; raise where a route declares none."""
    found = []
    for route in router.routes:
        path, methods, endpoint = (getattr(route, name, None) for name in ("path", "methods", "endpoint"))
        about = getattr(endpoint, "__access__", None)
        if about is None:
            raise ValueError(f"{sorted(methods or ())} {path} declares no scope; decorate it with @access(...).")
        documented = included and bool(getattr(route, "include_in_schema", False))
        found.append(RouteAccess(str(path), frozenset(methods or ()), about, documented))
    return found


class AccessTable:
    """Looks up who may call an address."""

    def __init__(self, routes: Iterable[RouteAccess], reserved: Mapping[str, str]) -> None:
        """Take the routes, and the scopes of addresses that need one even where no route answers, by their pattern."""
        self.routes = tuple(routes)
        self._fixed: dict[str, list[RouteAccess]] = {}
        self._patterns: list[tuple[re.Pattern[str], RouteAccess]] = []
        for route in self.routes:
            if "{" in route.path:
                self._patterns.append((compile_path(route.path)[0], route))
            else:
                self._fixed.setdefault(route.path, []).append(route)
        self._reserved = [(compile_path(path)[0], scope) for path, scope in reserved.items()]

    def find(self, method: str, path: str) -> Address:
        """Return what a request to this path needs.

        A method that no route of the path takes needs `admin`, or any key for GET, so that a mistake in a request never
        reveals more than the key may see. An open path is open for all methods.
        """
        found, task = self._routes_at(path)
        template = next((route.path for route in found if route.documented), "")
        logged = all(route.access.logged for route in found)
        for route in found:
            if method in route.methods or route.access.scope == OPEN:
                return Address(route.access.scope, task, template, logged)
        reserved = next((scope for pattern, scope in self._reserved if pattern.match(path)), None)
        return Address(reserved or (ANY if method == "GET" else ADMIN), None, template, logged)

    def methods(self, path: str) -> str:
        """List the documented methods of an address, as the Allow header does."""
        routes = [route for route in self._routes_at(path)[0] if route.documented]
        return ", ".join(sorted({method for route in routes for method in route.methods}))

    def _routes_at(self, path: str) -> tuple[list[RouteAccess], str | None]:
        if path in self._fixed:
            return self._fixed[path], None
        matches = [(match, route) for pattern, route in self._patterns if (match := pattern.match(path))]
        task = matches[0][0].groupdict().get("task") if matches else None
        return [route for _, route in matches], task
