"""Classification: every row has exactly one of the task's labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError
from adapterbank.kinds.divergence import between_softmaxes
from adapterbank.kinds.kind import Confidence, Estimator, HeadOutputs, Kind, ReportTable
from adapterbank.kinds.labels import check_index, class_name, in_order, label_indices, label_name
from adapterbank.kinds.values import as_number, is_missing, listed

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.metrics import Metric
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

_MOST_CLASSES = 1000
"""A column with more different values than this holds identifiers, not classes."""
_MOST_SHOWN = 20
"""Labels up to which the confusion matrix is printed."""


def _infer_labels(table: Table, column: str, rows: Sequence[int]) -> tuple[str, ...]:
    filled = [row for row in rows if not is_missing(table.columns[column][row])]
    names = in_order(class_name(table, column, row) for row in filled)
    if len(names) == 1:
        raise DataError(
            f"{table.source}: every row has the label {names[0]!r} in column {column!r}; a classifier needs "
            f"two labels or more, so add rows with another label or choose another column with --label."
        )
    # A table of at most 20 example rows may well show each class once.
    if len(names) > _MOST_CLASSES or (len(filled) > 20 and len(names) > len(filled) / 2):
        raise DataError(_too_many(table, column, names, len(filled)))
    return names


def _too_many(table: Table, column: str, names: Sequence[str], rows: int) -> str:
    words = [name for name in names if as_number(name) is None]
    remedy = "if it holds identifiers or texts,"
    if len(words) < len(names) / 2:
        remedy = f"for numbers use --kind regression{f' and correct {listed(words, 3)}' if words else ''}, or"
    return (
        f"{table.source}: column {column!r} has {len(names)} different labels in {rows} rows "
        f"({listed(names, 3)}), which is too many to be classes; {remedy} choose another column "
        f"with --label, or name the classes with --labels."
    )


def _read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
    names = [[class_name(table, task.label, row)] for row in rows]
    indices, notes = label_indices(table, task, rows, names)
    return [mine[0] for mine in indices], notes


def _targets(targets: Sequence[Any], head: Head) -> Tensor:
    import torch

    return torch.tensor(targets, dtype=torch.int64)


def _loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(x, targets, reduction="none")


def _consistency(x: Tensor, y: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    return between_softmaxes(x, y)


def _decide(given: HeadOutputs) -> list[Any]:
    if given.task.thresholds:
        return _choose(_softmax(given.logits), given.task.thresholds)
    indices: list[Any] = given.matrix.argmax(1).tolist()
    return indices


def _predict(given: HeadOutputs, best: int) -> list[dict[str, Any]]:
    names = given.task.labels
    return [{"label": names[index]} for index in _decide(given)]


def _softmax(x: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted = np.exp(x - x.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


# --- confidence -----------------------------------------------------------------------------------------------


def _choices(logits: np.ndarray, targets: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    return logits, np.array(targets)


def _choose(probabilities: np.ndarray, thresholds: Sequence[float]) -> list[Any]:
    """Choose the label that is furthest above its threshold; of two labels, the second where it is above its own."""
    import numpy as np

    indices: list[Any] = (probabilities - np.array(thresholds)).argmax(1).tolist()
    return indices


def _certainty(probabilities: np.ndarray, decisions: Sequence[Any]) -> np.ndarray:
    import numpy as np

    return np.asarray(probabilities[np.arange(len(decisions)), np.array(decisions, dtype=int)])


def _columns(probabilities: np.ndarray, targets: Sequence[Any], metric: Metric) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the second of two labels for metrics that score it alone, such as F1; other metrics need no threshold."""
    import numpy as np

    if metric.label_count != 2 or metric.from_counts is None:
        return None
    return probabilities[:, 1:], np.array(targets)[:, None] == 1


def _collapsed(task: Task, decisions: Sequence[Any], targets: Sequence[Any]) -> str:
    return repr(task.labels[decisions[0]]) if len(set(decisions)) == 1 < len(set(targets)) else ""


def _prior_loss(targets: Sequence[Any], labels: int) -> float:
    """Return the entropy of the classes."""
    shares = [count / len(targets) for count in Counter(targets).values()]
    return -sum(share * math.log(share) for share in shares)


def _details(predictions: Sequence[Any], targets: Sequence[Any], labels: Sequence[str]) -> dict[str, Any]:
    import numpy as np

    count = len(labels)
    confusion = np.bincount(np.array(targets) * count + np.array(predictions), minlength=count**2).reshape(count, count)
    hits, given, true = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    parts = ((hits, given), (hits, true), (2 * hits, given + true))
    columns = [*(above / np.maximum(below, 1) for above, below in parts), true]  # 0 where nothing was given or true
    names = ("precision", "recall", "f1", "support")
    return {
        "confusion": confusion.tolist(),
        "majority": max(Counter(targets).values()) / len(targets),
        "classes": {
            label: {name: column[index].item() for name, column in zip(names, columns, strict=True)}
            for index, label in enumerate(labels)
        },
    }


def _tables(report: Mapping[str, Any], labels: Sequence[str]) -> list[ReportTable]:
    scores = ("precision", "recall", "f1")
    classes = ReportTable(
        header=["label", *scores, "rows"],
        rows=[[label, *(f"{c[k]:.3f}" for k in scores), str(c["support"])] for label, c in report["classes"].items()],
    )
    if len(labels) > _MOST_SHOWN:
        return [classes, ReportTable(f"The confusion matrix of {len(labels)} labels is in the output of --json.")]
    confusion = ReportTable(
        "confusion matrix (rows: true label, columns: predicted label)",
        ["", *labels],
        [[label, *map(str, row)] for label, row in zip(labels, report["confusion"], strict=True)],
    )
    return [classes, confusion]


CLASSIFICATION = Kind(
    name="classification",
    metrics=("accuracy", "f1", "macro_f1", "micro_f1", "matthews", "accuracy_f1"),
    reported=("accuracy", "macro_f1"),
    check_prediction=check_index,
    check_target=check_index,
    details=_details,
    tables=_tables,
    fewest_labels=2,
    single_label=True,
    recognizes=lambda columns, values: True,
    infer_labels=_infer_labels,
    cell_labels=lambda value: [label_name(value)],
    read_targets=_read_targets,
    targets=_targets,
    loss=_loss,
    consistency=_consistency,
    decide=_decide,
    predict=_predict,
    probabilities=_softmax,
    confidence=Confidence(_choices, _choose, _certainty, _columns, lambda cuts: (round(1 - cuts[0], 2), cuts[0])),
    collapsed=_collapsed,
    prior_loss=_prior_loss,
    estimator=Estimator(),
)
