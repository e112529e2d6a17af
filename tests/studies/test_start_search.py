"""Claims about the automatic start: a bounded race on the task's own rows, and its winner, or none, is taken."""

from __future__ import annotations

import random

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError
from adapterbank.studies import start_search
from adapterbank.studies.start_search import MOST, STEPS, RaceTrial, explain
from small_data import FAST, flags, reviews, shell, write

ROWS = reviews(300)
OPTIONS = {**FAST, "few": "never", "epochs": 1}
AUTO = {**OPTIONS, "start_from": "auto"}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few steps, so that a task that knows the words is ahead."""
    monkeypatch.setattr(start_search, "STEPS", (1, 2, 3))


def renamed(rows):
    """Return the same question with other label names and in another order."""
    names = {"negative": "dull", "positive": "fine"}
    return [(text, names[label]) for text, label in random.Random(0).sample(rows, len(rows))]


def noise(rows):
    return [(text, random.Random(i).choice(("red", "blue"))) for i, (text, _) in enumerate(rows)]


@pytest.fixture
def known(bank):
    """Return a bank with a task that helps and one that does not."""
    bank.train("helps", ROWS, ROWS, **{**OPTIONS, "epochs": 3})
    bank.train("noise", noise(ROWS), noise(ROWS), **{**OPTIONS, "lr": 0.05})
    return bank


def test_the_task_that_helps_is_chosen_and_the_record_and_the_notes_say_so(known):
    notes, stages = [], []
    result = known.train("t", renamed(ROWS), note=notes.append, stage=lambda *a: stages.append(a), **AUTO)
    found = result.record["starting"]
    assert result.record["start_from"]["package"] == "helps@1"
    assert result.record["config"]["start_from"] == "helps@1"
    assert {(one["start"], one["round"]) for one in found["trials"]} >= {("noise@1", 1), ("none", 1), ("none", 3)}
    assert found["reason"] in notes
    assert found["reason"].startswith("The run starts from helps@1: ")
    assert found["rows"] + found["held_out"] == result.record["config"]["data"]["train"]["rows"]
    what = f"round 1 of 3: 3 starts, 1 steps each; best on {found['held_out']} held-out rows"
    assert any(note.startswith(what) for note in notes)
    assert any(what.startswith("round 3 of 3") for what, _, _ in stages)


def test_the_package_is_that_of_a_run_that_names_the_task(known, tmp_path):
    auto = known.train("t", renamed(ROWS), **AUTO)
    named = known.train("t", renamed(ROWS), **{**OPTIONS, "start_from": auto.record["config"]["start_from"]})
    assert named.package.manifest.weights_sha256 == auto.package.manifest.weights_sha256
    assert named.record["config"] == auto.record["config"]


def test_new_tensors_win_where_no_task_scores_higher(known, monkeypatch):
    monkeypatch.setattr(start_search, "_scores", lambda jobs, *rest: [0.5] * len(jobs))
    result = known.train("t", renamed(ROWS), **AUTO)
    assert "start_from" not in result.record["config"]
    assert result.record["starting"]["reason"] == (
        "The run starts with new tensors: 0.5000 on the held-out rows, and 0.5000 from helps@1."
    )
    plain = known.train("t", renamed(ROWS), **OPTIONS)
    assert plain.package.manifest.weights_sha256 == result.package.manifest.weights_sha256


def test_its_own_versions_and_tasks_of_the_same_rows_or_another_form_take_no_part(known):
    known.train("t", renamed(ROWS), **OPTIONS)
    known.train("same", renamed(ROWS), **OPTIONS)
    known.train("wide", ROWS, ROWS, **{**OPTIONS, "size": 8})
    found = known.train("t", renamed(ROWS), **AUTO).record["starting"]
    assert {one["start"] for one in found["trials"]} == {"none", "helps@1", "noise@1"}
    assert found["left_out"] == {"wide@1": found["left_out"]["wide@1"]}
    assert "wide@1 has size 8" in found["left_out"]["wide@1"]


def test_a_damaged_package_takes_no_part(known):
    weights = known.bank.get("helps").path / "weights.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    found = known.train("t", renamed(ROWS), **AUTO).record["starting"]
    assert "has been changed" in found["left_out"]["helps@1"]


def test_the_rounds_are_bounded_and_new_tensors_take_part_in_each(known, monkeypatch):
    monkeypatch.setattr(start_search, "STEPS", STEPS)
    counts = []

    def scores(jobs, course, encoder, watch):
        steps = [job.epochs * -(-job.train.units // job.batch) for job in jobs]
        assert all(job.train is jobs[0].train and not job.averages for job in jobs)
        counts.append((len(jobs), max(steps), len(course.held_out)))
        return list(range(len(jobs)))

    monkeypatch.setattr(start_search, "_scores", scores)
    real = start_search.Starts.fitting

    def many(starts, plan, may, most, base=None):
        found, _ = real(starts, plan, may, most)
        return (found * 20)[:most], {}

    monkeypatch.setattr(start_search.Starts, "fitting", many)
    known.train("t", renamed(ROWS), **{**AUTO, "batch": 32, "average": True})
    assert [count for count, _, _ in counts] == [MOST, MOST // 2, MOST // 4]
    assert all(steps <= most for (_, steps, _), most in zip(counts, STEPS, strict=True))
    assert sum(count * steps for count, steps, _ in counts) <= 960


def test_only_as_many_tasks_as_a_race_takes_are_read_those_with_the_most_rows(known):
    from adapterbank.training.builder import RunBuilder
    from adapterbank.training.dataset import DatasetReader, canonical
    from adapterbank.training.start import Starts

    known.train("small", reviews(40), reviews(40), **OPTIONS)
    reader = DatasetReader({"train": ROWS, "dev": ROWS})
    config = start_search.Config(task="t", **{**OPTIONS, "device": "cpu"})
    plan = RunBuilder(known.backbone, reader=reader).resolve(canonical(config, reader.splits)).plan
    found, left_out = Starts(known.backbone, known.path).fitting(plan, lambda manifest: True, 2)
    assert [start.ref for start in found] == ["helps@1", "noise@1"]
    assert left_out == {"small@1": "the 2 tasks that are compared were trained on more rows"}


@pytest.mark.parametrize(
    ("rows", "options", "note"),
    [
        (renamed(ROWS)[:100], {}, "the training rows are too few to hold some out"),
        (renamed(ROWS), {"size": 3}, "no task of the bank has the same form"),
        (renamed(ROWS), {"few": "always"}, "the training rows are too few to hold some out"),
    ],
)
def test_without_rows_or_tasks_to_compare_the_run_starts_with_new_tensors_and_says_so(known, rows, options, note):
    notes = []
    result = known.train("t", rows, note=notes.append, **{**AUTO, **options})
    assert f"start_from is 'auto', but {note}; the run starts with new tensors." in notes
    assert "start_from" not in result.record["config"]


def test_slots_that_cannot_share_a_batch_are_not_raced(known):
    options = {name: value for name, value in AUTO.items() if name != "size"}
    with pytest.raises(ConfigError, match="slots of method 'full' do not share a batch; name the task to start from"):
        known.train("t", renamed(ROWS), **options, method="full")


def test_in_a_new_bank_the_run_starts_with_new_tensors(bank):
    assert "no task of the bank" in bank.train("t", ROWS, **AUTO).record["starting"]["reason"]


def test_a_run_that_diverges_loses_the_race(known, monkeypatch):
    real = start_search.train

    def train(encoder, jobs, **options):
        states = real(encoder, jobs, **options)
        states[1].failure = "the loss became nan"
        return states

    monkeypatch.setattr(start_search, "train", train)
    result = known.train("t", renamed(ROWS), **AUTO)
    first = [one for one in result.record["starting"]["trials"] if one["round"] == 1]
    assert [one["score"] is None for one in first] == [False, True, False]


def test_the_reason_names_the_best_task_beside_new_tensors():
    last = [RaceTrial("none", 3, 80, 0.5), RaceTrial("a@1", 3, 80, 0.75), RaceTrial("b@1", 3, 80, 0.25)]
    assert explain(None, last) == "The run starts with new tensors: 0.5000 on the held-out rows, and 0.7500 from a@1."


def test_the_shell_and_a_study_each_say_what_they_can_do(known, tmp_path, checkpoint):
    file = write(tmp_path / "t.csv", renamed(ROWS))
    words = ("train", "--bank", known.path, "--task", "t", "--train", file, "--backbone", checkpoint("bert")[0])
    found = shell(*words, *flags({**AUTO, "device": "cpu"}))
    assert found.code == 0, found
    assert "The run starts from helps@1" in found.err
    refused = shell(*words, *flags(AUTO), "--resume")
    assert (refused.code, "start_from is 'auto', which cannot be resumed" in refused.err) == (2, True)
    with pytest.raises(ConfigError, match="start_from is 'auto', which only train can use; list the tasks"):
        known.sweep({"task": "t", "train": str(file), "start_from": ["auto", "none"]})
