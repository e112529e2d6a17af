"""Claims about `adapterbank.storage.files`: atomic writes, and a clear message for each disk error."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from adapterbank.errors import InputError, StorageError
from adapterbank.storage import files, reading


def refuse(code: int) -> Callable[..., NoReturn]:
    """Return a stand-in for a system call that fails."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call


def fill(final: Path, then: Callable[[], object] = lambda: None) -> None:
    """Write an atomic folder with one file, and call `then` before it is renamed."""
    with files.atomic_folder(final) as temporary:
        (temporary / "a").write_text("1")
        then()


def test_the_checksum_of_bytes_is_that_of_a_file_with_these_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert files.sha256_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert reading.sha256_file(tmp_path / "x") == files.sha256_bytes(b"abc")


def test_canonical_json_depends_on_neither_key_order_nor_container() -> None:
    assert files.canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'


def test_canonical_json_is_the_same_before_and_after_writing_and_reading_a_file(tmp_path: Path) -> None:
    value = {"by seed": {2: 0.1, 10: 1e-17}, "x": 1.0}
    files.write_json(tmp_path / "v.json", value)
    assert files.canonical_json(reading.read_json(tmp_path / "v.json")) == files.canonical_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"raw", "\ud800"])
def test_a_value_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match="cannot be stored as JSON"):
        files.canonical_json({"v": value})
    with pytest.raises(InputError, match="cannot be stored as JSON"):
        files.write_json(tmp_path / "v.json", {"v": value})
    assert list(tmp_path.iterdir()) == []


def test_written_json_is_indented_ends_in_a_newline_and_keeps_its_order(tmp_path: Path) -> None:
    files.write_json(tmp_path / "v.json", {"b": 1, "a": "é"})
    assert (tmp_path / "v.json").read_text(encoding="utf-8") == '{\n  "b": 1,\n  "a": "é"\n}\n'


def test_atomic_write_creates_folders_replaces_files_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x"
    files.atomic_write(path, b"old")
    files.atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["x"]


def test_the_umask_decides_who_can_read_a_written_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.atomic_write(tmp_path / "x", b"")
        with files.atomic_folder(tmp_path / "f"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o755


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_failed_write_keeps_the_old_file_and_names_path_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, call, refuse(code))
    with pytest.raises(StorageError) as caught:
        files.atomic_write(tmp_path / "x", b"new")
    assert str(tmp_path / "x") in str(caught.value)
    assert any(word in str(caught.value) for word in ("free some space", "choose"))
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_real_full_device_is_explained() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(StorageError, match=r"/dev/full .*the disk is full; free some space"),
        files.storage_errors(Path("/dev/full")),
        open("/dev/full", "wb") as file,
    ):
        file.write(b"x")


def test_any_error_of_the_system_names_the_path(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=f"{tmp_path.name} cannot be used: Input/output error"),
        files.storage_errors(tmp_path),
    ):
        raise OSError(errno.EIO, "bad")


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_a_missing_or_existing_file_is_left_to_the_caller(tmp_path: Path, error: type[OSError]) -> None:
    with pytest.raises(error), files.storage_errors(tmp_path):
        raise error


def test_a_folder_that_cannot_be_flushed_does_not_fail_a_completed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not here")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    files.atomic_write(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_file_in_the_way_of_a_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    for path in (tmp_path / "x", tmp_path / "x" / "y"):
        with pytest.raises(StorageError, match="file"):
            files.make_folder(path)


@pytest.mark.parametrize("links", [True, False])
def test_atomic_create_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EOPNOTSUPP))
    files.atomic_create(tmp_path / "x", b"first")
    with pytest.raises(FileExistsError):
        files.atomic_create(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_an_atomic_folder_is_hidden_until_it_is_complete(tmp_path: Path) -> None:
    with files.atomic_folder(tmp_path / "p") as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".tmp-")
        (temporary / "a").write_text("1")
        assert not (tmp_path / "p").exists()
    assert (tmp_path / "p" / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_interrupted_folder_is_deleted(tmp_path: Path, interruption: type[BaseException]) -> None:
    def interrupt() -> NoReturn:
        raise interruption

    with pytest.raises(interruption):
        fill(tmp_path / "p", interrupt)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_inside_an_atomic_folder_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="disk is full"):
        fill(tmp_path / "p", lambda: monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("late", [False, True])
def test_an_atomic_folder_does_not_replace_another(tmp_path: Path, late: bool) -> None:
    def take_the_name() -> None:
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "mine").write_text("kept")

    if not late:
        take_the_name()
    with pytest.raises(FileExistsError):
        fill(tmp_path / "p", take_the_name if late else lambda: None)
    assert os.listdir(tmp_path / "p") == ["mine"]
    assert os.listdir(tmp_path) == ["p"]


def test_not_even_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    with pytest.raises(FileExistsError):
        fill(tmp_path / "p")
    assert os.listdir(tmp_path / "p") == []


def test_a_name_taken_between_the_check_and_the_rename_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "mine").write_text("kept")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(FileExistsError):
        fill(tmp_path / "p")
    assert os.listdir(tmp_path / "p") == ["mine"]


def test_only_one_of_many_threads_holds_the_lock(tmp_path: Path) -> None:
    counter = tmp_path / "n"
    counter.write_text("0")

    def add() -> None:
        for _ in range(10):
            with files.locked(tmp_path / ".lock"):
                value = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(value + 1))

    threads = [threading.Thread(target=add) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "60"


def test_a_lock_is_free_again_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), files.locked(tmp_path / ".lock"):
        raise ValueError("inside")
    with files.locked(tmp_path / ".lock"):
        pass


def test_a_lock_that_cannot_be_written_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refuse(errno.EROFS))
    with pytest.raises(StorageError, match="read-only"), files.locked(tmp_path / ".lock"):
        pass


def test_only_old_unfinished_files_count_as_leftovers(tmp_path: Path) -> None:
    for name in (".tmp-old", ".tmp-new", ".tmp-busy", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(json.dumps("12"))
    hour_ago = time.time() - 3600
    for path in (".tmp-old", ".tmp-old/a", ".tmp-busy", "kept", "kept/a"):
        os.utime(tmp_path / path, (hour_ago, hour_ago))
    assert files.leftovers([tmp_path], 1800) == [tmp_path / ".tmp-old"]


def test_size_counts_files_and_not_folders(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"45")
    assert files.size_of(tmp_path) == 5
    assert files.size_of(tmp_path / "b") == 2
    assert files.size_of(tmp_path / "gone") == 0


def test_discard_deletes_files_and_folders_and_ignores_missing_ones(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    for name in ("d", "b", "gone"):
        files.discard(tmp_path / name)
    assert os.listdir(tmp_path) == []
