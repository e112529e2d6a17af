"""Claims about `adapterbank.training.wide_first`: wide adapters train, lose units, and train on with the others."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import jobs as small_jobs
from adapterbank.api.opened import open_bank
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, InputError
from adapterbank.methods import Options
from adapterbank.slots.plan import Plan
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.training import loop, run_state, wide_first
from adapterbank.training.job import Narrowing
from adapterbank.training.loop import Together
from adapterbank.training.narrowing import narrow_job, narrow_tensors, wide_job
from jobs import CPU, assert_close, assert_same_bits, job_on
from small_data import FAST, flags, reviews, shell, write

ROWS = reviews()
NARROWED = {**FAST, "size": "8to3", "epochs": 4}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def narrowing_job(bert, new_slot, mean=3, after=1, **changes):
    return job_on(bert, new_slot, Options(size=8), narrowing=Narrowing(mean, after), **{"epochs": 3, **changes})


def wide_first_states(encoder, jobs, *, dropout=None, together=None, **options):
    """Train jobs as a run does; return the final states in the order of the jobs, as `loop.train` does."""
    states = {}
    calls = {"watch": lambda progress: None, "keep": lambda run, state: None, "resume": {}, **options}
    together = together or Together()
    end = states.__setitem__
    wide_first.train(encoder, jobs, dropout=dropout, together=together, end=end, **calls)
    return [states[run] for run in range(len(jobs))]


def train_both_parts(backbone, *jobs, **options):
    return wide_first_states(place(backbone, CPU, torch.float32), jobs, **options)


def first_part(backbone, job):
    """Return the state of a run that has been trained up to its narrowing, and no further."""
    (state,) = loop.train(place(backbone, CPU, torch.float32), [wide_job(job)])
    return state


def masked(job, tensors, units):
    """Return wide tensors in which all numbers of the other units are zero."""
    kept = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        place_of = job.plan.split(name)
        if place_of is None:
            kept[name] = tensor
        elif units[place_of[0]]:
            index = (slice(None), units[place_of[0]]) if name.endswith("up.weight") else units[place_of[0]]
            kept[name][index] = tensor[index]
            if name.endswith("up.bias"):
                kept[name] = tensor
    return kept


# --- the two parts


def test_up_to_the_narrowing_a_run_is_one_with_wide_adapters(bert, new_slot):
    job, kept = narrowing_job(bert, new_slot, after=2), []
    train_both_parts(bert, job, keep=lambda _, state: kept.append(state.copy()))
    plain = []
    small_jobs.train_jobs(bert, dataclasses.replace(job, narrowing=None), keep=lambda _, state: plain.append(state))
    assert [state.epoch for state in kept] == [1, 2, 2, 3]
    for ours, its in zip(kept[:2], plain, strict=False):
        assert_same_bits(ours, its)


def test_weights_and_moments_of_the_kept_units_continue(bert, new_slot):
    job = narrowing_job(bert, new_slot)
    state = first_part(bert, job)
    found = wide_first.narrow(place(bert, CPU, torch.float32), job, state)
    units = found.narrowed["units"]
    assert 0 < sum(map(len, units.values())) <= 3 * 6
    for part in ("weights", "first", "second"):
        expected = narrow_tensors(job.plan, state.tensors[part], units)
        assert found.tensors[part].keys() == expected.keys()
        assert all(torch.equal(found.tensors[part][name], tensor) for name, tensor in expected.items())
    assert found.tensors["best"] is found.tensors["weights"]
    assert (found.step, found.epoch, found.best_epoch) == (state.step, 1, 1)
    assert found.narrowed["before"] == state.history[0]["score"]
    assert found.history[0]["score"] == found.narrowed["after"]


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_afterwards_it_trains_as_wide_adapters_whose_other_units_are_zero(dropout, bert, new_slot):
    """A unit that is zero, with zero moments, has no gradient and stays zero; the loop knows nothing of narrowing."""
    job = narrowing_job(bert, new_slot)
    (ours,) = train_both_parts(bert, job, dropout=dropout)
    units = ours.narrowed["units"]
    (state,) = loop.train(place(bert, CPU, torch.float32), [wide_job(job)], dropout=dropout)
    for part in ("weights", "first", "second"):
        state.tensors[part] = masked(job, state.tensors[part], units)
    state.best_epoch, state.tensors["best"] = 1, state.tensors["weights"]
    (whole,) = small_jobs.train_jobs(bert, dataclasses.replace(job, narrowing=None), dropout=dropout, resume={0: state})
    for part in ("weights", "first", "second"):
        expected = narrow_tensors(job.plan, whole.tensors[part], units)
        for name, tensor in expected.items():
            torch.testing.assert_close(ours.tensors[part][name], tensor, atol=1e-5, rtol=1e-4)
    assert small_jobs.moved(ours, narrow_job(job, units)) > 1e-4


def test_steps_as_graphs_give_what_eager_steps_give(bert, new_slot, graph_training, monkeypatch):
    job = narrowing_job(bert, new_slot)
    (expected,) = train_both_parts(bert, job)
    effects = wide_first.effects_of
    monkeypatch.setattr(wide_first, "effects_of", lambda encoder, *rest: eagerly(effects, encoder, *rest))
    monkeypatch.setattr(small_jobs, "train", wide_first_states)
    step = small_jobs.EagerStep.step

    def eagerly(work, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(small_jobs.EagerStep, "step", step)
            return work(*arguments)

    (found,) = graph_training(bert, job)
    assert graph_training.steps == found.step
    assert found.narrowed["units"] == expected.narrowed["units"]
    assert_close(found, expected)


def test_runs_beside_others_are_as_alone(bert, new_slot):
    made = [narrowing_job(bert, new_slot, seed=1), job_on(bert, new_slot, Options(size=4), epochs=3),
            narrowing_job(bert, new_slot, mean=5, after=2, seed=2)]  # fmt: skip
    for together, job in zip(train_both_parts(bert, *made), made, strict=True):
        (alone,) = train_both_parts(bert, job)
        assert together.narrowed.get("units") == alone.narrowed.get("units")
        assert_close(together, alone)


def test_a_run_that_fails_before_its_narrowing_ends_alone(bert, new_slot):
    bad, good = narrowing_job(bert, new_slot, rate=1e30), narrowing_job(bert, new_slot, seed=3)
    failed, trained = train_both_parts(bert, bad, good)
    assert "The learning rate 1e+30" in failed.failure
    assert (trained.epoch, trained.failure) == (3, "")


def test_a_run_that_begins_again_keeps_its_units(bert, new_slot, monkeypatch):
    monkeypatch.setattr("adapterbank.training.trainer.FEWEST_STEPS", 1)
    collapses = [True]
    job = narrowing_job(bert, new_slot, epochs=4, collapsed=lambda *_: bool(collapses and collapses.pop()))
    (state,) = train_both_parts(bert, job)
    assert len(state.restarts) == 1
    again = dataclasses.replace(narrow_job(job, state.narrowed["units"]), collapsed=lambda *_: False, rate=job.rate / 3)
    (expected,) = small_jobs.train_jobs(bert, again)
    for name, tensor in expected.tensors["weights"].items():
        torch.testing.assert_close(state.tensors["weights"][name], tensor)


def test_the_average_begins_with_the_narrowed_weights(bert, new_slot):
    kept = []
    (state,) = train_both_parts(
        bert, narrowing_job(bert, new_slot, averages=True), keep=lambda _, state: kept.append(state)
    )
    _, narrowed, second, third = (one.tensors["weights"] for one in kept)
    for name, tensor in state.tensors["average"].items():
        torch.testing.assert_close(tensor, narrowed[name] / 4 + second[name] / 4 + third[name] / 2)


def test_patience_counts_from_the_narrowing(bert, new_slot):
    scores = [0.1, 0.2, 0.3, 0.25, 0.24, 0.23]  # two wide epochs, the narrowed adapters, and further epochs
    left = list(scores)
    job = narrowing_job(bert, new_slot, after=2, epochs=9, patience=1, score=lambda outputs: left.pop(0))
    (state,) = train_both_parts(bert, job)
    assert (state.epoch, state.best_epoch, state.best_score) == (3, 2, 0.3)


# --- a run


def test_the_package_has_the_widths_that_were_chosen(bank):
    result = bank.train("s", ROWS, ROWS, **NARROWED)
    made, about = result.package.manifest, result.record["narrowed"]
    widths = [len(units) for units in about["units"].values()]
    assert made.method["adapter"].get("widths", [made.method["adapter"]["size"]] * 6) == widths
    assert sum(widths) <= 3 * 6
    assert (made.recipe["size"], made.recipe["narrow_after"], about["epoch"]) == ("8to3", 1, 1)
    assert result.record["config"]["size"] == "8to3"
    tensors = result.package.tensors()
    assert made.params["trained"] == sum(tensor.size for tensor in tensors.values())
    found = {name.split(".adapter.")[0]: tensor.shape[0] for name, tensor in tensors.items() if "down.weight" in name}
    assert list(found.values()) == [width for width in widths if width]
    assert any(note.startswith("After epoch 1 the adapters were narrowed to ") for note in made.notes)
    assert all(finding.ok for finding in bank.audit())
    again = open_bank(bank.path, bank.backbone, device="cpu")
    assert again.evaluate("s", ROWS)["accuracy"] == result.record["metrics"]["dev"]["accuracy"]


def stop_at(epoch, step):
    def watch(progress):
        if progress.score is None and progress.epoch == epoch and progress.step == 3 * (epoch - 1) + step:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("options", [{}, {"narrow_after": 2, "average": True, "few": "never"}])
@pytest.mark.parametrize("stops", [[(1, 2)], [(2, 2)], [(2, 1), (3, 1)], [(4, 3)]])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(stops, options, bank, tmp_path, bert):
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            bank.train("s", ROWS, ROWS, watch=stop_at(*stop), resume=True, **NARROWED, **options)
    resumed = bank.train("s", ROWS, ROWS, resume=True, **NARROWED, **options)
    whole = open_bank(tmp_path / "whole", bert, device="cpu").train("s", ROWS, ROWS, **NARROWED, **options)
    assert resumed.package.manifest.weights_sha256 == whole.package.manifest.weights_sha256
    assert resumed.record["narrowed"] == whole.record["narrowed"]
    assert resumed.record["metrics"] == whole.record["metrics"]
    assert not any(path.is_dir() and any(path.iterdir()) for path in (bank.path / "runs").iterdir())


def test_a_run_that_is_stopped_between_its_parts_resumes_to_the_bit(bank, tmp_path, bert, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wide_first, "narrow", stop)
        with pytest.raises(KeyboardInterrupt):
            bank.train("s", ROWS, ROWS, **NARROWED)
    resumed = bank.train("s", ROWS, ROWS, resume=True, **NARROWED)
    whole = open_bank(tmp_path / "whole", bert, device="cpu").train("s", ROWS, ROWS, **NARROWED)
    assert resumed.package.manifest.weights_sha256 == whole.package.manifest.weights_sha256


@pytest.mark.parametrize("name", ["unknown site", "unit beyond", "no unit", "text"])
def test_a_state_with_other_units_is_refused(name, bank, bert, new_slot, tmp_path):
    job = narrowing_job(bert, new_slot)
    state = wide_first.narrow(place(bert, CPU, torch.float32), job, first_part(bert, job))
    folder = tmp_path / "state"
    run_state.save(folder, state)
    assert run_state.load(folder, job).narrowed == state.narrowed
    units = dict(state.narrowed["units"])
    site = next(iter(units))
    change = {
        "unknown site": {"layers.9.x": [1]},
        "unit beyond": {site: [8]},
        "no unit": {site: []},
        "text": {site: "1"},
    }
    state.narrowed = {**state.narrowed, "units": {**units, **change[name]}}
    run_state.save(folder, state)
    with pytest.raises(InputError, match="run again without --resume"):
        run_state.load(folder, job)
    state.narrowed["units"] = units
    run_state.save(folder, state)
    with pytest.raises(InputError, match="units are not those of the run"):
        run_state.load(folder, dataclasses.replace(job, narrowing=None))


def test_a_run_that_is_killed_after_its_put_adds_no_second_version(bank, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed

    for where, name in ((records, "write"), (run_state, "forget")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, kill)
            with pytest.raises(Killed):
                bank.train("s", ROWS, ROWS, resume=True, **NARROWED)
        assert bank.train("s", ROWS, ROWS, resume=True, **NARROWED).package.ref == "s@1"
    assert Bank.open(bank.path).versions("s") == [1]


def test_a_study_trains_several_at_once(bank, tmp_path):
    study = {"task": "s", "train": str(write(tmp_path / "rows.csv", ROWS)), **NARROWED, "size": [8, "8to3"], "seeds": 2}
    bank.sweep(study, keep="all")
    found = {(r["config"]["size"], r["config"]["seed"]): r for r in records.read_all(bank.path / "records")}
    assert len(found) == 4
    for seed in (0, 1):
        own = found["8to3", seed]["narrowed"]["units"]
        plan = Plan.from_json(bank.show(found["8to3", seed]["package"]).method)
        assert plan.additions[0].width_at == {site: len(units) for site, units in own.items() if units}
        assert "narrowed" not in found[8, seed]
    assert all(finding.ok for finding in bank.audit())


def test_a_run_starts_from_it_and_such_versions_are_averaged(bank):
    bank.train("s", ROWS, ROWS, **NARROWED)
    with pytest.raises(ConfigError, match="use --size ") as caught:
        bank.train("t", ROWS, ROWS, start_from="s", **FAST)
    size = str(caught.value).rstrip(".").rsplit("--size ", 1)[1]
    for _ in range(2):
        bank.train("t", ROWS, ROWS, start_from="s", **{**FAST, "size": size})
    assert bank.soup(["t@1", "t@2"]).method["adapter"] == bank.show("s").method["adapter"]


def test_narrowed_versions_of_one_form_are_not_averaged(bank):
    for lr in (0.01, 0.0101):
        bank.train("s", ROWS, ROWS, **{**NARROWED, "size": "8to7", "lr": lr})
    ours, its = (bank.show(f"s@{version}").method for version in (1, 2))
    problem = "s@1 was narrowed in training .size 8to7., to units of its own" if ours == its else "different forms"
    with pytest.raises(InputError, match=problem):
        bank.soup(["s@1", "s@2"])


def test_it_starts_from_a_task_of_the_first_width(bank):
    bank.train("s", ROWS, ROWS, **{**FAST, "size": 8})
    made = bank.train("t", ROWS, ROWS, start_from="s", **NARROWED)
    assert made.record["start_from"]["package"] == "s@1"
    assert made.record["narrowed"]["epoch"] == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"size": "8to8"}, "size is '8to8'; it must be narrowed to a mean width of 1 or more, below the first width"),
        ({"size": "8to0"}, "size is '8to0'; it must be narrowed to a mean width of 1 or more, below the first width"),
        ({"size": "8,4to2"}, "size is '8,4to2'; it must be a whole number, widths by layer"),
        ({"size": "8to4", "depth": 2}, "size is '8to4', but depth is 2, and only one hidden layer is narrowed"),
        ({"size": "8to4", "mix": 2}, "size is '8to4', but mix is 2, with which adapters are not narrowed"),
        ({"size": "8to4", "on": "t"}, "size is '8to4', but on is 't', with which adapters are not narrowed"),
        ({"size": "8to4", "epochs": 2, "narrow_after": 2}, "narrow_after is 2, but the run has 2 epochs"),
        ({"size": 8, "narrow_after": 2}, "narrow_after is 2, but size is 8, which stays as it is"),
        ({"size": "8to4", "few": "always"}, "few is 'always', but size is 8to4"),
        ({"method": "layernorm", "size": "8to4"}, "size is '8to4', but method 'layernorm' does not use it"),
    ],
)
def test_what_cannot_be_narrowed_is_refused_in_one_sentence(options, problem, bank):
    with pytest.raises(ConfigError) as caught:
        bank.train("s", ROWS, ROWS, **{**NARROWED, **options})
    assert any(mistake.startswith(problem) for mistake in caught.value.mistakes), caught.value.mistakes
    assert bank.tasks() == [] or len(bank.tasks()) == 0


def test_few_rows_do_not_change_the_recipe_of_a_run_that_narrows(bank):
    made = bank.train("s", ROWS, ROWS, size="8to3", max_length=32)
    assert "fitted" not in made.record
    assert made.record["narrowed"]["epoch"] == 1


def test_the_shell_narrows_too(tmp_path, bert):
    file = write(tmp_path / "rows.csv", ROWS)
    options = {**NARROWED, "narrow_after": 2}
    given = ["--bank", str(tmp_path / "bank"), "--task", "s", "--train", str(file), "--dev", str(file)]
    found = shell("train", *given, "--backbone", bert.name, "--device", "cpu", "--json", *flags(options))
    assert found.code == 0, found.err
    assert found.json["narrowed"]["epoch"] == 2
    assert json.loads(json.dumps(found.json["config"]))["narrow_after"] == 2
