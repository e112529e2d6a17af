"""The shelf: tasks come, change and go while the service runs, and none of that touches the others."""

from __future__ import annotations

import asyncio
import logging
import shutil

import pytest

from adapterbank.errors import BankError, PackageDamaged, UnknownName
from adapterbank.serving import shelf as shelves
from adapterbank.serving.shelf import Shelf
from adapterbank.serving.terms import Ask, Refusal
from adapterbank.tasks.spec import Examples
from serving.small_bank import running, until


@pytest.fixture
def shelf(small):
    small.put("first", 0)
    small.put("second", 1)
    made = Shelf(small.bank, small.engine())
    made.look()
    return made


def damage(package):
    file = package.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_the_bank_holds_is_served(shelf):
    assert list(shelf.held()) == ["first", "second"]
    assert shelf.find("first").package.ref == shelf.find("first@1").package.ref == "first@1"
    assert shelf.ready


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
    (package.path / "weights.safetensors").write_bytes(whole)
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
        stop.append(True)

    async def run():
        async with running(small) as service:
            await asyncio.gather(come_and_go(service), *(load(service) for _ in range(4)))

    asyncio.run(run())
    assert len(found) > 10
    assert all(one["label"] == wanted["label"] for one in found)
    assert all(one["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-5) for one in found)


def test_a_request_that_waits_while_its_task_is_replaced_is_answered_as_it_was(small):
    small.put("a", 0)
    old = small.alone("a@1").predict([("a@1", Examples(["the cat"]))])[0][0].to_json()

    async def run():
        async with running(small, wait=1.0) as service:
            asked = asyncio.ensure_future(service.predict([Ask("a", ["the cat"])]))
            await until(lambda: service.batching.ready)
            await asyncio.to_thread(small.put, "a", 5)
            await until(lambda: service.shelf.find("a").package.ref == "a@2")
            assert not asked.done()
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
