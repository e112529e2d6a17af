"""A task is checked on creation and round-trips through JSON; a fingerprint names examples exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.errors import InputError, UnknownName
from adapterbank.tasks.spec import Examples, Task

SENTIMENT = Task("sst2", "classification", ("sentence",), "label", ("negative", "positive"), "accuracy")
SPAN = Task("squad", "span", ("question", "context"), "answers", (), "span_f1")


@pytest.mark.parametrize("task", [SENTIMENT, SPAN])
def test_a_task_round_trips_through_json(task: Task) -> None:
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert Task.from_json({**task.to_json(), "later": 1}) == task


def test_a_task_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SENTIMENT.kind = "span"  # type: ignore[misc]


def test_the_error_for_a_stored_task_names_missing_fields() -> None:
    with pytest.raises(InputError, match="cannot be used: labels is missing"):
        Task.from_json({"name": "x", "kind": "span", "text": [], "label": "y"})
    with pytest.raises(InputError, match="text is 'sentence', not a list"):
        Task.from_json({**SENTIMENT.to_json(), "text": "sentence"})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"kind": "clasification"}, UnknownName, "Did you mean 'classification'"),
        ({"metric": "acuracy"}, UnknownName, "Did you mean 'accuracy'"),
        ({"metric": "pearson"}, InputError, "cannot score a classification task"),
        ({"labels": ("a", "b", "c"), "metric": "f1"}, InputError, "exactly 2 labels"),
        ({"labels": ("one",)}, InputError, "needs 2 labels or more"),
        ({"labels": ("a", "b", "a")}, InputError, "names the label 'a' twice"),
        ({"text": ()}, InputError, "one or two text columns"),
        ({"text": ("a", "b", "c")}, InputError, "one or two text columns"),
        ({"kind": "span", "metric": "span_f1"}, InputError, "two text columns"),
        ({"kind": "regression", "metric": "pearson"}, InputError, "has no labels"),
        ({"kind": "multilabel", "metric": "micro_f1", "labels": ()}, InputError, "needs 1 labels or more"),
    ],
)
def test_a_task_that_could_not_be_scored_is_refused(change: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        replace(SENTIMENT, **change)


def test_select_returns_rows_in_the_given_order_with_all_columns() -> None:
    rows = Examples(["a", "b", "c"], ["x", "y", "z"], [0, 1, 2])
    assert len(rows) == 3
    assert rows.select([2, 0]) == Examples(["c", "a"], ["z", "x"], [2, 0])
    assert Examples(["a"]).select(iter([0])) == Examples(["a"])


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(InputError, match="2 texts and 1 pairs"):
        Examples(["a", "b"], ["x"])
    with pytest.raises(InputError, match="1 texts and 2 targets"):
        Examples(["a"], None, [0, 1])


def test_a_calibration_is_stored_with_the_task_and_absent_without_one() -> None:
    plain = Task("t", "classification", ("text",), "label", ("no", "yes"), "f1")
    assert not {"temperature", "thresholds"} & set(plain.to_json())
    fitted = replace(plain, temperature=1.5, thresholds=(0.7, 0.3))
    stored = json.loads(json.dumps(fitted.to_json()))
    assert (stored["temperature"], stored["thresholds"]) == (1.5, [0.7, 0.3])
    assert Task.from_json(stored) == fitted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0, not from 0.05 to 20.0"),
        ({"temperature": -1}, "temperature is -1, not from"),
        ({"temperature": float("nan")}, "temperature is nan, not a finite number"),
        ({"temperature": "hot"}, "temperature is 'hot', not a finite number"),
        ({"thresholds": [0.5, 1.5]}, r"thresholds\[1\] is 1.5, not from 0 to 1"),
        ({"thresholds": 0.5}, "thresholds is 0.5, not a list"),
        ({"thresholds": [0.5]}, "1 thresholds for 2 labels"),
        ({"kind": "regression", "labels": [], "metric": "spearman", "temperature": 2.0}, "no probabilities"),
    ],
)
def test_a_stored_calibration_that_cannot_be_used_is_refused(fields: dict[str, Any], message: str) -> None:
    stored = Task("t", "classification", ("text",), "label", ("no", "yes"), "f1").to_json()
    with pytest.raises(InputError, match=message):
        Task.from_json({**stored, **fields})


def test_different_examples_have_different_fingerprints() -> None:
    cases = [
        Examples([]),
        Examples(["a b"]),
        Examples(["a", "b"]),
        Examples(["ab"]),
        Examples(["a"], ["b"]),
        Examples(["a"], [""]),
        Examples(["a\nb"]),
        Examples(['a", "b']),
        Examples(["a"], None, [0]),
        Examples(["a"], None, [1]),
        Examples(["a"], None, [1.5]),
        Examples(["a"], None, [(0, 1)]),
        Examples(["a"], None, [(0, 1, ("x",))]),
        Examples(["\ud800"]),
    ]
    assert len({case.fingerprint() for case in cases}) == len(cases)


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    # printf '["gr\\u00f6\\u00dfe", "b", 1]\n' | sha256sum
    expected = "043ccc56471733e004883a95cac155a047b21e6f9b7a4d52af61642040acfd1b"
    assert Examples(["größe"], ["b"], [1]).fingerprint() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_fingerprints_are_equal_exactly_if_texts_are(first: list[str], second: list[str]) -> None:
    assert (Examples(first).fingerprint() == Examples(second).fingerprint()) == (first == second)


def test_importing_the_data_modules_loads_nothing_heavy() -> None:
    code = (
        "import sys, adapterbank.kinds.scoring, adapterbank.tasks.examples, adapterbank.tasks.columns\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'sklearn', 'pyarrow'} & set(sys.modules)))"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert result.stdout.strip() == ""
