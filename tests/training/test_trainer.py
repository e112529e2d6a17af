"""Tests of `adapterbank.training.trainer`: a run that collapses begins again, and what is told of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.config import Config
from adapterbank.inference.rows import Rows
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Head
from adapterbank.tasks.spec import Examples
from adapterbank.training import builder, run_state
from adapterbank.training import trainer as trainers
from adapterbank.training.trainer import MOST_RESTARTS
from jobs import assert_same_bits, job_on, kept_after, train_jobs
from kinds.tasks_of import task_of
from small_data import reviews

ROWS = reviews(24)
OPTIONS = {"size": 4, "max_length": 32, "batch": 8, "epochs": 4}


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(trainers, "FEWEST_STEPS", 8)


def stuck(times):
    """Return a check that finds the first so many starts collapsed."""
    seen = []
    return lambda outputs, loss: len(seen.append(loss) or seen) <= times


@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_a_run_that_collapses_begins_again_at_a_third_of_the_rate_and_at_most_twice(times, bert, new_slot):
    (found,) = train_jobs(bert, job_on(bert, new_slot, rate=9e-3, epochs=4, collapsed=stuck(times)))
    starts = min(times, MOST_RESTARTS)
    assert [one["lr"] for one in found.restarts] == pytest.approx([9e-3 / 3**k for k in range(starts)])
    assert (found.epoch, len(found.history), found.step) == (4, 4, 16)
    (fresh,) = train_jobs(bert, job_on(bert, new_slot, rate=9e-3 / 3**starts, epochs=4))
    for part in ("weights", "best"):
        for name, tensor in fresh.tensors[part].items():
            torch.testing.assert_close(found.tensors[part][name], tensor, rtol=1e-5, atol=1e-7)


def test_a_neighbour_is_not_touched_and_a_short_run_does_not_begin_again(bert, new_slot):
    jobs = [job_on(bert, new_slot, seed=seed, epochs=4) for seed in (0, 1)]
    alone = train_jobs(bert, jobs[1])[0]
    beside = train_jobs(bert, job_on(bert, new_slot, seed=0, epochs=4, collapsed=stuck(2)), jobs[1])
    assert len(beside[0].restarts) == 2
    assert beside[1].restarts == []
    for name, tensor in alone.tensors["weights"].items():
        torch.testing.assert_close(beside[1].tensors["weights"][name], tensor, rtol=1e-4, atol=1e-6)
    (short,) = train_jobs(bert, job_on(bert, new_slot, epochs=2, collapsed=stuck(5)))
    assert short.restarts == []


def test_a_run_that_began_again_is_resumed_to_the_bit(bert, new_slot, tmp_path):
    def job(times):
        return job_on(bert, new_slot, epochs=4, collapsed=stuck(times))

    whole, kept = kept_after(bert, job(1))
    state = kept[2]  # after two epochs at the lower rate; the epoch at which it began again is not kept
    assert (len(kept), state.epoch, len(state.restarts)) == (5, 2, 1)
    run_state.save(tmp_path, kept[0])
    run_state.save(tmp_path, kept[1])  # the first epoch again, in a file of another name
    assert run_state.load(tmp_path).restarts == kept[1].restarts
    (resumed,) = train_jobs(bert, job(0), resume={0: state})
    assert_same_bits(resumed, whole)
    assert resumed.restarts == whole.restarts


def test_a_run_is_not_judged_before_it_has_taken_a_hundred_steps(bert, new_slot, monkeypatch):
    monkeypatch.setattr(trainers, "FEWEST_STEPS", 10)  # three epochs of four steps
    kept = kept_after(bert, job_on(bert, new_slot, epochs=4, collapsed=stuck(1)))[1]
    assert [state.epoch for state in kept] == [1, 2, 1, 2, 3, 4]


def test_a_run_is_not_judged_before_it_has_taken_an_epoch_at_its_full_rate(bert, new_slot):
    kept = kept_after(bert, job_on(bert, new_slot, epochs=8, warmup=0.3, collapsed=stuck(1)))[1]
    assert [state.epoch for state in kept] == [1, 2, 3, *range(1, 9)]  # three epochs of warm-up


def test_a_run_of_tags_is_judged_after_a_third_of_its_epochs(bert, new_slot):
    rows = Rows(bert.tokenize(["the cat sat", "a dog ran on"] * 6), [np.array([-100, 1, 0, -100, -100])] * 12)
    common = {"head": Head("tagging", 2), "train": rows, "dev": rows, "score": lambda _: 0.0}
    kept = kept_after(bert, job_on(bert, new_slot, epochs=15, collapsed=stuck(1), **common))[1]
    assert [state.epoch for state in kept] == [1, 2, 3, 4, *range(1, 16)]


def test_a_run_whose_loss_still_falls_has_not_collapsed(one_answer):
    check = one_answer
    assert check([0.7, 0.7])
    assert check([0.6])
    assert not check([0.7, 0.6])


@pytest.fixture
def one_answer():
    """Return the check of a run that gives one answer to four rows of two classes, as a function of its losses."""
    task, targets = task_of("classification", ["a", "b"]), [0, 1, 0, 1]
    rows = Rows([None] * 4, targets)
    check = builder._collapse_check(Config(), task, rows, rows, Examples(["x"] * 4, None, targets))
    return lambda losses: check([np.array([1.0, 0.0])] * 4, losses)


@pytest.mark.parametrize(
    ("last", "losses", "told"),
    [("O", [0.49, 0.49], True), ("O", [0.9, 0.49], False), ("O", [0.35, 0.34], False), ("B-x", [0.49, 0.49], False)],
)
def test_a_tagger_of_one_tag_has_collapsed_if_its_loss_is_about_that_of_the_prior(monkeypatch, last, losses, told):
    task, true = task_of("tagging", ["O", "B-x"]), ["O"] * 8 + ["B-x"] * 2
    rows = Rows([None], [np.array([0] * 8 + [1] * 2)])  # the entropy of the tags is 0.500
    monkeypatch.setattr(builder, "decide", lambda *given: [("O",) * 9 + (last,)])
    target = tuple((place, place + 1, place, tag) for place, tag in enumerate(true))
    check = builder._collapse_check(Config(), task, rows, rows, Examples(["x"], None, [target]))
    assert check([], losses) is told


def test_the_user_and_the_record_are_told(tmp_path, bert, monkeypatch):
    monkeypatch.setattr(builder, "_collapse_check", lambda *given: stuck(1))
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    result = bank.train("s", ROWS, ROWS, **OPTIONS, lr=3e-3)
    assert [one["lr"] for one in result.record["restarts"]] == [3e-3]
    assert any("at the learning rate 0.003 the run gave one answer" in note for note in result.notes)
    assert any("it began again at 0.001." in note for note in result.notes)
    assert "restarts" not in bank.train("t", ROWS, ROWS, **{**OPTIONS, "epochs": 1}).record


@pytest.mark.parametrize(
    ("kind", "same", "different", "told"),
    [
        ("classification", [1, 1, 1], [0, 1, 1], "'b'"),
        ("multilabel", [(0, 1), (0, 1), (0, 1)], [(0,), (1,), ()], "'a', 'b'"),
        ("multilabel", [(), (), ()], [(0,), (1,), ()], "no label"),
        ("regression", [2.001, 2.0, 2.0], [1.0, 2.0, 3.0], "about 2.001"),
    ],
)
def test_a_kind_knows_one_answer_to_everything(kind, same, different, told):
    task, row = task_of(kind, ["a", "b"]), KINDS[kind]
    assert row.collapsed(task, same, different) == told
    assert row.collapsed(task, different, different) == ""
    assert row.collapsed(task, same, same[:1] * 3) == ""


def test_the_loss_of_the_prior_is_that_of_always_giving_it():
    assert KINDS["classification"].prior_loss([0, 0, 0, 1], 2) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    logits = torch.logit(torch.tensor([0.75, 0.5])).expand(4, 2)
    targets = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    assert KINDS["multilabel"].prior_loss([(0, 1), (0,), (0, 1), ()], 2) == pytest.approx(expected.item())
    assert KINDS["regression"].prior_loss([1.0, 5.0], 0) == 1.0
