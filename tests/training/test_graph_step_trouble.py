"""`training.graph_step`: losses that are read late, memory that runs out, and when a graph is used."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adapterbank.encoder.kernels import launch
from adapterbank.encoder.kernels.launch import Compilation, CompilerError
from adapterbank.errors import SlowerWarning, TrainingError
from adapterbank.inference import graphs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.sharing import step_form
from adapterbank.slots.stack import Stacks
from adapterbank.training import graph_step
from adapterbank.training import trainer as trainers
from adapterbank.training.eager_step import EagerStep
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.graph_step import padded_length
from adapterbank.training.job import ActiveRun, RunState
from jobs import CPU, GPU, GraphTraining, assert_close, assert_same_bits, job_on, three_runs, train_jobs
from plain_kernels import PLAIN

# --- losses that are read late


def test_losses_read_only_at_the_end_of_an_epoch_are_the_same(bert, new_slot, graph_training, monkeypatch):
    jobs = three_runs(bert, new_slot)
    reports = []
    often = graph_training(bert, *jobs)
    monkeypatch.setattr(trainers, "READ_EVERY", float("inf"))
    late = graph_training(bert, *jobs, watch=reports.append)
    for state, expected in zip(late, often, strict=True):
        assert_same_bits(state, expected)
    for run, state in enumerate(late):
        ends = [p for p in reports if p.run == run and p.score is not None]
        assert [p.score for p in ends] == [epoch["score"] for epoch in state.history]
        assert all(np.isfinite(p.loss) and p.rows_per_second > 0 for p in reports if p.run == run)
    assert len(reports) < sum(len(state.history) + state.step for state in late)


def test_losses_can_be_read_at_every_step(bert, new_slot, graph_training, monkeypatch):
    monkeypatch.setattr(trainers, "READ_EVERY", -1.0)
    reports = []
    (state,) = graph_training(bert, job_on(bert, new_slot), watch=reports.append)
    assert [p.step for p in reports if p.score is None] == list(range(1, state.step + 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_the_message_names_the_rate(bad, bert, new_slot, graph_training):
    job = job_on(bert, new_slot, rate=0.25)
    job.initial["head.weight"].fill_(bad)
    with pytest.raises(TrainingError, match=r"epoch 1.*learning rate 0\.25.*--lr 0\.025"):
        graph_training(bert, job)


def with_nan_at(step, which=0):
    """Return a `GraphStep.step` that sets the loss of one run to NaN at one step, counted from 1."""
    original, calls = graph_step.GraphStep.step, []

    def step_with_nan(self, inputs, table):
        calls.append(inputs)
        losses = original(self, inputs, table)
        if len(calls) == step:
            losses[self.place(inputs[which].slot)] = float("nan")
        return losses

    return step_with_nan


@pytest.mark.parametrize("every", [-1.0, float("inf")])
@pytest.mark.parametrize(
    ("step", "named"), [(1, "step 1, epoch 1"), (3, "step 3, epoch 1"), (4, "step 4, epoch 1"), (6, "step 6, epoch 2")]
)
def test_the_message_names_the_step_that_diverged_however_late_its_loss_is_read(
    step, named, every, bert, new_slot, graph_training, monkeypatch
):
    monkeypatch.setattr(trainers, "READ_EVERY", every)
    graph_training.changes = {(graph_step.GraphStep, "step"): with_nan_at(step)}
    with pytest.raises(TrainingError, match=f"At {named}, the loss became nan"):
        graph_training(bert, job_on(bert, new_slot))


def test_the_message_names_the_run_that_diverged(bert, new_slot, graph_training):
    jobs = [job_on(bert, new_slot, seed=k, rate=rate) for k, rate in enumerate((1e-3, 0.5, 1e-4))]
    for which, job in enumerate(jobs):
        graph_training.changes = {(graph_step.GraphStep, "step"): with_nan_at(2, which=which)}
        with pytest.raises(TrainingError, match=f"learning rate {job.rate:g} is"):
            graph_training(bert, *jobs)


# --- memory


@pytest.mark.parametrize(
    ("call", "every"),  # once with a loss that is not read yet
    [(2, float("inf")), (1, -1.0), (2, -1.0), (5, -1.0)],
)
def test_a_graph_that_does_not_fit_into_memory_falls_back_to_the_eager_step_with_the_same_result(
    call, every, bert, new_slot, graph_training, monkeypatch
):
    jobs = three_runs(bert, new_slot)
    expected = train_jobs(bert, *jobs)
    monkeypatch.setattr(trainers, "READ_EVERY", every)
    original, calls = graph_step.GraphStep.step, []

    def scarce(self, inputs, table):
        calls.append(inputs)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, inputs, table)

    graph_training.changes = {
        (graph_step.GraphStep, "step"): scarce,
        (EagerStep, "step"): EagerStep.step,
        (torch.cuda, "empty_cache"): lambda: None,
    }
    for state, eager in zip(graph_training(bert, *jobs, recompute="never"), expected, strict=True):
        assert (state.step, len(state.history)) == (eager.step, len(eager.history))
        assert_close(state, eager)
    assert len(calls) == call


# --- which runs share a graph, and when there is one


def plan_of(options, head=None):
    return make_plan(options, depth=3, head=head or Head("classification", 2))


def test_runs_share_a_graph_if_they_differ_only_in_their_true_size():
    base = plan_of(Options(size=5))
    for size in (5, 6, 7, 8):
        assert step_form(plan_of(Options(size=size))) == step_form(base)
        assert hash(step_form(plan_of(Options(size=size)))) == hash(step_form(base))
    others = [
        plan_of(Options(size=4)),
        plan_of(Options(size=9)),
        plan_of(Options(size=5, activation="relu")),
        plan_of(Options(size=5, layers="1-2")),
        plan_of(Options(size=5, train_norms=False)),
        plan_of(Options(size=5), Head("classification", 3)),
        plan_of(Options(size=5), Head("classification", 2, "mean", hidden=3)),
        plan_of(Options(method="layernorm")),
        plan_of(Options(method="feature")),
    ]
    assert len({step_form(plan) for plan in [base, *others]}) == 1 + len(others)


def test_rows_are_padded_to_few_lengths_with_little_padding():
    padded = {length: padded_length(length, 512) for length in range(1, 513)}
    assert all(length <= found < length + max(8, length / 2) for length, found in padded.items())
    assert list(padded.values()) == sorted(padded.values())
    assert len(set(padded.values())) <= 24
    assert all(padded_length(found, 512) == found for found in padded.values())
    assert [padded_length(length, 50) for length in (3, 48, 49, 50)] == [
        8,
        48,
        50,
        50,
    ]  # never beyond the last position


def prepared(backbone, jobs, *, places=8, limit=1 << 30):
    """Return a trainer that was prepared as if it were on a GPU."""
    stacks = SimpleNamespace(device=GPU)
    context = SimpleNamespace(config=backbone.config)
    encoder = SimpleNamespace(config=backbone.config, device=CPU)
    trainer = SimpleNamespace(context=context, stacks=stacks, encoder=encoder, limit=limit, sets=[])
    trainers.Trainer.prepare(trainer, [ActiveRun(i, x, RunState()) for i, x in enumerate(jobs)], places)
    return trainer


def test_a_graph_has_as_many_places_as_fit_into_memory(bert, new_slot):
    jobs = [job_on(bert, new_slot, seed=seed) for seed in range(5)]
    padded = 6 * padded_length(max(len(row) for job in jobs for row in job.train.tokens), bert.config.max_length)
    assert [prepared(bert, jobs, places=places).places for places in (8, 3, 1)] == [5, 3, 1]
    for limit, places in ((padded, 1), (3 * padded - 1, 2), (3 * padded, 3), (99 * padded, 5)):
        trainer = prepared(bert, jobs, limit=limit)
        assert (len(trainer.sets), trainer.places) == (5, places)
    assert not prepared(bert, jobs, limit=padded - 1).sets


def test_the_steps_that_are_left_are_counted_by_place(bert, new_slot):
    jobs = [job_on(bert, new_slot, seed=seed, epochs=2) for seed in range(4)]  # 8 steps each
    assert [prepared(bert, jobs, places=places).left for places in (4, 2, 1)] == [8, 16, 32]


def test_a_captured_step_may_hold_what_its_kernels_keep(bert, monkeypatch):
    monkeypatch.setattr(graph_step, "total_memory", lambda device: 1 << 30)
    monkeypatch.setattr(graph_step, "fused_attention", lambda config, device: device == GPU)
    config, limits, whole = bert.config, {}, {}
    for dtype, when in itertools.product((torch.float32, torch.bfloat16), ("never", "auto", "always")):
        encoder = SimpleNamespace(config=config, device=GPU, dtype=dtype, recompute=when)
        limits[dtype, when] = graph_step.captured_limit(encoder, plan_of(Options()))
        whole[dtype, when] = graph_step.captured_limit(encoder, plan_of(Options(method="full")))
    numbers = (1 << 29) // config.layers
    assert limits[torch.float32, "auto"] == limits[torch.float32, "always"] == numbers // (4 * 12 * config.hidden)
    assert limits[torch.bfloat16, "never"] == numbers // (2 * (12 * config.hidden + 3 * config.feedforward))
    assert set(whole.values()) == {limits[torch.float32, "never"], limits[torch.bfloat16, "never"]}
    assert graph_step.captured_limit(SimpleNamespace(config=config, device=CPU), plan_of(Options())) == 0


def test_the_cpu_never_uses_graphs(bert, new_slot, monkeypatch):
    monkeypatch.setattr(trainers, "GraphStep", None)
    job = job_on(bert, new_slot)
    assert train_jobs(bert, job, rule=ALWAYS)[0].epoch == job.epochs


# --- the first steps are eager


@pytest.fixture
def slow_compiler(monkeypatch):
    """Let the kernels be ready when `done` has been asked a number of times."""

    class Slow(Compilation):
        left = 5

        @property
        def done(self):
            Slow.left -= 1
            return Slow.left < 0

    monkeypatch.setattr(graphs, "Compilation", Slow)
    return Slow


def test_steps_are_eager_until_the_kernels_are_compiled(bert, new_slot, graph_training, slow_compiler):
    jobs = three_runs(bert, new_slot)
    expected = train_jobs(bert, *jobs)
    graph_training.changes = {(EagerStep, "step"): EagerStep.step}
    found = graph_training(bert, *jobs, rule=replace(ALWAYS, measured=2, waits=False))
    assert graph_training.steps == 8 - 2 - 5
    for state, eager in zip(found, expected, strict=True):
        assert_close(state, eager)


def test_a_graph_for_the_runs_that_are_left_has_no_empty_places(bert, new_slot, graph_training, slow_compiler):
    jobs = three_runs(bert, new_slot)  # the second ends after three steps
    slow_compiler.left = 0
    graph_training.changes = {(EagerStep, "step"): EagerStep.step}
    found = graph_training(bert, *jobs, rule=replace(ALWAYS, measured=4, waits=False))
    assert graph_training.steps == 4
    for state, eager in zip(found, train_jobs(bert, *jobs), strict=True):
        assert_close(state, eager)


@pytest.mark.parametrize("when", [5, 7])
def test_an_eager_step_between_graphs_reads_their_losses_first(when, bert, new_slot, graph_training, monkeypatch):
    """The second of three runs has ended, so graphs have a place more than there are runs."""
    jobs = [job_on(bert, new_slot, Options(size=5), seed=k, epochs=epochs) for k, epochs in enumerate((3, 1, 3))]
    expected = train_jobs(bert, *jobs)
    monkeypatch.setattr(trainers, "READ_EVERY", float("inf"))
    original, calls = graph_step.GraphStep.ready, []

    def ready(*arguments, **options):
        calls.append(original(*arguments, **options))
        return calls[-1] and len(calls) != when

    graph_training.changes = {(EagerStep, "step"): EagerStep.step, (graph_step.GraphStep, "ready"): ready}
    for state, eager in zip(graph_training(bert, *jobs), expected, strict=True):
        assert_close(state, eager)


def test_no_run_is_lost_where_memory_runs_out_while_places_are_removed(bert, new_slot, graph_training):
    jobs = [job_on(bert, new_slot, Options(size=5), seed=k, epochs=e) for k, e in enumerate((3, 1, 3, 1, 1))]
    original, calls = Stacks.put, []

    def put(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*arguments)

    graph_training.changes = {(EagerStep, "step"): EagerStep.step, (Stacks, "put"): put}
    with pytest.raises(torch.OutOfMemoryError):
        graph_training(bert, *jobs)
    assert len(calls) == 7


def test_what_computes_outputs_again_is_another_program(bert, new_slot, monkeypatch):
    """Memory runs out in an eager step between graphs; from then on kernels differ."""
    job, seen = job_on(bert, new_slot, Options(size=5), epochs=6), []
    body, ready, gradients = graph_step.GraphStep._body, graph_step.GraphStep.ready, EagerStep._gradients
    asked, failed = [], []

    def bodies(self, *shape):
        seen.append((bool(launch._CURRENT.get()), (*shape, self._context.recomputing.on)))
        return body(self, *shape)

    def not_once(*arguments, **options):
        asked.append(ready(*arguments, **options))
        return asked[-1] and len(asked) != 6

    def scarce(*arguments):
        failed.append(arguments)
        if len(failed) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradients(*arguments)

    training = GraphTraining(monkeypatch, PLAIN)
    training.changes = {(EagerStep, "step"): EagerStep.step, (EagerStep, "_gradients"): scarce}
    training.changes |= {(graph_step.GraphStep, "ready"): not_once, (graph_step.GraphStep, "_body"): bodies}
    training(bert, job)
    traced, ran = ({form for tracing, form in seen if tracing is which} for which in (True, False))
    assert {on for *_, on in ran} == {True, False}
    assert ran == traced


def test_kernels_that_do_not_compile_are_told_once_and_training_goes_on(bert, new_slot, graph_training, monkeypatch):
    jobs = three_runs(bert, new_slot)
    expected = train_jobs(bert, *jobs)

    def broken(compilation):
        raise CompilerError("RuntimeError: no compiler here")

    monkeypatch.setattr(Compilation, "wait", broken)
    graph_training.changes = {(EagerStep, "step"): EagerStep.step}
    with pytest.warns(SlowerWarning, match="no compiler here") as caught:
        found = graph_training(bert, *jobs)
    assert (len(caught), graph_training.steps) == (1, 0)
    for state, eager in zip(found, expected, strict=True):
        assert_close(state, eager)
