"""What is chosen on dev once training has ended, and the scores of the result. Knows no weights and no files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapterbank.kinds import scoring
from adapterbank.kinds.calibration import calibrate
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.reliability import reliability
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.spec import Task


def fitted_task(dev: HeadOutputs, *, calibrated: bool) -> Task:
    """Return the task with everything that is chosen on dev after training."""
    kind = KINDS[dev.task.kind]
    task = kind.tune(dev)
    if not calibrated or not kind.confidence:
        return task
    return calibrate(task, dev.matrix, dev.examples.targets or [])


def score_split(given: HeadOutputs, is_dev: bool, notes: list[str] | None) -> dict[str, Any]:
    """Score a split with the best weights; for dev, add a note if they give one answer to everything.

    Dev is scored without the thresholds, which were chosen on it: with them, its score would be too good.
    """
    task, targets = given.task, given.examples.targets or []
    predicted = KINDS[task.kind].decide(replace(given, task=replace(task, thresholds=())) if is_dev else given)
    if is_dev and notes is not None and (answer := KINDS[task.kind].collapsed(task, predicted, targets)):
        notes.append(
            f"The model predicts {answer} for every dev row: it has learned nothing else. "
            "Usually the learning rate is too high (try a tenth of it) or the epochs are too few."
        )
    return scoring.report(task, predicted, targets)


def measure_reliability(given: HeadOutputs) -> dict[str, Any]:
    """Return how reliable the probabilities of a split are, and its score with the thresholds if there are any."""
    found = reliability(given, given.examples.targets or [])
    if given.task.thresholds:
        predicted = KINDS[given.task.kind].decide(given)
        found["with_thresholds"] = scoring.score(given.task, predicted, given.examples.targets or [])
    return found
