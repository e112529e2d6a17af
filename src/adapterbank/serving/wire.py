"""The JSON of requests and answers, as pydantic models and as the OpenAPI document states them. Knows no routes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PredictRequest(_Model):
    """Texts for one task."""

    texts: list[str] | None = None
    pairs: list[str] | None = None
    text: str | None = None
    pair: str | None = None
    best: int = 0


class RowRequest(_Model):
    """A text and the task it is for."""

    task: str
    text: str
    pair: str | None = None


class RowsRequest(_Model):
    """Rows of any tasks."""

    rows: list[RowRequest]
    best: int = 0
