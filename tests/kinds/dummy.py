"""A kind of task that the library does not have, in one file: ordered labels, learned as a number and rounded."""

from __future__ import annotations

from adapterbank.kinds.kind import Estimator, Kind
from adapterbank.kinds.labels import check_index, class_name, in_order, label_indices, label_name


def _infer_labels(table, column, rows):
    return in_order(class_name(table, column, row) for row in rows)


def _read_targets(table, task, rows):
    indices, notes = label_indices(table, task, rows, [[class_name(table, task.label, row)] for row in rows])
    return [mine[0] for mine in indices], notes


def _targets(targets, head):
    import torch

    return torch.tensor(targets, dtype=torch.float32)


def _loss(x, targets, head, counts):
    return (x[:, 0] - targets) ** 2


def _decide(given):
    import numpy as np

    return np.clip(np.rint(given.matrix[:, 0]), 0, len(given.task.labels) - 1).astype(int).tolist()


def _predict(given, best):
    labels = given.task.labels
    return [
        {"label": labels[index], "value": value, "step": index}
        for index, value in zip(_decide(given), given.matrix[:, 0].tolist(), strict=True)
    ]


ORDINAL = Kind(
    name="ordinal",
    metrics=("accuracy", "macro_f1"),
    reported=("accuracy", "macro_f1"),
    check_prediction=check_index,
    check_target=check_index,
    fewest_labels=2,
    single_label=True,
    infer_labels=_infer_labels,
    cell_labels=lambda value: [label_name(value)],
    read_targets=_read_targets,
    outputs=lambda labels: 1,
    targets=_targets,
    loss=_loss,
    consistency=lambda x, y, targets, head, counts: (x[:, 0] - y[:, 0]) ** 2,
    decide=_decide,
    predict=_predict,
    estimator=Estimator(),
)
