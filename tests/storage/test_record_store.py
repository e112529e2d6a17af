"""Claims about `adapterbank.storage.record_store`: one record a config, in a folder or behind a URL, never changed."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from adapterbank.errors import DataError, InputError, StorageError
from adapterbank.storage import records
from adapterbank.storage.record_store import FolderStore, RemoteStore, open_ledger


@pytest.fixture(params=["folder", "file", "memory", "dir"])
def place(request, tmp_path):
    """Give a folder, its URL, an object store's, and a store that knows no puts of new objects only."""
    if request.param == "memory":
        yield f"memory://{tmp_path.name}/records"
        fsspec.filesystem("memory").store.clear()
    else:
        found = tmp_path / "records"
        yield {"folder": found, "file": f"file://{found}", "dir": f"local://{found}"}[request.param]


def record(number, value=0):
    return {"config": {"seed": number}, "value": value}


def test_a_record_is_kept_and_a_second_of_the_same_config_is_not(place):
    ledger = open_ledger(place)
    assert ledger.all() == {}
    assert ledger.add(record(1, 5))
    assert not ledger.add(record(1, 6))
    assert ledger.add(record(2))
    assert {one["value"] for one in open_ledger(place).all().values()} == {5, 0}
    assert set(ledger.all()) == {records.config_hash({"seed": n}) for n in (1, 2)}


def test_of_many_writers_at_once_one_wins(tmp_path):
    ledger = open_ledger(tmp_path / "records")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: ledger.add(record(1, n)), range(40)))
    assert sum(won) == 1
    (path,) = (tmp_path / "records").iterdir()
    assert records.read(path)["value"] == won.index(True)


def test_a_dropped_record_can_be_written_anew(place):
    ledger = open_ledger(place)
    ledger.add(record(1, 5))
    ledger.drop(records.config_hash({"seed": 1}))
    assert ledger.all() == {}
    assert ledger.add(record(1, 6))


def test_a_ledger_goes_to_another_process_and_place(place, tmp_path, monkeypatch):
    open_ledger(place).add(record(1))
    copy = pickle.loads(pickle.dumps(open_ledger(place)))
    monkeypatch.chdir(tmp_path)
    assert len(copy.all()) == 1


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = open_ledger("records")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.add(record(1))
    assert len(list((tmp_path / "records").iterdir())) == 1


def test_the_first_of_several_runs_of_one_config_counts(tmp_path):
    for value in (1, 2):
        records.write(tmp_path, record(1, value))
    assert [one["value"] for one in FolderStore(tmp_path).all().values()] == [1]


def test_what_is_no_record_is_told(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "x.json").write_text("[]")
    for place in (tmp_path / "records", f"local://{tmp_path / 'records'}"):
        with pytest.raises(DataError, match=r"x\.json is not a record"):
            open_ledger(place).all()


def test_an_unknown_kind_of_url_is_told():
    with pytest.raises(InputError, match=r"nosuch://x cannot be opened"):
        RemoteStore("nosuch://x")


def test_a_place_that_cannot_be_written_is_refused_and_a_new_one_is_not_made(place, tmp_path, monkeypatch):
    open_ledger(place).check()
    assert not (tmp_path / "records").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file cannot be used: it is a file"):
        open_ledger(tmp_path / "file" / "records").check()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(StorageError, match="cannot be written, so there is no place for records"):
        open_ledger(tmp_path / "records").check()
