"""Scores of a task's predictions, checked first: a value that is no prediction is an error, never a score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.errors import InputError
from adapterbank.kinds.kind import Kind
from adapterbank.kinds.table import KINDS
from adapterbank.metrics import METRICS, Metric, find_metric

if TYPE_CHECKING:
    from adapterbank.tasks.spec import Task


def check_metric(name: str, kind: Kind, labels: Sequence[str]) -> Metric:
    """Return the metric of this name if it can score a task of this kind with these labels."""
    metric = find_metric(name)
    if name not in kind.metrics:
        raise InputError(f"Metric {name!r} cannot score a {kind.name} task; choose one of: {', '.join(kind.metrics)}.")
    if metric.label_count not in (None, len(labels)):
        raise InputError(
            f"Metric {name!r} requires exactly {metric.label_count} labels, but the task has {len(labels)}; "
            f"choose another, such as {kind.metrics[0]!r}."
        )
    return metric


def score(task: Task, predictions: Iterable[Any], targets: Iterable[Any]) -> float:
    """Return the task's own metric of predictions, one for each target."""
    given, true = _checked(task, predictions, targets)
    return METRICS[task.metric].function(given, true, len(task.labels))


def report(task: Task, predictions: Iterable[Any], targets: Iterable[Any]) -> dict[str, Any]:
    """Return what `evaluate` shows: the task's own metric, the usual ones of its kind, and the kind's details."""
    kind = KINDS[task.kind]
    given, true = _checked(task, predictions, targets)
    scores: dict[str, Any] = {metric.name: metric.function(given, true, len(task.labels)) for metric in _reported(task)}
    return {**scores, "rows": len(true), **kind.details(given, true, task.labels)}


def intervals(task: Task, predictions: Iterable[Any], targets: Iterable[Any]) -> dict[str, list[float]]:
    """Return the 95 % confidence interval of each score of the report: by a formula, or by a bootstrap over rows."""
    given, true = _checked(task, predictions, targets)
    found: dict[str, tuple[float, float]] = {}
    for metric in _reported(task):
        if metric.interval:
            found[metric.name] = metric.interval(metric.function(given, true, len(task.labels)), len(true))
    if drawn := [metric for metric in _reported(task) if metric.from_counts and not metric.interval]:
        from adapterbank.kinds import bootstrap

        found |= bootstrap.intervals(drawn, given, true, len(task.labels))
    return {metric.name: list(found[metric.name]) for metric in _reported(task) if metric.name in found}


def _reported(task: Task) -> list[Metric]:
    """Return the metrics of a task's report, its own first."""
    own = METRICS[task.metric]
    return [METRICS[name] for name in dict.fromkeys((own.name, *own.parts, *KINDS[task.kind].reported))]


def _checked(task: Task, predictions: Any, targets: Any) -> tuple[list[Any], list[Any]]:
    # Arrays and tensors become lists of plain numbers here, so that one check serves them all.
    given, true = (list(values.tolist() if hasattr(values, "tolist") else values) for values in (predictions, targets))
    if len(given) != len(true):
        raise InputError(f"There are {len(given)} predictions for {len(true)} targets; each row needs both.")
    if not true:
        raise InputError("There is nothing to score: no predictions and no targets.")
    kind, labels = KINDS[task.kind], len(task.labels)
    return (
        [kind.check_prediction(value, labels, f"Prediction {row}") for row, value in enumerate(given, 1)],
        [kind.check_target(value, labels, f"Target {row}") for row, value in enumerate(true, 1)],
    )
