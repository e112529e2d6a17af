"""The routes that ask tasks. Knows no engine: a service answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from adapterbank.serving.http.middleware import RequestContext
from adapterbank.serving.http.schemas import (
    PredictAnswer,
    PredictRequest,
    RowsAnswer,
    RowsRequest,
    answers,
    predict_body,
    rows_body,
)
from adapterbank.serving.service.protocol import Ask, Limits, Refusal, Reply, Service

Form = TypeVar("Form", bound=BaseModel)

_TOLD = 100
"""With more mistakes than that none is told: to write them down would keep others waiting."""
WHOLE = 60.0
"""Seconds in which a body of JSON must have come."""
_SLOW = "The body comes too slowly; send it again over a better line."


def predict_router(service: Service, limits: Limits) -> APIRouter:
    """Make the routes that predict."""
    router = APIRouter(tags=["predict"])
    codes = (
        *("unknown_task", "unknown_version", "damaged", "overloaded"),
        *("too_large", "too_slow", "unsupported", "too_many_texts", "text_too_long"),
    )

    @router.post(
        "/v1/tasks/{task}/predict", responses=answers(PredictAnswer, *codes), openapi_extra=predict_body(limits)
    )
    async def predict(task: str, request: Request) -> Response:
        """Ask one task about texts."""
        form = await read_form(request, PredictRequest, limits)
        ask = _ask(task, form, limits)
        visit: RequestContext = request.state.visit
        visit.rows = len(ask.texts)
        (answer,) = await unless_gone(request, service.predict([ask]))
        visit.task = _answered([answer])
        return reply({"task": answer.task, "version": answer.version, "predictions": answer.predictions})

    @router.post("/v1/predict", responses=answers(RowsAnswer, *codes), openapi_extra=rows_body(limits))
    async def predict_rows(request: Request) -> Response:
        """Ask any tasks about rows, each naming its own."""
        form = await read_form(request, RowsRequest, limits)
        visit: RequestContext = request.state.visit
        visit.rows = len(form.rows)
        places: dict[tuple[str, bool], list[int]] = {}
        for i, row in enumerate(form.rows):
            places.setdefault((row.task, row.pair is None), []).append(i)
        _check([t for row in form.rows for t in (row.text, row.pair or "")], len(form.rows), form.best, limits)
        for name, _ in places:
            visit.need("predict", name)
        asks = [
            Ask(
                name,
                [form.rows[i].text for i in mine],
                None if lone else [form.rows[i].pair or "" for i in mine],
                form.best,
            )
            for (name, lone), mine in places.items()
        ]
        told = await unless_gone(request, service.predict(asks))
        visit.task = _answered(told)
        found: dict[int, Any] = {}
        for mine, answer in zip(places.values(), told, strict=True):
            for i, one in zip(mine, answer.predictions, strict=True):
                found[i] = {"task": answer.task, "version": answer.version, **one}
        return reply({"predictions": [found[i] for i in range(len(form.rows))]})

    return router


def _answered(told: Sequence[Reply]) -> str:
    """Name what answered, for the log: the task and its version, of several versions the task, else their number."""
    names = {answer.task for answer in told}
    versions = {answer.version for answer in told}
    if len(names) > 1:
        return f"{len(names)} tasks"
    return "@".join([*names, *(map(str, versions) if len(versions) == 1 else ())])


def reply(value: Any, status: int = 200) -> Response:
    """Answer with JSON."""
    return Response(json.dumps(value, ensure_ascii=False, allow_nan=False), status, media_type="application/json")


async def read_body(request: Request, most: int) -> bytes:
    """Read a body, and stop at once when it is larger than it may be."""
    refusal = Refusal("too_large", f"The body has more than {most:,} bytes; send fewer texts at once.")
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise refusal
    parts, size = [], 0
    try:
        async with asyncio.timeout(WHOLE):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise refusal
                parts.append(part)
    except TimeoutError:
        raise Refusal("too_slow", _SLOW) from None
    return b"".join(parts)


def check_unpacked(request: Request) -> None:
    """Refuse a body that is packed: how large it is would show too late."""
    if (how := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise Refusal("unsupported", f"The body's Content-Encoding is {how[:40]!r}; send it as it is, not packed.")


async def read_form(request: Request, kind: type[Form], limits: Limits) -> Form:
    """Read a body that is JSON of a kind."""
    check_unpacked(request)
    said = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if said != "application/json":
        raise Refusal("unsupported", f"The body is {said!r}; send JSON with 'Content-Type: application/json'.")
    try:
        return kind.model_validate_json(await read_body(request, limits.body))
    except ValidationError as error:
        if error.error_count() > _TOLD:
            raise Refusal("bad_request", f"The body has {error.error_count():,} mistakes; see /docs.") from None
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal("bad_request", f"{where or 'The body'}: {first['msg']}.") from error


async def unless_gone(request: Request, work: Any) -> Any:
    """Wait for an answer; when the client goes away first, cancel it."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientGone
        return answering.result()
    finally:
        leaving.cancel()
        if not answering.done():
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _ask(task: str, form: PredictRequest, limits: Limits) -> Ask:
    if (form.text is None) == (form.texts is None):
        raise Refusal("bad_request", "Give either 'texts', a list, or 'text', one string.")
    if (form.pair is not None and form.text is None) or (form.pairs is not None and form.texts is None):
        raise Refusal("bad_request", "'pair' goes with 'text', and 'pairs' with 'texts'.")
    texts = form.texts if form.texts is not None else [form.text or ""]
    pairs = form.pairs if form.texts is not None else None if form.pair is None else [form.pair]
    if pairs is not None and len(pairs) != len(texts):
        raise Refusal("bad_request", f"There are {len(texts)} texts and {len(pairs)} pairs; give as many of each.")
    _check([*texts, *(pairs or ())], len(texts), form.best, limits)
    return Ask(task, texts, pairs, form.best)


def _check(texts: list[str], count: int, best: int, limits: Limits) -> None:
    if not count:
        raise Refusal("bad_request", "There is no text; give at least one.")
    if count > limits.texts:
        raise Refusal("too_many_texts", f"There are {count} texts, and {limits.texts} are taken at once; send several.")
    longest = max(map(len, texts))
    if longest > limits.characters:
        limit = f"{limits.characters:,}"
        raise Refusal("text_too_long", f"A text has {longest:,} characters, and may have {limit}; cut it.")
    if not 0 <= best <= limits.best:
        raise Refusal("bad_request", f"best is {best}; give a number from 0 to {limits.best}.")
