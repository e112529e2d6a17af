"""A table of scikit-learn's models over features of texts, each with the settings to search over. Knows no search."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier, SGDRegressor
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import ComplementNB, MultinomialNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from adapterbank.automl.features import VECTORS, Features
from adapterbank.kinds.kind import Estimator
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.spec import Examples, Task


class Draws(Protocol):
    """What draws the settings: a trial of a search."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Draw one of these."""

    def suggest_int(self, name: str, low: int, high: int) -> int:
        """Draw an integer."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Draw a number, on a logarithmic scale with `log`."""


@dataclass(frozen=True)
class ModelRow:
    """One row of the table: a type of model."""

    draw: Callable[[Draws], dict[str, Any]]
    """Draws its own settings."""
    classifier: Callable[[Mapping[str, Any], int], Any]
    """(settings, seed) -> scikit-learn's classifier."""
    regressor: Callable[[Mapping[str, Any], int], Any] | None
    """The same for numbers; None if there is none."""
    dense: bool = False
    """Whether it needs a few dense columns."""
    balances: bool = False
    """Whether its classifier can weight rare classes as much as frequent ones."""


def _network(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_layer_sizes": (settings["width"],) * settings["hidden"],
        "alpha": settings["decay"],
        "learning_rate_init": 1e-3,
        "max_iter": settings["passes"],
    }


MODELS: Mapping[str, ModelRow] = {
    "linear": ModelRow(
        lambda d: {"strength": d.suggest_float("linear.strength", 1e-2, 1e2, log=True)},
        lambda s, seed: LogisticRegression(C=s["strength"], class_weight=s["balance"], max_iter=300, random_state=seed),
        lambda s, seed: Ridge(alpha=1 / s["strength"], random_state=seed),
        balances=True,
    ),
    "svm": ModelRow(
        lambda d: {"decay": d.suggest_float("svm.decay", 1e-6, 1e-2, log=True)},
        lambda s, seed: SGDClassifier(loss="hinge", alpha=s["decay"], class_weight=s["balance"], random_state=seed),
        lambda s, seed: SGDRegressor(loss="epsilon_insensitive", alpha=s["decay"], random_state=seed),
        balances=True,
    ),
    "bayes": ModelRow(
        lambda d: {
            "smoothing": d.suggest_float("bayes.smoothing", 1e-3, 10, log=True),
            "complement": d.suggest_categorical("bayes.complement", (False, True)),
        },
        lambda s, seed: (ComplementNB if s["complement"] else MultinomialNB)(alpha=s["smoothing"]),
        None,
    ),
    "boosting": ModelRow(
        lambda d: {
            "rate": d.suggest_float("boosting.rate", 0.02, 0.3, log=True),
            "leaves": d.suggest_int("boosting.leaves", 7, 63),
            "rounds": d.suggest_int("boosting.rounds", 30, 200),
        },
        lambda s, seed: HistGradientBoostingClassifier(**_boosted(s), random_state=seed),
        lambda s, seed: HistGradientBoostingRegressor(**_boosted(s), random_state=seed),
        dense=True,
    ),
    "network": ModelRow(
        lambda d: {
            "hidden": d.suggest_int("network.hidden", 1, 3),
            "width": d.suggest_categorical("network.width", (32, 64, 128, 256)),
            "decay": d.suggest_float("network.decay", 1e-5, 1e-1, log=True),
            "passes": d.suggest_int("network.passes", 10, 60),
        },
        lambda s, seed: make_pipeline(StandardScaler(), MLPClassifier(**_network(s), random_state=seed)),
        lambda s, seed: make_pipeline(StandardScaler(), MLPRegressor(**_network(s), random_state=seed)),
        dense=True,
    ),
}


def _boosted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"learning_rate": settings["rate"], "max_leaf_nodes": settings["leaves"], "max_iter": settings["rounds"]}


def draw(draws: Draws, kind: str) -> dict[str, Any]:
    """Draw features and a model for a kind of task."""
    numbers = _estimator(kind).regressor
    fitting = tuple(name for name, row in MODELS.items() if not numbers or row.regressor)
    model = draws.suggest_categorical("model", fitting)
    found = {"model": model, "vectors": draws.suggest_categorical("vectors", VECTORS)}
    found["words"] = draws.suggest_int("words", 1, 3)
    if found["vectors"] == "hashed":
        found["bits"] = draws.suggest_int("bits", 14, 18)
    else:
        found |= {
            "chars": draws.suggest_int("chars", 3, 5),
            "rarest": draws.suggest_int("rarest", 1, 3),
            "sublinear": draws.suggest_categorical("sublinear", (False, True)),
        }
    if MODELS[model].dense:
        found["components"] = draws.suggest_categorical("components", (50, 100, 200))
    if MODELS[model].balances and not numbers:
        found["balance"] = draws.suggest_categorical("balance", (None, "balanced"))
    return found | MODELS[model].draw(draws)


def _estimator(kind: str) -> Estimator:
    estimator = KINDS[kind].estimator
    assert estimator is not None  # `search.check` refuses such kinds
    return estimator


class TextModel:
    """Features and a model for a task, with the settings drawn."""

    def __init__(self, task: Task, choice: Mapping[str, Any], seed: int) -> None:
        """Create the model; `fit` trains it."""
        row = MODELS[choice["model"]]
        self._task, self._features = task, Features(choice, dense=row.dense, seed=seed)
        self._estimator = _estimator(task.kind)
        if self._estimator.regressor:
            assert row.regressor is not None
            self._model = TransformedTargetRegressor(row.regressor(choice, seed), transformer=StandardScaler())
        else:
            made = row.classifier(choice, seed)
            self._model = OneVsRestClassifier(made) if self._estimator.per_label else made

    def fit(self, examples: Examples) -> None:
        """Fit to labelled rows."""
        targets = self._estimator.encode(examples.targets or [], len(self._task.labels))
        with warnings.catch_warnings():
            # About fits that have not converged, and labels that no row or every row has: the score shows it.
            warnings.simplefilter("ignore")
            self._model.fit(self._features.fit(examples), targets)

    def decide(self, examples: Examples) -> list[Any]:
        """Return the prediction for each row as metrics compare it."""
        return self._estimator.decode(self._model.predict(self._features.table(examples)))

    @property
    def numbers(self) -> int:
        """How many numbers were learned: coefficients or nodes of trees, and those of the reduction."""
        return self._features.numbers + _count(self._model)


_LEARNED = ("coef_", "intercept_", "feature_log_prob_", "class_log_prior_", "coefs_", "intercepts_")


def _count(model: Any) -> int:
    """Return how many numbers a fitted model has learned."""
    if hasattr(model, "regressor_"):
        return _count(model.regressor_)
    if hasattr(model, "steps"):
        return _count(model.steps[-1][1])
    if isinstance(model, OneVsRestClassifier):
        return sum(_count(one) for one in model.estimators_)
    if hasattr(model, "_predictors"):  # the trees of gradient boosting, a list for each round
        return sum(len(tree.nodes) for trees in model._predictors for tree in trees)
    found = (getattr(model, name) for name in _LEARNED if hasattr(model, name))
    return sum(np.size(part) for each in found for part in (each if isinstance(each, list) else [each]))
