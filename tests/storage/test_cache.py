"""Claims about `adapterbank.storage.cache`: damaged entries are absent, and clearing deletes nothing else."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from adapterbank.errors import StorageError
from adapterbank.storage import cache

ARRAYS = {"a": np.arange(1000), "b": np.array([[1.5, -2.0]]), "c": np.array([True, False])}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_stored_arrays_are_returned() -> None:
    assert cache.get("key") is None
    cache.put("key", ARRAYS)
    found = cache.get("key")
    assert found is not None
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("where", [0, 40, 500, 3000, -30])
def test_any_damaged_byte_makes_an_entry_absent_or_leaves_it_correct(folder: Path, where: int) -> None:
    cache.put("key", ARRAYS)
    file = folder / "key.npz"
    data = bytearray(file.read_bytes())
    data[where] ^= 0xFF
    file.write_bytes(bytes(data))
    found = cache.get("key")
    assert found is None or all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_every_byte_of_the_archives_directory_may_be_damaged(folder: Path) -> None:
    """Among them are the bit for "encrypted" and the bytes of the compression method."""
    cache.put("key", {"a": np.arange(3)})
    file = folder / "key.npz"
    whole = file.read_bytes()
    places = [*range(40), *range(whole.index(b"PK\1\2"), len(whole))]
    for place in places:
        for bits in (1, 8, 0xFF):
            data = bytearray(whole)
            data[place] ^= bits
            file.write_bytes(bytes(data))
            found = cache.get("key")
            assert found is None or all(np.array_equal(array, np.arange(3)) for array in found.values()), place


def test_a_missing_home_folder_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTERBANK_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(StorageError, match="ADAPTERBANK_CACHE is '~nobody-of-this-name/x'"):
        cache.folder()


def seal(file: Path) -> None:
    """Append the checksum with which an entry ends, so that what is wrong with it is its content."""
    data = file.read_bytes()
    file.write_bytes(data + hashlib.sha256(data).digest())


def test_a_sealed_archive_is_an_entry(folder: Path) -> None:
    folder.mkdir()
    np.savez(folder / "key.npz", a=np.arange(3))
    assert cache.get("key") is None
    seal(folder / "key.npz")
    assert list((cache.get("key") or {})["a"]) == [0, 1, 2]


def test_a_pickle_is_never_opened(folder: Path) -> None:
    folder.mkdir()
    np.savez(folder / "key.npz", a=np.array([{"code": 1}], dtype=object))
    seal(folder / "key.npz")
    assert cache.get("key") is None


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text.encode() + b"\n"


@pytest.mark.parametrize(
    "member",
    [
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}") + b"\0" * 4,
        header("{'descr': ('<f4',), 'fortran_order': False, 'shape': (1,)}") + b"\0" * 4,
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1"),
        header("((((((((("),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}"),
        b"no array at all",
    ],
)
def test_a_member_that_is_no_array_makes_an_entry_absent(folder: Path, member: bytes) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "key.npz", "w") as archive:
        archive.writestr("a.npy", member)
    seal(folder / "key.npz")
    assert cache.get("key") is None


def test_an_array_without_an_archive_makes_an_entry_absent(folder: Path) -> None:
    folder.mkdir()
    with (folder / "key.npz").open("wb") as file:
        np.save(file, np.arange(3))
    seal(folder / "key.npz")
    assert cache.get("key") is None


def test_clearing_removes_entries_and_leftovers_and_nothing_else(folder: Path) -> None:
    cache.put("one", ARRAYS)
    cache.put("two", ARRAYS)
    (folder / ".tmp-left").write_bytes(b"half")
    (folder / "mine.txt").write_text("a note")
    entries, taken = cache.usage()
    assert entries == 2
    assert taken == sum(path.stat().st_size for path in folder.glob("*.npz"))
    assert cache.clear() == (entries, taken)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert cache.usage() == cache.clear() == (0, 0)


def test_a_disk_error_does_not_fail_the_run(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    cache.put("key", ARRAYS)
    assert cache.get("key") is None


def test_the_default_folder_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ADAPTERBANK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "adapterbank"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.fspath(cache.folder()) == str(tmp_path / ".cache" / "adapterbank")


def test_a_changed_shape_makes_an_entry_absent_although_numpy_would_read_it() -> None:
    cache.put("a", {"tokens": np.arange(1000)})
    (path,) = cache.folder().glob("a.npz")
    path.write_bytes(path.read_bytes().replace(b"(1000,)", b"(0000,)"))
    assert cache.get("a") is None
