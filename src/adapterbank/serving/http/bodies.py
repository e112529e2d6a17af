"""Reads request bodies under limits of size and time, and writes JSON responses. Knows no service."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from adapterbank.serving.service.protocol import Limits, Refusal, shown

Model = TypeVar("Model", bound=BaseModel)

_MAX_ERRORS = 100
"""A body with more errors gets their number alone: describing them all would delay other requests."""
BODY_TIMEOUT = 60.0
"""Seconds within which a JSON body must arrive."""


class ClientDisconnected(Exception):
    """The client closed its connection before the response; the middleware records it, and nobody is answered."""


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(json.dumps(value, ensure_ascii=False, allow_nan=False), status, media_type="application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body, and stop as soon as it is larger than the limit."""
    too_large = Refusal("too_large", f"The body is larger than {limit:,} bytes; send fewer texts per request.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        message = f"The body did not arrive within {BODY_TIMEOUT:.0f} seconds; send it again."
        raise Refusal("too_slow", message) from None
    return b"".join(parts)


def check_encoding(request: Request) -> None:
    """Refuse a compressed body: its true size would be known too late."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Refusal("unsupported", f"Content-Encoding is {encoding[:40]!r}; send the body uncompressed.")


async def read_json(request: Request, model: type[Model], limits: Limits) -> Model:
    """Read a JSON body and validate it."""
    check_encoding(request)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            "unsupported", f"Content-Type is {shown(kind)!r}; send JSON with 'Content-Type: application/json'."
        )
    try:
        return model.model_validate_json(await read_body(request, limits.body))
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            raise Refusal("bad_request", f"The body has {error.error_count():,} errors; see /docs.") from None
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(shown(str(part)) for part in first["loc"])
        what = _unknown(model, first["loc"]) if first["type"] == "extra_forbidden" else first["msg"]
        raise Refusal("bad_request", f"{where or 'The body'}: {what}.") from error


def _unknown(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return what to say of an unknown field: the nearest known one, and all that there are."""
    for part in place[:-1]:
        nested = _models(model.model_fields[part].annotation) if part in model.model_fields else []
        model = nested[0] if nested else model
    names, given = list(model.model_fields), str(place[-1])[:100]
    near = difflib.get_close_matches(given, names, n=1)
    return f"there is no such field{f'; did you mean {near[0]!r}?' if near else '.'} The fields are {', '.join(names)}"


def _models(hint: Any) -> list[type[BaseModel]]:
    """Return the models that a type names, such as that of the items of a list."""
    inside = [one for part in get_args(hint) for one in _models(part)]
    return [hint, *inside] if isinstance(hint, type) and issubclass(hint, BaseModel) else inside


async def cancel_on_disconnect(request: Request, work: Any) -> Any:
    """Wait for a result; cancel the work if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
