"""The routes that predict. Knows no engine; a service answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from adapterbank.serving.http.access import access
from adapterbank.serving.http.bodies import cancel_on_disconnect, json_response, read_json
from adapterbank.serving.http.middleware import RequestContext
from adapterbank.serving.http.schemas import (
    PredictAnswer,
    PredictRequest,
    RowsAnswer,
    RowsRequest,
    predict_body,
    responses,
    rows_body,
)
from adapterbank.serving.service.protocol import Ask, Limits, Refusal, Reply, Service

_CODES = (
    *("unknown_task", "unknown_version", "damaged", "overloaded"),
    *("too_large", "too_slow", "unsupported", "too_many_texts", "text_too_long"),
)


def predict_router(service: Service, limits: Limits) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["predict"])

    @router.post(
        "/v1/tasks/{task}/predict", responses=responses(PredictAnswer, *_CODES), openapi_extra=predict_body(limits)
    )
    @access("predict")
    async def predict(task: str, request: Request) -> Response:
        """Predict texts with one task."""
        form = await read_json(request, PredictRequest, limits)
        ask = _ask(task, form, limits)
        context: RequestContext = request.state.context
        context.rows = len(ask.texts)
        (reply,) = await cancel_on_disconnect(request, service.predict([ask]))
        context.rows = reply.rows or context.rows
        context.task = _log_name([reply])
        return json_response({"task": reply.task, "version": reply.version, "predictions": reply.predictions})

    @router.post("/v1/predict", responses=responses(RowsAnswer, *_CODES), openapi_extra=rows_body(limits))
    @access("predict")
    async def predict_rows(request: Request) -> Response:
        """Predict rows, each with the task that it names."""
        form = await read_json(request, RowsRequest, limits)
        context: RequestContext = request.state.context
        context.rows = len(form.rows)
        _check([t for row in form.rows for t in (row.text, row.pair or "")], len(form.rows), form, limits)
        groups = _group(form, limits)
        for ask, _ in groups:
            context.require("predict", ask.task)
        replies = await cancel_on_disconnect(request, service.predict([ask for ask, _ in groups]))
        context.rows, context.task = sum(reply.rows for reply in replies) or context.rows, _log_name(replies)
        found: dict[int, Any] = {}
        for (_, places), reply in zip(groups, replies, strict=True):
            for i, prediction in zip(places, reply.predictions, strict=True):
                found[i] = {"task": reply.task, "version": reply.version, **prediction}
        return json_response({"predictions": [found[i] for i in range(len(form.rows))]})

    return router


def _group(form: RowsRequest, limits: Limits) -> list[tuple[Ask, list[int]]]:
    """Group rows by task, and by whether they have a pair; return each group with the places of its rows."""
    places: dict[tuple[str, bool], list[int]] = {}
    for i, row in enumerate(form.rows):
        places.setdefault((row.task, row.pair is None), []).append(i)
    return [
        (
            Ask(
                name,
                [form.rows[i].text for i in mine],
                None if single else [form.rows[i].pair or "" for i in mine],
                form.best,
                form.abstain,
                limits.texts if form.explain else 0,
            ),
            mine,
        )
        for (name, single), mine in places.items()
    ]


def _log_name(replies: Sequence[Reply]) -> str:
    """Return what answered, for the log: `task@version`, `task` for several versions, or the number of tasks."""
    names = {reply.task for reply in replies}
    versions = {reply.version for reply in replies}
    if len(names) > 1:
        return f"{len(names)} tasks"
    return "@".join([*names, *(map(str, versions) if len(versions) == 1 else ())])


def _ask(task: str, form: PredictRequest, limits: Limits) -> Ask:
    if (form.text is None) == (form.texts is None):
        raise Refusal("bad_request", "Give either 'texts' (a list) or 'text' (one string).")
    if (form.pair is not None and form.text is None) or (form.pairs is not None and form.texts is None):
        raise Refusal("bad_request", "Give 'pair' with 'text', and 'pairs' with 'texts'.")
    texts = form.texts if form.texts is not None else [form.text or ""]
    pairs = form.pairs if form.texts is not None else None if form.pair is None else [form.pair]
    if pairs is not None and len(pairs) != len(texts):
        raise Refusal("bad_request", f"There are {len(texts)} texts but {len(pairs)} pairs; give one pair per text.")
    _check([*texts, *(pairs or ())], len(texts), form, limits)
    return Ask(task, texts, pairs, form.best, form.abstain, limits.texts if form.explain else 0)


def _check(texts: list[str], count: int, form: PredictRequest | RowsRequest, limits: Limits) -> None:
    if not count:
        raise Refusal("bad_request", "There is no text; give at least one.")
    if count > limits.texts:
        message = f"There are {count} texts, but a request may have {limits.texts}; send several requests."
        raise Refusal("too_many_texts", message)
    longest = max(map(len, texts))
    if longest > limits.characters:
        message = f"A text has {longest:,} characters, but may have {limits.characters:,}; shorten it."
        raise Refusal("text_too_long", message)
    if not 0 <= form.best <= limits.best:
        raise Refusal("bad_request", f"best is {form.best}; give a number from 0 to {limits.best}.")
    if not 0 <= form.abstain <= 1:
        raise Refusal("bad_request", f"abstain is {form.abstain}; give a probability from 0 to 1, such as 0.8.")
