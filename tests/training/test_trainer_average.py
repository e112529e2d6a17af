"""Claims about `--average`: the mean of the epochs' weights is scored on dev at the end, and kept if it is better."""

from __future__ import annotations

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.config import Config
from adapterbank.training import trainer
from jobs import assert_same_bits, job_on, train_jobs
from small_data import FAST, flags, reviews, shell, write

ROWS = reviews()
MANY = {**FAST, "epochs": 3, "few": "never"}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def graded(*scores):
    """Return a score function that returns these in turn, whatever the outputs are."""
    left = list(scores)
    return lambda outputs: left.pop(0)


def trained(bert, new_slot, *scores, **changes):
    """Train a job of so many epochs and one average with these scores; return its state and the epochs' weights."""
    epochs = []
    changes = {"epochs": len(scores) - 1, "averages": True, "score": graded(*scores), **changes}
    job = job_on(bert, new_slot, **changes)
    (state,) = train_jobs(bert, job, keep=lambda _, kept: epochs.append(kept.tensors["weights"]))
    return state, epochs


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_each_epoch_counts_twice_as_much_as_the_one_before(bert, new_slot):
    state, (first, second, third) = trained(bert, new_slot, 0.1, 0.2, 0.3, 0.9)
    for name, tensor in state.tensors["average"].items():
        torch.testing.assert_close(tensor, first[name] / 4 + second[name] / 4 + third[name] / 2)
    assert equal(state.tensors["weights"], third)


def test_the_average_is_kept_if_it_is_better_than_the_best_epoch(bert, new_slot):
    state, _ = trained(bert, new_slot, 0.1, 0.3, 0.2, 0.9)
    assert equal(state.kept, state.tensors["average"])
    assert equal(state.without_average().kept, state.tensors["best"])
    assert (state.average, state.best_score) == ({"score": 0.9, "kept": True}, 0.9)
    assert [epoch.get("average") for epoch in state.history] == [None, None, 0.9]
    assert state.notes() == [
        "The average of the epochs scores 0.9000 on dev, better than epoch 2 (0.3000); the average is kept."
    ]


@pytest.mark.parametrize("score", [0.3, 0.2])
def test_the_best_epoch_is_kept_otherwise(bert, new_slot, score):
    state, epochs = trained(bert, new_slot, 0.1, 0.3, 0.2, score)
    assert equal(state.tensors["best"], epochs[1])
    assert (state.average, state.best_score) == ({"score": score, "kept": False}, 0.3)
    assert state.notes()[0].endswith("no better than epoch 2 (0.3000); that epoch is kept.")


def test_a_run_that_stops_early_is_averaged_up_to_there(bert, new_slot):
    state, epochs = trained(bert, new_slot, 0.5, 0.1, 0.1, 0.9, epochs=9, patience=2)
    assert (len(epochs), state.average) == (3, {"score": 0.9, "kept": True})


def test_a_run_that_begins_again_forgets_its_average(bert, new_slot, monkeypatch):
    monkeypatch.setattr(trainer, "FEWEST_STEPS", 1)
    collapsed = iter([True, False, False])
    scores = (0.1, 0.1, 0.1, 0.2, 0.3, 0.9)
    state, epochs = trained(bert, new_slot, *scores, epochs=3, collapsed=lambda outputs, losses: next(collapsed, False))
    assert len(state.restarts) == 1
    first, second, third = epochs[-3:]
    for name, tensor in state.tensors["average"].items():
        torch.testing.assert_close(tensor, first[name] / 4 + second[name] / 4 + third[name] / 2)


def test_runs_beside_one_that_averages_are_as_beside_one_that_does_not(bert, new_slot):
    plain, other = job_on(bert, new_slot), job_on(bert, new_slot, seed=1)
    averaging = job_on(bert, new_slot, seed=1, averages=True)
    alone, beside = train_jobs(bert, plain, other)[0], train_jobs(bert, plain, averaging)[0]
    assert_same_bits(beside, alone)


# --- in a bank


def test_the_record_the_manifest_and_the_note_say_which_weights_are_kept(bank):
    plain = bank.train("s", ROWS, ROWS, **MANY)
    result = bank.train("s", ROWS, ROWS, **MANY, average=True)
    found = result.record["average"]
    assert result.record["history"][-1]["average"] == found["score"]
    assert result.package.manifest.recipe["average"] is True
    assert any(note.startswith("The average of the epochs scores ") for note in result.package.manifest.notes)
    assert result.record["config"]["average"] is True
    assert result.record_path.stem != plain.record_path.stem
    kept = max(found["score"], result.record["history"][result.record["best_epoch"] - 1]["score"])
    assert bank.evaluate("s", ROWS)["accuracy"] == kept


def test_a_plain_run_has_no_average_and_the_same_epochs(bank):
    plain, averaged = bank.train("s", ROWS, ROWS, **MANY), bank.train("s", ROWS, ROWS, **MANY, average=True)
    assert "average" not in plain.record
    assert "average" not in plain.record["config"]
    assert "average" not in plain.package.manifest.recipe
    shown = [[(e["loss"], e["score"]) for e in one.record["history"]] for one in (plain, averaged)]
    assert shown[0] == shown[1]
    if not averaged.record["average"]["kept"]:
        assert plain.package.manifest.weights_sha256 == averaged.package.manifest.weights_sha256


def test_without_a_choice_on_dev_or_epochs_it_has_no_effect_and_a_note_says_so(bank):
    few = bank.train("s", ROWS, ROWS[:4], **MANY, average=True, patience=2)
    assert (
        "4 dev rows are too few to choose an epoch; the last one is kept, and patience and average have no effect."
        in (few.record["notes"])
    )
    assert "average" not in few.record
    fitted = bank.train("s", ROWS, ROWS, **{**MANY, "few": "always"}, average=True)
    assert "The head is fitted, not trained in epochs, so that there is no average of their weights." in fitted.notes


def test_a_run_that_asks_for_an_average_trains_in_epochs_however_few_its_labels(bank):
    options = {"size": 4, "max_length": 32, "average": True}
    assert "fitted" not in bank.train("s", ROWS, ROWS, **options).record
    assert Config().average is False


def test_the_shell_names_the_average_in_place_of_the_epoch(bank, tmp_path, checkpoint):
    file = write(tmp_path / "s.csv", ROWS)
    words = ("train", "--bank", bank.path, "--task", "s", "--train", file, "--dev", file)
    found = shell(*words, "--backbone", checkpoint("bert")[0], *flags({**MANY, "device": "cpu"}), "--average")
    assert found.code == 0, found
    line = found.out.splitlines()[0]
    assert line.endswith("average of the epochs") == ("the average is kept" in found.err)
