"""The search for the best model without an encoder, under a budget, with Optuna. Knows no files, configs or banks.

Section 3 of the paper compares adapters with such a search over models that know no pretrained encoder. This one is
smaller, and of classical models: what an afternoon of scikit-learn gives.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank import metrics
from adapterbank.automl.models import TextModel, draw
from adapterbank.errors import ConfigError, InputError, TrainingError
from adapterbank.storage import files
from adapterbank.tasks.spec import Examples, Task


@dataclass(frozen=True)
class SearchResult:
    """The best model, and the way to it."""

    model: TextModel = field(repr=False)
    choice: dict[str, Any]
    history: list[dict[str, Any]] = field(repr=False)
    """Score, seconds and choice of each trial; the score is None of one that could not be fitted."""
    best: int
    """Which of them it is, from 1."""
    stopped: bool
    """Whether the user stopped it before its budget was spent."""

    def about(self, task: Task, splits: Mapping[str, Examples], encoder: int) -> dict[str, Any]:
        """Give what a record says of it; `encoder` is the size of the one it is compared with."""
        count, spent = self.model.numbers, sum(trial["seconds"] for trial in self.history)
        return {
            "task": task.to_json(),
            "metrics": {
                name: metrics.report(task.kind, self.model.decide(rows), rows.targets or [], task.labels, task.metric)
                for name, rows in splits.items()
                if name != "train"
            },
            # The encoder has no part in the total: such a model stands alone.
            "params": {"trained": count, "encoder": encoder, "total": count, "percent": 100 * count / encoder},
            "best_epoch": self.best,
            "history": self.history,
            "choice": self.choice,
            "examples_per_second": len(splits["train"]) * len(self.history) / max(spent, 1e-9),
            "created": files.now(),
        }


def check(task: Task) -> None:
    """Refuse what cannot be searched for, before anything is written."""
    if task.kind == "span":
        raise ConfigError(
            ["method is 'automl', which does not answer spans; use one with an encoder, such as adapter."]
        )
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(["method is 'automl', which needs Optuna: pip install 'adapterbank[automl]'."])


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
    """Try models until the budget is spent, or the user interrupts; the best on dev is kept, the first of equals.

    `watch` hears of trials done, of how many, and the best score so far.
    """
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would tell of every study it makes
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
        raise TrainingError(f"None of {len(history)} models could be fitted to {len(train)} rows; give more rows.")
    _, best, model = kept
    return SearchResult(model, history[best - 1]["choice"], history, best, stopped)


def _tried(
    task: Task, choice: dict[str, Any], train: Examples, dev: Examples, seed: int
) -> tuple[TextModel, float | None]:
    """Fit a model and score it on dev; no score where there is nothing to fit, as of n-grams that all are too rare."""
    model = TextModel(task, choice, seed)
    try:
        model.fit(train)
        return model, metrics.score(task.metric, model.decide(dev), dev.targets or [], task.labels)
    except (ValueError, InputError):  # the latter of numbers that are not finite
        return model, None
