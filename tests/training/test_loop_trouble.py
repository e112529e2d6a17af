"""Runs that run out of memory, are interrupted, diverge or stop early, and which weights they give back."""

from __future__ import annotations

import pytest
import torch

from adapterbank.errors import TrainingError
from adapterbank.methods import Options
from adapterbank.training import eager_step
from adapterbank.training import trainer as trainers
from adapterbank.training.optimizer import AdamSettings
from jobs import assert_close, assert_same_bits, job_on, kept_after, learn

# --- memory ---


def long_and_short(backbone, new_slot):
    return [
        job_on(backbone, new_slot, Options(size=4), seed=0),
        job_on(backbone, new_slot, Options(size=9), seed=1, class_weights=(0.5, 2.0), batch=5),
    ]


@pytest.mark.parametrize("limit", [1, 20, 64])
def test_micro_batches_add_up_to_the_whole_batch(limit, bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = learn(bert, *jobs)
    calls = []
    original = eager_step.forward
    monkeypatch.setattr(eager_step, "forward", lambda *a: calls.append(a[2]) or original(*a))
    monkeypatch.setattr(trainers, "token_limit", lambda config, device: limit)
    cut = learn(bert, *jobs)
    assert len(calls) > sum(state.step for state in cut)
    assert all(len(batch.lengths) * batch.longest <= limit or len(batch.lengths) == 1 for batch in calls)
    for mine, expected in zip(cut, whole, strict=True):
        assert_close(mine, expected)


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
def test_a_step_that_ran_out_of_memory_is_taken_again_in_halves_with_the_same_result(call, bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = learn(bert, *jobs)
    scarce = Scarce(monkeypatch, lambda number, batch: number == call)
    states = learn(bert, *jobs)
    assert scarce.sizes[call] < scarce.sizes[call - 1] == 11
    for mine, expected in zip(states, whole, strict=True):
        assert mine.step == expected.step
        assert_close(mine, expected)


def test_running_out_in_the_middle_of_a_step_leaves_nothing_of_it_behind(bert, new_slot, monkeypatch):
    jobs = long_and_short(bert, new_slot)
    whole = learn(bert, *jobs)
    monkeypatch.setattr(trainers, "token_limit", lambda config, device: 60)
    scarce = Scarce(monkeypatch, lambda number, batch: number == 2)
    states = learn(bert, *jobs)
    assert scarce.sizes[0] < 11  # the first part of the step went well, the second did not
    for mine, expected in zip(states, whole, strict=True):
        assert_close(mine, expected)


def test_memory_for_a_few_rows_only_is_found_by_halving_again(bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot)
    (whole,) = learn(bert, job)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    scarce = Scarce(monkeypatch, lambda number, batch: len(batch.lengths) * batch.longest > 24, error)
    (state,) = learn(bert, job)
    assert scarce.calls > state.step
    assert_close(state, whole)


def test_memory_for_not_even_one_row_ends_the_run_with_a_way_out(bert, new_slot, monkeypatch):
    Scarce(monkeypatch, lambda number, batch: True)
    with pytest.raises(TrainingError, match=r"Not even one row.*--max-length"):
        learn(bert, job_on(bert, new_slot))


def test_any_other_error_of_torch_is_not_taken_for_a_lack_of_memory(bert, new_slot, monkeypatch):
    scarce = Scarce(monkeypatch, lambda number, batch: True, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learn(bert, job_on(bert, new_slot))
    assert scarce.calls == 1


# --- interrupted and resumed ---


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("method", ["adapter", "full", "feature"])
def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(method, bias_correction, bert, new_slot):
    settings = AdamSettings(bias_correction=bias_correction)
    job = job_on(bert, new_slot, Options(method=method), epochs=4, settings=settings, rows=15)
    end, kept = kept_after(bert, job)
    assert [state.epoch for state in kept] == [1, 2, 3, 4]
    for state in kept:
        (resumed,) = learn(bert, job, resume={0: state})
        assert_same_bits(resumed, end)


def test_a_run_resumed_beside_another_ends_where_it_would_have(bert, new_slot):
    jobs = [
        job_on(bert, new_slot, seed=0, epochs=3),
        job_on(bert, new_slot, Options(size=9), seed=1, epochs=3),
    ]
    ends = [kept_after(bert, job) for job in jobs]
    resumed = learn(bert, *jobs, resume={1: ends[1][1][1]})
    for state, (end, _) in zip(resumed, ends, strict=True):
        assert (state.epoch, state.step) == (end.epoch, end.step)
        assert_close(state, end)


def test_a_state_that_is_kept_is_not_changed_by_the_epochs_after_it(bert, new_slot):
    """Whoever keeps states in memory has one for each epoch, not the last one three times."""
    kept = []
    learn(bert, job_on(bert, new_slot, epochs=3), keep=lambda run, state: kept.append(state))
    assert [state.epoch for state in kept] == [1, 2, 3]


def test_resuming_leaves_the_given_state_as_it_was(bert, new_slot):
    job = job_on(bert, new_slot, epochs=3)
    _, kept = kept_after(bert, job)
    given = kept[0]
    learn(bert, job, resume={0: given})
    assert (given.epoch, given.step, len(given.history)) == (1, 4, 1)


def test_a_finished_run_that_is_resumed_takes_no_step(bert, new_slot, monkeypatch):
    job = job_on(bert, new_slot)
    end, kept = kept_after(bert, job)
    Scarce(monkeypatch, lambda number, batch: True)
    (again,) = learn(bert, job, resume={0: kept[-1]})
    assert_same_bits(again, end)


# --- failing ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_learning_rate(bad, bert, new_slot):
    job = job_on(bert, new_slot, rate=0.25)
    job.initial["head.weight"].fill_(bad)
    with pytest.raises(TrainingError, match=r"step 1, epoch 1.*learning rate 0\.25.*--lr 0\.025"):
        learn(bert, job)


def test_a_learning_rate_without_measure_ends_in_that_error(bert, new_slot):
    with pytest.raises(TrainingError, match="learning rate 1e\\+30"):
        learn(bert, job_on(bert, new_slot, rate=1e30, epochs=3))


def test_dev_outputs_that_are_no_numbers_end_the_run_too(bert, new_slot):
    """The last step of an epoch may be the one that breaks, after its loss was seen to be fine."""
    with pytest.raises(TrainingError, match=r"dev rows.*learning rate"):
        learn(bert, job_on(bert, new_slot, rate=1e38, epochs=1, batch=20))


# --- which weights are given back ---


def scored(*wanted):
    """Give a score that says these numbers, an epoch each, whatever it is shown."""
    numbers = iter(wanted)
    return lambda given: next(numbers)


@pytest.mark.parametrize(
    ("wanted", "best"),
    [
        ((0.1, 0.5, 0.5, 0.3), 2),
        ((0.9, 0.5, 0.1, 0.0), 1),
        ((0.0, 0.0, 0.0, 0.0), 1),
        ((-3.0, -2.0, -2.5, -1.0), 4),
    ],
)
def test_the_best_epochs_weights_are_kept_and_the_first_of_equals(wanted, best, bert, new_slot):
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
def test_patience_stops_a_run_after_so_many_epochs_without_a_better_score(patience, wanted, epochs, bert, new_slot):
    job = job_on(bert, new_slot, Options(method="feature"), epochs=5, patience=patience, score=scored(*wanted))
    (state,) = learn(bert, job)
    assert state.epoch == len(state.history) == epochs
    assert state.best_score == max(wanted[:epochs])


def test_a_score_that_is_no_number_still_leaves_weights_to_give_back(bert, new_slot):
    (state,) = learn(bert, job_on(bert, new_slot, score=scored(float("nan"), float("nan"))))
    assert state.best_epoch in (1, 2)
    assert state.tensors["best"].keys() == state.tensors["weights"].keys()


# --- failing beside others ---


@pytest.mark.parametrize("steady", [False, True])
def test_a_run_that_fails_leaves_its_place_to_the_next_and_its_neighbours_notice_nothing(
    steady, bert, new_slot, graph_training
):
    way = graph_training if steady else learn
    jobs = [job_on(bert, new_slot, seed=k, rate=1e30 if k in (1, 2) else 1e-3, epochs=3) for k in range(5)]
    ended = {}
    way(bert, *jobs, at_once=2, end=lambda number, state: ended.setdefault(number, state))
    assert set(ended) == set(range(5))
    assert [number for number, state in sorted(ended.items()) if state.failure] == [1, 2]
    assert "The learning rate 1e+30 is most likely too high" in ended[1].failure
    for number in (0, 3, 4):
        assert_close(ended[number], way(bert, jobs[number])[0])


def test_a_run_that_has_ended_is_handed_over_at_once_and_not_kept(bert, new_slot):
    jobs = [job_on(bert, new_slot, seed=k, epochs=k + 1) for k in range(3)]
    order, steps = [], []
    states = learn(
        bert,
        *jobs,
        watch=lambda progress: steps.append(progress.run),
        end=lambda number, state: order.append((number, len(steps), set(state.tensors))),
    )
    assert [number for number, _, _ in order] == [0, 1, 2]
    assert order[0][1] < order[1][1] < order[2][1]
    assert all(held == {"weights", "best", "first", "second"} for _, _, held in order)
    assert [state.tensors for state in states] == [{}, {}, {}]


def test_memory_for_not_even_one_row_fails_the_runs_there_are(bert, new_slot, monkeypatch):
    Scarce(monkeypatch, lambda number, batch: True)
    failures = []
    jobs = [job_on(bert, new_slot, seed=k) for k in range(3)]
    learn(bert, *jobs, at_once=2, end=lambda number, state: failures.append(state.failure))
    assert len(failures) == 3
    assert all("Not even one row" in one for one in failures)
