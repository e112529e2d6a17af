"""Claims about `adapterbank.storage.record_store`: one record per config, in a folder or at a URL, never changed."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from adapterbank.errors import DataError, InputError, StorageError
from adapterbank.storage import records
from adapterbank.storage.record_store import FolderStore, RemoteStore, open_store


@pytest.fixture(params=["folder", "file", "memory", "dir"])
def place(request, tmp_path):
    """Yield a folder, its URL, the URL of an object store, and that of a store without conditional puts."""
    if request.param == "memory":
        yield f"memory://{tmp_path.name}/records"
        fsspec.filesystem("memory").store.clear()
    else:
        found = tmp_path / "records"
        yield {"folder": found, "file": f"file://{found}", "dir": f"local://{found}"}[request.param]


def record(number, value=0):
    return {"config": {"seed": number}, "value": value}


def test_a_record_is_stored_and_a_second_one_of_the_same_config_is_not(place):
    store = open_store(place)
    assert store.all() == {}
    assert store.add(record(1, 5))
    assert not store.add(record(1, 6))
    assert store.add(record(2))
    assert {one["value"] for one in open_store(place).all().values()} == {5, 0}
    assert set(store.all()) == {records.config_hash({"seed": n}) for n in (1, 2)}


def test_one_of_many_concurrent_writers_wins(tmp_path):
    store = open_store(tmp_path / "records")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store.add(record(1, n)), range(40)))
    assert sum(won) == 1
    (path,) = (tmp_path / "records").iterdir()
    assert records.read(path)["value"] == won.index(True)


def test_a_dropped_record_can_be_written_again(place):
    store = open_store(place)
    store.add(record(1, 5))
    store.drop(records.config_hash({"seed": 1}))
    assert store.all() == {}
    assert store.add(record(1, 6))


def test_a_store_works_in_another_process_and_working_directory(place, tmp_path, monkeypatch):
    open_store(place).add(record(1))
    copy = pickle.loads(pickle.dumps(open_store(place)))
    monkeypatch.chdir(tmp_path)
    assert len(copy.all()) == 1


def test_a_relative_folder_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("records")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.add(record(1))
    assert len(list((tmp_path / "records").iterdir())) == 1


def test_each_record_is_parsed_once_and_new_ones_are_found(place, monkeypatch):
    store, parsed, real = open_store(place), [], records.decode

    def decode(data, file):
        found = real(data, file)
        parsed.append(found["config"]["seed"])
        return found

    for number in (1, 2):
        open_store(place).add(record(number))
    monkeypatch.setattr(records, "decode", decode)
    assert len(store.all()) == len(store.all()) == 2
    assert sorted(parsed) == [1, 2]
    other = open_store(place)  # of another process
    other.add(record(3))
    parsed.clear()
    assert len(store.all()) == 3
    assert parsed == [3]


def test_a_record_that_another_process_has_replaced_is_read_again(tmp_path):
    store, other = open_store(tmp_path), open_store(tmp_path)
    store.add(record(1, 5))
    assert [one["value"] for one in store.all().values()] == [5]
    other.drop(records.config_hash({"seed": 1}))
    assert store.all() == {}
    other.add(record(1, 6))
    assert [one["value"] for one in store.all().values()] == [6]


def test_a_pickled_store_carries_no_records(place):
    store = open_store(place)
    empty = len(pickle.dumps(store))
    store.add(record(1))
    assert len(store.all()) == 1
    assert len(pickle.dumps(store)) == empty


def test_the_first_of_several_runs_of_one_config_counts(tmp_path):
    for value in (1, 2):
        records.write(tmp_path, record(1, value))
    assert [one["value"] for one in FolderStore(tmp_path).all().values()] == [1]


def test_a_file_that_is_not_a_record_is_reported(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "x.json").write_text("[]")
    for place in (tmp_path / "records", f"local://{tmp_path / 'records'}"):
        with pytest.raises(DataError, match=r"x\.json is not a record"):
            open_store(place).all()


def test_an_unknown_url_scheme_is_reported():
    with pytest.raises(InputError, match=r"nosuch://x cannot be opened"):
        RemoteStore("nosuch://x")


def test_an_unwritable_folder_is_refused_and_a_new_one_is_not_created(place, tmp_path, monkeypatch):
    open_store(place).check()
    assert not (tmp_path / "records").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file cannot be used: it is a file"):
        open_store(tmp_path / "file" / "records").check()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(StorageError, match="is not writable, so records cannot be stored there"):
        open_store(tmp_path / "records").check()
