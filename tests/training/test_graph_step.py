"""A step as a program, on the CPU: the same weights, moments and losses as the eager path gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import Rows
from adapterbank.methods import Head, Options
from adapterbank.training import loop as training
from adapterbank.training import trainer as trainers
from adapterbank.training.graph_step import DeviceRows
from adapterbank.training.optimizer import AdamSettings
from families import FAMILIES
from jobs import assert_close, assert_same_bits, job_on, kept_after, learn, moved, three_runs

TEXTS = ["the cat sat", "a dog ran on", "why was it", "red fox jumps over the lazy dog", "who is bad", "in the house"]


def assert_like_eager(steadily, backbone, *jobs, **options):
    """Train the lessons both ways and compare all that is left of them; give the steady states."""
    expected = learn(backbone, *jobs, **options)
    steadily.steps = 0
    found = steadily(backbone, *jobs, **options)
    assert 0 < steadily.steps <= sum(state.step for state in found)
    for mine, wanted, job in zip(found, expected, jobs, strict=True):
        assert (mine.epoch, mine.step) == (wanted.epoch, wanted.step)
        assert moved(wanted, job) > 1e-4
        assert_close(mine, wanted)
    return found


# --- like the eager path


@pytest.mark.parametrize("dropout", [None, 0.0, 0.4])
def test_one_run_whose_last_batch_is_smaller_than_the_others(dropout, bert, new_slot, steadily):
    job = job_on(bert, new_slot, rows=20, batch=6, epochs=2)
    assert_like_eager(steadily, bert, job, dropout=dropout)
    assert steadily.steps == 8


def test_one_run_with_fewer_rows_than_a_batch(bert, new_slot, steadily):
    assert_like_eager(steadily, bert, job_on(bert, new_slot, rows=5, batch=16, epochs=2))


def test_three_runs_at_once_of_near_sizes_with_seeds_rates_and_ends_of_their_own(bert, new_slot, steadily):
    jobs = three_runs(bert, new_slot)
    found = assert_like_eager(steadily, bert, *jobs)
    assert [state.step for state in found] == [8, 3, 6]
    assert steadily.steps == 8  # nobody took a step alone while others could have shared it
    assert steadily.moves == 1  # when one of three was left; the place of the first to end stayed empty


def test_three_runs_on_the_same_rows(bert, new_slot, steadily):
    jobs = three_runs(bert, new_slot)
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    data = DeviceRows.of([job.train for job in jobs], jobs[0].plan.head, torch.device("cpu"))
    assert len(data.targets) == len(data.tokens.lengths) == len(jobs[0].train)
    assert_like_eager(steadily, bert, *jobs)


@pytest.mark.parametrize("weights", [(0.2, 3.0), (1.0, 1e-3)])
def test_class_weights(weights, bert, new_slot, steadily):
    jobs = [job_on(bert, new_slot, seed=seed, class_weights=weights) for seed in range(2)]
    assert_like_eager(steadily, bert, *jobs)


METHODS = {
    "adapter": Options(size=5),
    "adapter without norms": Options(size=5, train_norms=False, activation="silu"),
    "adapter of all sorts": Options(size=5, placement="parallel", combine="multiply", depth=2, inner_norm=True),
    "adapter at one site": Options(size=5, sites="feedforward", activation="relu"),
    "adapter above": Options(size=5, layers="2"),
    "adapter here and there": Options(size=5, layers="0,2", train_norms=False),
    "layernorm": Options(method="layernorm"),
    "layernorm above": Options(method="layernorm", layers="1-2"),
    "lora": Options(method="lora", rank=3),
    "lora everywhere above": Options(method="lora", rank=5, targets="query,key,value,output,up,down", layers="1-2"),
    "bitfit": Options(method="bitfit"),
    "bitfit above": Options(method="bitfit", layers="1-2"),
    "feature": Options(method="feature"),
    "top": Options(method="top", top=2),
    "full": Options(method="full"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_alone_and_with_two_others(method, bert, new_slot, steadily):
    pooling = "pooler" if method in ("top", "full") else "mean"
    jobs = [
        job_on(bert, new_slot, METHODS[method], head=Head("classification", 2, pooling), seed=seed, epochs=1)
        for seed in range(3)
    ]
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    assert_like_eager(steadily, bert, jobs[0])
    assert_like_eager(steadily, bert, *jobs)
    assert steadily.steps == (12 if jobs[0].plan.alone else 4)


TARGETS = {
    "classification": [0, 1, 2, 2, 1, 0],
    "multilabel": [(), (0,), (1, 2), (0, 1, 2), (2,), (1,)],
    "regression": [1.0, 5.0, 2.5, 3.0, 4.0, 0.0],
    "span": [(1, 1), (1, 2), (2, 3), (1, 3), (2, 2), (3, 3)],
}
HEADS = {
    "first token": Head("classification", 3, "first"),
    "mean": Head("classification", 3, "mean"),
    "pooler": Head("classification", 3, "pooler"),
    "hidden layer": Head("classification", 3, "pooler", hidden=7),
    "multilabel": Head("multilabel", 3, "mean"),
    "multilabel, first token": Head("multilabel", 3, "first"),
    "regression": Head("regression", 1, "mean", shift=2.5, scale=1.6),
    "regression, hidden layer": Head("regression", 1, "first", shift=2.5, scale=1.6, hidden=7),
    "span": Head("span", 2),
    "span, hidden layer": Head("span", 2, hidden=7),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("runs", [1, 3])
def test_every_kind_of_head(head, runs, bert, new_slot, steadily):
    rows = Rows(bert.tokenize(TEXTS), TARGETS[HEADS[head].kind])
    common = {"head": HEADS[head], "train": rows, "dev": rows, "score": lambda given: 0.0, "batch": 4}
    if HEADS[head].kind == "span":  # its bias moves all tokens alike, so its gradient is rounding: do not blow it up
        common["settings"] = AdamSettings(epsilon=1e-3)
    assert_like_eager(
        steadily, bert, *(job_on(bert, new_slot, Options(size=4), seed=seed, **common) for seed in range(runs))
    )


@pytest.mark.parametrize("epochs", [(1,), (1, 2, 2)])  # a last batch that is smaller, and a place that is empty
def test_places_without_a_row_do_not_look_for_an_answer_beyond_the_steps_length(epochs, bert, new_slot, steadily):
    """The first row has its answer at token 14; short rows are filled up to 8."""
    tokens = bert.tokenize(["the big red fox jumps over the lazy dog in the house on the mat", *["the cat sat"] * 22])
    assert len(tokens[0]) == 17
    rows = Rows(tokens, [(14, 15), *[(1, 2)] * 22])
    common = {"head": Head("span", 2), "train": rows, "dev": rows, "score": lambda given: 0.0, "batch": 4}
    common["settings"] = AdamSettings(epsilon=1e-3)
    jobs = [job_on(bert, new_slot, seed=seed, epochs=n, **common) for seed, n in enumerate(epochs)]
    assert_like_eager(steadily, bert, *jobs)


@pytest.mark.parametrize("budget", [{}, {"memory": 0}, {"memory": 0, "disk": 0}])
@pytest.mark.parametrize("runs", [1, 3])
def test_a_kept_prefix_in_memory_in_a_file_or_not_at_all(budget, runs, bert, new_slot, steadily, monkeypatch):
    original = training.PrefixCache
    monkeypatch.setattr(training, "PrefixCache", lambda config, frozen: original(config, frozen, **budget))
    jobs = [job_on(bert, new_slot, Options(size=4, layers="1-2"), seed=seed) for seed in range(runs)]
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    assert_like_eager(steadily, bert, *jobs)


def test_runs_above_a_prefix_of_other_rows_are_taught_apart(bert, new_slot, steadily):
    jobs = [job_on(bert, new_slot, Options(size=4, layers="2"), seed=seed) for seed in range(2)]
    assert_like_eager(steadily, bert, *jobs)
    assert steadily.steps == 16


@pytest.mark.parametrize("method", ["adapter", "full", "lora", "bitfit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, method, tiny, new_slot, steadily):
    backbone = tiny(family)
    pooling = "pooler" if backbone.has_pooler else "mean"
    options = {"head": Head("classification", 2, pooling), "rows": 8, "batch": 5, "epochs": 1}
    jobs = [job_on(backbone, new_slot, Options(method, size=3), seed=seed, **options) for seed in range(2)]
    assert_like_eager(steadily, backbone, *jobs)


def test_every_form_at_once_each_with_its_like(bert, new_slot, steadily):
    sorts = [("adapter", 4, 6), ("full", 4, 6), ("adapter", 9, 6), ("adapter", 3, 6), ("adapter", 4, 5)]
    jobs = [
        job_on(bert, new_slot, Options(method, size=size), seed=k, epochs=1, batch=batch)
        for k, (method, size, batch) in enumerate(sorts)
    ]
    assert_like_eager(steadily, bert, *jobs)
    assert steadily.steps == 4 * 4  # the first and the fourth share theirs


@pytest.mark.parametrize("runs", [1, 2])
def test_when_the_pass_computes_in_another_type_than_weights_are_kept_in(runs, bert, new_slot, steadily):
    """On a GPU it is a lower one; here a higher one, which every CPU has and which shows that it was used."""
    jobs = [job_on(bert, new_slot, seed=seed) for seed in range(runs)]
    found = assert_like_eager(steadily, bert, *jobs, dtype=torch.float64)
    for mine, plain in zip(found, steadily(bert, *jobs), strict=True):
        assert all(tensor.dtype == torch.float32 for part in mine.tensors.values() for tensor in part.values())
        same = [torch.equal(t, plain.tensors["first"][name]) for name, t in mine.tensors["first"].items()]
        assert not any(same)


def test_trying_a_step_before_it_is_captured_does_no_harm(bert, new_slot, steadily):
    jobs = three_runs(bert, new_slot)
    plain, tried = steadily(bert, *jobs), []

    def capture(programs, body):
        body()
        body()
        tried.append(body)
        return body

    steadily.changes = {(GraphCompiler, "capture"): capture}
    for mine, wanted in zip(steadily(bert, *jobs), plain, strict=True):
        assert_same_bits(mine, wanted)
    assert len(tried) > 1


# --- places


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_run_in_a_place_that_another_left_is_the_run_alone(at_once, bert, new_slot, steadily):
    jobs = [
        job_on(bert, new_slot, Options(size=size), seed=k, epochs=epochs, rate=rate, rows=rows)
        for k, (size, epochs, rate, rows) in enumerate(
            [(4, 1, 1e-2, 20), (3, 3, 1e-3, 7), (4, 2, 3e-3, 13), (3, 1, 1e-3, 20), (4, 2, 1e-2, 9)]
        )
    ]
    together = steadily(bert, *jobs, at_once=at_once)
    for state, job in zip(together, jobs, strict=True):
        assert state.epoch == job.epochs
        assert_close(state, steadily(bert, job)[0])
        assert_close(state, learn(bert, job)[0])


def test_moving_together_changes_nothing_but_where_runs_stand(bert, new_slot, steadily):
    jobs = three_runs(bert, new_slot)
    moves, move = [], trainers.Trainer._move_together

    def held(trainer):
        rows = (None, trainer.adam.first, trainer.adam.second)
        return {
            active.number: [
                *(trainer.stacks.take(active.slot, of) for of in rows),
                trainer.adam.steps[active.slot],
                trainer.adam.settings[active.slot],
            ]
            for active in trainer.runs
        }

    def checked(trainer):
        before, places = held(trainer), trainer.places
        move(trainer)
        after = held(trainer)
        assert after.keys() == before.keys()
        for run in before:
            for mine, wanted in zip(after[run][:3], before[run][:3], strict=True):
                assert mine.keys() == wanted.keys()
                assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
            assert after[run][3:] == before[run][3:]
        assert {len(block.owners) for block in trainer.stacks.blocks} == {len(before)}
        moves.append((places, trainer.places))

    steadily.changes = {(trainers.Trainer, "_move_together"): checked}
    moving = steadily(bert, *jobs)
    assert moves == [(3, 1)]
    steadily.changes = {(trainers.Trainer, "_move_together"): lambda trainer: None}
    for mine, wanted in zip(moving, steadily(bert, *jobs), strict=True):
        assert_close(mine, wanted)


def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(bert, new_slot, steadily, monkeypatch):
    job = job_on(bert, new_slot, epochs=3, rows=15, settings=AdamSettings(bias_correction=True))
    kept = []
    (end,) = steadily(bert, job, keep=lambda run, state: kept.append(state))
    assert [state.epoch for state in kept] == [1, 2, 3]
    for state in kept:
        assert_same_bits(steadily(bert, job, resume={0: state})[0], end)
    _, eager = kept_after(bert, job)
    assert_close(steadily(bert, job, resume={0: eager[0]})[0], end)
