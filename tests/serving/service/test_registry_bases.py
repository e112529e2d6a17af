"""Claims about the registry: tasks that stand on others are served while these are there, and affect no other."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest

from adapterbank.inference.loading import content_name
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.registry import TaskRegistry
from adapterbank.tasks.spec import Examples
from serving.small_bank import assert_same, damage, running


@pytest.fixture
def stacked(small):
    """Return a bank with a base, two tasks that stand on it, and one that does not."""
    base = small.put("base", 0)
    small.put("one", 1, on=base)
    small.put("two", 2, on=base)
    small.put("plain", 3)
    return small


@pytest.fixture
def registry(stacked):
    made = TaskRegistry(stacked.bank, stacked.engine())
    made.scan()
    return made


def answers(engine, key):
    rows = engine.backbone.tokenize(["why is it big", "no"])
    return np.array(engine.outputs(rows, [key] * len(rows)))


def state(registry):
    return sorted(registry.tasks()), sorted(registry.problems)


def test_a_base_is_loaded_once_whether_it_is_served_or_not(registry, stacked):
    assert state(registry) == (["base", "one", "plain", "two"], [])
    assert len(registry.engine.residents) == 4
    alone = stacked.alone("one@1")
    assert np.array_equal(answers(registry.engine, registry.find("one").key), answers(alone, "one@1"))
    before = registry.engine.slots.bytes
    stacked.put("base", 9)  # the tasks still stand on version 1
    registry.scan()
    assert registry.find("base").package.ref == "base@2"
    assert content_name(stacked.bank.get("base@1")) in registry.engine.residents
    assert registry.engine.slots.bytes == before + registry.find("base").handle.bytes


@pytest.mark.parametrize("thorough", [True, False])
def test_a_base_that_disappears_and_comes_back_takes_its_tasks_with_it(registry, stacked, tmp_path, thorough):
    folder = stacked.bank.path / "tasks" / "base"
    plain, before = registry.find("plain"), answers(registry.engine, registry.find("one").key)
    shutil.move(folder, tmp_path / "away")
    registry.scan(thorough=thorough)
    assert state(registry) == (["plain"], ["one", "two"])
    assert "one@1 stands on base@1, which is not in this bank" in registry.problems["one"]
    assert registry.find("plain") is plain
    assert [*registry.engine.residents] == [plain.key]
    shutil.move(tmp_path / "away", folder)
    registry.scan(thorough=thorough)
    assert state(registry) == (["base", "one", "plain", "two"], [])
    assert np.array_equal(answers(registry.engine, registry.find("one").key), before)


def test_a_base_that_is_damaged_refuses_its_tasks_alone(registry, stacked):
    damage(stacked.bank.get("base"))
    registry.scan()
    assert state(registry) == (["plain"], ["base", "one", "two"])
    assert "base/1/weights.safetensors has been changed" in registry.problems["one"]
    stacked.put("base", 4)
    registry.scan()
    assert state(registry) == (["base", "plain"], ["one", "two"])


def test_a_fused_task_is_served_while_all_its_members_are_there(stacked, tmp_path):
    members = [stacked.put(name, seed) for seed, name in enumerate(("m", "n"), 20)]
    stacked.put("fused", 30, fuse=members)
    registry = TaskRegistry(stacked.bank, stacked.engine())
    registry.scan()
    assert state(registry) == (["base", "fused", "m", "n", "one", "plain", "two"], [])
    before = answers(registry.engine, registry.find("fused").key)
    assert np.array_equal(before, answers(stacked.alone("fused@1"), "fused@1"))
    assert len(registry.engine.residents) == 7
    others = ["base", "m", "one", "plain", "two"]
    folder = stacked.bank.path / "tasks" / "n"
    shutil.move(folder, tmp_path / "away")
    registry.scan()
    assert state(registry) == (others, ["fused"])
    assert "fused@1 stands on n@1, which is not in this bank" in registry.problems["fused"]
    shutil.move(tmp_path / "away", folder)
    registry.scan()
    assert np.array_equal(answers(registry.engine, registry.find("fused").key), before)
    damage(stacked.bank.get("n"))
    registry.scan()
    assert state(registry) == (others, ["fused", "n"])


def test_the_lowest_of_a_chain_may_arrive_last(stacked, tmp_path):
    stacked.put("top", 5, on=stacked.bank.get("one"))
    folder = stacked.bank.path / "tasks" / "base"
    shutil.move(folder, tmp_path / "away")
    registry = TaskRegistry(stacked.bank, stacked.engine())
    registry.scan()
    assert state(registry) == (["plain"], ["one", "top", "two"])
    shutil.move(tmp_path / "away", folder)
    registry.scan(thorough=False)
    assert state(registry) == (["base", "one", "plain", "top", "two"], [])
    expected = answers(stacked.alone("top@1"), "top@1")
    assert np.array_equal(answers(registry.engine, registry.find("top").key), expected)


def test_a_pinned_version_stands_on_its_base(registry, stacked):
    stacked.put("one", 7)
    registry.scan()
    found = registry.fetch("one@1")
    assert np.array_equal(answers(registry.engine, found.key), answers(stacked.alone("one@1"), "one@1"))


def test_the_last_task_that_leaves_takes_an_unserved_base_with_it(stacked):
    stacked.put("base", 8)
    registry = TaskRegistry(stacked.bank, stacked.engine())
    registry.scan()
    base = content_name(stacked.bank.get("base@1"))
    for task, left in (("one", True), ("two", False)):
        stacked.bank.remove(task)
        registry.scan()
        assert (base in registry.engine.residents) == left
    assert state(registry) == (["base", "plain"], [])


def test_a_service_answers_for_all_and_removes_no_base(stacked):
    async def main():
        async with running(stacked, budget=1) as service:
            tasks = ["one", "base", "two", "plain"]
            found = await service.predict([Ask(task, ["why is it", "no"]) for task in tasks])
            with pytest.raises(Refusal, match=r"base@1 cannot be removed, because one@1, two@1 stand on it") as refused:
                await service.remove("base")
            return tasks, found, refused.value.code

    tasks, found, code = asyncio.run(main())
    assert code == "conflict"
    alone = stacked.alone(*(f"{task}@1" for task in tasks))
    wanted = alone.predict([(f"{task}@1", Examples(["why is it", "no"])) for task in tasks])
    for answer, expected in zip(found, wanted, strict=True):
        assert_same(answer.predictions, expected)


def test_many_tasks_that_are_loaded_at_once_stand_on_one_copy(small, frequent_thread_switches):
    base = small.put("base", 0)
    small.put("base", 1)  # version 1 is there for others only
    names = [f"task{number}" for number in range(12)]
    for number, name in enumerate(names):
        small.put(name, number + 2, on=base)
    for _ in range(5):
        registry = TaskRegistry(small.bank, small.engine(budget=1))
        registry.scan()
        assert state(registry) == (["base", *sorted(names)], [])
        assert len(registry.engine.residents) == len(names) + 2
        handles = [registry.find(name).handle for name in names]
        assert len({one.bases for one in handles}) == 1
        expected = answers(small.alone("task3@1"), "task3@1")
        assert np.array_equal(answers(registry.engine, registry.find("task3").key), expected)  # loaded again
        assert handles[0].bases[0].users == 0
