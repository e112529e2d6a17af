"""Regression: the head predicts one number for each row, trained in units of the labels' standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.kind import Estimator, HeadOutputs, Kind
from adapterbank.kinds.values import as_number, is_missing, short

if TYPE_CHECKING:
    from torch import Tensor

    from adapterbank.slots.plan import Head
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

_LITTLE = 0.01
"""Share of the targets' range within which all predictions count as one."""


def _recognizes(columns: Columns, values: Sequence[Any]) -> bool:
    numbers = [as_number(value) for value in values]
    whole = all(number is None or number.is_integer() for number in numbers)
    return not whole and None not in numbers


def _number(table: Table, column: str, row: int) -> float:
    value = table.columns[column][row]
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise DataError(
            f"{table.at(row)}: {short(value)!r} in column {column!r} is not a finite number, which regression "
            f"needs; correct the row, or use --kind classification."
        )
    return number


def _check_rows(table: Table, column: str, rows: Sequence[int]) -> tuple[str, ...]:
    """Return no label names, after a check that every row with a label has a number."""
    for row in rows:
        if not is_missing(table.columns[column][row]):
            _number(table, column, row)
    return ()


def _read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
    return [_number(table, task.label, row) for row in rows], []


def _profile(values: Sequence[Any]) -> dict[str, Any]:
    numbers = [number for number in map(as_number, values) if number is not None]
    if not numbers:
        return {"numbers": {}}
    return {"numbers": {"min": min(numbers), "mean": sum(numbers) / len(numbers), "max": max(numbers)}}


def _profile_text(profile: Mapping[str, Any]) -> str:
    spread = profile["numbers"]
    return f"labels from {spread['min']:g} to {spread['max']:g}, mean {spread['mean']:.3f}" if spread else ""


def _standardize(targets: Sequence[Any]) -> tuple[float, float]:
    import numpy as np

    numbers = np.array(targets, dtype=float)
    return float(numbers.mean()), float(numbers.std()) or 1.0


def _targets(targets: Sequence[Any], head: Head) -> Tensor:
    import torch

    return torch.tensor(targets, dtype=torch.float32)


def _loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Return the squared error in units of the labels' spread, so that one learning rate suits every scale."""
    return ((x[:, 0] - targets) / head.scale) ** 2


def _consistency(x: Tensor, y: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    return ((x[:, 0] - y[:, 0]) / head.scale) ** 2


def _decide(given: HeadOutputs) -> list[Any]:
    numbers: list[Any] = given.matrix[:, 0].tolist()
    return numbers


def _collapsed(task: Task, decisions: Sequence[Any], targets: Sequence[Any]) -> str:
    spread = max(targets) - min(targets)
    return f"about {decisions[0]:.4g}" if spread and max(decisions) - min(decisions) < _LITTLE * spread else ""


def _predict(given: HeadOutputs, best: int) -> list[dict[str, Any]]:
    return [{"value": value} for value in _decide(given)]


def _check(value: Any, labels: int, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what} is {value!r}, not a number.") from None
    if not math.isfinite(number):
        raise InputError(f"{what} is {number}, which cannot be scored: the training diverged or the data is wrong.")
    return number


def _details(predictions: Sequence[Any], targets: Sequence[Any], labels: Sequence[str]) -> dict[str, Any]:
    return {"mse": sum((a - b) * (a - b) for a, b in zip(predictions, targets, strict=True)) / len(targets)}


REGRESSION = Kind(
    name="regression",
    metrics=("spearman", "pearson", "pearson_spearman"),
    reported=("pearson", "spearman"),
    check_prediction=_check,
    check_target=_check,
    details=_details,
    recognizes=_recognizes,
    infer_labels=_check_rows,
    read_targets=_read_targets,
    clean=lambda label: None if label in (None, "", -1, -1.0) else label,
    profile=_profile,
    profile_text=_profile_text,
    outputs=lambda labels: 1,
    standardize=_standardize,
    targets=_targets,
    loss=_loss,
    consistency=_consistency,
    decide=_decide,
    predict=_predict,
    collapsed=_collapsed,
    prior_loss=lambda targets, labels: 1.0,  # targets are standardised
    estimator=Estimator(regressor=True, decode=lambda predicted: [float(one) for one in predicted]),
)
