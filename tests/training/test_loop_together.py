"""`training.loop`: a run gives the same results again, alone, beside other runs, and in a queue."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from adapterbank.encoder import prefix_cache as prefixes
from adapterbank.methods import Options
from adapterbank.training import eager_step
from adapterbank.training import loop as training
from adapterbank.training.optimizer import AdamSettings
from jobs import assert_close, assert_same_bits, job_on, moved, scores, train_jobs

# --- repeated runs ---


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_two_runs_with_the_same_seed_are_equal_to_the_bit(family, tiny, new_slot):
    backbone = tiny(family)
    assert backbone.config.dropout == backbone.config.attention_dropout == 0.1
    job = job_on(backbone, new_slot)
    (a,), (b,) = train_jobs(backbone, job), train_jobs(backbone, job)
    assert_same_bits(a, b)
    assert moved(a, job) > 1e-4


def test_another_seed_gives_different_results(bert, new_slot):
    job = job_on(bert, new_slot)
    (a,), (b,) = train_jobs(bert, job), train_jobs(bert, dataclasses.replace(job, seed=1))
    assert scores(a) != scores(b)


def test_the_global_generator_of_torch_has_no_effect(bert, new_slot):
    job = job_on(bert, new_slot)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (a,) = train_jobs(bert, job)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    (b,) = train_jobs(bert, job)
    assert_same_bits(a, b)


def test_dropout_is_on_unless_it_is_switched_off(bert, new_slot):
    job = job_on(bert, new_slot)
    (own,), (named,), (off,) = (train_jobs(bert, job, dropout=rate) for rate in (None, 0.1, 0.0))
    assert_same_bits(own, named)
    assert scores(own) != scores(off)


def test_every_step_draws_different_dropout_masks(bert, new_slot):
    """With one row and a negligible learning rate, only dropout can change the loss."""
    job = job_on(bert, new_slot, rows=1, batch=1, rate=1e-12, epochs=4)
    (on,), (off,) = train_jobs(bert, job), train_jobs(bert, job, dropout=0.0)
    losses = [epoch["loss"] for epoch in on.history]
    assert all(abs(a - b) > 1e-4 for a, b in itertools.combinations(losses, 2))
    assert [epoch["loss"] for epoch in off.history] == pytest.approx([off.history[0]["loss"]] * 4, abs=1e-6)


# --- runs beside other runs ---


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_a_run_beside_others_trains_as_if_alone_up_to_rounding(family, tiny, new_slot):
    backbone = tiny(family)
    jobs = [
        job_on(backbone, new_slot, Options(size=4), seed=0, rate=1e-3, epochs=2),
        job_on(backbone, new_slot, Options(size=7, activation="relu"), seed=5, rate=3e-3, epochs=3, batch=4, rows=13),
        job_on(backbone, new_slot, Options(method="layernorm"), seed=9, rate=1e-3, epochs=1, batch=9),
        job_on(backbone, new_slot, Options(size=3), seed=2, settings=AdamSettings(bias_correction=True, clip=0.1)),
    ]
    together = train_jobs(backbone, *jobs)
    for job, state in zip(jobs, together, strict=True):
        (alone,) = train_jobs(backbone, job)
        assert state.step == alone.step == job.epochs * -(-len(job.train) // job.batch)
        assert moved(alone, job) > 1e-3
        assert_close(state, alone)


@pytest.mark.parametrize("order", list(itertools.permutations(["full", "adapter", "other full"])))
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_run_that_trains_the_whole_encoder_can_have_any_position_beside_others(family, order, tiny, new_slot):
    backbone = tiny(family)
    jobs = {
        "full": job_on(backbone, new_slot, Options(method="full"), seed=1, epochs=1, rate=1e-4),
        "other full": job_on(backbone, new_slot, Options(method="full"), seed=2, epochs=1, rate=1e-4),
        "adapter": job_on(backbone, new_slot, Options(size=4), seed=3, epochs=1),
    }
    together = train_jobs(backbone, *(jobs[name] for name in order))
    for name, state in zip(order, together, strict=True):
        assert_close(state, train_jobs(backbone, jobs[name])[0])


@pytest.mark.parametrize("method", ["full", "top"])
def test_rows_of_a_slot_that_changes_whole_layers_are_packed_separately(method, bert, new_slot, monkeypatch):
    packed = []
    original = eager_step.segments
    monkeypatch.setattr(
        eager_step, "segments", lambda rows: packed.append({slot for slot, _ in rows}) or original(rows)
    )
    options = Options(method=method, top=3)
    jobs = [job_on(bert, new_slot, o, seed=k, epochs=1) for k, o in enumerate((options, Options(size=4), options))]
    train_jobs(bert, *jobs)
    assert len(packed) == 12
    assert all(len(slots) == 1 for slots in packed)


def test_runs_that_start_at_different_layers_train_separately_as_if_alone(bert, new_slot):
    jobs = [job_on(bert, new_slot, Options(layers=layers), seed=k) for k, layers in enumerate(("all", "2", "all"))]
    for state, job in zip(train_jobs(bert, *jobs), jobs, strict=True):
        assert_close(state, train_jobs(bert, job)[0])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_run_that_starts_when_another_ends_trains_as_if_alone(at_once, bert, new_slot):
    """With different size classes, rates and numbers of epochs, rows of the stacks are freed and reused."""
    jobs = [
        job_on(bert, new_slot, Options(size=size), seed=k, epochs=epochs, rate=rate)
        for k, (size, epochs, rate) in enumerate(
            [(4, 1, 1e-2), (9, 3, 1e-3), (4, 2, 3e-3), (3, 1, 1e-3), (16, 2, 1e-2)]
        )
    ]
    together = train_jobs(bert, *jobs, at_once=at_once)
    for state, job in zip(together, jobs, strict=True):
        assert state.epoch == job.epochs
        assert_close(state, train_jobs(bert, job)[0])


@pytest.mark.parametrize("options", [Options(method="feature"), Options(method="top", top=1), Options(layers="2")])
def test_frozen_lower_layers_run_once_per_row_however_many_epochs_and_runs(options, bert, new_slot, monkeypatch):
    jobs = [job_on(bert, new_slot, options, seed=k, epochs=3) for k in range(2)]
    jobs[1] = dataclasses.replace(jobs[1], train=jobs[0].train, dev=jobs[0].dev)
    expected = [train_jobs(bert, job)[0] for job in jobs]
    rows, original = [], prefixes.hidden_below

    def counted(config, slots, batch, first):
        rows.append(len(batch.lengths))
        return original(config, slots, batch, first)

    monkeypatch.setattr(prefixes, "hidden_below", counted)
    found = train_jobs(bert, *jobs)
    assert sum(rows) <= 2 * len(jobs[0].train) + len(jobs[0].dev)  # a mixed batch may compute a row twice
    assert sum(rows) >= len(jobs[0].train)
    for state, alone in zip(found, expected, strict=True):
        assert_close(state, alone)


@pytest.mark.parametrize("budget", [{"memory": 0}, {"memory": 0, "disk": 0}])
def test_a_prefix_in_a_mapped_file_or_none_at_all_gives_the_same(budget, bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot, Options(method="top", top=1), epochs=2)
    (expected,) = train_jobs(bert, job)
    original = training.PrefixCache
    monkeypatch.setattr(training, "PrefixCache", lambda config, frozen: original(config, frozen, **budget))
    assert_close(train_jobs(bert, job)[0], expected)
