"""Claims about the registry: tasks come, change and go while the service runs, without affecting the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import time

import pytest

from adapterbank.errors import BankError, PackageDamaged, UnknownName
from adapterbank.serving.service import registry as registries
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.registry import TaskRegistry
from serving.small_bank import KINDS, PATIENCE, damage, rewrite, running


@pytest.fixture
def registry(small):
    small.put("first", 0)
    small.put("second", 1)
    made = TaskRegistry(small.bank, small.engine())
    made.scan()
    return made


def test_the_tasks_of_the_bank_are_served(registry):
    assert list(registry.tasks()) == ["first", "second"]
    assert registry.find("first").package.ref == registry.find("first@1").package.ref == "first@1"
    assert registry.ready


@pytest.mark.parametrize("fails", [False, True])
def test_the_registry_is_ready_after_the_warm_up_even_if_that_fails(small, caplog, fails):
    small.put("first")
    made, seen = TaskRegistry(small.bank, small.engine()), []

    def warm():
        seen.append((list(made.tasks()), made.ready))
        if fails:
            raise RuntimeError("no compiler here")

    made.engine.warm = warm
    made.scan()
    made.scan()
    assert seen == [(["first"], False)]
    assert made.ready
    assert ("no compiler here" in caplog.text) == fails


def test_a_scan_of_an_unchanged_bank_reads_nothing(registry, monkeypatch):
    monkeypatch.setattr(type(registry.bank), "get", lambda self, ref: pytest.fail(ref))
    registry.scan()
    registry.scan(thorough=False)
    assert registry.count == 2


def test_a_new_task_and_a_new_version_are_seen_by_the_next_scan(registry, small):
    small.put("third", 2)
    small.put("first", 3)
    old = registry.find("first")
    registry.scan(thorough=False)
    assert list(registry.tasks()) == ["first", "second", "third"]
    assert registry.find("first").package.ref == "first@2"
    assert old.key not in registry.engine.residents
    assert len(registry.engine.residents) == 3


def test_a_rollback_is_followed(registry, small):
    small.put("first", 3)
    registry.scan()
    small.bank.rollback("first")
    registry.scan(thorough=False)
    assert registry.find("first").package.ref == "first@1"


def test_a_removed_task_is_unknown_and_similar_names_are_suggested(registry, small):
    small.bank.remove("first")
    registry.scan(thorough=False)
    assert registry.find("first") is None
    with pytest.raises(UnknownName, match=r"'first' is not a task of this bank.*second"):
        registry.fetch("first")
    with pytest.raises(UnknownName):
        registry.fetch("first@1")
    assert list(registry.engine.residents) == [registry.find("second").key]


def test_a_folder_that_is_deleted_is_a_removed_task(registry, small):
    shutil.rmtree(small.bank.path / "tasks" / "first")
    registry.scan(thorough=False)
    assert list(registry.tasks()) == ["second"]


def test_a_task_added_since_the_last_scan_is_found_on_request(registry, small):
    small.put("third", 2)
    assert registry.fetch("third").package.ref == "third@1"


def test_a_damaged_package_is_refused_and_logged_once_and_affects_no_other(registry, small, caplog):
    damage(small.put("third", 2))
    with caplog.at_level(logging.INFO, "adapterbank.serving"):
        for _ in range(3):
            registry.scan()
    assert [r.fields["task"] for r in caplog.records if r.message == "refused"] == ["third"]
    assert "its sha256 differs" in registry.problems["third"]
    assert list(registry.tasks()) == ["first", "second"]
    with pytest.raises(PackageDamaged, match="its sha256 differs"):
        registry.fetch("third")


def test_a_package_damaged_while_it_is_served_is_refused_and_served_again_once_restored(registry, small):
    package = small.bank.get("first")
    whole = (package.path / "weights.safetensors").read_bytes()
    damage(package)
    registry.scan()
    assert list(registry.problems) == ["first"]
    assert registry.find("first") is None
    rewrite(package.path / "weights.safetensors", whole)
    registry.scan()
    assert not registry.problems
    assert registry.find("first").package.ref == "first@1"


@pytest.mark.parametrize("name", ["task.json", "1/manifest.json"])
def test_files_that_cannot_be_read_are_a_problem_of_their_task_alone(registry, small, name):
    (small.bank.path / "tasks" / "first" / name).write_text("{")
    registry.scan()
    assert list(registry.problems) == ["first"]
    assert list(registry.tasks()) == ["second"]


def test_a_pinned_version_is_loaded_on_demand(registry, small):
    small.put("first", 3)
    registry.scan()
    assert registry.find("first@1") is None
    served = registry.fetch("first@1")
    assert served.package.ref == "first@1"
    assert registry.find("first@1") is served
    with pytest.raises(BankError, match="no version 7"):
        registry.fetch("first@7")


def test_few_pinned_versions_are_kept(registry, small, monkeypatch):
    monkeypatch.setattr(registries, "PINNED", 2)
    for seed in range(4):
        small.put("first", seed)
    registry.scan()
    for version in (1, 2, 3):
        registry.fetch(f"first@{version}")
    assert [registry.find(f"first@{version}") is None for version in (1, 2, 3)] == [True, False, False]
    assert len(registry.engine.residents) == 4  # two defaults, two pinned


@pytest.mark.parametrize("name", ["../first", "..", "first/../second", "first@0", "first@x", "", "a b", "/etc/passwd"])
def test_no_name_reaches_outside_the_bank(small, name):
    small.put("first")

    async def run():
        async with running(small) as service:
            for act in (service.task, service.remove, service.rollback):
                with pytest.raises(Refusal) as refused:
                    await act(name)
                assert refused.value.code == "unknown_task"
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask(name, ["why"])])
            assert refused.value.code == "unknown_task"

    asyncio.run(run())
    assert (small.bank.path / "tasks" / "first" / "1" / "manifest.json").exists()


@pytest.mark.parametrize("file", ["task.json", "1/manifest.json", "1/weights.safetensors"])
def test_an_unexpected_error_affects_no_other_task_and_may_be_temporary(registry, small, file):
    small.put("third", 2)
    path = small.bank.path / "tasks" / "first" / file
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()
    for _ in range(2):
        registry.scan()
    assert list(registry.tasks()) == ["second", "third"]
    assert "cannot be read: it is a folder" in registry.problems["first"]
    path.rmdir()
    path.write_bytes(whole)
    registry.scan()
    assert not registry.problems
    shutil.rmtree(small.bank.path / "tasks" / "first")
    registry.scan()
    assert list(registry.tasks()) == ["second", "third"]


def test_a_problem_disappears_with_its_folder(registry, small):
    path = small.bank.path / "tasks" / "first" / "task.json"
    path.unlink()
    path.mkdir()
    registry.scan()
    assert list(registry.problems) == ["first"]
    shutil.rmtree(path.parent)
    registry.scan(thorough=False)
    assert not registry.problems


def test_a_version_added_while_the_previous_one_is_read_is_not_missed(registry, small, monkeypatch):
    default = type(small.bank).default

    def late(bank, name):
        found = default(bank, name)
        if name == "first":
            monkeypatch.undo()
            small.put("first", 7)
        return found

    small.put("first", 3)
    monkeypatch.setattr(type(small.bank), "default", late)
    registry.scan()
    registry.scan(thorough=False)
    assert registry.find("first").package.ref == "first@3"


@pytest.mark.parametrize("ref", ["third", "third@1"])
def test_a_task_removed_while_it_is_read_is_unknown_and_not_a_problem(registry, small, monkeypatch, ref):
    small.put("third", 3)
    get = type(small.bank).get

    def late(bank, ref):
        monkeypatch.undo()
        small.bank.remove("third")
        return get(bank, ref)

    monkeypatch.setattr(type(small.bank), "get", late)
    with pytest.raises(UnknownName, match="'third' is not a task of this bank"):
        registry.fetch(ref)
    assert not registry.problems


def test_a_removed_pinned_version_is_unknown_and_a_new_one_is_read_again(registry, small):
    small.put("first", 3)
    registry.scan()
    registry.fetch("first@1")
    small.bank.remove("first@1")
    registry.scan(thorough=False)
    with pytest.raises(BankError, match="no version 1"):
        registry.fetch("first@1")
    assert len(registry.engine.residents) == 2


def test_a_recreated_task_with_the_same_version_and_weights_has_its_own_labels(registry, small, monkeypatch):
    before = registry.find("first")
    shutil.rmtree(small.bank.path / "tasks" / "first")
    kind = ("up", "down", "left"), "accuracy", 3
    monkeypatch.setitem(KINDS, "classification", kind)
    small.put("first", 0)
    registry.scan(thorough=False)
    served = registry.find("first")
    assert served.package.ref == before.package.ref
    assert served.package.manifest.weights_sha256 == before.package.manifest.weights_sha256
    assert served.handle.about.task.labels == ("up", "down", "left")
    assert len(registry.engine.residents) == 2


def test_a_change_within_one_tick_of_a_coarse_clock_is_seen(registry, small, monkeypatch):
    """Neither times nor inodes tell two writes of the same second apart."""
    now = int(time.time())
    monkeypatch.setattr(time, "time", lambda: now + 0.9)
    monkeypatch.setattr(registries, "_stat", lambda path: (now * 10**9, 0, 0) if os.path.exists(path) else None)
    for seed in (3, 4):
        small.put("first", seed)
        registry.scan(thorough=False)
    assert registry.find("first").package.ref == "first@3"


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_clock_that_jumps_hides_no_version(registry, small, monkeypatch, step):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + step)
    small.put("first", 3)
    registry.scan(thorough=False)
    assert registry.find("first").package.ref == "first@2"


def test_a_damaged_package_that_is_restored_with_its_old_times_is_served_again(registry, small):
    package = small.put("third", 2)
    file = package.path / "weights.safetensors"
    whole, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    damage(package)
    os.utime(file, ns=times)
    registry.scan()
    assert list(registry.problems) == ["third"]
    rewrite(file, whole)
    os.utime(file, ns=times)
    registry.scan()
    assert not registry.problems


def test_a_request_for_one_task_does_not_wait_while_others_are_loaded(registry, small, monkeypatch):
    small.put("slow", 2)
    begun, go, load = threading.Event(), threading.Event(), registry.engine.load

    def slowly(package, name, **how):
        if package.manifest.name == "slow":
            begun.set()
            assert go.wait(PATIENCE)
        return load(package, name, **how)

    monkeypatch.setattr(registry.engine, "load", slowly)
    nowhere, quick = "nowhere", "quick"
    scanning = threading.Thread(target=registry.scan)
    scanning.start()
    try:
        assert begun.wait(PATIENCE)
        with pytest.raises(UnknownName):
            registry.fetch(nowhere)
        small.put(quick, 3)
        assert registry.fetch(quick).package.ref == f"{quick}@1"
    finally:
        go.set()
        scanning.join()
    assert list(registry.tasks()) == ["first", quick, "second", "slow"]


def test_many_replacements_leave_nothing_behind(registry, small):
    package, other = small.bank.get("first"), small.put("first", 3)
    registry.scan()
    for turn in range(300):
        (other if turn % 2 else package).path.parent.joinpath("task.json").write_text(
            json.dumps({"default": 1 + turn % 2, "previous": [], "last": 2})
        )
        registry.refresh("first", thorough=True)
        registry.fetch(f"first@{2 - turn % 2}")
    slots = registry.engine.slots
    assert (
        len(registry.engine.residents) == len(slots._handles) == len(slots._names) == len(registry.engine.stacks) == 3
    )
    assert len(registry.stamps) == len(registry.tasks()) == 2
    assert len(registry.pinned) == 1
    assert len(registry.engine.stacks._layouts) == len(registry.engine.stacks._blocks) <= 4
    assert sum(len(block.tensor) for block in registry.engine.stacks.blocks) <= 4 * len(registry.engine.stacks.blocks)
