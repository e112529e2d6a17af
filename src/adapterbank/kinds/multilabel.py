"""Multi-label classification: every row has any number of the task's labels, none included."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.divergence import between_sigmoids
from adapterbank.kinds.kind import Confidence, Estimator, HeadOutputs, Kind
from adapterbank.kinds.labels import check_index, in_order, is_list_text, items_of, label_indices, label_name
from adapterbank.kinds.values import is_missing, short

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.metrics import Metric
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

_SEPARATOR = "|"
"""Between the labels of a row whose cell is one string."""


def cell_labels(value: Any) -> list[str]:
    """Return the labels of a cell: a list, a list as text, or one string with `|` between the names."""
    if is_list_text(value):
        return items_of(value)
    if isinstance(value, str):
        parts: Iterable[Any] = value.split(_SEPARATOR)
    else:
        parts = value if isinstance(value, (list, tuple, set)) else (value,)
    return [label_name(part) for part in parts if not is_missing(part)]


def _recognizes(columns: Columns, values: Sequence[Any]) -> bool:
    if all(map(is_list_text, values)) and any(mark in value for value in values for mark in ("'", '"', ",", "[]")):
        return True
    return any(isinstance(value, (list, tuple, set)) for value in values) or any(
        isinstance(value, str) and _SEPARATOR in value for value in values
    )


def _labels_at(table: Table, column: str, row: int) -> list[str]:
    try:
        return cell_labels(table.columns[column][row])
    except DataError as error:
        raise DataError(f"{table.at(row)}: {error}") from None


def _infer_labels(table: Table, column: str, rows: Sequence[int]) -> tuple[str, ...]:
    names = [_labels_at(table, column, row) for row in rows if not is_missing(table.columns[column][row])]
    width = len(names[0]) if names else 0
    if width > 1 and all(len(mine) == width and {*mine} <= {"0", "1"} for mine in names):
        raise DataError(
            f"{table.source}: column {column!r} seems to have a 0 or 1 for each of {width} labels; list the names of "
            f"the labels that apply, or put each label into a column of its own and name them with --label a,b."
        )
    return in_order(name for mine in names for name in mine)


def _read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
    names = [_labels_at(table, task.label, row) for row in rows]
    for row, mine in zip(rows, names, strict=True):
        if len(set(mine)) < len(mine):
            raise DataError(
                f"{table.at(row)}: {short(table.columns[task.label][row])} names a label twice; "
                f"list the names of the labels that apply, not a 0 or 1 for each."
            )
    indices, notes = label_indices(table, task, rows, names)
    return [tuple(sorted(mine)) for mine in indices], notes


def _targets(targets: Sequence[Any], head: Head) -> Tensor:
    import torch

    wanted = torch.zeros(len(targets), head.outputs)
    for row, labels in enumerate(targets):
        wanted[row, list(labels)] = 1.0
    return wanted


def _loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.binary_cross_entropy_with_logits(x, targets, reduction="none").mean(1)


def _consistency(x: Tensor, y: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    return between_sigmoids(x, y).mean(1)


def _decide(given: HeadOutputs) -> list[Any]:
    if given.task.thresholds:
        return _choose(_sigmoid(given.logits), given.task.thresholds)
    return _chosen(given.matrix > 0)


def _chosen(flags: np.ndarray) -> list[Any]:
    import numpy as np

    return [tuple(np.flatnonzero(row).tolist()) for row in flags]


def _predict(given: HeadOutputs, best: int) -> list[dict[str, Any]]:
    names = given.task.labels
    return [{"labels": tuple([names[index] for index in mine])} for mine in _decide(given)]


def _collapsed(task: Task, decisions: Sequence[Any], targets: Sequence[Any]) -> str:
    if not len(set(decisions)) == 1 < len(set(targets)):
        return ""
    return ", ".join(repr(task.labels[index]) for index in decisions[0]) or "no label"


def _prior_loss(targets: Sequence[Any], labels: int) -> float:
    """Return the mean entropy of the labels, each as present or absent."""
    counts = Counter(index for mine in targets for index in mine)
    shares = [counts[index] / len(targets) for index in range(labels)]
    return -sum(part * math.log(part) for share in shares for part in (share, 1 - share) if part) / labels


def _sigmoid(x: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))  # this form of the sigmoid does not overflow


# --- confidence -----------------------------------------------------------------------------------------------


def _choices(logits: np.ndarray, targets: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return every label of every row as a choice of two: the sigmoid of x is the softmax of (0, x)."""
    import numpy as np

    flat = logits.ravel()
    return np.stack([np.zeros_like(flat), flat], 1), _indicators(targets, logits.shape[1]).ravel()


def _choose(probabilities: np.ndarray, thresholds: Sequence[float]) -> list[Any]:
    import numpy as np

    return _chosen(probabilities > np.array(thresholds))


def _certainty(probabilities: np.ndarray, decisions: Sequence[Any]) -> np.ndarray:
    import numpy as np

    chosen = _indicators(decisions, probabilities.shape[1]) > 0
    return np.asarray(np.where(chosen, probabilities, 1 - probabilities).min(1))


def _columns(probabilities: np.ndarray, targets: Sequence[Any], metric: Metric) -> tuple[np.ndarray, np.ndarray] | None:
    if metric.from_counts is None:
        return None
    return probabilities, _indicators(targets, probabilities.shape[1]) > 0


def _check(value: Any, labels: int, what: str) -> frozenset[int]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise InputError(f"{what} is {value!r}, not a list of label indices.")
    return frozenset(check_index(part, labels, what) for part in value)


def _indicators(targets: Sequence[Any], labels: int) -> np.ndarray:
    import numpy as np

    found = np.zeros((len(targets), labels), dtype=int)
    for row, mine in enumerate(targets):
        found[row, list(mine)] = 1
    return found


MULTILABEL = Kind(
    name="multilabel",
    metrics=("micro_f1", "macro_f1", "subset_accuracy"),
    reported=("micro_f1", "macro_f1", "subset_accuracy"),
    check_prediction=_check,
    check_target=_check,
    fewest_labels=1,
    several_labels=True,
    recognizes=_recognizes,
    infer_labels=_infer_labels,
    cell_labels=cell_labels,
    blank_is_label=True,  # a CSV file has no other way to say that no label applies
    read_targets=_read_targets,
    targets=_targets,
    loss=_loss,
    consistency=_consistency,
    decide=_decide,
    predict=_predict,
    collapsed=_collapsed,
    prior_loss=_prior_loss,
    probabilities=_sigmoid,
    confidence=Confidence(_choices, _choose, _certainty, _columns, tuple),
    estimator=Estimator(per_label=True, encode=_indicators, decode=_chosen),
)
