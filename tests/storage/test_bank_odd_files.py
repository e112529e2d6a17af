"""Promise: whatever lies in a bank's folder, what is wrong with it is told by task, and no other task suffers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterbank.errors import AdapterbankError, BankError, InputError, PackageDamaged, StorageError
from adapterbank.storage import files, reading
from adapterbank.storage.bank import Bank
from packages import TENSORS, draft, pointers, put

pytestmark = pytest.mark.usefixtures("no_flush")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


@pytest.mark.parametrize("make", [fifo, folder, loop, sparse])
@pytest.mark.parametrize("file", ["task.json", "1/manifest.json"])
def test_an_odd_file_is_named_and_hides_no_other_task(bank: Bank, file: str, make: Callable[[Path], None]) -> None:
    put(bank, "mrpc", "sst2", "wnli")
    odd = bank.path / "tasks" / "sst2" / file
    odd.unlink()
    make(odd)
    packages, problems = bank.listing()
    assert [package.manifest.name for package in packages] == ["mrpc", "wnli"]
    assert len(problems) == 1
    assert str(odd) in problems[0]
    with pytest.raises(AdapterbankError, match=file):
        bank.get("sst2")
    assert bank.names() == ["mrpc", "sst2", "wnli"]
    assert bank.gc(older_than_seconds=0) == []
    bank.put(draft("mrpc"), TENSORS)
    assert bank.get("mrpc").ref == "mrpc@2"


@pytest.mark.parametrize("make", [fifo, folder, loop, sparse])
def test_an_odd_weights_file_is_named(bank: Bank, make: Callable[[Path], None]) -> None:
    package = bank.put(draft(), TENSORS)
    odd = package.path / "weights.safetensors"
    odd.unlink()
    make(odd)
    with pytest.raises(AdapterbankError, match=r"weights\.safetensors"):
        package.tensors()


@pytest.mark.parametrize("make", [fifo, folder, loop])
def test_an_odd_head_of_the_bank_is_named(bank: Bank, make: Callable[[Path], None]) -> None:
    (bank.path / "bank.json").unlink()
    make(bank.path / "bank.json")
    with pytest.raises(AdapterbankError, match=r"bank\.json"):
        Bank.open(bank.path)


def test_a_file_in_place_of_a_task_is_named(bank: Bank) -> None:
    put(bank, "mrpc", "sst2")
    shutil.rmtree(bank.path / "tasks" / "sst2")
    (bank.path / "tasks" / "sst2").write_text("")
    packages, problems = bank.listing()
    assert [package.manifest.name for package in packages] == ["mrpc"]
    assert "tasks/sst2 is not a folder of a task; remove it" in problems[0]
    assert bank.gc(older_than_seconds=0) == []
    with pytest.raises(AdapterbankError, match="sst2"):
        bank.put(draft("sst2"), TENSORS)


# --- pointers


def change_pointers(bank: Bank, name: str, **changes: object) -> None:
    """Change pointers and seal them again."""
    file = bank.path / "tasks" / name / "task.json"
    value = json.loads(file.read_text())
    del value["checksum"]
    files.write_json(file, reading.seal(value | changes))


@pytest.mark.parametrize("default", [0, -1, 10**300, True, "1", 1.0, [1]])
def test_pointers_to_impossible_versions_are_damaged_though_their_checksum_is_right(
    bank: Bank, default: object
) -> None:
    put(bank, "mrpc", "sst2")
    change_pointers(bank, "sst2", default=default)
    packages, problems = bank.listing()
    assert [package.manifest.name for package in packages] == ["mrpc"]
    assert "task.json is damaged (default is" in problems[0]


def test_every_flipped_bit_of_the_pointers_is_reported_or_changes_nothing(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    file = bank.path / "tasks" / "sst2" / "task.json"
    whole = file.read_bytes()
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            assert bank.default("sst2") == 2
        except PackageDamaged:
            continue


def test_another_tasks_pointers_are_refused(bank: Bank) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    tasks = bank.path / "tasks"
    shutil.copy(tasks / "mrpc" / "task.json", tasks / "sst2" / "task.json")
    with pytest.raises(PackageDamaged, match="it is the file of the task 'mrpc'"):
        bank.get("sst2")


def test_the_pointers_and_the_head_of_an_older_bank_are_read(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    files.write_json(bank.path / "tasks" / "sst2" / "task.json", {"default": 1, "previous": [], "last": 2})
    head = json.loads((bank.path / "bank.json").read_text())
    del head["checksum"]
    files.write_json(bank.path / "bank.json", head)
    assert Bank.open(bank.path).get("sst2").ref == "sst2@1"
    bank.put(draft("sst2"), TENSORS)
    assert pointers(bank) == {"default": 3, "previous": [1], "last": 3}


def test_a_changed_head_of_the_bank_is_damaged(bank: Bank) -> None:
    head = (bank.path / "bank.json").read_text()
    (bank.path / "bank.json").write_text(head.replace("tiny", "tina"))
    with pytest.raises(BankError, match=r"bank\.json is damaged"):
        Bank.open(bank.path)


@pytest.mark.parametrize(
    "pointers",
    [
        {"default": 3, "previous": [1, 2], "last": 1},
        {"default": 3, "previous": [1, 4], "last": 3},
        {"default": 3, "previous": [2, 3], "last": 3},
        {"default": 3, "previous": [1, 2], "last": 3, "gone": [3]},
    ],
)
def test_pointers_that_contradict_themselves_are_damaged_and_gc_removes_nothing(
    bank: Bank, pointers: dict[str, object]
) -> None:
    put(bank, "sst2", "sst2", "sst2")
    file = bank.path / "tasks" / "sst2" / "task.json"
    for value in (reading.seal({"name": "sst2", **pointers}), pointers):
        files.write_json(file, value)
        assert bank.gc(older_than_seconds=0) == []
        assert "task.json is damaged" in bank.listing()[1][0]
    file.unlink()
    assert bank.versions("sst2") == [1, 2, 3]


def test_gc_keeps_versions_that_an_older_copy_of_the_pointers_does_not_know(bank: Bank) -> None:
    put(bank, "sst2")
    file = bank.path / "tasks" / "sst2" / "task.json"
    before = file.read_bytes()
    put(bank, "sst2", "sst2")
    file.write_bytes(before)
    assert bank.gc(older_than_seconds=0) == []
    assert bank.versions("sst2") == [1, 2, 3]


@pytest.mark.parametrize("target", ["loop", "x" * 4000, "sst2/task.json/x"])
def test_a_link_that_leads_nowhere_in_place_of_a_task_is_named(bank: Bank, target: str) -> None:
    put(bank, "mrpc", "sst2")
    (bank.path / "tasks" / "loop").symlink_to(target)
    packages, problems = bank.listing()
    assert [package.manifest.name for package in packages] == ["mrpc", "sst2"]
    assert len(problems) == 1
    assert "tasks/loop" in problems[0]
    assert bank.gc(older_than_seconds=0) == []
    assert bank.default("mrpc") == 1


# --- a full disk


def full_disk(monkeypatch: pytest.MonkeyPatch, path: Path, space: int) -> None:
    """Let writes fail while the files in a folder have more than `space` bytes."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if files.size_of(path) > space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("ref", ["sst2", "sst2@2", "sst2@1"])
def test_a_removal_frees_space_on_a_full_disk(bank: Bank, monkeypatch: pytest.MonkeyPatch, ref: str) -> None:
    put(bank, "sst2", "sst2", "mrpc")
    full_disk(monkeypatch, bank.path, files.size_of(bank.path))
    with pytest.raises(StorageError, match="the disk is full"):
        bank.put(draft(), TENSORS)
    bank.remove(ref)
    assert bank.names() == ["mrpc"] if ref == "sst2" else ["mrpc", "sst2"]
    assert not list(bank.path.rglob(".tmp-*"))
    assert bank.listing()[1] == []


def test_gc_frees_space_on_a_full_disk(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bank, "sst2", "sst2", "sst2")
    full_disk(monkeypatch, bank.path, files.size_of(bank.path))
    assert [item.path.name for item in bank.gc()] == ["1"]
    assert (bank.versions("sst2"), bank.default("sst2")) == ([2, 3], 3)


def test_a_removal_that_was_killed_on_a_full_disk_can_be_repeated(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    shutil.rmtree(bank.path / "tasks" / "sst2" / "2")  # the folder was deleted, and the pointers not yet written
    with pytest.raises(BankError, match="has no version 2"):
        bank.get("sst2")
    bank.remove("sst2@2")
    assert bank.get("sst2").ref == "sst2@1"


def test_a_task_whose_versions_are_all_gone_can_be_removed(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "mrpc")
    for version in ("1", "2"):
        shutil.rmtree(bank.path / "tasks" / "sst2" / version)
    bank.remove("sst2")
    assert bank.names() == ["mrpc"]
    assert bank.listing()[1] == []
    assert bank.put(draft(), TENSORS).ref == "sst2@3"


def test_what_is_too_large_to_be_read_back_is_not_written(bank: Bank) -> None:
    labels = [f"label {number} of a task with far too many" for number in range(300_000)]
    task = {"kind": "classification", "text": ["text"], "labels": labels, "metric": "accuracy"}
    with pytest.raises(InputError, match="use fewer or shorter labels"):
        bank.put(draft(task=task), TENSORS)
    assert bank.names() == []
    (bank.path / "tasks" / "sst2" / "999999999").mkdir(parents=True)
    with pytest.raises(BankError, match="the highest possible"):
        bank.put(draft(), TENSORS)


# --- leftovers


def killed_put(bank: Bank, name: str) -> None:
    """Leave a version as a put does that is killed after its rename and before its pointers are written."""
    task = bank.path / "tasks" / name / "task.json"
    before = task.read_bytes()
    (bank.put(draft(name), TENSORS).path / ".unfinished").touch()
    task.write_bytes(before)


def test_gc_removes_the_version_of_a_killed_put_and_never_uses_its_number_again(bank: Bank) -> None:
    put(bank, "sst2", "mrpc")
    bank.remove("sst2")
    killed_put(bank, "sst2")
    killed_put(bank, "mrpc")
    assert bank.unfinished() == ["sst2@2"]
    assert bank.gc() == []  # it may still be written
    assert sorted(str(item.path.relative_to(bank.path)) for item in bank.gc(older_than_seconds=0)) == [
        "tasks/mrpc/2",
        "tasks/sst2/2",
    ]
    assert bank.unfinished() == []
    assert bank.names() == ["mrpc"]
    assert bank.put(draft("sst2"), TENSORS).ref == "sst2@3"


@pytest.mark.parametrize("pointed", [True, False])
def test_gc_finishes_a_put_that_was_killed_before_its_mark_was_removed(bank: Bank, pointed: bool) -> None:
    package = bank.put(draft(), TENSORS)
    (package.path / ".unfinished").touch()
    if not pointed:  # the first version of a task is its default without pointers too
        (package.path.parent / "task.json").unlink()
    assert bank.gc(older_than_seconds=0) == []
    assert sorted(os.listdir(package.path)) == ["manifest.json", "weights.safetensors"]
    assert bank.get("sst2") == package


def test_gc_finishes_the_removal_of_a_default_that_was_killed(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bank, "sst2", "sst2")
    with monkeypatch.context() as patch:
        patch.setattr(files, "set_aside", lambda path: path)  # killed before the folder is hidden
        patch.setattr(files, "discard", lambda path: None)
        bank.remove("sst2@2")
    assert bank.get("sst2").ref == "sst2@1"
    assert [item.path.name for item in bank.gc()] == ["2"]
    assert bank.versions("sst2") == [1]
    assert bank.put(draft(), TENSORS).ref == "sst2@3"


def test_gc_removes_the_empty_folder_of_a_task_whose_first_put_was_killed(bank: Bank) -> None:
    (bank.path / "tasks" / "new").mkdir()
    assert bank.gc() == []  # it may still be written
    assert [item.path.name for item in bank.gc(dry_run=True, older_than_seconds=0)] == ["new"]
    assert [item.path.name for item in bank.gc(older_than_seconds=0)] == ["new"]
    assert os.listdir(bank.path / "tasks") == []


def test_gc_removes_leftovers_dated_in_the_future(bank: Bank) -> None:
    left = bank.path / "tasks" / ".tmp-left"
    left.mkdir(parents=True)
    soon, late = time.time() + 60, time.time() + 10**7
    os.utime(left, (soon, soon))
    assert bank.gc() == []  # the clock of another machine may be a minute ahead
    os.utime(left, (late, late))
    assert [item.path for item in bank.gc()] == [left]
