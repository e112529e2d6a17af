"""What an unfinished run stands on is kept: while its process has its folder, and as long as its state is there."""

from __future__ import annotations

import pytest

from adapterbank.errors import PackageRequired
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from adapterbank.storage.leases import leased, unfinished
from packages import BACKBONE, put


@pytest.fixture
def bank(tmp_path):
    bank = Bank.open(tmp_path / "bank", BACKBONE, create=True)
    put(bank, "base", "other")
    return bank


def test_a_run_that_goes_on_protects_what_it_stands_on(bank):
    message = (
        r"base@1 cannot be removed, because the unfinished run one of 'rte' stands on it; remove it first; "
        r"let a run end, or remove its state by gc --runs\."
    )
    folder = bank.runs_path / "one"
    with files.claimed(folder), leased(folder, "rte", ["base@1"]):
        with pytest.raises(PackageRequired, match=message):
            bank.remove("base")
        bank.remove("other")
    assert not folder.exists()
    bank.remove("base")


def test_it_does_so_as_long_as_its_state_is_there(bank):
    folder = bank.runs_path / "one"
    with files.claimed(folder), leased(folder, "rte", ["base@1"]):
        (folder / "state.json").write_text("{}")
    with pytest.raises(PackageRequired, match="the unfinished run one of 'rte'"):
        bank.remove("base@1")
    put(bank, "base")
    put(bank, "base")
    assert bank.gc(older_than_seconds=0) == []
    files.discard(folder)
    assert [removed.path.name for removed in bank.gc(older_than_seconds=0)] == ["1"]


def test_a_run_that_was_killed_before_it_had_a_state_protects_nothing(bank):
    folder = bank.runs_path / "one"
    with files.claimed(folder), leased(folder, "rte", ["base@1"]):
        left = (folder / "stands-on.json").read_bytes()
    folder.mkdir(parents=True)
    (folder / "stands-on.json").write_bytes(left)
    assert unfinished(bank.runs_path) == {}
    bank.remove("base")


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"requires": 3, "task": "rte"}'])
def test_a_damaged_file_hides_nothing_else(bank, damaged):
    for name in ("one", "two"):
        (bank.runs_path / name).mkdir(parents=True)
        (bank.runs_path / name / "state.json").write_text("{}")
    (bank.runs_path / "one" / "stands-on.json").write_text(damaged)
    with leased(bank.runs_path / "two", "sst2", ["other@1"]):
        assert unfinished(bank.runs_path) == {"other@1": ["the unfinished run two of 'sst2'"]}
    bank.remove("base")


def test_a_run_that_stands_on_nothing_writes_nothing(tmp_path):
    with leased(tmp_path, "rte", []):
        assert list(tmp_path.iterdir()) == []
