"""Claims about `Bank.put` under many writers, full disks and interruptions: atomic in every case."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import adapterbank
from adapterbank.errors import StorageError
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from packages import TENSORS, contents, draft, pointers, put

pytestmark = pytest.mark.usefixtures("no_flush")

RACE = """
import sys
import numpy as np
from adapterbank.storage.bank import Bank
from packages import draft
path, worker = sys.argv[1], int(sys.argv[2])
backbone = {"name": "tiny", "sha256": "a" * 64}
print("ready", flush=True)
sys.stdin.readline()
bank = Bank.open(path, backbone, create=True)
for _ in range(4):
    package = bank.put(draft(seed=worker), {"w": np.full(100, worker, np.float32)})
    print(package.manifest.version, flush=True)
"""


def test_eight_processes_create_one_bank_and_each_put_gets_its_own_version(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    paths = [Path(adapterbank.__file__).parents[1], Path(__file__).parents[1]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(path), str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for worker in range(8)
    ]
    for worker in workers:  # all imports are done, so that the workers start at the same time
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    given = [[int(line) for line in worker.communicate()[0].split()] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    assert sorted(version for versions in given for version in versions) == list(range(1, 33))
    bank = Bank.open(path)
    for worker_number, versions in enumerate(given):
        for version in versions:
            package = bank.get(f"sst2@{version}")
            assert package.manifest.seed == worker_number
            assert (package.tensors()["w"] == worker_number).all()
    assert pointers(bank) == {"default": 32, "previous": list(range(1, 32)), "last": 32}
    assert not list(bank.path.rglob(".tmp-*"))


def fail_from(monkeypatch: pytest.MonkeyPatch, call: str, count: int, error: BaseException) -> list[int]:
    """Let `os.<call>` fail from the `count`-th call on, an interrupt only once; return the number of calls."""
    real, made = getattr(os, call), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        if made[0] == count or (made[0] > count and isinstance(error, OSError)):
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, wrapped)
    return made


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_a_disk_that_fills_up_during_a_put_leaves_the_bank_unchanged(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, call: str, earlier: int
) -> None:
    messages = []
    for count in range(1, 40):
        name = f"task{count}"
        put(bank, *[name] * earlier)
        before = contents(bank)
        with monkeypatch.context() as patch:
            made = fail_from(patch, call, count, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            try:
                bank.put(draft(name), TENSORS)
            except StorageError as error:
                messages.append(str(error))
                assert contents(bank) == before
            else:  # only the flush of a folder was refused, or nothing
                assert bank.get(name).verify() == []
                assert bank.get(name).manifest.version == earlier + 1
        if made[0] < count:
            break
    assert messages
    assert all("the disk is full; free some space" in message for message in messages)


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir", "open"])
def test_an_interrupt_during_a_put_leaves_nothing_or_the_complete_package(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    interrupted = 0
    for count in range(1, 30):
        before, served = contents(bank), len(bank.names())
        with monkeypatch.context() as patch:
            fail_from(patch, call, count, KeyboardInterrupt())
            try:
                bank.put(draft(f"task{count}"), TENSORS)
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
        assert not list(bank.path.rglob(".tmp-*"))
        if len(bank.names()) == served:
            assert contents(bank) == before
        else:
            assert bank.get(f"task{count}").verify() == []
    assert interrupted >= 1


def test_a_process_killed_before_it_writes_the_pointers_leaves_a_working_bank(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    files.write_json(bank.path / "tasks" / "sst2" / "task.json", {"default": 1, "previous": [], "last": 1})
    assert bank.get("sst2").ref == "sst2@1"
    assert bank.put(draft(), TENSORS).ref == "sst2@3"
