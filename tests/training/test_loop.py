"""`training.loop`: gradients against `transformers`, what training changes and fits, and progress reports."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from adapterbank.encoder.families import checkpoint_names
from adapterbank.inference.rows import Rows, epoch_order, make_rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, first_trained_layer
from adapterbank.training import eager_step
from adapterbank.training.eager_step import EagerStep
from adapterbank.training.job import RunState
from adapterbank.training.optimizer import AdamSettings
from families import FAMILIES
from jobs import accuracy, assert_close, job_on, reviews, train_jobs

# --- one step's gradient, against transformers ---

METHODS = {
    "full": Options(method="full"),
    "top 2": Options(method="top", top=2),
    "layernorm": Options(method="layernorm"),
    "bitfit": Options(method="bitfit"),
    "feature": Options(method="feature"),
}


def one_step(backbone, job):
    """Return the gradient of the first step: Adam's first moment is a tenth of it if nothing is clipped."""
    job = dataclasses.replace(job, epochs=1, batch=len(job.train), settings=AdamSettings(clip=0.0))
    (state,) = train_jobs(backbone, job, dropout=0.0)
    return {name: moment / 0.1 for name, moment in state.tensors["first"].items()}, state


def their_gradient(model, backbone, job, loss):
    """Return the gradient of the same loss from `transformers` and torch's autograd, under our names."""
    model = copy.deepcopy(model)
    names = checkpoint_names(backbone.config, backbone.has_pooler)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for ours, value in job.initial.items():
            if ours in names:
                theirs[names[ours]].copy_(value)
    head = torch.nn.Linear(backbone.config.hidden, job.plan.head.outputs)
    head.load_state_dict({leaf: job.initial[f"head.{leaf}"] for leaf in ("weight", "bias")})
    pooled = []
    for row in job.train.tokens:
        out = model(input_ids=torch.from_numpy(row.ids)[None])
        pooled.append(out.pooler_output[0] if job.plan.head.pooling == "pooler" else out.last_hidden_state[0].mean(0))
    value = loss(head(torch.stack(pooled)), torch.tensor(job.train.targets))
    value.backward()
    found = {"head.weight": head.weight.grad, "head.bias": head.bias.grad}
    return found | {ours: theirs[names[ours]].grad for ours in job.initial if ours in names}, value.item()


@pytest.mark.parametrize(
    ("family", "method"),  # top does not apply to layers that share their weights
    [(family, method) for family in FAMILIES for method in METHODS if (family, method) != ("albert", "top 2")],
)
def test_the_gradient_of_a_step_equals_that_of_transformers_and_autograd(family, method, tiny, checkpoint, new_slot):
    backbone = tiny(family)
    pooling = "pooler" if backbone.has_pooler and method == "full" and family != "mpnet" else "mean"
    job = job_on(backbone, new_slot, METHODS[method], head=Head("classification", 2, pooling), rows=8)
    found, state = one_step(backbone, job)
    expected, loss = their_gradient(checkpoint(family)[1], backbone, job, torch.nn.CrossEntropyLoss())
    assert found.keys() == expected.keys() == job.initial.keys()
    assert state.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5 * max(1.0, scale), rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 3.0), (5.0, 0.0)])
def test_class_weights_give_the_gradient_of_torchs_weighted_cross_entropy(weights, bert, checkpoint, new_slot):
    job = job_on(bert, new_slot, METHODS["layernorm"], rows=9, class_weights=weights)
    assert 0 < sum(job.train.targets) < 9
    found, state = one_step(bert, job)
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights))
    expected, loss = their_gradient(checkpoint("bert")[1], bert, job, weighted)
    assert state.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# --- what training changes and fits ---

EVERY_METHOD = {
    "adapter": Options(size=4),
    "adapter without norms": Options(size=4, train_norms=False),
    "adapter in upper layers": Options(size=4, layers="1-2"),
    "full": Options(method="full"),
    "top": Options(method="top", top=2),
    "layernorm": Options(method="layernorm"),
    "feature": Options(method="feature"),
}


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_training_changes_no_bit_of_the_backbone_and_every_tensor_of_the_slot(method, bert, new_slot):
    before = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    head = Head("classification", 2, "pooler" if method in ("full", "top") else "mean")
    job = job_on(bert, new_slot, EVERY_METHOD[method], head=head)
    initial = {name: tensor.clone() for name, tensor in job.initial.items()}
    (state,) = train_jobs(bert, job)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bert.tensors.items())
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in bert.tensors.values())
    assert all(torch.equal(tensor, initial[name]) for name, tensor in job.initial.items())
    same = {name for name, tensor in state.tensors["weights"].items() if torch.equal(tensor, initial[name])}
    assert state.tensors["weights"].keys() == initial.keys()
    # The bias of the keys adds the same number to all scores of a query, which the softmax cancels: its gradient is
    # rounding alone, and may be zero.
    assert {name for name in same if not name.endswith("attention.key.bias")} == set()


@pytest.mark.parametrize("layers", ["all", "1-2", "2"])
def test_starting_at_the_lowest_trained_layer_does_not_change_gradients(layers, bert, new_slot, monkeypatch):
    """Below the lowest trained layer nothing is saved for the backward pass, which must not affect the layers above."""
    job = job_on(bert, new_slot, Options(size=4, layers=layers))
    (found,) = train_jobs(bert, job, dropout=0.0)
    original, starts = eager_step.forward, set()

    def from_the_bottom(config, route, batch, dropout, first, prefix):
        starts.add(first)
        return original(config, route, batch, dropout, 0)

    monkeypatch.setattr(eager_step, "forward", from_the_bottom)
    (expected,) = train_jobs(bert, job, dropout=0.0)
    assert starts == {first_trained_layer(job.initial, 3)}
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("kind", "outputs", "targets"),
    [
        ("multilabel", 3, [(), (0,), (1, 2), (0, 1, 2), (2,), (1,), (0, 2)]),
        ("regression", 1, [1.0, 5.0, 2.5, 3.0, 4.0, 0.0, 2.0]),
        ("span", 2, [(1, 1), (1, 2), (2, 3), (1, 3), (2, 2), (3, 3), (1, 2)]),
    ],
)
def test_every_kind_of_task_fits_its_training_rows(kind, outputs, targets, bert, new_slot):
    tokens = bert.tokenize(
        ["the cat sat", "a dog ran on", "why was it", "red fox jumps", "who is bad", "in the house", "big small lazy"]
    )
    shift, scale = (2.5, 1.6) if kind == "regression" else (0.0, 1.0)
    rows = Rows(tokens, targets)
    job = job_on(
        bert,
        new_slot,
        Options(size=16),
        head=Head(kind, outputs, "mean", shift=shift, scale=scale),
        train=rows,
        dev=rows,
        score=lambda outputs: 0.0,
        rate=1e-2,
        epochs=40,
        batch=7,
    )
    (state,) = train_jobs(bert, job, dropout=0.0)
    assert state.history[-1]["loss"] < 0.1 < state.history[0]["loss"]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "albert"])
def test_adapters_on_a_small_random_encoder_learn_to_separate_good_from_bad(family, tiny, new_slot):
    backbone = tiny(family)
    data, dev = reviews(96, 1), reviews(60, 2)
    job = job_on(
        backbone,
        new_slot,
        Options(size=8),
        train=make_rows(backbone, data, kind="classification", max_length=32),
        dev=make_rows(backbone, dev, kind="classification", max_length=32),
        score=accuracy(dev.targets),
        rate=1e-2,
        epochs=12,
        batch=16,
    )
    (state,) = train_jobs(backbone, job)
    assert state.best_score > 0.9
    assert state.history[-1]["loss"] < state.history[0]["loss"]


# --- progress reports ---


def test_watch_is_called_after_every_step_and_after_every_epoch_with_its_score(bert, new_slot):
    reports = []
    jobs = [job_on(bert, new_slot, seed=0, rows=13), job_on(bert, new_slot, seed=1, rows=6, epochs=3)]
    states = train_jobs(bert, *jobs, watch=reports.append)
    for run, (job, state) in enumerate(zip(jobs, states, strict=True)):
        own = [progress for progress in reports if progress.run == run]
        steps = [progress for progress in own if progress.score is None]
        ends = [progress for progress in own if progress.score is not None]
        assert [progress.step for progress in steps] == list(range(1, state.step + 1))
        assert [progress.epoch for progress in ends] == list(range(1, job.epochs + 1))
        assert [progress.score for progress in ends] == [epoch["score"] for epoch in state.history]
        assert {progress.steps for progress in own} == {state.step}
        per_epoch = state.step // job.epochs
        assert [progress.epoch for progress in steps] == [1 + k // per_epoch for k in range(state.step)]
        assert all(progress.rows_per_second > 0 and np.isfinite(progress.loss) for progress in own)


def test_the_rows_of_each_step_follow_the_order_of_the_epoch(bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot, seed=4, rows=13, batch=5)
    seen = []
    original = EagerStep.step
    monkeypatch.setattr(
        EagerStep, "step", lambda self, *args: seen.append(args[-1][0].batch.tolist()) or original(self, *args)
    )
    train_jobs(bert, job)
    lengths = [len(row) for row in job.train.tokens]
    expected = [part.tolist() for epoch in (0, 1) for part in epoch_order(lengths, 5, seed=4, epoch=epoch)]
    assert seen == expected


def test_a_new_state_has_no_best_epoch():
    assert RunState().best_score == float("-inf")
