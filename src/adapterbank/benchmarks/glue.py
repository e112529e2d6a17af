"""GLUE's score and the files of a submission. It knows no models; the caller provides the predictions.

The benchmark's score is the mean over nine tasks. A task with two metrics counts with their mean, and MNLI with the
mean of its matched and mismatched part (https://gluebenchmark.com, "GLUE score"). The paper leaves WNLI out.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import listed
from adapterbank.storage.files import atomic_write
from adapterbank.tasks.catalog import find

TASKS = tuple(f"glue/{name}" for name in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"))
"""The nine tasks of the score."""
DEV = {name: {"dev": find(name).sizes[1]} for name in TASKS}
"""Rows of each task's official dev sets."""
DEV["glue/mnli"]["dev_mismatched"] = 9832
MAJORITY = "not_entailment"
"""WNLI's majority label in training; its dev set is adversarial to anything learned from the training set."""


@dataclass(frozen=True)
class Sheet:
    """One file of a submission."""

    file: str
    task: str
    """The catalog's task whose rows it predicts."""
    split: str
    rows: int
    """The number of rows that the server expects."""
    numbered: bool = False
    """Whether labels are written as indices instead of names."""
    by: str = ""
    """The task that predicts the rows, if it is another one."""

    @property
    def predicted_by(self) -> str:
        """The task that predicts the rows."""
        return self.by or self.task


SHEETS = (
    Sheet("AX.tsv", "glue/ax", "test", 1104, by="glue/mnli"),
    Sheet("CoLA.tsv", "glue/cola", "test", 1063, numbered=True),
    Sheet("MNLI-m.tsv", "glue/mnli", "test", 9796),
    Sheet("MNLI-mm.tsv", "glue/mnli", "test_mismatched", 9847),
    Sheet("MRPC.tsv", "glue/mrpc", "test", 1725, numbered=True),
    Sheet("QNLI.tsv", "glue/qnli", "test", 5463),
    Sheet("QQP.tsv", "glue/qqp", "test", 390965, numbered=True),
    Sheet("RTE.tsv", "glue/rte", "test", 3000),
    Sheet("SST-2.tsv", "glue/sst2", "test", 1821, numbered=True),
    Sheet("STS-B.tsv", "glue/stsb", "test", 1379),
    Sheet("WNLI.tsv", "glue/wnli", "test", 146, numbered=True),
)
"""Every file of a submission; the server refuses a zip that lacks one."""


def task_score(name: str, metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """Return a task's part of the score from its metrics by split: dev, or for MNLI the mean of both parts."""
    metric = find(name).metric
    values = [float(metrics[split][metric]) for split in DEV[name] if metric in metrics.get(split, {})]
    return sum(values) / len(values)


def unofficial(name: str, rows: Mapping[str, int]) -> str:
    """Return how splits with these numbers of rows differ from the official dev sets; empty if they do not."""
    odd = [
        f"{split} has {rows.get(split, 0):,} rows, the official one {size:,}"
        for split, size in DEV[name].items()
        if (split == "dev" or split in rows) and rows.get(split) != size
    ]
    return "; ".join([*odd, *(["matched only"] if set(DEV[name]) - {"dev"} - set(rows) else [])])


def glue_score(scores: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
    """Return the mean over the given tasks, and the missing ones of the nine; without any it is the GLUE score."""
    odd = [name for name in scores if name not in TASKS]
    if odd or not scores:
        raise DataError(f"The GLUE score is the mean of {listed(TASKS)}, not of {listed(odd) or 'nothing'}.")
    return sum(scores.values()) / len(scores), tuple(name for name in TASKS if name not in scores)


def sheet_text(sheet: Sheet, answers: Sequence[Any], indices: Sequence[Any] | None = None) -> str:
    """Return the content of one file: a header, then the number and prediction (a label or a number) of each row."""
    numbers = [str(index) for index in (indices if indices is not None else range(len(answers)))]
    if len(numbers) != len(answers) or len(set(numbers)) != len(numbers):
        raise DataError(
            f"{sheet.file}: {len(answers)} predictions for {len(set(numbers))} different rows; give one for each row."
        )
    words = ("prediction", *(_word(sheet, answer) for answer in answers))
    return "".join(f"{index}\t{word}\n" for index, word in zip(("index", *numbers), words, strict=True))


def _word(sheet: Sheet, answer: Any) -> str:
    labels = find(sheet.task).labels
    if not labels:
        if not math.isfinite(answer):
            raise DataError(f"{sheet.file}: a prediction is {answer}, not a number from 0 to 5; train the task again.")
        return f"{min(5.0, max(0.0, float(answer))):.3f}"  # STS-B's scale
    if answer not in labels:
        raise DataError(f"{sheet.file}: {answer!r} is not one of its labels: {listed(labels)}.")
    return str(labels.index(answer)) if sheet.numbered else str(answer)


def write_zip(path: Path, files: Mapping[str, str]) -> None:
    """Write the zip atomically, with the same bytes for the same predictions."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    atomic_write(path, buffer.getvalue())
