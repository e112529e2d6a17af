"""The JSON of requests and responses, as pydantic models and for the OpenAPI document. Knows no routes.

The models validate requests. Responses are not validated; their models only describe them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, PlainValidator
from pydantic_core import PydanticCustomError

from adapterbank.kinds.words import Words
from adapterbank.serving.service.protocol import CODES, Limits


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return Words.of(value)
    raise PydanticCustomError("text", "Input should be a valid string, or for tagging the list of a text's words")


_Text = Annotated[str, PlainValidator(_text)]
"""A text, or the words of one, which become a text."""
_Texts = Annotated[list[_Text] | None, FailFast()]
"""Stops at the first error: listing a million of them would delay other requests."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number; 3.0 is one in JSON."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredictRequest(_Strict):
    """Texts for one task."""

    texts: _Texts = None
    pairs: Annotated[list[str] | None, FailFast()] = None
    text: _Text | None = None
    pair: str | None = None
    best: _Whole = 0
    abstain: float = 0.0
    explain: bool = False


class RowRequest(_Strict):
    """A text and the task it is for."""

    task: str
    text: _Text
    pair: str | None = None


class RowsRequest(_Strict):
    """Rows of any tasks."""

    rows: Annotated[list[RowRequest], FailFast()]
    best: _Whole = 0
    abstain: float = 0.0
    explain: bool = False


class _Extensible(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(BaseModel):
    """An error."""

    code: str
    message: str
    request_id: str


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class Predicted(_Extensible):
    """The prediction for one row; it has the fields of its task's kind."""

    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    probabilities: dict[str, float] | None = None
    answer: str | None = None
    start: int | None = None
    end: int | None = None
    null_odds: float | None = None
    best: list[dict[str, Any]] | None = None
    truncated: bool | None = None
    windows: int | None = None
    explanation: dict[str, Any] | None = None


class PredictAnswer(BaseModel):
    """The predictions of one task, in the order of the texts."""

    task: str
    version: int
    predictions: list[Predicted]


class RowPredicted(Predicted):
    """The prediction for one row, with its task."""

    task: str
    version: int


class RowsAnswer(BaseModel):
    """The predictions, in the order of the rows."""

    predictions: list[RowPredicted]


class Params(BaseModel):
    """Parameter counts."""

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
    rows: dict[str, int]
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
    """A task that cannot be served, and the reason."""

    task: str
    message: str


class TasksAnswer(BaseModel):
    """The tasks that are served, and those that cannot be."""

    backbone: BackboneLine
    tasks: list[TaskLine]
    problems: list[Problem]


class TaskAnswer(_Extensible):
    """A task's manifest, its versions and its newest ablation."""

    name: str
    version: int
    versions: list[int]
    default: int | None
    ablation: dict[str, Any] | None


class RemovedReply(BaseModel):
    """The task or version that was removed."""

    removed: str


class RolledBackReply(BaseModel):
    """The version that is served now."""

    task: str
    version: int


class Status(BaseModel):
    """The state of the server."""

    status: str


class Readiness(Status):
    """Whether requests are answered, and what stands still."""

    stalled: list[str]


class RunAnswer(BaseModel):
    """A training run."""

    id: str
    task: str
    state: str
    options: dict[str, Any]
    data: dict[str, Any]
    created: str
    started: str | None
    ended: str | None
    progress: dict[str, Any]
    history: list[dict[str, Any]]
    notes: list[str]
    version: int | None = None
    metrics: dict[str, Any] | None = None
    failure: str | None = None


class RunsAnswer(BaseModel):
    """Training runs, newest first."""

    runs: list[RunAnswer]


_COMMON = (
    *("bad_header", "head_too_large", "unauthorized", "forbidden"),
    *("rate_limited", "not_ready", "internal", "bad_request"),
)


def responses(model: type[BaseModel], *codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route: its model, and its error codes with those that every route has."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    errors: dict[int, list[str]] = {}
    for code in (*_COMMON, *codes):
        errors.setdefault(CODES[code], []).append(code)
    if CODES["not_found"] in errors:  # a control character in the address, whatever the route
        errors[CODES["not_found"]].append("not_found")
    return found | {
        status: {"model": ErrorAnswer, "description": ", ".join(dict.fromkeys(names))}
        for status, names in sorted(errors.items())
    }


_EXPLAIN = {
    "type": "boolean",
    "default": False,
    "description": "Whether to add each word's share in the answer. Each word counts as one more row of the request.",
}


def predict_body(limits: Limits) -> dict[str, Any]:
    """Return the schema of a predict request."""
    text = {"type": "string", "maxLength": limits.characters}
    seconds = {"type": "array", "items": text, "minItems": 1, "maxItems": limits.texts}
    many = {**seconds, "items": _or_words(text)}
    shared = _shared(limits)
    pairs = _or_null(seconds) | {"description": "The second text of each row: as many as there are texts."}
    none = {"type": "null"}
    shapes = [
        _record({"texts": many, "pairs": pairs, "text": none, "pair": none, **shared}, ["texts"]),
        _record({"text": _or_words(text), "pair": _or_null(text), "texts": none, "pairs": none, **shared}, ["text"]),
    ]
    return _body({"oneOf": shapes}, {"texts": ["A warm and funny film.", "Dull."]})


_TASK = "^[A-Za-z0-9][A-Za-z0-9._/-]*(@[1-9][0-9]{0,8})?$"
"""A task's name, or a catalog's such as glue/mrpc, with or without a version."""


def rows_body(limits: Limits) -> dict[str, Any]:
    """Return the schema of a request with rows of several tasks."""
    text = {"type": "string", "maxLength": limits.characters}
    fields = {"task": {"type": "string", "pattern": _TASK}, "text": _or_words(text), "pair": _or_null(text)}
    row = _record(fields, ["task", "text"])
    rows = {"type": "array", "items": row, "minItems": 1, "maxItems": limits.texts}
    example = {"rows": [{"task": "sentiment", "text": "Dull."}, {"task": "topic@2", "text": "Shares rose."}]}
    return _body(_record({"rows": rows, **_shared(limits)}, ["rows"]), example)


def _shared(limits: Limits) -> dict[str, Any]:
    """Return the fields of every predict request."""
    return {
        "explain": _EXPLAIN,
        "best": {"type": "integer", "minimum": 0, "maximum": limits.best, "default": 0},
        "abstain": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "default": 0,
            "description": "label and labels are null where the answer is less probable than this.",
        },
    }


def _or_words(text: dict[str, Any]) -> dict[str, Any]:
    words = {"type": "array", "items": {"type": "string"}, "description": "The words of a text, for tagging."}
    return {"anyOf": [text, words]}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _record(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}
