"""Claims about the automatic size: halving keeps the best and the small, and the smallest in tolerance is chosen."""

from __future__ import annotations

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError, TrainingError
from adapterbank.studies import size_search
from adapterbank.studies.size_search import Trial, choose, reason, survivors
from small_data import FAST, reviews

AUTO = {**FAST, "size": "auto", "epochs": 2}


def trials(*scores):
    """Return trials of the last rung: (size, score)."""
    return [Trial(size, 1e-3, 3, 4, score) for size, score in scores]


def test_the_smallest_within_the_tolerance_is_chosen():
    found = trials((4, 0.880), (16, 0.896), (64, 0.900), (256, 0.899))
    assert choose(found, 0.5).size == 16
    assert choose(found, 0.3).size == 64
    assert choose(found, 2.0).size == 4
    assert "0.40 points below the best (90.00, size 64): the smallest size within 0.5 points" in reason(
        found[1], found, 0.5
    )
    assert "no smaller size is within 0.1 points" in reason(found[2], found, 0.1)


def test_the_better_learning_rate_of_a_size_is_chosen():
    found = [Trial(4, 3e-4, 3, 4, 0.90), Trial(4, 1e-3, 3, 4, 0.91), Trial(64, 1e-3, 3, 4, 0.91)]
    assert choose(found, 1.5) == found[1]


def test_the_best_continues_then_the_small_within_the_tolerance_then_by_score():
    found = trials((4, 0.896), (8, 0.70), (16, 0.80), (64, 0.898), (256, 0.900))
    assert [trial.size for trial in survivors(found, 0.5, 4)] == [256, 4, 64, 16]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(size_search, "SIZES", (2, 4))


def test_a_task_is_trained_at_the_chosen_size_and_the_record_lists_the_trials(bert, tmp_path, few):
    notes, stages = [], []
    bank = open_bank(tmp_path / "bank", bert)
    options = {**AUTO, "lr": None}
    result = bank.train("s", reviews(40), note=notes.append, stage=lambda *a: stages.append(a), **options)
    table = result.record["sizing"]
    assert [sum(t["rung"] == rung for t in table["trials"]) for rung in (1, 2, 3)] == [6, 3, 2]
    assert {t["epochs"] for t in table["trials"]} == {1, 2}
    assert result.record["config"]["size"] in (2, 4)
    assert result.record["config"]["lr"] in size_search.RATES
    assert any(note == table["reason"] for note in notes)
    assert any("rung 1 of 3: 6 runs of 1 epoch" in note for note in notes)
    assert [done for what, done, total in stages if what.startswith("rung 1")][-1] == 6 * 5


def test_the_run_is_that_of_a_plain_training_of_that_size(bert, tmp_path, few):
    found = open_bank(tmp_path / "auto", bert).train("s", reviews(40), **AUTO)
    config = found.record["config"]
    plain = open_bank(tmp_path / "plain", bert).train("s", reviews(40), **{**FAST, "size": config["size"], "epochs": 2})
    assert plain.record["config"] == config
    ours, theirs = found.package.tensors(), plain.package.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(torch.from_numpy(ours[n]), torch.from_numpy(theirs[n]), atol=1e-5) for n in ours)


def test_rungs_of_equally_many_epochs_are_trained_once(bert, tmp_path, few, monkeypatch):
    real, trained = size_search.train, []

    def train(backbone, jobs, **options):
        trained.append([job.epochs for job in jobs])
        return real(backbone, jobs, **options)

    monkeypatch.setattr(size_search, "train", train)
    result = open_bank(tmp_path / "bank", bert).train("s", reviews(40), **{**AUTO, "epochs": 1, "lr": None})
    assert trained == [[1] * 6]
    assert [sum(t["rung"] == rung for t in result.record["sizing"]["trials"]) for rung in (1, 2, 3)] == [6, 3, 2]


def test_a_diverging_rate_is_left_out_and_reported(bert, tmp_path, few, monkeypatch):
    real = size_search.train

    def train(backbone, jobs, **options):
        if any(job.rate == 3e-3 for job in jobs):
            raise TrainingError("the loss became nan.")
        return real(backbone, jobs, **options)

    monkeypatch.setattr(size_search, "train", train)
    notes = []
    result = open_bank(tmp_path / "bank", bert).train("s", reviews(40), note=notes.append, **{**AUTO, "lr": None})
    assert any("Learning rate 0.003 is left out" in note for note in notes)
    assert {t["lr"] for t in result.record["sizing"]["trials"]} == {3e-4, 1e-3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full"}, "method 'full' has no size"),
        ({"resume": True}, "cannot be resumed"),
        ({"tolerance": -1}, "tolerance is -1"),
    ],
)
def test_mistakes_are_reported_before_anything_is_trained(bert, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        open_bank(tmp_path / "bank", bert).train("s", reviews(), **{**AUTO, **options})
    assert not (tmp_path / "bank").exists()
