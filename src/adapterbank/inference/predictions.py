"""From a task's outputs to its predictions, and to what metrics compare. Knows no encoder and no slots.

The kind (`kinds/`) decides the fields of a prediction; this module builds it and adds the probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np

from adapterbank.errors import InputError, PackageDamaged
from adapterbank.inference.rows import Rows
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.spec import Examples, Task


@dataclass  # not frozen: a frozen dataclass takes four times as long to create
class Prediction:
    """A task's prediction for one row; only the fields of its kind are set."""

    label: str | None = None
    """Classification: the most probable label."""
    labels: tuple[str, ...] | None = None
    """Multi-label: every label with a probability above one half, or above its threshold."""
    value: float | None = None
    """Regression."""
    answer: str | None = None
    """Span: the answer's text, with its first and last-plus-one character in the context."""
    start: int | None = None
    end: int | None = None
    null_odds: float | None = None
    """Span with questions that may have no answer: by how much "no answer" scores above the best answer."""
    best: tuple[dict[str, Any], ...] | None = None
    """Span, on request: the best answers with positions, scores and probabilities."""
    probabilities: dict[str, float] | None = None
    truncated: bool | None = None
    """True if the text was longer than the task's limit, so that a part was not read; otherwise not set."""
    windows: int | None = None
    """The number of windows whose outputs were pooled; not set if the text was read at once."""
    explanation: dict[str, Any] | None = None
    """On request: each word's share in the answer; see `inference.explain`."""
    embedding: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Bare backbone: the mean of the last hidden states."""
    abstained: str | None = None
    """The field that is None because the answer is less certain than was asked for: label or labels."""
    other: dict[str, Any] | None = None
    """Fields of a kind that are none of these; they are attributes too."""

    def __getattr__(self, name: str) -> Any:
        """Return a field of `other`; Python asks only for names that are not found otherwise."""
        other = vars(self).get("other") or {}
        if name not in other:
            raise AttributeError(f"a prediction has no {name!r}")
        return other[name]

    def __repr__(self) -> str:
        """Show the fields that are set; of an embedding, its length and first numbers."""
        shown = {name: repr(value) for name, value in vars(self).items() if value is not None}
        if self.embedding is not None:
            first = ", ".join(f"{number:.4f}" for number in self.embedding[:3])
            shown["embedding"] = f"<{self.embedding.size} numbers: {first}, …>"
        return f"Prediction({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set; an answer that was not given is null."""
        fields: dict[str, Any] = {
            name: value
            for name, value in vars(self).items()
            if (value is not None or name == self.abstained) and name != "abstained"
        }
        fields |= fields.pop("other", {})
        if self.probabilities is not None:  # further digits are rounding errors and differ between machines
            fields["probabilities"] = {name: int(p * 1e6 + 0.5) / 1e6 for name, p in self.probabilities.items()}
        if self.embedding is not None:
            fields["embedding"] = self.embedding.tolist()
        return fields


LARGEST = 1e30
"""Outputs are smaller than this: sums and differences of larger ones overflow float32."""
_NAMES = frozenset(one.name for one in dataclass_fields(Prediction))


def decide(task: Task, examples: Examples, rows: Rows, outputs: Sequence[np.ndarray]) -> list[Any]:
    """Return the prediction for each example as metrics compare it."""
    return KINDS[task.kind].decide(HeadOutputs(task, examples, rows, outputs)) if outputs else []


def are_usable(outputs: Sequence[np.ndarray]) -> bool:
    """Return whether outputs can be turned into answers; all at once, because a batch has many rows."""
    return not outputs or bool((np.abs(np.concatenate([out.ravel() for out in outputs])) < LARGEST).all())


def check_finite(head_outputs: HeadOutputs) -> None:
    """Refuse outputs that are nan or infinite, which finite weights can lead to if they are large."""
    task = head_outputs.task
    if not are_usable(head_outputs.outputs):
        raise PackageDamaged(
            f"{task.name!r} computes numbers that are not finite, so its weights are useless; train it again."
        )


def predict(head_outputs: HeadOutputs, best: int = 0, abstain: float = 0.0) -> list[Prediction]:
    """Return the prediction for each example; span tasks also list the `best` answers.

    An answer that is less certain than `abstain` is None; its probabilities are given.
    """
    found = _fields(head_outputs, best, abstain, rounded=False)
    if abstain:
        found = [{**fields, "abstained": next((n for n in fields if fields[n] is None), None)} for fields in found]
    if all(_NAMES.issuperset(fields) for fields in found[:1]):  # the rows of one task have the same fields
        return [Prediction(**fields) for fields in found]
    return [_with_other(fields) for fields in found]


def _with_other(fields: Mapping[str, Any]) -> Prediction:
    known = {name: value for name, value in fields.items() if name in _NAMES}
    return Prediction(**known, other={name: value for name, value in fields.items() if name not in _NAMES})


def predict_json(head_outputs: HeadOutputs, best: int = 0, abstain: float = 0.0) -> list[dict[str, Any]]:
    """Return the `to_json` of each prediction, equal to the bit, in less than half the time for many rows."""
    return _fields(head_outputs, best, abstain, rounded=True)


def check_abstain(task: Task, abstain: float) -> None:
    """Refuse a confidence that is none, and one that is asked of a task without probabilities."""
    if not 0 <= abstain <= 1:
        raise InputError(f"abstain is {abstain!r}; give a probability from 0 to 1, such as 0.8.")
    if abstain and not KINDS[task.kind].confidence:
        raise InputError(f"{task.name!r} is {task.kind}, which has no probabilities; leave out abstain.")


def _fields(head_outputs: HeadOutputs, best: int, abstain: float, *, rounded: bool) -> list[dict[str, Any]]:
    if not head_outputs.outputs:
        return []
    check_abstain(head_outputs.task, abstain)
    check_finite(head_outputs)
    kind, names = KINDS[head_outputs.task.kind], head_outputs.task.labels
    predictions = kind.predict(head_outputs, best)
    if kind.probabilities:
        likely = kind.probabilities(head_outputs.logits)
        if abstain and kind.confidence:
            certainty = kind.confidence.certainty(likely, kind.decide(head_outputs))
            predictions = [
                dict.fromkeys(fields) if sure < abstain else fields
                for fields, sure in zip(predictions, certainty, strict=True)
            ]
        likely = np.floor(likely * 1e6 + 0.5) / 1e6 if rounded else likely
        for fields, row in zip(predictions, likely.tolist(), strict=True):
            fields["probabilities"] = dict(zip(names, row, strict=True))
    _tell_reading(predictions, head_outputs.rows)
    return predictions


def _tell_reading(predictions: Sequence[dict[str, Any]], rows: Rows) -> None:
    """Add to predictions whether their text was read in part, and in how many windows if there are several."""
    if not rows.cut and not rows.pooling:
        return
    for fields, mine in zip(predictions, rows.by_example(len(predictions)), strict=True):
        if len(mine) > 1 and rows.pooling:
            fields["windows"] = len(mine)
        if any(rows.tokens[row].cut for row in mine):
            fields["truncated"] = True
