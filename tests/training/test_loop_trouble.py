"""`training.loop`: runs that run out of memory, are interrupted, diverge or stop early, and the weights they return."""

from __future__ import annotations

import pytest
import torch

from adapterbank.encoder.recompute import Recompute
from adapterbank.errors import TrainingError
from adapterbank.methods import Options
from adapterbank.training import eager_step
from adapterbank.training import trainer as trainers
from adapterbank.training.optimizer import AdamSettings
from jobs import assert_close, assert_same_bits, job_on, kept_after, train_jobs

# --- memory ---


def long_and_short(backbone, new_slot):
    return [
        job_on(backbone, new_slot, Options(size=4), seed=0),
        job_on(backbone, new_slot, Options(size=9), seed=1, class_weights=(0.5, 2.0), batch=5),
    ]


@pytest.mark.parametrize("limit", [1, 20, 64])
def test_micro_batches_add_up_to_the_whole_batch(limit, bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = train_jobs(bert, *jobs)
    calls = []
    original = eager_step.forward
    monkeypatch.setattr(eager_step, "forward", lambda *a: calls.append(a[2]) or original(*a))
    monkeypatch.setattr(trainers, "token_limit", lambda config, device: limit)
    cut = train_jobs(bert, *jobs)
    assert len(calls) > sum(state.step for state in cut)
    assert all(len(batch.lengths) * batch.longest <= limit or len(batch.lengths) == 1 for batch in calls)
    for state, expected in zip(cut, whole, strict=True):
        assert_close(state, expected)


class Scarce:
    """A forward pass that runs out of memory at some of its calls."""

    def __init__(self, monkeypatch, fails, error=None):
        self.calls, self.fails, self.sizes = 0, fails, []
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.original = eager_step.forward
        monkeypatch.setattr(eager_step, "forward", self)

    def __call__(self, config, route, batch, *rest):
        self.calls += 1
        self.sizes.append(len(batch.lengths))
        if self.fails(self.calls, batch):
            raise self.error
        return self.original(config, route, batch, *rest)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_runs_out_of_memory_is_repeated_in_halves_with_the_same_result(call, bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = train_jobs(bert, *jobs)
    scarce = Scarce(monkeypatch, lambda number, batch: number == call)
    states = train_jobs(bert, *jobs, recompute="never")
    assert scarce.sizes[call] < scarce.sizes[call - 1] == 11
    for state, expected in zip(states, whole, strict=True):
        assert state.step == expected.step
        assert_close(state, expected)


@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_outputs_are_computed_again_before_a_step_is_cut(recompute, bert, new_slot, monkeypatch):
    jobs, entered = long_and_short(bert, new_slot), []
    whole = train_jobs(bert, *jobs)
    dropping = Recompute.dropping
    monkeypatch.setattr(Recompute, "dropping", lambda self: entered.append(scarce.calls) or dropping(self))
    scarce = Scarce(monkeypatch, lambda number, batch: number == 3)
    states = train_jobs(bert, *jobs, recompute=recompute)
    if recompute == "auto":
        assert scarce.sizes[2] == scarce.sizes[3] == 11  # again, and whole
        assert entered == list(range(3, scarce.calls))  # from then on
        for state, expected in zip(states, whole, strict=True):
            assert_same_bits(state, expected)
    else:
        assert scarce.sizes[3] < scarce.sizes[2] == 11
        assert entered == list(range(scarce.calls))


def test_running_out_of_memory_in_the_middle_of_a_step_leaves_no_trace(bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = train_jobs(bert, *jobs)
    monkeypatch.setattr(trainers, "token_limit", lambda config, device: 60)
    scarce = Scarce(monkeypatch, lambda number, batch: number == 2)
    states = train_jobs(bert, *jobs)
    assert scarce.sizes[0] < 11  # the first part of the step succeeded, the second failed
    for state, expected in zip(states, whole, strict=True):
        assert_close(state, expected)


def test_parts_are_halved_until_they_fit_into_memory(bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot)
    (whole,) = train_jobs(bert, job)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    scarce = Scarce(monkeypatch, lambda number, batch: len(batch.lengths) * batch.longest > 24, error)
    (state,) = train_jobs(bert, job)
    assert scarce.calls > state.step
    assert_close(state, whole)


def test_a_run_fails_with_a_remedy_if_not_even_one_row_fits_into_memory(bert, new_slot, monkeypatch):
    Scarce(monkeypatch, lambda number, batch: True)
    with pytest.raises(TrainingError, match=r"Not even one row.*--max-length"):
        train_jobs(bert, job_on(bert, new_slot))


def test_other_torch_errors_are_not_treated_as_a_lack_of_memory(bert, new_slot, monkeypatch):
    scarce = Scarce(monkeypatch, lambda number, batch: True, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train_jobs(bert, job_on(bert, new_slot))
    assert scarce.calls == 1


# --- interrupted and resumed ---


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("method", ["adapter", "full", "feature"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(method, bias_correction, bert, new_slot):
    settings = AdamSettings(bias_correction=bias_correction)
    job = job_on(bert, new_slot, Options(method=method), epochs=4, settings=settings, rows=15)
    end, kept = kept_after(bert, job)
    assert [state.epoch for state in kept] == [1, 2, 3, 4]
    for state in kept:
        (resumed,) = train_jobs(bert, job, resume={0: state})
        assert_same_bits(resumed, end)


def test_a_run_resumed_beside_another_ends_like_an_uninterrupted_one(bert, new_slot):
    jobs = [
        job_on(bert, new_slot, seed=0, epochs=3),
        job_on(bert, new_slot, Options(size=9), seed=1, epochs=3),
    ]
    ends = [kept_after(bert, job) for job in jobs]
    resumed = train_jobs(bert, *jobs, resume={1: ends[1][1][1]})
    for state, (end, _) in zip(resumed, ends, strict=True):
        assert (state.epoch, state.step) == (end.epoch, end.step)
        assert_close(state, end)


def test_later_epochs_do_not_change_a_saved_state(bert, new_slot):
    """A caller that collects states gets one for each epoch, not the last one three times."""
    kept = []
    train_jobs(bert, job_on(bert, new_slot, epochs=3), keep=lambda run, state: kept.append(state))
    assert [state.epoch for state in kept] == [1, 2, 3]


def test_resuming_does_not_change_the_given_state(bert, new_slot):
    job = job_on(bert, new_slot, epochs=3)
    _, kept = kept_after(bert, job)
    state = kept[0]
    train_jobs(bert, job, resume={0: state})
    assert (state.epoch, state.step, len(state.history)) == (1, 4, 1)


def test_resuming_a_finished_run_takes_no_step(bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot)
    end, kept = kept_after(bert, job)
    Scarce(monkeypatch, lambda number, batch: True)
    (again,) = train_jobs(bert, job, resume={0: kept[-1]})
    assert_same_bits(again, end)


# --- diverging ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_the_message_names_the_rate(bad, bert, new_slot):
    job = job_on(bert, new_slot, rate=0.25)
    job.initial["head.weight"].fill_(bad)
    with pytest.raises(TrainingError, match=r"step 1, epoch 1.*learning rate 0\.25.*--lr 0\.025"):
        train_jobs(bert, job)


def test_an_absurd_learning_rate_ends_in_the_same_error(bert, new_slot):
    with pytest.raises(TrainingError, match="learning rate 1e\\+30"):
        train_jobs(bert, job_on(bert, new_slot, rate=1e30, epochs=3))


def test_dev_outputs_that_are_not_finite_end_the_run(bert, new_slot):
    """The last step of an epoch may diverge although its loss was finite."""
    with pytest.raises(TrainingError, match=r"dev rows.*learning rate"):
        train_jobs(bert, job_on(bert, new_slot, rate=1e38, epochs=1, batch=20))


# --- which weights are returned ---


def scored(*wanted):
    """Return a score function that returns these numbers, one for each epoch."""
    numbers = iter(wanted)
    return lambda outputs: next(numbers)


@pytest.mark.parametrize(
    ("wanted", "best"),
    [
        ((0.1, 0.5, 0.5, 0.3), 2),
        ((0.9, 0.5, 0.1, 0.0), 1),
        ((0.0, 0.0, 0.0, 0.0), 1),
        ((-3.0, -2.0, -2.5, -1.0), 4),
    ],
)
def test_the_weights_of_the_best_epoch_are_kept_and_the_first_wins_a_tie(wanted, best, bert, new_slot):
    end, kept = kept_after(bert, job_on(bert, new_slot, epochs=4, score=scored(*wanted)))
    assert end.best_epoch == best
    assert end.best_score == wanted[best - 1]
    assert [epoch["score"] for epoch in end.history] == list(wanted)
    for name, tensor in kept[best - 1].tensors["weights"].items():
        assert torch.equal(end.tensors["best"][name], tensor)
    others = [state for state in kept if state.epoch != best]
    for state in others:
        assert not torch.equal(end.tensors["best"]["head.weight"], state.tensors["weights"]["head.weight"])


@pytest.mark.parametrize(
    ("patience", "wanted", "epochs"),
    [
        (0, (0.5, 0.4, 0.3, 0.2, 0.1), 5),
        (1, (0.5, 0.6, 0.6, 0.9, 0.9), 3),
        (2, (0.5, 0.4, 0.6, 0.5, 0.4), 5),
        (2, (0.5, 0.4, 0.3, 0.9, 0.9), 3),
        (9, (0.5, 0.4, 0.3, 0.2, 0.1), 5),
    ],
)
def test_patience_stops_a_run_after_that_many_epochs_without_a_better_score(patience, wanted, epochs, bert, new_slot):
    job = job_on(bert, new_slot, Options(method="feature"), epochs=5, patience=patience, score=scored(*wanted))
    (state,) = train_jobs(bert, job)
    assert state.epoch == len(state.history) == epochs
    assert state.best_score == max(wanted[:epochs])


def test_a_run_with_nan_scores_still_returns_weights(bert, new_slot):
    (state,) = train_jobs(bert, job_on(bert, new_slot, score=scored(float("nan"), float("nan"))))
    assert state.best_epoch in (1, 2)
    assert state.tensors["best"].keys() == state.tensors["weights"].keys()


# --- runs that fail beside others ---


@pytest.mark.parametrize("graphs", [False, True])
def test_a_run_that_fails_frees_its_place_and_does_not_affect_the_others(graphs, bert, new_slot, graph_training):
    train = graph_training if graphs else train_jobs
    jobs = [job_on(bert, new_slot, seed=k, rate=1e30 if k in (1, 2) else 1e-3, epochs=3) for k in range(5)]
    ended = {}
    train(bert, *jobs, at_once=2, end=lambda number, state: ended.setdefault(number, state))
    assert set(ended) == set(range(5))
    assert [number for number, state in sorted(ended.items()) if state.failure] == [1, 2]
    assert "The learning rate 1e+30 is probably too high" in ended[1].failure
    for number in (0, 3, 4):
        assert_close(ended[number], train(bert, jobs[number])[0])


def test_end_is_called_as_soon_as_a_run_ends_and_its_tensors_are_released(bert, new_slot):
    jobs = [job_on(bert, new_slot, seed=k, epochs=k + 1) for k in range(3)]
    order, steps = [], []
    states = train_jobs(
        bert,
        *jobs,
        watch=lambda progress: steps.append(progress.run),
        end=lambda number, state: order.append((number, len(steps), set(state.tensors))),
    )
    assert [number for number, _, _ in order] == [0, 1, 2]
    assert order[0][1] < order[1][1] < order[2][1]
    assert all(parts == {"weights", "best", "first", "second"} for _, _, parts in order)
    assert [state.tensors for state in states] == [{}, {}, {}]


def test_all_active_runs_fail_if_not_even_one_row_fits_into_memory(bert, new_slot, monkeypatch):
    Scarce(monkeypatch, lambda number, batch: True)
    failures = []
    jobs = [job_on(bert, new_slot, seed=k) for k in range(3)]
    train_jobs(bert, *jobs, at_once=2, end=lambda number, state: failures.append(state.failure))
    assert len(failures) == 3
    assert all("Not even one row" in one for one in failures)
