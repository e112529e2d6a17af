"""Claims about the mirror: after any change of a bank behind a URL, its copy becomes the same, step by step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
import threading
from types import SimpleNamespace
from uuid import uuid4

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapterbank.errors import BankError, InputError, PackageDamaged, StorageError
from adapterbank.install import extra_command
from adapterbank.serving.service.bank_mirror import MIRROR_FOLDER, Mirror, is_url
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.registry import TaskRegistry
from adapterbank.serving.service.service import BankService
from adapterbank.storage import cache
from adapterbank.storage.bank import Bank
from packages import BACKBONE, contents, put
from serving.small_bank import PATIENCE, until

SERVED = ("bank.json", "keys.json", "tasks/")


@pytest.fixture
def mirror(bank, no_flush):
    """A mirror of the bank behind a URL of local files."""
    made = Mirror(f"local://{bank.path}")
    yield made
    made.close()


@pytest.fixture
def store():
    """The URL of an empty store in memory, and a function that uploads a bank to it."""
    fs, url = fsspec.filesystem("memory"), f"memory://{uuid4().hex}/bank"

    def upload(bank, *only):
        for name, data in contents(bank).items():
            if (bank.path / name).is_file() and (not only or name in only):
                fs.pipe_file(f"{url}/{name}", data)

    yield fs, url, upload
    for path in [path for path in fs.store if url.removeprefix("memory:/") in path]:
        fs.store.pop(path)


def copied(bank):
    """Return the files of a bank that a mirror has, without empty folders."""
    return {name: data for name, data in contents(bank).items() if data and name.startswith(SERVED)}


def settle(mirror):
    """Refresh until what is gone is believed to be."""
    mirror.refresh()
    mirror.refresh()


def same(mirror, bank):
    return copied(Bank.open(mirror.path)) == copied(bank)


def becomes_same(mirror, bank):
    """Compare while the mirror changes: what was there a moment ago may have been moved."""
    with contextlib.suppress(FileNotFoundError):
        return same(mirror, bank)


def test_a_mirror_has_the_files_of_the_bank_and_opens_as_one(bank, mirror):
    put(bank, "a", "b", "a")
    (bank.path / "keys.json").write_text("{}")
    (bank.path / "records").mkdir()
    (bank.path / "records" / "x.json").write_text("{}")
    mirror.refresh()
    assert same(mirror, bank)
    assert [package.ref for package in Bank.open(mirror.path).tasks()] == ["a@2", "b@1"]
    assert not (mirror.path / "records").exists()
    assert (mirror.path / "keys.json").stat().st_mode & 0o077 == 0


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "remove", "rollback", "delete", "damage", "cut", "repair", "look"]),
            st.sampled_from(["a", "b"]),
        ),
        max_size=10,
    )
)
def test_after_any_changes_the_copy_equals_the_bank(steps, tmp_path_factory):
    bank = Bank.open(tmp_path_factory.mktemp("banks") / "bank", BACKBONE, create=True)
    mirror = Mirror(f"local://{bank.path}")
    try:
        for step, name in steps:
            change(bank, mirror, step, name)
        settle(mirror)
        for name in bank.folders():  # a pointer that leads to half a version is not followed; make all whole
            if any(
                not {p.name for p in f.iterdir()} >= {"manifest.json", "weights.safetensors"} for f in whole(bank, name)
            ):
                shutil.rmtree(bank.path / "tasks" / name)
        settle(mirror)
        assert same(mirror, bank)
        assert not list(mirror.path.rglob(".tmp-*"))
    finally:
        mirror.close()


def whole(bank, name):
    return [path for path in (bank.path / "tasks" / name).iterdir() if path.is_dir()]


def change(bank, mirror, step, name):
    weights = [path / "weights.safetensors" for path in whole(bank, name)] if name in bank.folders() else []
    if step == "put":
        put(bank, name)
    elif step == "look":
        mirror.refresh()
    elif step == "delete":
        shutil.rmtree(bank.path / "tasks" / name, ignore_errors=True)
    elif step in ("damage", "cut", "repair"):
        for file in weights[:1]:
            if step == "cut":
                file.unlink(missing_ok=True)
            elif file.exists() or step == "repair":
                file.write_bytes(b"not what was written" if step == "damage" else b"again")
    elif name in bank.names():
        if step == "remove":
            bank.remove(name)
        elif len(bank.versions(name)) > 1:
            bank.rollback(name, bank.versions(name)[0])


def test_unchanged_files_are_not_fetched_again(bank, mirror, monkeypatch):
    put(bank, "a", "b")
    mirror.refresh()
    fetched = []
    get = mirror.fs.get_file
    monkeypatch.setattr(type(mirror.fs), "get_file", lambda self, path, *rest: (fetched.append(path), get(path, *rest)))
    monkeypatch.setattr(type(mirror.fs), "cat_file", lambda self, path, *rest: pytest.fail(path))
    mirror.refresh()
    assert fetched == []
    monkeypatch.undo()
    monkeypatch.setattr(type(mirror.fs), "get_file", lambda self, path, *rest: (fetched.append(path), get(path, *rest)))
    put(bank, "b")
    mirror.refresh()
    assert {path.split("/tasks/")[1] for path in fetched} == {"b/2/manifest.json", "b/2/weights.safetensors"}


def test_one_listing_without_a_task_does_not_remove_it(bank, mirror, monkeypatch):
    put(bank, "a")
    mirror.refresh()
    monkeypatch.setattr(type(mirror.fs), "find", lambda *_, **__: {})
    mirror.refresh()
    monkeypatch.undo()
    mirror.refresh()
    assert same(mirror, bank)
    bank.remove("a")
    shutil.rmtree(bank.path / "tasks" / "a")
    settle(mirror)
    assert Bank.open(mirror.path).folders() == []


def test_a_pointer_waits_for_its_version(bank, store, no_flush, caplog):
    _, url, upload = store
    put(bank, "a")
    upload(bank)
    mirror = Mirror(url)
    mirror.refresh()
    put(bank, "a")
    upload(bank, "tasks/a/task.json", "tasks/a/2/manifest.json")
    with caplog.at_level(logging.WARNING, "adapterbank.serving"):
        settle(mirror)
    assert Bank.open(mirror.path).default("a") == 1
    assert [record.fields["task"] for record in caplog.records] == ["a@2"]
    upload(bank)
    mirror.refresh()
    assert same(mirror, bank)
    assert Bank.open(mirror.path).get("a").verify() == []
    mirror.close()


def test_an_incomplete_new_task_is_refused_until_the_rest_arrives(bank, store, no_flush):
    _, url, upload = store
    put(bank, "a", "b")
    upload(bank, "bank.json", *(name for name in contents(bank) if name.startswith("tasks/b/")))
    upload(bank, "tasks/a/task.json", "tasks/a/1/manifest.json")
    mirror = Mirror(url)
    mirror.refresh()
    copy = Bank.open(mirror.path)
    with pytest.raises(PackageDamaged, match="missing"):
        copy.get("a").tensors()
    assert copy.get("b").verify() == []
    upload(bank)
    mirror.refresh()
    assert copy.get("a").verify() == []
    mirror.close()


def test_names_that_lead_outside_the_bank_are_ignored(bank, store, no_flush, tmp_path):
    fs, url, upload = store
    put(bank, "a")
    upload(bank)
    for name in ("tasks/../escaped/1/manifest.json", "tasks/.tmp-x/1/manifest.json", "tasks/a/01/manifest.json",
                 "tasks/a/1/other", "tasks/a/1/x/manifest.json", "tasks/a b/task.json"):  # fmt: skip
        fs.store[f"/{url.removeprefix('memory://')}/{name}"] = fs.store[f"/{url.removeprefix('memory://')}/bank.json"]
    mirror = Mirror(url)
    mirror.refresh()
    assert same(mirror, bank)
    mirror.close()


def test_an_unavailable_store_changes_nothing_and_is_logged_once(bank, mirror, monkeypatch, caplog):
    put(bank, "a")
    mirror.refresh()
    tries = []

    def away(*_, **__):
        tries.append(1)
        raise ConnectionError("no route to the store")

    monkeypatch.setattr(type(mirror.fs), "ls", away)
    mirror.every = 0.01
    with caplog.at_level(logging.ERROR, "adapterbank.serving"):
        mirror.follow()
        asyncio.run(until(lambda: len(tries) > 5))
    assert same(mirror, bank)
    assert [record.fields["problem"] for record in caplog.records] == ["ConnectionError: no route to the store"]
    monkeypatch.undo()
    put(bank, "b")
    asyncio.run(until(lambda: becomes_same(mirror, bank)))


def test_one_task_that_cannot_be_fetched_does_not_stop_the_others(bank, mirror, monkeypatch):
    put(bank, "a", "b", "c")
    get = mirror.fs.get_file

    def fetch(self, path, *rest):
        if "/tasks/b/" in path:
            raise OSError("this object is not for you")
        get(path, *rest)

    monkeypatch.setattr(type(mirror.fs), "get_file", fetch)
    with pytest.raises(StorageError, match="not for you"):
        mirror.refresh()
    assert [package.ref for package in Bank.open(mirror.path).tasks()] == ["a@1", "c@1"]
    monkeypatch.undo()
    mirror.refresh()
    assert same(mirror, bank)


def test_keys_that_are_removed_at_the_source_are_removed_here(bank, mirror):
    (bank.path / "keys.json").write_text("{}")
    mirror.refresh()
    assert (mirror.path / "keys.json").read_text() == "{}"
    (bank.path / "keys.json").unlink()
    mirror.refresh()
    assert not (mirror.path / "keys.json").exists()


def test_a_url_without_a_bank_is_reported(tmp_path, store):
    _, url, _ = store
    for where in (url, f"local://{tmp_path}"):
        with pytest.raises(BankError, match=r"is not a bank: it has no bank\.json"):
            Mirror(where)
    with pytest.raises(InputError, match=r"nonsense://x/y cannot be opened"):
        Mirror("nonsense://x/y")
    left = cache.folder() / MIRROR_FOLDER
    assert [path for path in left.iterdir() if path.is_dir()] == []


def test_an_unreachable_store_is_reported_at_the_start(bank, monkeypatch):
    fs = fsspec.filesystem("local")
    monkeypatch.setattr(type(fs), "ls", lambda *_, **__: 1 / 0)
    with pytest.raises(BankError, match=r"cannot be read \(ZeroDivisionError.*check the address and the credentials"):
        Mirror(f"local://{bank.path}")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match=re.escape(extra_command("ray"))):
        Mirror("s3://bucket/bank")


def test_each_process_has_its_own_folder_and_deletes_it(bank, mirror):
    other = Mirror(f"local://{bank.path}")
    assert other.path != mirror.path
    left = mirror.path.parent / "1-of-a-killed-process"
    (left / "tasks").mkdir(parents=True)
    Mirror(f"local://{bank.path}").close()
    assert not left.exists()
    assert (mirror.path / "bank.json").exists()
    other.close()
    assert not other.path.exists()


@pytest.mark.parametrize(
    ("bank", "wanted"),
    [("bank", False), ("/a/b", False), ("file:///a", False), ("s3://a/b", True), ("memory://a", True)],
)
def test_urls_and_folders_are_distinguished(bank, wanted):
    assert is_url(bank) is wanted


def test_a_service_follows_a_mirror_and_does_not_change_it(small):
    small.put("first", 0)
    mirror = Mirror(f"local://{small.bank.path}", every=0.02)
    mirror.refresh()
    service = BankService(Bank.open(mirror.path), small.engine(), mirror=mirror)

    async def use():
        await service.start()
        assert service.alive
        await until(lambda: service.ready)
        wanted = await service.predict([Ask("first", ["the cat"])])
        small.put("second", 1)
        await until(lambda: service.registry.count == 2)
        for act in (service.remove, service.rollback):
            with pytest.raises(Refusal, match=r"reads its bank from a URL .* change the bank at its source") as refused:
                await act("first")
            assert refused.value.code == "conflict"
        assert await service.predict([Ask("first", ["the cat"])]) == wanted
        small.bank.remove("first")
        await until(lambda: service.registry.count == 1)
        await service.stop()

    asyncio.run(use())
    assert not service.alive
    assert not mirror.path.exists()
    assert small.bank.default("second") == 1


def test_a_damaged_package_is_refused_by_the_registry_and_served_when_it_is_restored(small):
    small.put("first", 0)
    package = small.put("second", 1)
    file = package.path / "weights.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    mirror = Mirror(f"local://{small.bank.path}")
    mirror.refresh()
    registry = TaskRegistry(Bank.open(mirror.path), small.engine())
    registry.scan()
    assert list(registry.tasks()) == ["first"]
    assert "weights.safetensors has been changed" in registry.problems["second"]
    file.write_bytes(good)
    mirror.refresh()
    registry.scan()
    assert list(registry.tasks()) == ["first", "second"]
    mirror.close()


def test_the_message_of_a_read_only_bank_does_not_contain_its_address(small, tmp_path):
    mirror = Mirror(f"local://{small.bank.path}")
    try:
        assert str(tmp_path) not in mirror.refusal
    finally:
        mirror.close()


def test_a_task_that_cannot_be_fetched_holds_up_no_other(bank, mirror, monkeypatch):
    put(bank, "hung")
    put(bank, "quick")
    mirror._reader.patience = 0.2
    released, real = threading.Event(), mirror.fs.get_file

    def fetch(source, target, **options):
        assert "/hung/" not in source or released.wait(PATIENCE)
        return real(source, target, **options)

    monkeypatch.setattr(mirror.fs, "get_file", fetch)
    mirror.refresh()
    mirror.refresh()  # what hangs is skipped
    copy = Bank.open(mirror.path)
    assert copy.default("quick") == 1
    assert copy.names() == ["quick"]
    assert list(mirror._reader.hung()) == ["hung"]
    released.set()

    async def fetched():
        await until(lambda: not mirror._reader.hung())

    asyncio.run(fetched())
    mirror.refresh()
    assert copy.names() == ["hung", "quick"]
    assert mirror.stalled() == []


@pytest.mark.parametrize("file", ["task.json", "1/manifest.json"])
def test_a_pipe_at_the_source_is_not_waited_for(small, file):
    small.put("first", 0)
    odd = small.put("second", 1).path.parent / file
    odd.unlink()
    os.mkfifo(odd)
    mirror = Mirror(f"local://{small.bank.path}")
    mirror.refresh()
    assert "first" in [package.manifest.name for package in Bank.open(mirror.path).listing()[0]]


@pytest.mark.parametrize("place", ["task.json", "1/manifest.json", "1", ""])
def test_a_pipe_in_place_of_what_was_fetched_removes_nothing_and_is_logged_once(bank, mirror, caplog, place):
    put(bank, "first")
    put(bank, "second")
    settle(mirror)
    before = copied(bank)
    odd = bank.path / "tasks" / "second" / place
    moved = odd.rename(bank.path / "aside")
    os.mkfifo(odd)
    for _ in range(4):
        mirror.refresh()
    assert copied(Bank.open(mirror.path)) == before
    assert len([record for record in caplog.records if "tasks/second" in str(vars(record).get("fields"))]) == 1
    odd.unlink()
    moved.rename(odd)
    put(bank, "third")
    settle(mirror)
    assert same(mirror, bank)


def test_pointers_that_are_nested_too_deeply_hide_no_other_task(bank, mirror):
    put(bank, "first")
    put(bank, "second")
    (bank.path / "tasks" / "first" / "task.json").write_text("[" * 100_000)
    mirror.refresh()
    mirror.refresh()
    assert same(mirror, bank)
    packages, problems = Bank.open(mirror.path).listing()
    assert [package.manifest.name for package in packages] == ["second"]
    assert len(problems) == 1


@pytest.mark.parametrize("name", ["bank.json", "keys.json"])
def test_a_bank_whose_keys_are_a_pipe_is_not_opened_without_them(bank, name):
    (bank.path / name).unlink(missing_ok=True)
    os.mkfifo(bank.path / name)
    with pytest.raises(BankError, match=f"{name} is not a regular file"):
        Mirror(f"local://{bank.path}")


def test_pointers_that_are_too_large_are_refused_and_not_fetched_whole(small):
    small.put("first", 0)
    os.truncate(small.put("second", 1).path.parent / "task.json", 10 << 30)
    mirror = Mirror(f"local://{small.bank.path}")
    mirror.refresh()
    packages, problems = Bank.open(mirror.path).listing()
    assert [package.manifest.name for package in packages] == ["first"]
    assert "task.json is damaged" in problems[0]


@pytest.mark.parametrize("file", ["1/manifest.json", "1/weights.safetensors"])
def test_a_file_that_is_too_large_is_not_fetched_and_the_others_are(small, file, monkeypatch):
    small.put("first", 0)
    huge = small.put("second", 1).path.parent / file
    os.truncate(huge, 10 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    mirror = Mirror(f"local://{small.bank.path}")
    with pytest.raises(BankError, match=f"{file} has "):
        mirror.refresh()
    assert [package.manifest.name for package in Bank.open(mirror.path).listing()[0]] == ["first"]
