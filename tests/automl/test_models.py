"""Claims about `automl.models`: every model of the table learns every kind of task that it supports."""

from __future__ import annotations

import random

import pytest

from adapterbank.automl.models import MODELS, TextModel, draw
from adapterbank.kinds import table
from adapterbank.tasks.spec import Examples, Task

WORDS = ("cat", "dog", "fox")
TARGETS = {
    "classification": lambda i: i % 3,
    "multilabel": lambda i: tuple({i % 3, i // 3 % 3}) if i % 4 else (),
    "regression": lambda i: float(i % 3) * 10 - 5,
}


class Chance:
    """A trial that draws at random, apart from the values that are fixed."""

    def __init__(self, seed, **fixed):
        self.random, self.fixed = random.Random(seed), fixed

    def suggest_categorical(self, name, choices):
        return self.fixed[name] if name in self.fixed else self.random.choice(choices)

    def suggest_int(self, name, low, high):
        return self.fixed[name] if name in self.fixed else self.random.randint(low, high)

    def suggest_float(self, name, low, high, *, log=False):
        return self.fixed[name] if name in self.fixed else self.random.uniform(low, high)


def task_of(kind, pair=False):
    labels = () if kind == "regression" else WORDS
    return Task("t", kind, ("text", "text_pair") if pair else ("text",), "label", labels, table.KINDS[kind].metrics[0])


def rows_of(kind, count=60, pair=False):
    """Return texts whose words state the label."""
    targets = [TARGETS[kind](i) for i in range(count)]
    named = [t if isinstance(t, tuple) else (round((t + 5) / 10) if kind == "regression" else t,) for t in targets]
    texts = [f"number {i % 7} is the {' '.join(WORDS[k] for k in mine) or 'none'}" for i, mine in enumerate(named)]
    return Examples(texts, [f"it was {i % 5}" for i in range(count)] if pair else None, targets)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_every_kind_of_task(model, kind, pair):
    if kind == "regression" and MODELS[model].regressor is None:
        return
    rows = rows_of(kind, pair=pair)
    fixed = {"model": model, "vectors": "words", "rarest": 1, "components": 50, "network.passes": 60}
    choice = draw(Chance(0, **fixed, **{"svm.decay": 1e-4, "bayes.smoothing": 0.1}), kind)
    made = TextModel(task_of(kind, pair), choice, 0)
    made.fit(rows)
    said = made.decide(rows)
    if kind == "regression":
        assert all(isinstance(one, float) for one in said)
        error = sum(abs(a - b) for a, b in zip(said, rows.targets, strict=True)) / len(said)
        assert error < 4  # the labels' mean alone is off by 6.7
    else:
        right = sum(
            set(a) == set(b) if kind == "multilabel" else a == b for a, b in zip(said, rows.targets, strict=True)
        )
        assert right > 40
    assert made.numbers > 0


def test_the_settings_drawn_are_all_that_a_model_needs():
    for seed in range(60):
        kind = list(TARGETS)[seed % 3]
        choice = draw(Chance(seed), kind)
        TextModel(task_of(kind), choice, 0)
        assert kind != "regression" or choice["model"] != "bayes"
        assert ("bits" in choice) == (choice["vectors"] == "hashed")
        assert ("components" in choice) == MODELS[choice["model"]].dense


def test_the_numbers_of_a_linear_model_are_its_coefficients():
    rows = Examples(["yes please", "no thanks", "yes yes", "no no"], None, [1, 0, 1, 0])
    task = Task("t", "classification", ("text",), "label", ("a", "b"), "accuracy")
    choice = draw(Chance(0, model="linear", vectors="words", words=1, rarest=1), "classification")
    made = TextModel(task, choice, 0)
    made.fit(rows)
    assert made.numbers == 4 + 1
