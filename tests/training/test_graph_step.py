"""`training.graph_step` on the CPU: the same weights, moments and losses as the eager step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import Rows, Windows, make_rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head
from adapterbank.tasks.spec import Examples
from adapterbank.training import graph_step
from adapterbank.training import loop as training
from adapterbank.training import trainer as trainers
from adapterbank.training.graph_step import DeviceRows
from adapterbank.training.optimizer import AdamSettings
from families import FAMILIES
from jobs import GraphTraining, assert_close, assert_same_bits, job_on, kept_after, moved, three_runs, train_jobs
from plain_kernels import PLAIN

TEXTS = ["the cat sat", "a dog ran on", "why was it", "red fox jumps over the lazy dog", "who is bad", "in the house"]


def assert_like_eager(graph_training, backbone, *jobs, **options):
    """Train the jobs both ways and compare the results; return the states of the graphs."""
    expected = train_jobs(backbone, *jobs, **options)
    graph_training.steps = 0
    found = graph_training(backbone, *jobs, **options)
    assert 0 < graph_training.steps <= sum(state.step for state in found)
    for state, eager, job in zip(found, expected, jobs, strict=True):
        assert (state.epoch, state.step) == (eager.epoch, eager.step)
        assert moved(eager, job) > 1e-4
        assert_close(state, eager)
    return found


# --- like the eager step


@pytest.mark.parametrize("dropout", [None, 0.0, 0.4])
def test_a_run_with_a_smaller_last_batch_trains_like_the_eager_step(dropout, bert, new_slot, graph_training):
    job = job_on(bert, new_slot, rows=20, batch=6, epochs=2)
    assert_like_eager(graph_training, bert, job, dropout=dropout)
    assert graph_training.steps == 8


def test_a_run_with_fewer_rows_than_a_batch_trains_like_the_eager_step(bert, new_slot, graph_training):
    assert_like_eager(graph_training, bert, job_on(bert, new_slot, rows=5, batch=16, epochs=2))


def test_three_runs_with_different_settings_train_like_the_eager_step(bert, new_slot, graph_training):
    jobs = three_runs(bert, new_slot)
    found = assert_like_eager(graph_training, bert, *jobs)
    assert [state.step for state in found] == [8, 3, 6]
    assert graph_training.steps == 8  # all runs share every step
    assert graph_training.made == 2  # one at the start, and one when a single run is left


def test_three_runs_on_the_same_rows_store_them_once(bert, new_slot, graph_training):
    jobs = three_runs(bert, new_slot)
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    data = DeviceRows.of([job.train for job in jobs], jobs[0].plan.head, torch.device("cpu"))
    assert len(data.targets) == len(data.tokens.lengths) == len(jobs[0].train)
    assert_like_eager(graph_training, bert, *jobs)


@pytest.mark.parametrize("weights", [(0.2, 3.0), (1.0, 1e-3)])
def test_class_weights_train_like_the_eager_step(weights, bert, new_slot, graph_training):
    jobs = [job_on(bert, new_slot, seed=seed, class_weights=weights) for seed in range(2)]
    assert_like_eager(graph_training, bert, *jobs)


METHODS = {
    "adapter": Options(size=5),
    "adapter without norms": Options(size=5, train_norms=False, activation="silu"),
    "adapter with all variants": Options(size=5, placement="parallel", combine="multiply", depth=2, inner_norm=True),
    "adapter at one site": Options(size=5, sites="feedforward", activation="relu"),
    "adapter in the last layer": Options(size=5, layers="2"),
    "adapter in some layers": Options(size=5, layers="0,2", train_norms=False),
    "layernorm": Options(method="layernorm"),
    "layernorm in upper layers": Options(method="layernorm", layers="1-2"),
    "lora": Options(method="lora", rank=3),
    "lora on all targets": Options(method="lora", rank=5, targets="query,key,value,output,up,down", layers="1-2"),
    "bitfit": Options(method="bitfit"),
    "bitfit in upper layers": Options(method="bitfit", layers="1-2"),
    "feature": Options(method="feature"),
    "top": Options(method="top", top=2),
    "full": Options(method="full"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_like_the_eager_step_alone_and_with_two_others(method, bert, new_slot, graph_training):
    pooling = "pooler" if method in ("top", "full") else "mean"
    jobs = [
        job_on(bert, new_slot, METHODS[method], head=Head("classification", 2, pooling), seed=seed, epochs=1)
        for seed in range(3)
    ]
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    assert_like_eager(graph_training, bert, jobs[0])
    assert_like_eager(graph_training, bert, *jobs)
    assert graph_training.steps == (12 if jobs[0].plan.alone else 4)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("top", "full")])
def test_only_methods_that_train_whole_layers_need_torchs_compiler(method, bert, new_slot, monkeypatch):
    def compiled(step):
        raise AssertionError("torch's compiler is asked")

    monkeypatch.setattr(graph_step.GraphStep, "_compile", compiled)
    job = job_on(bert, new_slot, METHODS[method], epochs=1)
    training = GraphTraining(monkeypatch, PLAIN)
    training(bert, job)
    assert training.steps == 4
    with pytest.raises(AssertionError, match="compiler is asked"):
        training(bert, job_on(bert, new_slot, Options(method="full"), epochs=1))


TARGETS = {
    "classification": [0, 1, 2, 2, 1, 0],
    "multilabel": [(), (0,), (1, 2), (0, 1, 2), (2,), (1,)],
    "regression": [1.0, 5.0, 2.5, 3.0, 4.0, 0.0],
    "span": [(1, 1), (1, 2), (2, 3), (1, 3), (2, 2), (3, 3)],
    "tagging": [np.array([-100, row % 3, -100, 2]) for row in range(5)] + [np.full(4, -100)],
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
    "tagging": Head("tagging", 3),
    "tagging, hidden layer": Head("tagging", 3, hidden=7),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("runs", [1, 3])
def test_every_head_trains_like_the_eager_step(head, runs, bert, new_slot, graph_training):
    rows = Rows(bert.tokenize(TEXTS), TARGETS[HEADS[head].kind])
    common = {"head": HEADS[head], "train": rows, "dev": rows, "score": lambda outputs: 0.0, "batch": 4}
    if HEADS[head].kind == "span":  # the gradient of its bias is only rounding: do not amplify it
        common["settings"] = AdamSettings(epsilon=1e-3)
    assert_like_eager(
        graph_training, bert, *(job_on(bert, new_slot, Options(size=4), seed=seed, **common) for seed in range(runs))
    )


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("runs", [1, 3])
def test_pooled_windows_train_like_the_eager_step(weighs, runs, bert, new_slot, graph_training):
    texts = [f"{'the big red fox was in the house ' * (1 + k % 4)}{text}" for k, text in enumerate(TEXTS * 3)]
    examples = Examples(texts, None, [k % 3 for k in range(len(texts))])
    pooling = "weights" if weighs else "mean"
    rows = make_rows(bert, examples, kind="classification", max_length=14, windows=Windows(3, pooling))
    assert rows.most_windows == 3 > 1 == np.diff(rows.starts).min()
    common = {"head": Head("classification", 3, weighs=weighs), "train": rows, "dev": rows, "score": lambda _: 0.0}
    jobs = [job_on(bert, new_slot, seed=seed, **common, batch=4) for seed in range(runs)]
    assert_like_eager(graph_training, bert, *jobs)


@pytest.mark.parametrize("epochs", [(1,), (1, 2, 2)])  # a smaller last batch, and an empty place
def test_places_without_a_row_have_no_target_beyond_the_length_of_the_step(epochs, bert, new_slot, graph_training):
    """The answer of the first row is at token 14; short rows are padded to 8 tokens."""
    tokens = bert.tokenize(["the big red fox jumps over the lazy dog in the house on the mat", *["the cat sat"] * 22])
    assert len(tokens[0]) == 17
    rows = Rows(tokens, [(14, 15), *[(1, 2)] * 22])
    common = {"head": Head("span", 2), "train": rows, "dev": rows, "score": lambda outputs: 0.0, "batch": 4}
    common["settings"] = AdamSettings(epsilon=1e-3)
    jobs = [job_on(bert, new_slot, seed=seed, epochs=n, **common) for seed, n in enumerate(epochs)]
    assert_like_eager(graph_training, bert, *jobs)


@pytest.mark.parametrize("budget", [{}, {"memory": 0}, {"memory": 0, "disk": 0}])
@pytest.mark.parametrize("runs", [1, 3])
def test_runs_on_a_cached_prefix_train_like_the_eager_step(budget, runs, bert, new_slot, graph_training, monkeypatch):
    original = training.PrefixCache
    monkeypatch.setattr(training, "PrefixCache", lambda config, frozen: original(config, frozen, **budget))
    jobs = [job_on(bert, new_slot, Options(size=4, layers="1-2"), seed=seed) for seed in range(runs)]
    jobs = [dataclasses.replace(job, train=jobs[0].train) for job in jobs]
    assert_like_eager(graph_training, bert, *jobs)


def test_runs_with_prefixes_of_different_rows_train_separately(bert, new_slot, graph_training):
    jobs = [job_on(bert, new_slot, Options(size=4, layers="2"), seed=seed) for seed in range(2)]
    assert_like_eager(graph_training, bert, *jobs)
    assert graph_training.steps == 16


@pytest.mark.parametrize("method", ["adapter", "full", "lora", "bitfit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_like_the_eager_step(family, method, tiny, new_slot, graph_training):
    backbone = tiny(family)
    pooling = "pooler" if backbone.has_pooler else "mean"
    options = {"head": Head("classification", 2, pooling), "rows": 8, "batch": 5, "epochs": 1}
    jobs = [job_on(backbone, new_slot, Options(method, size=3), seed=seed, **options) for seed in range(2)]
    assert_like_eager(graph_training, backbone, *jobs)


def test_runs_of_different_forms_are_grouped_by_form(bert, new_slot, graph_training):
    forms = [("adapter", 4, 6), ("full", 4, 6), ("adapter", 9, 6), ("adapter", 3, 6), ("adapter", 4, 5)]
    jobs = [
        job_on(bert, new_slot, Options(method, size=size), seed=k, epochs=1, batch=batch)
        for k, (method, size, batch) in enumerate(forms)
    ]
    assert_like_eager(graph_training, bert, *jobs)
    assert graph_training.steps == 4 * 4  # the first and the fourth run share their steps


@pytest.mark.parametrize("runs", [1, 2])
def test_the_pass_may_compute_in_another_dtype_than_the_weights(runs, bert, new_slot, graph_training):
    """On a GPU the dtype is lower. A higher one, which every CPU supports, shows here that it is used."""
    jobs = [job_on(bert, new_slot, seed=seed) for seed in range(runs)]
    found = assert_like_eager(graph_training, bert, *jobs, dtype=torch.float64)
    for state, plain in zip(found, graph_training(bert, *jobs), strict=True):
        assert all(tensor.dtype == torch.float32 for part in state.tensors.values() for tensor in part.values())
        same = [torch.equal(t, plain.tensors["first"][name]) for name, t in state.tensors["first"].items()]
        assert not all(same)  # one tensor may round to the same float32 on some CPUs, never all of them


def test_warm_up_before_a_capture_changes_nothing(bert, new_slot, graph_training):
    jobs = three_runs(bert, new_slot)
    plain, captured = graph_training(bert, *jobs), []

    def capture(compiler, body, *, warm=True):
        for _ in range(2 * warm):
            body()
        captured.append(body)
        return body

    graph_training.changes = {(GraphCompiler, "capture"): capture}
    for state, expected in zip(graph_training(bert, *jobs), plain, strict=True):
        assert_same_bits(state, expected)
    assert captured


# --- places


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_run_in_a_reused_place_trains_as_if_alone(at_once, bert, new_slot, graph_training):
    jobs = [
        job_on(bert, new_slot, Options(size=size), seed=k, epochs=epochs, rate=rate, rows=rows)
        for k, (size, epochs, rate, rows) in enumerate(
            [(4, 1, 1e-2, 20), (3, 3, 1e-3, 7), (4, 2, 3e-3, 13), (3, 1, 1e-3, 20), (4, 2, 1e-2, 9)]
        )
    ]
    together = graph_training(bert, *jobs, at_once=at_once)
    for state, job in zip(together, jobs, strict=True):
        assert state.epoch == job.epochs
        assert_close(state, graph_training(bert, job)[0])
        assert_close(state, train_jobs(bert, job)[0])


def test_compacting_changes_only_the_places_of_runs(bert, new_slot, graph_training):
    jobs = three_runs(bert, new_slot)
    moves, compact = [], trainers.Trainer.compact

    def contents(trainer):
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
        before, places = contents(trainer), trainer.places
        compact(trainer)
        after = contents(trainer)
        assert after.keys() == before.keys()
        for run in before:
            for new, old in zip(after[run][:3], before[run][:3], strict=True):
                assert new.keys() == old.keys()
                assert all(torch.equal(new[name], old[name]) for name in old)
            assert after[run][3:] == before[run][3:]
        assert {len(block.owners) for block in trainer.stacks.blocks} == {len(before)}
        moves.append((places, trainer.places))

    graph_training.changes = {(trainers.Trainer, "compact"): checked}
    compacted = graph_training(bert, *jobs)
    assert moves == [(3, 1)]
    graph_training.changes = {(trainers.Trainer, "compact"): lambda trainer: None}
    for state, expected in zip(compacted, graph_training(bert, *jobs), strict=True):
        assert_close(state, expected)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(bert, new_slot, graph_training, monkeypatch):
    job = job_on(bert, new_slot, epochs=3, rows=15, settings=AdamSettings(bias_correction=True))
    kept = []
    (end,) = graph_training(bert, job, keep=lambda run, state: kept.append(state))
    assert [state.epoch for state in kept] == [1, 2, 3]
    for state in kept:
        assert_same_bits(graph_training(bert, job, resume={0: state})[0], end)
    _, eager = kept_after(bert, job)
    assert_close(graph_training(bert, job, resume={0: eager[0]})[0], end)
