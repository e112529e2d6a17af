"""The search for the best model without an encoder, under a budget, with Optuna. Knows no files, configs or banks.

Section 3 of the paper compares adapters with such a search over models without a pretrained encoder. This one is
smaller and uses classical models of scikit-learn.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank.automl.models import TextModel, draw
from adapterbank.errors import ConfigError, InputError, TrainingError
from adapterbank.install import extra_command
from adapterbank.kinds import scoring
from adapterbank.kinds.table import KINDS
from adapterbank.storage import files
from adapterbank.tasks.spec import Examples, Task


@dataclass(frozen=True)
class SearchResult:
    """The best model, and the trials that led to it."""

    model: TextModel = field(repr=False)
    choice: dict[str, Any]
    history: list[dict[str, Any]] = field(repr=False)
    """Score, seconds and settings of each trial; the score is None if the model could not be fitted."""
    best: int
    """The number of the best trial, from 1."""
    stopped: bool
    """Whether the user interrupted it before its budget was spent."""

    def about(self, task: Task, splits: Mapping[str, Examples], encoder: int | None) -> dict[str, Any]:
        """Return its part of a record; `encoder` is the number of parameters of the encoder it is compared with.

        None if no encoder is loaded: the search needs none.
        """
        count, spent = self.model.numbers, sum(trial["seconds"] for trial in self.history)
        percent = 100 * count / encoder if encoder else None
        return {
            "task": task.to_json(),
            "metrics": {
                name: scoring.report(task, self.model.decide(rows), rows.targets or [])
                for name, rows in splits.items()
                if name != "train"
            },
            # The encoder is not part of the total: such a model works without it.
            "params": {"trained": count, "encoder": encoder, "total": count, "percent": percent},
            "best_epoch": self.best,
            "history": self.history,
            "choice": self.choice,
            "examples_per_second": len(splits["train"]) * len(self.history) / max(spent, 1e-9),
            "created": files.now(),
        }


def check(task: Task) -> None:
    """Raise if there is no model for the task, or no Optuna, before anything is written."""
    if KINDS[task.kind].estimator is None:
        raise ConfigError(
            [f"method is 'automl', which cannot learn a {task.kind} task; use one with an encoder, such as adapter."]
        )
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError([f"method is 'automl', which needs Optuna: {extra_command('automl')}"])


def search(
    task: Task,
    train: Examples,
    dev: Examples,
    *,
    trials: int,
    minutes: float = 0.0,
    seed: int = 0,
    watch: Callable[[int, int, float | None], None] = lambda done, total, best: None,
) -> SearchResult:
    """Try models until the budget is spent or the user interrupts; keep the best on dev, of equal ones the first.

    `watch` is called with the number of trials done, the number of all trials, and the best score so far.
    """
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would log every study
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    optuna.logging.set_verbosity(level)
    history: list[dict[str, Any]] = []
    kept: tuple[float, int, TextModel] | None = None
    stopped, ends = False, time.perf_counter() + 60 * minutes
    try:
        while len(history) < trials and not (history and minutes and time.perf_counter() >= ends):
            watch(len(history), trials, kept[0] if kept else None)
            trial, began = study.ask(), time.perf_counter()
            choice = draw(trial, task.kind)
            model, score = _tried(task, choice, train, dev, seed)
            if score is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
            history.append({"score": score, "seconds": time.perf_counter() - began, "choice": choice})
            if score is not None and (kept is None or score > kept[0]):
                kept = (score, len(history), model)
    except KeyboardInterrupt:
        if kept is None:
            raise
        stopped = True
    if kept is None:
        raise TrainingError(f"None of {len(history)} models could be fitted to {len(train)} rows; add rows.")
    _, best, model = kept
    return SearchResult(model, history[best - 1]["choice"], history, best, stopped)


def _tried(
    task: Task, choice: dict[str, Any], train: Examples, dev: Examples, seed: int
) -> tuple[TextModel, float | None]:
    """Fit a model and score it on dev; the score is None if it cannot be fitted, as when all n-grams are too rare."""
    model = TextModel(task, choice, seed)
    try:
        model.fit(train)
        return model, scoring.score(task, model.decide(dev), dev.targets or [])
    except (ValueError, InputError):  # InputError: numbers that are not finite
        return model, None
