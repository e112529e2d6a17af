"""The JSON of requests and answers, as pydantic models and as the OpenAPI document states it. Knows no routes.

Requests are checked by the models; answers are written as they are, and their models only describe them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast

from adapterbank.serving.service.protocol import CODES, Limits

_Texts = Annotated[list[str] | None, FailFast()]
"""The first mistake is enough: a body of a million would keep everyone waiting while they are listed."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredictRequest(_Strict):
    """Texts for one task."""

    texts: _Texts = None
    pairs: _Texts = None
    text: str | None = None
    pair: str | None = None
    best: int = 0


class RowRequest(_Strict):
    """A text and the task it is for."""

    task: str
    text: str
    pair: str | None = None


class RowsRequest(_Strict):
    """Rows of any tasks."""

    rows: Annotated[list[RowRequest], FailFast()]
    best: int = 0


class _Shown(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str
    message: str
    request_id: str


class ErrorAnswer(BaseModel):
    """Every error."""

    error: ErrorDetail


class Predicted(_Shown):
    """What a task says of one row; the fields that its kind has are there."""

    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    probabilities: dict[str, float] | None = None
    answer: str | None = None
    start: int | None = None
    end: int | None = None
    null_odds: float | None = None
    best: list[dict[str, Any]] | None = None


class PredictAnswer(BaseModel):
    """What one task says of the texts, in their order."""

    task: str
    version: int
    predictions: list[Predicted]


class RowPredicted(Predicted):
    """What a row's task says of it."""

    task: str
    version: int


class RowsAnswer(BaseModel):
    """What each row's task says of it, in the order of the rows."""

    predictions: list[RowPredicted]


class Params(BaseModel):
    """Numbers of parameters."""

    trained: int | None
    encoder: int | None
    total: int | None
    percent: float | None


class TaskLine(BaseModel):
    """A task in the list."""

    name: str
    version: int
    kind: str
    text: list[str]
    labels: list[str]
    metric: str
    score: float | None
    test_score: float | None
    method: str | None
    size: int | None
    params: Params
    bytes: int
    created: str
    resident: bool


class BackboneLine(BaseModel):
    """The encoder that all tasks share."""

    name: str
    sha256: str
    parameters: int


class Problem(BaseModel):
    """A task that is refused, and why."""

    task: str
    message: str


class TasksAnswer(BaseModel):
    """The tasks that are served, and those that are refused."""

    backbone: BackboneLine
    tasks: list[TaskLine]
    problems: list[Problem]


class TaskAnswer(_Shown):
    """A task's manifest, its versions and its newest ablation."""

    name: str
    version: int
    versions: list[int]
    default: int | None
    ablation: dict[str, Any] | None


class RemovedReply(BaseModel):
    """What was removed."""

    removed: str


class RolledBackReply(BaseModel):
    """Which version is served now."""

    task: str
    version: int


class Status(BaseModel):
    """How the server is."""

    status: str


def answers(model: type[BaseModel], *codes: str) -> dict[int | str, dict[str, Any]]:
    """State what a route may answer: its model, and an error for each of the codes and those that any route has."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    told: dict[int, list[str]] = {}
    for code in ("unauthorized", "forbidden", "rate_limited", "not_ready", "internal", "bad_request", *codes):
        told.setdefault(CODES[code], []).append(code)
    return found | {
        status: {"model": ErrorAnswer, "description": ", ".join(dict.fromkeys(names))}
        for status, names in sorted(told.items())
    }


def predict_body(limits: Limits) -> dict[str, Any]:
    """State the body of a predict request."""
    text = {"type": "string", "maxLength": limits.characters}
    many = {"type": "array", "items": text, "minItems": 1, "maxItems": limits.texts}
    best = {"type": "integer", "minimum": 0, "maximum": limits.best, "default": 0}
    shapes = [
        _record({"texts": many, "pairs": many, "best": best}, ["texts"]),
        _record({"text": text, "pair": text, "best": best}, ["text"]),
    ]
    return _body({"oneOf": shapes}, {"texts": ["A warm and funny film.", "Dull."]})


def rows_body(limits: Limits) -> dict[str, Any]:
    """State the body of a request with rows of any tasks."""
    text = {"type": "string", "maxLength": limits.characters}
    row = _record({"task": {"type": "string"}, "text": text, "pair": text}, ["task", "text"])
    rows = {"type": "array", "items": row, "minItems": 1, "maxItems": limits.texts}
    best = {"type": "integer", "minimum": 0, "maximum": limits.best, "default": 0}
    example = {"rows": [{"task": "sentiment", "text": "Dull."}, {"task": "topic@2", "text": "Shares rose."}]}
    return _body(_record({"rows": rows, "best": best}, ["rows"]), example)


def _record(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}
