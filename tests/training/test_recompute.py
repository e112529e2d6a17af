"""Promise: training that computes outputs again instead of keeping them gives the same bits, in less memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from adapterbank.encoder import recompute as module
from adapterbank.encoder.recompute import Recompute
from adapterbank.methods import Options
from adapterbank.slots.plan import Head
from adapterbank.training import graph_step
from adapterbank.training.eager_step import EagerStep
from families import FAMILIES
from jobs import GraphTraining, assert_close, assert_same_bits, job_on, train_jobs
from plain_kernels import PLAIN

METHODS = {
    "adapter": Options(size=5),
    "adapter of all variants": Options(size=5, placement="parallel", combine="multiply", depth=2, inner_norm=True),
    "layernorm": Options(method="layernorm"),
    "lora on all targets": Options(method="lora", rank=3, targets="query,key,value,output,up,down"),
    "ia3": Options(method="ia3"),
    "bitfit": Options(method="bitfit"),
    "top": Options(method="top", top=2),
    "full": Options(method="full"),
}


@pytest.fixture
def in_place(monkeypatch):
    """Return a function that trains through the kernels that read slots in place."""
    return GraphTraining(monkeypatch, PLAIN)


@pytest.fixture
def made_again(monkeypatch):
    """Return a list that grows with every output that is computed again."""
    found, run_again = [], module._run_again
    monkeypatch.setattr(module, "_run_again", lambda *given: found.append(given) or run_again(*given))
    return found


def two_jobs(backbone, new_slot, options, **changes):
    """Return two jobs on the same rows; a step of them has rows of two slots."""
    pooling = "pooler" if options.method in ("top", "full") else "mean"
    jobs = [
        job_on(backbone, new_slot, options, head=Head("classification", 2, pooling), seed=seed, epochs=1, **changes)
        for seed in range(2)
    ]
    return [dataclasses.replace(job, train=jobs[0].train) for job in jobs]


def assert_same(train, backbone, jobs, **options):
    for state, expected in zip(
        train(backbone, *jobs, recompute="always", **options), train(backbone, *jobs, recompute="never", **options),
        strict=True,
    ):  # fmt: skip
        assert_same_bits(state, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_to_the_same_bits(method, dropout, bert, new_slot, made_again):
    assert_same(train_jobs, bert, two_jobs(bert, new_slot, METHODS[method]), dropout=dropout)
    assert made_again


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_to_the_same_bits(family, tiny, new_slot, made_again):
    assert_same(train_jobs, tiny(family), two_jobs(tiny(family), new_slot, METHODS["adapter"]))
    assert made_again


@pytest.mark.parametrize("method", ["adapter", "layernorm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_train_to_the_same_bits(family, method, tiny, new_slot, in_place, made_again):
    assert_same(in_place, tiny(family), two_jobs(tiny(family), new_slot, METHODS[method]))
    assert made_again


def test_after_a_captured_step_without_memory_graphs_compute_outputs_again(bert, new_slot, in_place, monkeypatch):
    jobs = two_jobs(bert, new_slot, METHODS["adapter"])
    expected, original = in_place(bert, *jobs), graph_step.GraphStep.step
    passes, steps, eager, dropping = [], [], [], Recompute.dropping

    def scarce(self, *given):
        steps.append(len(passes))
        if len(steps) == 2:
            raise torch.OutOfMemoryError
        return original(self, *given)

    eager_step = EagerStep.step
    monkeypatch.setattr(Recompute, "dropping", lambda self: passes.append(1) or dropping(self))
    in_place.changes = {
        (graph_step.GraphStep, "step"): scarce,
        (EagerStep, "step"): lambda *given: eager.append(len(steps)) or eager_step(*given),
    }
    for state, before in zip(in_place(bert, *jobs), expected, strict=True):
        assert_close(state, before)
    assert in_place.made == 2
    assert eager == [2]  # the step that failed, and no other
    assert steps[:2] == [0, 0]
    assert len(passes) > len(steps) - 2
