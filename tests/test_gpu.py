"""Promise: on a GPU, training and inference give what the CPU gives, as graphs and in bf16 too."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.placed import place
from adapterbank.errors import SlowerWarning
from adapterbank.inference.rows import Rows, Windows, make_rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head
from adapterbank.tasks.spec import Examples
from adapterbank.training import graph_step
from adapterbank.training import loop as training
from adapterbank.training import trainer as trainers
from adapterbank.training.graph_rule import ALWAYS, NEVER
from jobs import GPU, job_on, three_runs
from small_data import reviews
from training.test_run_bf16 import WAYS, works

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    # Compilers warn about other things (TF32, for example); only a fall back to slower code is an error here.
    pytest.mark.filterwarnings("ignore", "error::adapterbank.errors.SlowerWarning"),
]

TEXTS = ["the big dog ran", "why", "a good film on the mat , was it ?"] * 7


@pytest.fixture
def trained(tmp_path, bert):
    """Return a bank of four tasks of several methods and sizes, trained on the GPU in bf16."""
    bank = open_bank(tmp_path / "bank", bert, device="cuda")
    for name, options in {
        "a": {"size": 8},
        "b": {"size": 3, "pooling": "first"},
        "c": {"method": "layernorm"},
        "d": {"method": "top"},
    }.items():
        bank.train(name, reviews(), epochs=2, max_length=32, **options)
    return bank


def test_an_audit_by_another_engine_on_the_same_gpu_agrees_to_the_bit(trained, bert):
    findings = list(open_bank(trained.path, bert, device="cuda").audit())
    assert [(f.ref, f.ok, f.how) for f in findings] == [(f"{n}@1", True, "to the bit") for n in "abcd"]


def test_an_audit_on_the_cpu_is_within_tolerance_and_reports_it(trained, bert):
    findings = list(open_bank(trained.path, bert, device="cpu").audit())
    assert [(f.ref, f.ok, "within 0.1" in f.how) for f in findings] == [(f"{n}@1", True, True) for n in "abcd"]


def test_the_same_seed_gives_the_same_package_twice_in_a_run_too_short_for_graphs(tmp_path, bert):
    shas = []
    for name in ("one", "two"):
        bank = open_bank(tmp_path / name, bert, device="cuda")
        shas.append(bank.train("a", reviews(), epochs=2, size=8, max_length=32).package.manifest.weights_sha256)
    assert shas[0] == shas[1]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_gives_a_package_that_audits(way, tmp_path, bert):
    bank = open_bank(tmp_path / "bank", bert, device="cuda")
    for seed, name in enumerate(("base", "other")):
        bank.train(name, reviews(), reviews(), **WAYS["adapter"], seed=seed)
    assert works(bank.train("task", reviews(), reviews(), **WAYS[way]).record)
    assert all(finding.ok for finding in bank.audit())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_few_labels_are_trained_on_pairs_and_answer_on_the_cpu_too(tmp_path, bert, precision):
    bank = open_bank(tmp_path / "bank", bert, device="cuda", precision=precision)
    result = bank.train("a", reviews(), reviews(), size=8, max_length=32, lr=1e-2)
    assert result.record["fitted"]["steps"] == 30
    cpu = open_bank(tmp_path / "bank", bert, device="cpu").evaluate("a", reviews())
    assert cpu["accuracy"] == pytest.approx(result.record["metrics"]["dev"]["accuracy"], abs=0.1)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_mixed_rows_on_the_gpu_equal_each_task_alone_on_the_cpu(trained, bert, precision, tolerance):
    gpu = open_bank(trained.path, bert, device="cuda", precision=precision)
    cpu = open_bank(trained.path, bert, device="cpu")
    names = [["a", "b", "c", "d"][i % 4] for i in range(len(TEXTS))]
    for name, text, found in zip(names, TEXTS, gpu.predict(names, TEXTS), strict=True):
        (expected,) = cpu.predict(name, [text])
        assert found.probabilities == pytest.approx(expected.probabilities, abs=tolerance)


def test_rows_without_a_task_get_the_mean_of_the_encoders_hidden_states(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert, device="cuda", precision="fp32")
    for found, hidden in zip(bank.predict(None, TEXTS), bert.encode(TEXTS), strict=True):
        np.testing.assert_allclose(found.embedding, hidden.mean(0), atol=1e-4)


# --- steps and batches as graphs


@pytest.fixture
def learn(monkeypatch):
    """Return a function that trains on the GPU, by default with graphs.

    It returns the states, and the loss of each run and step.
    """

    def run(backbone, *jobs, rule=ALWAYS, dtype=torch.float32, dropout=0.1, recompute="auto"):
        losses, read = {}, trainers.Trainer.read_losses

        def record(trainer):
            for found, runs in trainer.unread:
                losses.update({(active.number, step): float(found[k]) for active, k, step in runs})
            read(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(graph_step, "USES_WORTH_A_GRAPH", 1)
            patch.setattr(trainers.Trainer, "read_losses", record)
            states = training.train(
                place(backbone, GPU, dtype), jobs, dropout=dropout, together=training.Together(rule=rule)
            )
        assert len(losses) == sum(state.step for state in states)
        return states, losses

    return run


def assert_same_losses(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for key in sorted(expected):
        assert found[key] == pytest.approx(expected[key], abs=tolerance), f"run and step {key}"


@pytest.mark.parametrize("name", ["kernel", "composed"])
def test_a_captured_run_takes_the_steps_of_an_eager_one(name, backbones, new_slot, learn, replays):
    """Three runs at once, each with its own seed, rate, size and end, with dropout and rows of many lengths."""
    jobs = three_runs(backbones[name], new_slot)
    assert len({len(row) for job in jobs for row in job.train.tokens}) > 4
    _, expected = learn(backbones[name], *jobs, rule=NEVER)
    assert not replays
    states, found = learn(backbones[name], *jobs)
    assert 0 < len(replays) < max(state.step for state in states)
    assert_same_losses(found, expected, 1e-4)


@pytest.mark.parametrize("name", ["kernel", "composed"])
def test_a_captured_run_of_tagging_takes_the_steps_of_an_eager_one(name, backbones, new_slot, learn, replays):
    job = job_on(backbones[name], new_slot, head=Head("tagging", 3), epochs=3)
    job = replace(job, train=tagged_rows(job.train.tokens), dev=tagged_rows(job.dev.tokens), score=lambda outputs: 0.0)
    _, expected = learn(backbones[name], job, rule=NEVER)
    _, found = learn(backbones[name], job)
    assert 0 < len(replays) <= len(found)
    assert_same_losses(found, expected, 1e-4)


def tagged_rows(tokens):
    """Return rows whose every other token has a tag; the last row has none."""
    targets = [np.where(np.arange(len(row)) % 2, (row.ids + k) % 3, -100) for k, row in enumerate(tokens)]
    return Rows(tokens, [*targets[:-1], np.full(len(tokens[-1]), -100)])


@pytest.mark.parametrize("weighs", [False, True])
def test_captured_runs_with_pooled_windows_take_the_steps_of_eager_ones(weighs, backbones, new_slot, learn, replays):
    texts = [f"{'the big red fox was in the house ' * (1 + k % 4)}{text}" for k, text in enumerate(TEXTS)]
    examples = Examples(texts, None, [k % 3 for k in range(len(texts))])
    windows = Windows(3, "weights" if weighs else "mean")
    rows = make_rows(backbones["kernel"], examples, kind="classification", max_length=14, windows=windows)
    common = {"head": Head("classification", 3, weighs=weighs), "train": rows, "dev": rows, "score": lambda _: 0.0}
    jobs = [job_on(backbones["kernel"], new_slot, seed=seed, **common) for seed in range(2)]
    _, expected = learn(backbones["kernel"], *jobs, rule=NEVER)
    assert not replays
    states, found = learn(backbones["kernel"], *jobs)
    assert 0 < len(replays) < max(state.step for state in states)
    assert_same_losses(found, expected, 1e-4)


@pytest.mark.parametrize("method", ["layernorm", "lora", "ia3", "bitfit", "feature", "top", "full"])
def test_every_method_is_captured(method, backbones, new_slot, learn, replays):
    head = Head("classification", 2, "pooler" if method in ("top", "full") else "mean")
    job = job_on(backbones["kernel"], new_slot, Options(method=method), head=head, rate=1e-4, epochs=1)
    _, expected = learn(backbones["kernel"], job, rule=NEVER)
    _, found = learn(backbones["kernel"], job)
    assert 0 < len(replays) <= len(found)
    assert_same_losses(found, expected, 1e-4)


def bf16_jobs(backbone, new_slot, epochs):
    """Return three jobs of one form: the tests that run them share what is compiled for it."""
    common = {"rows": 120, "rate": 3e-3, "epochs": epochs, "batch": 16}
    return [job_on(backbone, new_slot, Options(size=8), seed=seed, **common) for seed in range(3)]


@pytest.mark.parametrize(("name", "dropout"), [("kernel", 0.1), ("composed", 0.0)])
def test_captured_steps_in_bf16_learn_from_the_first_step_on(name, dropout, backbones, new_slot, learn, replays):
    jobs = bf16_jobs(backbones[name], new_slot, epochs=12)
    states, found = learn(backbones[name], *jobs, dtype=torch.bfloat16, dropout=dropout)
    _, exact = learn(backbones[name], *jobs, rule=NEVER, dropout=dropout)
    assert 12 * 8 / 2 < len(replays) < 12 * 8
    first = [(run, step) for run in range(3) for step in range(3)]
    assert_same_losses({key: found[key] for key in first}, {key: exact[key] for key in first}, 5e-2)
    for state in states:
        assert state.history[-1]["loss"] < 0.3 < state.history[0]["loss"]
        assert state.best_score > 0.8


def test_the_same_seed_gives_the_same_bits_twice_as_a_graph_too(backbones, new_slot, learn, replays):
    jobs = bf16_jobs(backbones["kernel"], new_slot, epochs=2)
    (states, losses), (again, others) = (learn(backbones["kernel"], *jobs, dtype=torch.bfloat16) for _ in range(2))
    assert replays
    assert losses == others
    for mine, wanted in zip(again, states, strict=True):
        assert all(torch.equal(t, wanted.tensors["weights"][key]) for key, t in mine.tensors["weights"].items())


def broken(function, **options):
    """Stand in for `torch.compile` on a machine without a compiler."""

    def call(*arguments, **more):
        raise RuntimeError("no compiler here")

    return call


def test_training_without_a_compiler_is_slower_and_warns_once(backbones, new_slot, learn, replays, monkeypatch):
    head = Head("classification", 2, "pooler")
    job = job_on(backbones["kernel"], new_slot, Options(method="full"), head=head, rate=1e-4, epochs=1)
    _, expected = learn(backbones["kernel"], job, rule=NEVER)
    monkeypatch.setattr(torch, "compile", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, found = learn(backbones["kernel"], job)
    slower = [str(one.message) for one in caught if issubclass(one.category, SlowerWarning)]
    assert len(slower) == 1
    assert "no compiler here" in slower[0]
    assert len(replays) == len(found)  # captured all the same
    assert_same_losses(found, expected, 1e-4)


@pytest.mark.parametrize("rule", [ALWAYS, NEVER])
def test_outputs_that_are_computed_again_give_the_same_bits(rule, backbones, new_slot, learn):
    job = job_on(backbones["kernel"], new_slot, Options(size=8), epochs=2)
    (kept, losses), (again, others) = (
        learn(backbones["kernel"], job, rule=rule, dtype=torch.bfloat16, recompute=when) for when in ("never", "always")
    )
    assert losses == others
    for name, tensor in kept[0].tensors["weights"].items():
        assert torch.equal(tensor, again[0].tensors["weights"][name]), name
