"""Tests of `adapterbank.training.fitted`: few labels and frozen encoders, from the data to the package."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError, DataError, TrainingError
from adapterbank.storage.records import read_all
from adapterbank.training import pairs
from small_data import FAST, reviews, scores

ROWS = reviews(24)
OTHERS = reviews(36)[24:]
OPTIONS = {"size": 4, "max_length": 32}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def embedded(bank, rows):
    vectors = np.stack([row.embedding for row in bank.predict(None, [text for text, _ in rows])])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def answered(bank, name, rows):
    return np.array([list(row.probabilities.values()) for row in bank.predict(name, [text for text, _ in rows])])


def test_a_head_on_the_frozen_encoder_is_scikit_learns_regression_on_its_embeddings(bank):
    bank.train("s", ROWS, method="feature", max_length=32)
    model = LogisticRegression(C=10, max_iter=1000).fit(embedded(bank, ROWS), [label for _, label in ROWS])
    np.testing.assert_allclose(answered(bank, "s", OTHERS), model.predict_proba(embedded(bank, OTHERS)), atol=1e-5)


def test_few_labels_hold_out_no_row_and_bring_the_rows_of_a_class_together(bank):
    few = bank.train("few", ROWS, test=OTHERS, **OPTIONS, lr=1e-2)
    frozen = bank.train("frozen", ROWS, test=OTHERS, method="feature", max_length=32)
    assert few.record["config"]["data"]["train"]["rows"] == 24
    assert "dev" not in few.record["config"]["data"]
    scores = {name: one.record["metrics"] for name, one in (("few", few), ("frozen", frozen))}
    assert scores["few"]["dev"]["accuracy"] == pytest.approx(scores["frozen"]["dev"]["accuracy"], abs=0.1)
    assert scores["few"]["test"]["accuracy"] >= scores["frozen"]["test"]["accuracy"]
    assert few.record["history"][0]["loss"] < 0.3  # about one half at first
    assert few.record["fitted"] == {"steps": 30, "strength": 10.0, "rows": 24}
    assert "Few labels: 30 steps train on pairs of rows" in "\n".join(few.notes)
    assert few.package.manifest.method["head"]["unit"] is True


def test_the_recipe_in_the_package_has_no_epochs_and_a_killed_run_is_not_added_twice(bank):
    package = bank.train("s", ROWS, **OPTIONS).package
    assert not {"epochs", "patience"} & package.manifest.recipe.keys()
    again = bank.train("s", ROWS, **OPTIONS, resume=True).package  # as after a kill between package and record
    assert again.ref == package.ref


def test_the_package_predicts_as_trained_and_passes_the_audit(bank, bert):
    result = bank.train("s", ROWS, OTHERS, **OPTIONS)
    again = open_bank(bank.path, bert, device="cpu")
    assert again.evaluate("s", OTHERS)["accuracy"] == result.record["metrics"]["dev"]["accuracy"]
    assert all(finding.ok for finding in again.audit())
    assert again.train("t", ROWS, OTHERS, **OPTIONS).package.manifest.weights_sha256 == (
        result.package.manifest.weights_sha256
    )


@pytest.mark.parametrize("method", ["lora", "layernorm", "full", "top"])
def test_every_method_that_changes_the_encoder_trains_on_pairs(bank, method):
    result = bank.train("s", ROWS, OTHERS, method=method, max_length=32)
    assert result.record["fitted"]["steps"] == 30
    assert result.record["metrics"]["dev"]["accuracy"] == bank.evaluate("s", OTHERS)["accuracy"]


@pytest.mark.parametrize(
    ("rows", "options", "few"),
    [
        (reviews(128), {}, True),
        (reviews(130), {}, False),
        (reviews(130), {"few": "always"}, True),
        (reviews(130), {"limit": 128}, True),
        (ROWS, {"few": "never"}, False),
        (ROWS, {"epochs": 1}, False),
        (ROWS, {"epochs": 1, "few": "always"}, True),
        (ROWS, {"patience": 2}, False),
        (ROWS, {"head_hidden": 4}, False),
    ],
)
def test_up_to_64_rows_a_class_are_few_unless_the_user_has_a_recipe(bank, rows, options, few):
    record = bank.train("s", rows, **(OPTIONS | options)).record
    assert ("fitted" in record, "dev" in record["config"]["data"]) == (few, not few)


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (scores(), {}, "few is 'always', but the task is regression, for which there is no such recipe; leave it out."),
        (ROWS, {"head_hidden": 4}, "few is 'always', but head_hidden is 4, for which"),
        (ROWS, {"method": "automl"}, "few is 'always', but the method is automl, for which"),
    ],
)
def test_what_the_recipe_cannot_do_is_refused(bank, rows, options, why):
    with pytest.raises(ConfigError, match=why):
        bank.train("s", rows, few="always", **options)
    assert not bank.path.exists()


def test_numbers_are_trained_as_before_however_few_they_are(bank):
    assert "fitted" not in bank.train("s", scores(), **OPTIONS).record


def test_a_class_of_one_row_is_learned(bank):
    rows = [*ROWS, ("a red fox", "other")]
    result = bank.train("s", rows, **OPTIONS, lr=1e-2)
    assert result.record["config"]["data"]["train"]["rows"] == 25
    assert bank.predict("s", ["a red fox"])[0].label == "other"


def test_dev_rows_choose_the_penalty_of_a_head_only_where_they_are_many(bank):
    many = bank.train("s", reviews(200), reviews(120), method="feature", max_length=32).record
    assert [len(many["history"]), many["fitted"]["rows"]] == [4, 200]
    assert many["metrics"]["dev"]["accuracy"] == max(epoch["score"] for epoch in many["history"])
    assert len(bank.train("s", reviews(200), reviews(40), method="feature", max_length=32).record["history"]) == 1


def test_a_size_is_not_searched_and_nothing_is_pruned_where_no_dev_rows_compare(bank):
    result = bank.train("s", ROWS, size="auto", prune=True, max_length=32, note=(notes := []).append)
    assert result.record["config"]["size"] == 64
    assert any(
        "size is 'auto', but with few labels no dev rows compare sizes; size 64 is used." in one for one in notes
    )
    assert any("Nothing is pruned: with few labels there are no dev rows" in one for one in notes)


def test_runs_with_few_labels_share_a_sweep_with_others(bank):
    path = bank.path.parent / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS), encoding="utf-8")
    bank.sweep({"task": "s", "train": str(path), "few": ["auto", "never"], "seed": [0, 1], **OPTIONS})
    found = [(record["config"].get("few"), "fitted" in record) for record in read_all(bank.bank.records_path)]
    assert sorted(found, key=str) == [("never", False)] * 2 + [(None, True)] * 2


def test_a_rate_that_is_too_high_is_told_and_nothing_is_written(bank, monkeypatch):
    monkeypatch.setattr(pairs, "pair_loss", lambda vectors, classes, rows: vectors.sum() * float("nan"))
    with pytest.raises(TrainingError, match=r"At step 1 the loss became nan. The learning rate 0.001 is probably too"):
        bank.train("s", ROWS, **OPTIONS)
    assert bank.tasks() == []


def test_progress_is_reported_for_every_step(bank):
    seen = []
    bank.train("s", ROWS, **OPTIONS, watch=seen.append)
    assert [one.step for one in seen] == [*range(1, 31), 30]
    assert seen[-1].score is not None
    assert FAST["epochs"] == 2  # tests that train with FAST follow the usual recipe


def test_rows_of_one_class_are_refused_in_a_sentence(bank):
    for options in ({}, {"method": "feature"}):
        with pytest.raises(DataError, match="The training rows have only one class of 's'; add rows of another one"):
            bank.train("s", [("a cat", "x"), ("a dog", "x")], labels="x,y", max_length=32, **options)


def test_the_score_of_the_bare_encoder_is_not_told_as_the_models_and_decides_nothing(bank):
    rows = [(f"the cat {i}", "a") for i in range(40)] + [(f"the cat {i}", "b") for i in range(40, 42)]
    result = bank.train("s", rows, **OPTIONS)
    assert not any("for every dev row" in note for note in result.notes)
    again = bank.train("s", rows[20:], **OPTIONS, default="better")
    assert bank.show("s").version == again.package.manifest.version == 2


def test_a_size_is_searched_by_one_recipe_at_every_rung(bank):
    result = bank.train("s", ROWS, size="auto", epochs=20, lr=1e-2, batch=8, max_length=32)
    assert "dev" in result.record["config"]["data"]
    assert "fitted" not in result.record
