"""Small training jobs for the tiny encoders, ways to run them, and ways to compare two runs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from adapterbank.encoder.placed import place
from adapterbank.inference import graphs
from adapterbank.inference.rows import make_rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Examples
from adapterbank.training import graph_step
from adapterbank.training import trainer as trainers
from adapterbank.training.eager_step import EagerStep
from adapterbank.training.graph_rule import ALWAYS, BY_THE_CLOCK
from adapterbank.training.job import TrainingJob
from adapterbank.training.loop import AT_ONCE, Together, train
from adapterbank.training.optimizer import AdamSettings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SUBJECTS = ("the cat", "a dog", "the big red fox", "the lazy small dog in the house", "it", "a mat")
ENDS = ("", ".", " on the mat", " in a house!", " over it", " why")


def reviews(count, seed):
    """Return texts of various lengths that contain `good` or `bad`; the target says which of the two."""
    random = np.random.default_rng(seed)
    targets = [int(t) for t in random.integers(0, 2, count)]
    texts = [f"{random.choice(SUBJECTS)} was {('bad', 'good')[t]}{random.choice(ENDS)}" for t in targets]
    return Examples(texts, None, targets)


def accuracy(targets):
    """Return a score function: the share of dev rows whose largest output is the target."""
    return lambda outputs: float(np.mean([int(out.argmax()) == t for out, t in zip(outputs, targets, strict=True)]))


def job_on(backbone, new_slot, options=None, *, head=None, rows=20, seed=0, rate=1e-3, epochs=2, **changes):
    """Return a small classification job; `changes` are fields of `TrainingJob`."""
    head = head or Head("classification", 2)
    config = backbone.config
    plan = make_plan(options or Options(size=4), depth=config.layers, head=head, shared_layers=config.shared_layers)
    data, dev = reviews(rows, seed), reviews(7, seed + 100)
    return TrainingJob(
        **{
            "plan": plan,
            "initial": new_slot(backbone, plan, seed=seed, sigma=0.05),
            "train": make_rows(backbone, data, kind="classification", max_length=32),
            "dev": make_rows(backbone, dev, kind="classification", max_length=32),
            "score": accuracy(dev.targets),
            "rate": rate,
            "epochs": epochs,
            "batch": 6,
            "seed": seed,
            **changes,
        }
    )


def train_jobs(backbone, *jobs, **options):
    """Train on the CPU in float32; return the states."""
    dtype, recompute = options.pop("dtype", torch.float32), options.pop("recompute", "auto")
    together = Together(options.pop("at_once", AT_ONCE), options.pop("rule", BY_THE_CLOCK))
    return train(place(backbone, CPU, dtype, recompute=recompute), jobs, together=together, **options)


def assert_same_bits(found, expected):
    """Check that all tensors, scores and counters of two states are equal to the bit."""
    assert found.tensors.keys() == expected.tensors.keys() == {"weights", "best", "first", "second"}
    for part, tensors in expected.tensors.items():
        assert found.tensors[part].keys() == tensors.keys()
        for name in tensors:
            assert torch.equal(found.tensors[part][name], tensors[name]), f"{part} {name}"
    assert scores(found) == scores(expected)
    assert (found.epoch, found.step, found.best_epoch) == (expected.epoch, expected.step, expected.best_epoch)


def assert_close(found, expected, tolerance=1e-5):
    """Check that weights, moments and losses of two states are equal up to rounding."""
    for part in ("weights", "first", "second"):
        for name, tensor in expected.tensors[part].items():
            close = {"atol": tolerance, "rtol": tolerance}
            torch.testing.assert_close(found.tensors[part][name], tensor, msg=lambda m, n=name: f"{n}: {m}", **close)
    losses = [[epoch["loss"] for epoch in state.history] for state in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerance)


def scores(state):
    """Return loss and score of each epoch."""
    return [(epoch["loss"], epoch["score"]) for epoch in state.history]


def moved(state, job):
    """Return the largest change of any weight since the start."""
    return max(float((t - job.initial[name]).abs().max()) for name, t in state.tensors["weights"].items())


def through_numpy(state):
    """Return a state as it comes back from a file."""
    kept = copy.deepcopy(state)
    for part, tensors in kept.tensors.items():
        kept.tensors[part] = {name: torch.from_numpy(t.numpy().copy()) for name, t in tensors.items()}
    return kept


def kept_after(backbone, job, **options):
    """Train to the end; return the end state and the state kept after each epoch."""
    kept = []
    (end,) = train_jobs(backbone, job, keep=lambda run, state: kept.append(through_numpy(state)), **options)
    return end, kept


def three_runs(backbone, new_slot):
    """Return three jobs of one form that differ in everything in which such jobs may differ."""
    settings = [
        AdamSettings(),
        AdamSettings(bias_correction=True, clip=0.1),
        AdamSettings(weight_decay=0.2, epsilon=1e-4, clip=0),
    ]
    return [
        job_on(backbone, new_slot, Options(size=size), seed=seed, rate=rate, epochs=epochs, rows=rows, settings=adam)
        for size, seed, rate, epochs, rows, adam in zip(
            (5, 6, 8), (0, 3, 2**33 + 5), (1e-3, 3e-3, 5e-4), (2, 1, 3), (20, 13, 9), settings, strict=True
        )
    ]


class GraphTraining:
    """Trains on the CPU as on a GPU: every step is a graph, none of them eager."""

    def __init__(self, monkeypatch, kernels=None):
        self.monkeypatch, self.kernels, self.steps, self.made, self.changes = monkeypatch, kernels, 0, 0, {}

    def __call__(self, backbone, *jobs, **options):
        """Train as `train_jobs` does; `changes`, (owner, name) -> value, are in force meanwhile.

        `steps` counts the steps of all calls; `made` counts the `GraphStep`s of the last one: one at the start, and
        one whenever the remaining runs are compacted.
        """
        original, self.made = graph_step.GraphStep.step, 0

        def never(*_):
            raise AssertionError("an eager step")

        def counted(*arguments):
            self.steps += 1
            return original(*arguments)

        def make(*arguments, **options):
            self.made += 1
            return graph_step.GraphStep(*arguments, **options)

        with self.monkeypatch.context() as patch:
            patch.setattr(graphs, "DEVICES", ("cpu",))
            patch.setattr(graph_step, "find_kernels", lambda device: self.kernels)
            patch.setattr(trainers, "GraphStep", make)
            patch.setattr(EagerStep, "step", never)
            patch.setattr(graph_step.GraphStep, "step", counted)
            for (owner, name), value in self.changes.items():
                patch.setattr(owner, name, value)
            return train_jobs(backbone, *jobs, **{"rule": ALWAYS, **options})
