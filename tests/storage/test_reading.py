"""Claims about `adapterbank.storage.reading`: only regular files of a known size are read, and nothing blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterbank.errors import InputError, StorageError
from adapterbank.storage import files, reading


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))


ODD: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "it is a pipe, not a regular file"),
    (Path.mkdir, "it is a folder, not a regular file"),
    (loop, "it is a link that leads to itself"),
    (sparse, "has 10,737,418,240 bytes, more than the 1,048,576"),
    (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    (unix_socket, "it is a socket"),
]


@pytest.mark.parametrize(("make", "problem"), ODD)
def test_an_odd_file_is_refused_at_once_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    make(Path("odd"))
    for read in (reading.read_json, reading.read_checked):
        with pytest.raises(StorageError, match=f"^odd .*{problem}"):
            read(Path("odd"), reading.SMALL)


def test_a_file_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert reading.read_file(tmp_path / "x", 3) == b"abc"
    with pytest.raises(StorageError, match="has 3 bytes, more than the 2"):
        reading.read_file(tmp_path / "x", 2)


def test_a_file_that_says_it_is_empty_and_is_not_is_read_no_further_than_the_limit() -> None:
    """Files in /proc have a size of 0, like one that grows after its size was read."""
    assert reading.read_file("/proc/self/status", 1 << 20).startswith(b"Name:")
    with pytest.raises(StorageError, match="grows while it is read"):
        reading.read_file("/proc/self/status", 10)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("x")
    assert reading.read_json(tmp_path / "link") == [1]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000, b"1" * 5000])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "v.json").write_bytes(data)
    with pytest.raises(InputError, match=r"v\.json is not JSON"):
        reading.read_json(tmp_path / "v.json")


def test_a_missing_json_file_is_distinguished_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reading.read_json(tmp_path / "v.json")


def test_every_flipped_bit_of_a_sealed_file_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    value: dict[str, Any] = {"default": 2, "previous": [1], "last": 2}
    whole = files.pretty_json(reading.seal(value))
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "v.json").write_bytes(flipped)
        try:
            assert reading.read_checked(tmp_path / "v.json", before=tuple(value)) == value
        except InputError:
            continue


def test_a_file_from_before_checksums_has_exactly_the_fields_of_then(tmp_path: Path) -> None:
    files.write_json(tmp_path / "v.json", {"a": 1, "b": 2})
    assert reading.read_checked(tmp_path / "v.json", before=("a", "b")) == {"a": 1, "b": 2}
    for before in ((), ("a",), ("a", "b", "c")):
        with pytest.raises(InputError, match="was changed after it was written"):
            reading.read_checked(tmp_path / "v.json", before=before)
