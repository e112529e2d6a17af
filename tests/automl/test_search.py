"""Claims about `automl.search` and the run that uses it: a budget, a seed, the best on dev, a record, no package."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from typing import ClassVar

import pytest

from adapterbank.analysis.run_table import load as load_runs
from adapterbank.api.opened import open_bank
from adapterbank.automl import search as searches
from adapterbank.errors import ConfigError, InputError, TrainingError, UnknownName
from adapterbank.install import extra_command
from adapterbank.storage import records
from adapterbank.tasks.spec import Examples, Task
from small_data import answers, flags, pairs, reviews, scores, shell, tags, write

ROWS = reviews()
TASK = Task("s", "classification", ("text",), "label", ("negative", "positive"), "accuracy")
TRAIN = Examples([text for text, _ in ROWS], None, [int(label == "positive") for _, label in ROWS])
FAST = {"method": "automl", "trials": 4}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


class Fake:
    """A model that scores what the test sets, or fails, or is interrupted."""

    results: ClassVar[list[object]] = []

    def __init__(self, task, choice, seed):
        self.numbers = 7

    def fit(self, examples):
        self.right = Fake.results.pop(0)
        if isinstance(self.right, BaseException):
            raise self.right

    def decide(self, examples):
        return [t if i < self.right else 1 - t for i, t in enumerate(examples.targets)]


@pytest.fixture
def fake(monkeypatch):
    def prepare(*scores):
        Fake.results = list(scores)

    monkeypatch.setattr(searches, "TextModel", Fake)
    return prepare


# --- the search


def test_the_best_on_dev_is_kept_and_the_first_of_equals(fake):
    fake(3, 20, 5, 20)
    found = searches.search(TASK, TRAIN, TRAIN, trials=4)
    assert [round(trial["score"] * 24) for trial in found.history] == [3, 20, 5, 20]
    assert (found.best, found.model.right, found.stopped) == (2, 20, False)
    assert found.choice == found.history[1]["choice"]


def test_the_same_seed_tries_the_same_models_and_another_seed_others():
    same, again, other = (
        [(trial["choice"], trial["score"]) for trial in searches.search(TASK, TRAIN, TRAIN, trials=4, seed=s).history]
        for s in (3, 3, 4)
    )
    assert same == again != other


def test_a_model_that_cannot_be_fitted_is_skipped(fake):
    fake(ValueError("empty vocabulary"), 9, InputError("not a number"), 2)
    found = searches.search(TASK, TRAIN, TRAIN, trials=4)
    assert [trial["score"] is None for trial in found.history] == [True, False, True, False]
    assert found.best == 2


def test_it_is_an_error_if_no_model_can_be_fitted(fake):
    fake(*[ValueError("empty")] * 2)
    with pytest.raises(TrainingError, match="None of 2 models could be fitted to 24 rows"):
        searches.search(TASK, TRAIN, TRAIN, trials=2)


def test_an_interruption_keeps_the_best_so_far(fake):
    fake(3, 9, KeyboardInterrupt())
    found = searches.search(TASK, TRAIN, TRAIN, trials=10)
    assert (found.stopped, found.best, len(found.history)) == (True, 2, 2)


def test_an_interruption_before_the_first_model_is_raised(fake):
    fake(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        searches.search(TASK, TRAIN, TRAIN, trials=10)


def test_no_model_is_started_after_the_time_limit_but_one_always_is(fake, monkeypatch):
    clock = iter(range(0, 10_000, 25))  # seconds that each look at the clock takes
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    fake(*range(20))
    assert len(searches.search(TASK, TRAIN, TRAIN, trials=20, minutes=3).history) == 3
    fake(*range(20))
    assert len(searches.search(TASK, TRAIN, TRAIN, trials=20, minutes=0.01).history) == 1


def test_the_watcher_is_called_for_each_model_with_the_best_score_so_far(fake):
    calls = []
    fake(6, 12, 3)
    searches.search(TASK, TRAIN, TRAIN, trials=3, watch=lambda *call: calls.append(call))
    assert calls == [(0, 3, None), (1, 3, 0.25), (2, 3, 0.5)]


# --- a run


def test_a_run_leaves_a_record_like_any_other_and_no_package(bank, bert):
    result = bank.train("s", ROWS, ROWS, reviews(8), **FAST)
    other = bank.train("t", ROWS, ROWS, reviews(8), epochs=1, max_length=32).record
    record = result.record
    assert result.package is None
    assert records.read(result.record_path) == record
    assert set(record) == {*other, "choice"} - {"calibration"}
    assert set(record["config"]) == set(other["config"])
    assert set(record["params"]) == set(other["params"])
    assert record["stamp"] == other["stamp"]
    assert record["metrics"]["dev"].keys() == other["metrics"]["dev"].keys() - {"calibration_error"}
    assert record["metrics"]["dev"]["accuracy"] == max(trial["score"] for trial in record["history"])
    assert record["history"][record["best_epoch"] - 1]["score"] == record["metrics"]["dev"]["accuracy"]
    assert record["metrics"]["test"]["rows"] == 8
    assert (record["package"], record["bytes"], len(record["history"])) == (None, 0, 4)
    assert record["params"]["trained"] == record["params"]["total"] > 0
    assert [task.name for task in bank.tasks()] == ["t"]


@pytest.mark.parametrize("rows", [scores(), tags(), pairs()], ids=["regression", "multilabel", "pairs"])
def test_every_kind_of_task_but_span_can_be_searched(bank, rows):
    record = bank.train("s", rows, rows, **FAST).record
    assert record["metrics"]["dev"][record["task"]["metric"]] > 0.5


def test_span_tasks_are_refused_before_the_bank_is_created(bank):
    with pytest.raises(ConfigError, match="'automl', which cannot learn a span task; use one with an encoder"):
        bank.train("s", answers(), answers(), **FAST)
    assert not bank.path.exists()


def test_the_error_without_optuna_names_what_to_install(bank, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"needs Optuna: {extra_command('automl')}")):
        bank.train("s", ROWS, ROWS, **FAST)
    assert not bank.path.exists()


def test_predict_and_evaluate_say_that_there_is_a_record_but_no_package(bank):
    bank.train("s", ROWS, ROWS, **FAST)
    for ask in (lambda: bank.predict("s", ["good"]), lambda: bank.evaluate("s", ROWS), lambda: bank.show("s")):
        with pytest.raises(InputError, match="'s' was run with method 'automl', which writes a record but no package"):
            ask()
    with pytest.raises(UnknownName, match="'z' is not a task of this bank"):
        bank.predict("z", ["good"])
    bank.train("s", ROWS, ROWS, epochs=1, max_length=32)
    assert bank.predict("s", ["good"])[0].label


def test_the_record_of_an_interrupted_run_is_marked(bank, fake):
    fake(3, 9, KeyboardInterrupt())
    result = bank.train("s", ROWS, ROWS, method="automl", trials=10)
    assert result.notes == ("Stopped after 2 of 10 models; the best of them is kept.",)
    assert result.record["notes"] == list(result.notes)
    assert result.record["metrics"]["dev"]["accuracy"] == 9 / 24
    assert (result.record["stopped"], result.record["config"]["trials"]) == (True, 2)


def swept(bank, tmp_path, **options):
    data = write(tmp_path / "s.csv", ROWS)
    study = {"task": "s", "train": data, "dev": data, "max_length": 32, "trials": 10, **options}
    return bank.sweep(study)


def test_a_sweep_runs_it_once_beside_methods_with_an_encoder(bank, tmp_path, fake):
    fake(*range(1, 11))
    methods = {"method": ["automl", "feature"], "epochs": 1}
    assert swept(bank, tmp_path, **methods).tally.done == 2
    found = {record["config"]["method"]: record for record in records.read_all(bank.path / "records")}
    assert (found["automl"]["package"], len(found["automl"]["history"])) == (None, 10)
    assert found["automl"]["metrics"]["dev"]["accuracy"] == 10 / 24
    assert swept(bank, tmp_path, **methods).tally.known == 2


def test_an_interrupted_sweep_leaves_no_record(bank, tmp_path, fake):
    fake(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        swept(bank, tmp_path, method="automl")
    assert [path.name for path in bank.path.rglob("*.json")] == []


def test_a_failed_search_does_not_stop_a_sweep(bank, tmp_path, fake):
    fake(ValueError(), ValueError())
    outcome = swept(bank, tmp_path, method=["automl", "feature"], epochs=1, trials=2)
    assert (outcome.tally.done, outcome.tally.failed) == (1, 1)
    ((config, failure),) = outcome.tally.failures
    assert (config.method, failure[:35]) == ("automl", "None of 2 models could be fitted to")


def test_the_shell_trains_and_predict_explains(tmp_path, checkpoint):
    data, bank, encoder = write(tmp_path / "train.csv", ROWS), tmp_path / "bank", checkpoint("bert")[0]
    words = ["train", "--bank", bank, "--train", data, "--dev", data, "--backbone", encoder, "--task", "s"]
    found = shell(*words, *flags(FAST))
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("s  accuracy ")
    assert "4 models" in found.out
    assert "record only, no package: model " in found.out
    found = shell("predict", "--bank", bank, "--task", "s", "--text", "good")
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert "writes a record but no package" in found.err


# --- without an encoder


@pytest.fixture
def nowhere(monkeypatch):
    """Fail if an encoder is looked for."""

    def refuse(name):
        raise AssertionError(f"looked for the encoder {name}")

    monkeypatch.setattr("adapterbank.encoder.backbone.locate", refuse)


def test_a_search_needs_no_weights_in_python_in_the_shell_and_in_a_study(tmp_path, nowhere):
    data = write(tmp_path / "rows.csv", ROWS)
    result = open_bank(tmp_path / "bank", "minilm").train("s", ROWS, ROWS, **FAST)
    assert (result.record["config"]["backbone_sha256"], result.record["params"]["encoder"]) == ("", None)
    words = ["--task", "t", "--train", data, "--dev", data, "--method", "automl", "--trials", 2]
    found = shell("train", "--bank", tmp_path / "bank", *words)
    assert found.code == 0, found.err
    assert "record only, no package" in found.out
    (tmp_path / "study.yaml").write_text(json.dumps({"task": "u", "train": str(data), "dev": str(data), **FAST}))
    again = [shell("sweep", tmp_path / "study.yaml", "--bank", tmp_path / "bank").out for _ in range(2)]
    assert ["1 done" in again[0], "1 had records" in again[1]] == [True, True]
    assert len(records.read_all(tmp_path / "bank" / "records")) == 3
    assert repr(open_bank(tmp_path / "bank", "minilm")).endswith("the first training creates it.")


def test_the_bank_may_follow_and_knows_the_records(tmp_path, bert):
    searched = open_bank(tmp_path / "bank", bert.name).train("s", ROWS, ROWS, **FAST).record
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    assert bank.tasks() == []
    bank.train("t", ROWS, ROWS, epochs=1, max_length=32)
    assert [task.name for task in bank.tasks()] == ["t"]
    study = load_runs([tmp_path / "bank"])
    assert (len(study.rows), study.backbones) == (2, [bert.name])
    with pytest.raises(InputError, match="'s' was run with method 'automl'"):
        bank.predict("s", ["the cat"])
    later = open_bank(tmp_path / "bank").train("s", ROWS, ROWS, **FAST).record
    assert later["config"] == {**searched["config"], "backbone_sha256": bert.sha256}


def test_a_folder_with_other_files_is_refused_before_the_search(tmp_path, nowhere):
    (tmp_path / "photo.jpg").write_text("x")
    data = write(tmp_path / "rows.csv", ROWS)
    found = shell("train", "--bank", tmp_path, "--task", "t", "--train", data, "--method", "automl")
    assert (found.code, "is not a bank" in found.err) == (2, True)
    assert not (tmp_path / "records").exists()
