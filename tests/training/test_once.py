"""Claims about `adapterbank.training.once`: a run that is killed after its put, at any point, adds one version."""

from __future__ import annotations

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.config import parse
from adapterbank.storage import files, pointers, records
from adapterbank.storage.bank import Bank
from adapterbank.tasks.tables import table_from
from adapterbank.training import run_state
from adapterbank.training.builder import RunBuilder
from adapterbank.training.dataset import DatasetReader, canonical
from adapterbank.training.once import is_version_of
from small_data import FAST, reviews

ROWS = reviews()


class Killed(BaseException):
    """Ends a run like a kill: nothing catches it."""


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def kill(*given, **named):
    raise Killed


def killed_at(monkeypatch, bank, where, name, **options):
    with monkeypatch.context() as patch:
        patch.setattr(where, name, kill)
        with pytest.raises(Killed):
            bank.train("s", ROWS, ROWS, **{**FAST, **options})


def versions(bank):
    return Bank.open(bank.path).versions("s"), Bank.open(bank.path).default("s")


@pytest.mark.parametrize(("where", "name"), [(records, "write"), (run_state, "forget")])
def test_a_run_killed_after_its_put_adds_one_version_and_one_record(bank, monkeypatch, where, name):
    killed_at(monkeypatch, bank, where, name)
    result = bank.train("s", ROWS, ROWS, resume=True, **FAST)
    assert versions(bank) == ([1], 1)
    assert (result.package.ref, result.record["package"]) == ("s@1", "s@1")
    assert [record["package"] for record in records.read_all(bank.path / "records")] == ["s@1"]
    assert not any(path.is_dir() and any(path.iterdir()) for path in (bank.path / "runs").iterdir())
    again = bank.train("s", ROWS, ROWS, resume=True, **FAST)  # as if it had been killed at its very end
    assert (again.package.ref, versions(bank)) == ("s@1", ([1], 1))


def test_a_run_killed_between_its_version_and_the_pointer_becomes_the_default(bank, monkeypatch):
    bank.train("s", ROWS, ROWS, **FAST, seed=1)
    killed_at(monkeypatch, bank, records, "write")
    pointers.write(bank.path / "tasks" / "s" / pointers.FILE, "s", pointers.Pointers(1, (), 1))  # as a kill leaves it
    assert bank.train("s", ROWS, ROWS, resume=True, **FAST).package.ref == "s@2"
    assert versions(bank) == ([1, 2], 2)


def test_a_resumed_run_leaves_a_better_default_as_the_run_had(bank, monkeypatch):
    wrong = [(text, "negative") for text, _ in ROWS[:12]] + [(text, "positive") for text, _ in ROWS[12:]]
    bank.train("s", ROWS, ROWS, **{**FAST, "epochs": 8})
    options = {**FAST, "default": "better"}
    with monkeypatch.context() as patch:
        patch.setattr(records, "write", kill)
        with pytest.raises(Killed):
            bank.train("s", wrong, ROWS, **options)
    assert versions(bank) == ([1, 2], 1)
    assert bank.train("s", wrong, ROWS, resume=True, **options).package.ref == "s@2"
    assert versions(bank) == ([1, 2], 1)


def test_an_earlier_version_of_the_same_run_is_not_taken_for_it(bank, monkeypatch):
    bank.train("s", ROWS, ROWS, **FAST)
    bank.train("s", ROWS, ROWS, **FAST, seed=1)
    killed_at(monkeypatch, bank, Bank, "put")
    assert bank.train("s", ROWS, ROWS, resume=True, **FAST).package.ref == "s@3"
    bank.train("s", ROWS, ROWS, **FAST, seed=1)
    assert bank.train("s", ROWS, ROWS, resume=True, **FAST).package.ref == "s@5"
    assert bank.train("s", ROWS, ROWS, **FAST).package.ref == "s@6"


@pytest.mark.parametrize(("where", "name"), [(records, "write"), (run_state, "forget")])
def test_a_run_that_continues_its_own_task_is_killed_after_its_put_and_adds_one_version(bank, monkeypatch, where, name):
    bank.train("s", ROWS, ROWS, **FAST)
    killed_at(monkeypatch, bank, where, name, start_from="s")
    result = bank.train("s", ROWS, ROWS, resume=True, start_from="s", **FAST)
    assert (result.package.ref, versions(bank)) == ("s@2", ([1, 2], 2))
    assert bank.train("s", ROWS, ROWS, start_from="s", **FAST).record["start_from"]["package"] == "s@2"
    killed_at(monkeypatch, bank, Bank, "put", start_from="s")
    assert bank.train("s", ROWS, ROWS, resume=True, start_from="s", **FAST).record["start_from"]["package"] == "s@3"
    assert versions(bank) == ([1, 2, 3, 4], 4)


def test_a_sweep_killed_between_a_package_and_its_record_adds_no_second_version(bank, monkeypatch):
    files.write_json(bank.path.parent / "rows.json", [{"text": text, "label": label} for text, label in ROWS])
    rows = str(bank.path.parent / "rows.json")
    for keep in ("all", "best"):
        study = {"task": keep, "train": rows, "dev": rows, **FAST}
        with monkeypatch.context() as patch:
            patch.setattr("adapterbank.studies.sweep._end", kill)
            with pytest.raises(Killed):
                bank.sweep(study, keep=keep)
        bank.sweep(study, keep=keep)
        assert Bank.open(bank.path).versions(keep) == [1]
    kept = [record["package"] for record in records.read_all(bank.path / "records")]
    assert sorted(kept) == ["all@1", "best@1"]


@pytest.mark.parametrize("more", [{"mix": 2}, {"average": True}, {"size": "4to2", "epochs": 2}])
def test_a_version_of_a_plainer_run_is_not_taken_for_that_of_an_interrupted_one(bank, more):
    recipe = {**FAST, "few": "never", "size": 4, "epochs": 2}
    plain = bank.train("s", ROWS, ROWS, **recipe).package.manifest
    reader = DatasetReader({"train": table_from(ROWS, "train"), "dev": table_from(ROWS, "dev")})
    for options, own in ((recipe, True), ({**recipe, **more}, False)):
        config = canonical(parse({**options, "task": "s", "device": "cpu"}), reader.splits)
        assert is_version_of(plain, RunBuilder(bank.backbone, reader=reader).resolve(config)) is own
