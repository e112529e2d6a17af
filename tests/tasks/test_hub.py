"""The hub, with a stand-in for the library `datasets`: names, splits, label names, and the message when it fails."""

from __future__ import annotations

import builtins
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adapterbank.errors import DataError
from adapterbank.install import extra_command
from adapterbank.tasks.catalog import load
from adapterbank.tasks.examples import read_examples


class Split:
    """The attributes that a data set of the library has."""

    def __init__(self, columns: dict[str, list[Any]], names: list[str] | None = None) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.features = {
            name: SimpleNamespace(names=names) if name == "label" and names else object() for name in columns
        }

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None], Any]:
    """Return the data sets of a stand-in library, by path and config."""
    shelf: dict[tuple[str, str | None], Any] = {}

    def load_dataset(path: str, config: str | None = None) -> Any:
        if (path, config) not in shelf:
            raise ConnectionError(f"Couldn't reach {path}\nand more")
        return shelf[path, config]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return shelf


def test_data_that_is_not_in_the_data_root_comes_from_the_hub(hub: dict[Any, Any]) -> None:
    names = ["not_equivalent", "equivalent"]
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "idx": [0, 1]}
    hub["nyu-mll/glue", "mrpc"] = {
        "train": Split({**rows, "label": [1, 0]}, names),
        "validation": Split({**rows, "label": [0, 0]}, names),
        "test": Split({**rows, "label": [-1, -1]}, names),
    }
    found = load("glue/mrpc")
    assert found.source == "nyu-mll/glue on the hub"
    assert list(found.tables) == ["train", "dev", "test"]
    assert list(found.labelled()) == ["train", "dev"]
    examples, _ = read_examples(found.tables["train"], found.task)
    assert (examples.texts, examples.pairs, examples.targets) == (["a", "b"], ["c", "d"], [1, 0])
    assert found.tables["test"].columns["index"] == [0, 1]


def test_columns_and_labels_get_the_catalogs_names(hub: dict[Any, Any]) -> None:
    hub["nyu-mll/glue", "mnli"] = {
        "train": Split(
            {"premise": ["p"], "hypothesis": ["h"], "label": [2]}, ["entailment", "neutral", "contradiction"]
        ),
        "validation_mismatched": Split({"premise": ["p"], "hypothesis": ["h"], "label": ["neutral"]}),
    }
    found = load("glue/mnli")
    assert found.tables["train"].columns == {"sentence1": ["p"], "sentence2": ["h"], "label": ["contradiction"]}
    assert list(found.labelled()) == ["train", "dev_mismatched"]
    hub["cornell-movie-review-data/rotten_tomatoes", None] = {
        "train": Split({"text": ["t"], "label": [1]}, ["neg", "pos"])
    }
    assert load("mr").tables["train"].columns["label"] == ["positive"]
    hub["clinc/clinc_oos", "plus"] = {"train": Split({"text": ["a", "b", "c"], "intent": ["oos", "balance", "apr"]})}
    assert load("clinc150").tables["train"].columns == {"text": ["b", "c"], "label": ["balance", "apr"]}
    assert load("clinc150").task.labels == ("apr", "balance")


def test_squad_comes_with_ids_and_questions_without_answers(hub: dict[Any, Any]) -> None:
    answers = [{"text": ["Ann"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    columns = {"id": ["x", "y"], "question": ["who", "why"], "context": ["Ann ran"] * 2, "answers": answers}
    hub["rajpurkar/squad_v2", None] = {"train": Split(columns)}
    found = load("squad/v2")
    assert found.task.threshold == 0.0
    examples, _ = read_examples(found.tables["train"], found.task)
    assert examples.targets == [(0, 3, ("Ann",)), (-1, -1, ("",))]
    assert found.tables["train"].columns["id"] == ["x", "y"]


def test_a_failure_of_the_hub_is_one_sentence_with_the_remedy(hub: dict[Any, Any]) -> None:
    with pytest.raises(
        DataError,
        match=r"'nyu-mll/glue' is not in the data root and cannot be downloaded .* \(Couldn't reach",
    ) as error:
        load("glue/cola")
    assert "\n" not in str(error.value)
    assert "--data-root" in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(DataError, match=re.escape(extra_command("data")) + ".*--data-root or ADAPTERBANK_DATA"):
        load("glue/cola")
