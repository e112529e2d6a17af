"""Promise: runs that differ only in whether they average train once, and each ends as if it had trained alone."""

from __future__ import annotations

import numpy as np
import pytest

from adapterbank.api.opened import open_bank
from adapterbank.studies import saved_states
from adapterbank.training import run as runs
from adapterbank.training.job import RunState
from small_data import FAST, reviews, write
from studies.test_sweep import TIMES, records_of

BOTH = [False, True]


@pytest.fixture
def bank(tmp_path, bert, monkeypatch):
    write(tmp_path / "a.csv", reviews())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(saved_states, "SAVE_EVERY", 0.0)
    return open_bank("bank", bert, device="cpu")


def study(average, **options):
    return {"task": "a", "train": "a.csv", "dev": "a.csv", **FAST, "epochs": 4, "few": "never", "average": average,
            **options}  # fmt: skip


def by_average(bank):
    return {"average" in record["config"]: record for record in records_of(bank)}


def epochs_of(record):
    return [(epoch["loss"], epoch["score"]) for epoch in record["history"]]


@pytest.fixture
def finished(monkeypatch):
    """Return the states and packages of runs in the order in which they are finished."""
    found, finish = [], runs.finish_run

    def note(prepared, backbone, state, *more):
        outcome = finish(prepared, backbone, state, *more)
        found.append((state, outcome.package))
        return outcome

    monkeypatch.setattr(runs, "finish_run", note)
    return found


def test_they_train_once_and_have_a_record_each(bank, bert, monkeypatch):
    trained = []
    real = runs.train
    options = {"lr": [0.01, 0.03], "seeds": 2}
    with monkeypatch.context() as patched:
        patched.setattr(runs, "train", lambda placed, jobs, **o: trained.append(len(jobs)) or real(placed, jobs, **o))
        progress = bank.sweep(study(BOTH, **options)).progress
    assert (progress.done, trained) == (8, [4])
    found = {(r["config"]["lr"], r["config"]["seed"], "average" in r["config"]): r for r in records_of(bank)}
    alone = open_bank("alone", bert, device="cpu")
    alone.sweep(study(False, **options))  # the same runs share its batches
    for record in records_of(alone):
        lr, seed = record["config"]["lr"], record["config"]["seed"]
        plain, averaging = found[lr, seed, False], found[lr, seed, True]
        for name in set(record) - set(TIMES):
            assert plain[name] == record[name], name
        assert averaging["history"][-1].pop("average") == averaging["average"]["score"]
        assert epochs_of(plain) == epochs_of(averaging) == epochs_of(record)


@pytest.mark.parametrize("kept", [True, False])
def test_each_package_has_the_weights_of_its_run_and_the_average_is_served(bank, monkeypatch, finished, kept):
    score = property(lambda self: {"score": 0.5, "kept": kept} if "average" in self.history[-1] else {})
    monkeypatch.setattr(RunState, "average", score)
    bank.sweep(study(BOTH), keep="all")
    (plain, first), (averaging, second) = finished
    for state, package, part in ((plain, first, "best"), (averaging, second, "average" if kept else "best")):
        stored = package.tensors()
        assert stored.keys() == state.tensors[part].keys()
        for name, tensor in state.tensors[part].items():
            np.testing.assert_array_equal(stored[name], tensor.numpy())
    assert not np.array_equal(averaging.tensors["average"]["head.weight"], averaging.tensors["best"]["head.weight"])
    assert (first.ref, second.ref, bank.show("a").version) == ("a@1", "a@2", 2)


def test_an_interrupt_between_them_loses_nothing(bank, monkeypatch):
    finish, calls = runs.finish_run, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finish(*given)

    with monkeypatch.context() as patched:
        patched.setattr(runs, "finish_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bank.sweep(study(BOTH))
    assert list(by_average(bank)) == [False]
    assert len(list((bank.path / "runs").glob("*/state.json"))) == 1
    bank.sweep(study(BOTH))
    found = by_average(bank)
    assert "Resuming after epoch 4." in found[True]["notes"]
    assert epochs_of(found[True]) == epochs_of(found[False])
    assert list((bank.path / "runs").iterdir()) == []


def stop_after(epoch):
    def watch(progress):
        if progress.last.kind == "running" and progress.last.share > epoch / 4:
            raise KeyboardInterrupt

    return watch


def test_both_go_on_from_the_saved_state_of_the_one_that_averages(bank):
    with pytest.raises(KeyboardInterrupt):
        bank.sweep(study(BOTH), watch=stop_after(2))
    bank.sweep(study(BOTH))
    found = by_average(bank)
    assert all("Resuming after epoch 2." in record["notes"] for record in found.values())
    assert epochs_of(found[True]) == epochs_of(found[False])


def test_a_saved_state_without_an_average_is_used_by_its_own_run_alone(bank):
    with pytest.raises(KeyboardInterrupt):
        bank.sweep(study(False), watch=stop_after(2))
    bank.sweep(study(BOTH))
    resumed = {average: [note for note in r["notes"] if "Resuming" in note] for average, r in by_average(bank).items()}
    assert resumed == {False: ["Resuming after epoch 2."], True: []}


def test_a_failure_is_that_of_both(bank, monkeypatch):
    real = runs.train

    def diverging(placed, jobs, *, end, **given):
        def failed(place, state):
            state.failure = "the loss became nan"
            end(place, state)

        real(placed, jobs, end=failed, **given)

    monkeypatch.setattr(runs, "train", diverging)
    assert bank.sweep(study(BOTH)).progress.failed == 2
    assert [record["failure"] for record in by_average(bank).values()] == ["the loss became nan"] * 2
