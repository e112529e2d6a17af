"""The shelf: tasks come, change and go while the service runs, and none of that touches the others."""

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
from adapterbank.serving.service import registry as shelves
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.registry import TaskRegistry
from adapterbank.tasks.spec import Examples
from serving.small_bank import KINDS, PATIENCE, occupied, running, until


@pytest.fixture
def shelf(small):
    small.put("first", 0)
    small.put("second", 1)
    made = TaskRegistry(small.bank, small.engine())
    made.look()
    return made


def damage(package):
    file = package.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    rewrite(file, data)


def rewrite(file, data):
    """Write a file anew, at another time than it has: some clocks of files tick a hundred times a second."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        file.write_bytes(data)


def test_what_the_bank_holds_is_served(shelf):
    assert list(shelf.held()) == ["first", "second"]
    assert shelf.find("first").package.ref == shelf.find("first@1").package.ref == "first@1"
    assert shelf.ready


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_ready_once_what_it_holds_is_compiled_for_and_if_that_fails_all_the_same(small, caplog, fails):
    small.put("first")
    made, seen = TaskRegistry(small.bank, small.engine()), []

    def warm():
        seen.append((list(made.held()), made.ready))
        if fails:
            raise RuntimeError("no compiler here")

    made.engine.warm = warm
    made.look()
    made.look()
    assert seen == [(["first"], False)]
    assert made.ready
    assert ("no compiler here" in caplog.text) == fails


def test_a_look_at_a_bank_that_has_not_changed_reads_nothing(shelf, monkeypatch):
    monkeypatch.setattr(shelf, "_refresh", lambda name: pytest.fail(name))
    shelf.look()
    shelf.look(closely=False)
    assert shelf.count == 2


def test_a_new_task_and_a_new_version_are_seen_at_the_next_look(shelf, small):
    small.put("third", 2)
    small.put("first", 3)
    old = shelf.find("first")
    shelf.look(closely=False)
    assert list(shelf.held()) == ["first", "second", "third"]
    assert shelf.find("first").package.ref == "first@2"
    assert old.key not in shelf.engine.residents
    assert len(shelf.engine.residents) == 3


def test_a_rollback_is_followed(shelf, small):
    small.put("first", 3)
    shelf.look()
    small.bank.rollback("first")
    shelf.look(closely=False)
    assert shelf.find("first").package.ref == "first@1"


def test_a_removed_task_is_unknown_and_near_names_are_told(shelf, small):
    small.bank.remove("first")
    shelf.look(closely=False)
    assert shelf.find("first") is None
    with pytest.raises(UnknownName, match=r"'first' is not a task of this bank.*second"):
        shelf.fetch("first")
    with pytest.raises(UnknownName):
        shelf.fetch("first@1")
    assert list(shelf.engine.residents) == [shelf.find("second").key]


def test_a_folder_that_is_deleted_is_a_removed_task(shelf, small):
    shutil.rmtree(small.bank.path / "tasks" / "first")
    shelf.look(closely=False)
    assert list(shelf.held()) == ["second"]


def test_a_task_put_in_since_the_last_look_is_found_by_who_asks(shelf, small):
    small.put("third", 2)
    assert shelf.fetch("third").package.ref == "third@1"


def test_a_damaged_package_is_refused_and_logged_once_and_touches_no_other(shelf, small, caplog):
    damage(small.put("third", 2))
    with caplog.at_level(logging.INFO, "adapterbank.serving"):
        for _ in range(3):
            shelf.look()
    assert [r.fields["task"] for r in caplog.records if r.message == "refused"] == ["third"]
    assert "its sha256 differs" in shelf.problems["third"]
    assert list(shelf.held()) == ["first", "second"]
    with pytest.raises(PackageDamaged, match="its sha256 differs"):
        shelf.fetch("third")


def test_a_package_damaged_while_it_is_served_is_refused_and_served_again_once_restored(shelf, small):
    package = small.bank.get("first")
    whole = (package.path / "weights.safetensors").read_bytes()
    damage(package)
    shelf.look()
    assert list(shelf.problems) == ["first"]
    assert shelf.find("first") is None
    rewrite(package.path / "weights.safetensors", whole)
    shelf.look()
    assert not shelf.problems
    assert shelf.find("first").package.ref == "first@1"


@pytest.mark.parametrize("name", ["task.json", "1/manifest.json"])
def test_files_that_cannot_be_read_are_a_problem_of_their_task_alone(shelf, small, name):
    (small.bank.path / "tasks" / "first" / name).write_text("{")
    shelf.look()
    assert list(shelf.problems) == ["first"]
    assert list(shelf.held()) == ["second"]


def test_a_pinned_version_is_loaded_when_it_is_asked_for(shelf, small):
    small.put("first", 3)
    shelf.look()
    assert shelf.find("first@1") is None
    held = shelf.fetch("first@1")
    assert held.package.ref == "first@1"
    assert shelf.find("first@1") is held
    with pytest.raises(BankError, match="no version 7"):
        shelf.fetch("first@7")


def test_few_pinned_versions_are_kept(shelf, small, monkeypatch):
    monkeypatch.setattr(shelves, "PINNED", 2)
    for seed in range(4):
        small.put("first", seed)
    shelf.look()
    for version in (1, 2, 3):
        shelf.fetch(f"first@{version}")
    assert [shelf.find(f"first@{version}") is None for version in (1, 2, 3)] == [True, False, False]
    assert len(shelf.engine.residents) == 4  # two defaults, two pinned


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


def test_tasks_come_and_go_under_load_and_every_answer_is_right(small):
    small.put("steady", 0)
    wanted = small.alone("steady").predict([("steady", Examples(["the cat"]))])[0][0].to_json()
    stop, found = [], []

    async def load(service):
        while not stop:
            (answer,) = await service.predict([Ask("steady", ["the cat"])])
            found.append(answer.predictions[0])

    async def come_and_go(service):
        for seed in range(3):
            await asyncio.to_thread(small.put, "guest", seed)
            await until(lambda: service.shelf.find("guest") is not None)
            (answer,) = await service.predict([Ask("guest", ["the cat"])])
            assert answer.version == seed + 1
            await service.remove("guest")
            with pytest.raises(Refusal, match="'guest' is not a task"):
                await service.predict([Ask("guest", ["the cat"])])
        await until(lambda: len(found) > 10)
        stop.append(True)

    async def run():
        async with running(small) as service:
            await asyncio.gather(come_and_go(service), *(load(service) for _ in range(4)))

    asyncio.run(run())
    assert all(one["label"] == wanted["label"] for one in found)
    assert all(one["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5) for one in found)


def test_a_request_that_waits_while_its_task_is_replaced_is_answered_as_it_was(small):
    small.put("a", 0)
    old = small.alone("a@1").predict([("a@1", Examples(["the cat"]))])[0][0].to_json()

    async def run():
        async with running(small) as service:
            gate, first = await occupied(service)
            asked = asyncio.ensure_future(service.predict([Ask("a", ["the cat"])]))
            await until(lambda: service.batching.ready)
            await asyncio.to_thread(small.put, "a", 5)
            await until(lambda: service.shelf.find("a").package.ref == "a@2")
            assert not asked.done()
            gate.opened.set()
            await first
            return await asked, await service.predict([Ask("a", ["the cat"])])

    (before,), (after,) = asyncio.run(run())
    assert (before.version, after.version) == (1, 2)
    assert before.predictions[0]["probabilities"] == pytest.approx(old["probabilities"], abs=1e-5)
    assert after.predictions[0]["probabilities"] != pytest.approx(old["probabilities"], abs=1e-3)


def test_problems_are_listed_and_told_apart_from_unknown_tasks(small):
    small.put("good")
    damage(small.put("bad", 1))

    async def run():
        async with running(small) as service:
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("bad", ["why"])])
            return refused.value.code, await service.tasks(), await service.task("good")

    code, listed, told = asyncio.run(run())
    assert code == "damaged"
    assert [task["name"] for task in listed["tasks"]] == ["good"]
    assert [problem["task"] for problem in listed["problems"]] == ["bad"]
    assert (told["versions"], told["default"], told["ablation"]) == ([1], 1, None)


def test_a_rollback_without_an_earlier_version_is_a_conflict(small):
    small.put("a")

    async def run():
        async with running(small) as service:
            with pytest.raises(Refusal) as refused:
                await service.rollback("a")
            await asyncio.to_thread(small.put, "a", 1)
            return refused.value.code, await service.rollback("a"), service.shelf.find("a").package.ref

    assert asyncio.run(run()) == ("conflict", 1, "a@1")


@pytest.mark.parametrize("file", ["task.json", "1/manifest.json", "1/weights.safetensors"])
def test_a_failure_that_nobody_foresaw_stops_no_other_task_and_may_pass(shelf, small, file):
    small.put("third", 2)
    path = small.bank.path / "tasks" / "first" / file
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()  # the system's error, which is none of the bank's
    for _ in range(2):
        shelf.look()
    assert list(shelf.held()) == ["second", "third"]
    assert "cannot be read (IsADirectoryError" in shelf.problems["first"]
    path.rmdir()
    path.write_bytes(whole)
    shelf.look()
    assert not shelf.problems
    shutil.rmtree(small.bank.path / "tasks" / "first")
    shelf.look()
    assert list(shelf.held()) == ["second", "third"]


def test_a_problem_goes_with_its_folder(shelf, small):
    path = small.bank.path / "tasks" / "first" / "task.json"
    path.unlink()
    path.mkdir()
    shelf.look()
    assert list(shelf.problems) == ["first"]
    shutil.rmtree(path.parent)
    shelf.look(closely=False)
    assert not shelf.problems


def test_a_version_that_is_put_in_while_the_one_before_is_read_is_not_missed(shelf, small, monkeypatch):
    default = type(small.bank).default

    def late(bank, name):
        found = default(bank, name)
        monkeypatch.undo()
        small.put("first", 7)
        return found

    small.put("first", 3)
    monkeypatch.setattr(type(small.bank), "default", late)
    shelf.look()
    shelf.look(closely=False)
    assert shelf.find("first").package.ref == "first@3"


@pytest.mark.parametrize("ref", ["third", "third@1"])
def test_a_task_removed_while_it_is_read_is_unknown_and_no_problem(shelf, small, monkeypatch, ref):
    small.put("third", 3)
    get = type(small.bank).get

    def late(bank, ref):
        monkeypatch.undo()
        small.bank.remove("third")
        return get(bank, ref)

    monkeypatch.setattr(type(small.bank), "get", late)
    with pytest.raises(UnknownName, match="'third' is not a task of this bank"):
        shelf.fetch(ref)
    assert not shelf.problems


def test_a_pinned_version_that_is_removed_is_unknown_and_one_made_anew_is_read_anew(shelf, small):
    small.put("first", 3)
    shelf.look()
    shelf.fetch("first@1")
    small.bank.remove("first@1")
    shelf.look(closely=False)
    with pytest.raises(BankError, match="no version 1"):
        shelf.fetch("first@1")
    assert len(shelf.engine.residents) == 2


def test_a_task_made_anew_under_the_same_number_and_weights_has_its_own_labels(shelf, small, monkeypatch):
    before = shelf.find("first")
    shutil.rmtree(small.bank.path / "tasks" / "first")
    kind = ("up", "down", "left"), "accuracy", 3
    monkeypatch.setitem(KINDS, "classification", kind)
    small.put("first", 0)
    shelf.look(closely=False)
    held = shelf.find("first")
    assert held.package.ref == before.package.ref
    assert held.package.manifest.weights_sha256 == before.package.manifest.weights_sha256
    assert held.known.about.task.labels == ("up", "down", "left")
    assert len(shelf.engine.residents) == 2


def test_where_times_are_coarse_what_is_written_within_one_tick_is_seen(shelf, small, monkeypatch):
    """Neither times nor inodes tell two writes of the same second apart."""
    now = int(time.time())
    monkeypatch.setattr(time, "time", lambda: now + 0.9)
    monkeypatch.setattr(shelves, "_stat", lambda path: (now * 10**9, 0, 0) if os.path.exists(path) else None)
    for seed in (3, 4):
        small.put("first", seed)
        shelf.look(closely=False)
    assert shelf.find("first").package.ref == "first@3"


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_clock_that_jumps_hides_no_version(shelf, small, monkeypatch, step):
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + step)
    small.put("first", 3)
    shelf.look(closely=False)
    assert shelf.find("first").package.ref == "first@2"


def test_a_damaged_package_that_is_restored_with_its_old_times_is_served_again(shelf, small):
    package = small.put("third", 2)
    file = package.path / "weights.safetensors"
    whole, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    damage(package)
    os.utime(file, ns=times)
    shelf.look()
    assert list(shelf.problems) == ["third"]
    rewrite(file, whole)
    os.utime(file, ns=times)
    shelf.look()
    assert not shelf.problems


def test_who_asks_for_one_task_does_not_wait_while_others_are_loaded(shelf, small, monkeypatch):
    small.put("slow", 2)
    begun, go, load = threading.Event(), threading.Event(), TaskRegistry._load

    def slowly(self, package):
        if package.manifest.name == "slow":
            begun.set()
            assert go.wait(PATIENCE)
        return load(self, package)

    monkeypatch.setattr(TaskRegistry, "_load", slowly)
    monkeypatch.setattr(TaskRegistry, "_lock_of", lambda self, name: self._locks[len(name)])
    looking = threading.Thread(target=shelf.look)
    looking.start()
    try:
        assert begun.wait(PATIENCE)
        with pytest.raises(UnknownName):
            shelf.fetch("nowhere")
        small.put("quick", 3)
        assert shelf.fetch("quick").package.ref == "quick@1"
    finally:
        go.set()
        looking.join()
    assert list(shelf.held()) == ["first", "quick", "second", "slow"]


def test_what_was_replaced_many_times_leaves_nothing_behind(shelf, small):
    package, other = small.bank.get("first"), small.put("first", 3)
    shelf.look()
    for turn in range(300):
        (other if turn % 2 else package).path.parent.joinpath("task.json").write_text(
            json.dumps({"default": 1 + turn % 2, "previous": [], "last": 2})
        )
        shelf.look_at("first", closely=True)
        shelf.fetch(f"first@{2 - turn % 2}")
    slots = shelf.engine.slots
    assert len(shelf.engine.residents) == len(slots._known) == len(slots._names) == len(shelf.engine.stacks) == 3
    assert len(shelf._seen) == len(shelf._held) == 2
    assert len(shelf._pinned) == 1
    assert len(shelf.engine.stacks._layouts) == len(shelf.engine.stacks._blocks) <= 4
    assert sum(len(block.tensor) for block in shelf.engine.stacks.blocks) <= 4 * len(shelf.engine.stacks.blocks)
