"""Claims about `adapterbank.storage.bank`: versions are never reused, one is served, and names stay inside the bank."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import adapterbank
from adapterbank.errors import BackboneMismatch, BankError, InputError, PackageDamaged, UnknownName
from adapterbank.storage import files
from adapterbank.storage.bank import Bank, Pointers
from adapterbank.storage.package import FORMAT
from packages import BACKBONE, STRANGE_NAMES, TENSORS, contents, draft, pointers, put

pytestmark = pytest.mark.usefixtures("no_flush")


# --- opening


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_a_strange_name_is_refused_by_every_use_and_changes_nothing(bank: Bank, name: str) -> None:
    before = contents(bank)
    uses: list[Callable[[], object]] = [
        lambda: bank.put(draft(name), TENSORS),
        lambda: bank.versions(name),
        lambda: bank.set_default(name, 1),
        lambda: bank.rollback(name),
    ]
    for use in uses:
        with pytest.raises(InputError):
            use()
    assert contents(bank) == before


def test_a_missing_bank_is_not_created_by_accident(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="does not exist; the first training creates it"):
        Bank.open(tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_a_bank_is_created_once_and_then_only_opened(tmp_path: Path) -> None:
    Bank.open(tmp_path / "deep" / "bank", BACKBONE, create=True)
    head = (tmp_path / "deep" / "bank" / "bank.json").read_bytes()
    again = Bank.open(str(tmp_path / "deep" / "bank"), BACKBONE, create=True)
    assert again.backbone == BACKBONE
    assert (again.path / "bank.json").read_bytes() == head
    assert json.loads(head)["format"] == FORMAT
    assert Bank.open(again.path) == again


def test_creating_a_bank_needs_a_complete_backbone(tmp_path: Path) -> None:
    for backbone in (None, {"name": "tiny"}):
        with pytest.raises(InputError, match="give its backbone"):
            Bank.open(tmp_path / "bank", backbone, create=True)
    assert not (tmp_path / "bank").exists()


def test_a_bank_may_start_in_a_folder_with_only_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("")
    assert Bank.open(tmp_path, BACKBONE, create=True).names() == []


@pytest.mark.parametrize("create", [False, True])
def test_a_folder_of_other_files_is_not_used_as_a_bank(tmp_path: Path, create: bool) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(BankError, match=r"is not a bank"):
        Bank.open(tmp_path, BACKBONE, create=create)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("create", [False, True])
def test_a_file_is_not_used_as_a_bank(tmp_path: Path, create: bool) -> None:
    (tmp_path / "bank").write_text("")
    with pytest.raises(BankError, match="is a file, and a bank is a folder"):
        Bank.open(tmp_path / "bank", BACKBONE, create=create)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "backbone": "tiny"}'])
def test_a_damaged_bank_json_is_named(bank: Bank, text: str) -> None:
    (bank.path / "bank.json").write_text(text)
    with pytest.raises(BankError, match=r"bank\.json is damaged; restore"):
        Bank.open(bank.path)


def test_a_bank_of_a_later_format_asks_for_an_upgrade(bank: Bank) -> None:
    (bank.path / "bank.json").write_text(json.dumps({"format": FORMAT + 1, "backbone": BACKBONE}))
    with pytest.raises(BankError, match="upgrade adapterbank"):
        Bank.open(bank.path)


def test_another_encoder_is_refused_and_both_are_named(bank: Bank) -> None:
    other = {"name": "large", "sha256": "b" * 64}
    for use in (lambda: Bank.open(bank.path, other), lambda: bank.put(draft(backbone=other), TENSORS)):
        with pytest.raises(BackboneMismatch, match=r"tiny \(sha256 aaaaaaaaaaaa.*large \(sha256 bbbb"):
            use()
    assert bank.names() == []


def test_a_package_copied_in_from_a_bank_of_another_encoder_is_refused(bank: Bank, tmp_path: Path) -> None:
    other = {"name": "large", "sha256": "b" * 64}
    stranger = Bank.open(tmp_path / "other", other, create=True)
    stranger.put(draft(backbone=other), TENSORS)
    shutil.copytree(stranger.path / "tasks" / "sst2", bank.path / "tasks" / "sst2")
    with pytest.raises(BackboneMismatch):
        bank.get("sst2")


# --- put and get


def test_each_put_is_a_new_version_and_the_default(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    assert bank.versions("sst2") == [1, 2, 3]
    assert bank.get("sst2").ref == "sst2@3"
    assert bank.get("sst2@1").ref == "sst2@1"
    assert pointers(bank) == {"default": 3, "previous": [1, 2], "last": 3}


def test_an_unknown_task_is_reported_with_similar_names(bank: Bank) -> None:
    put(bank, "mrpc", "sst2")
    for ref in ("mprc", "mprc@1"):
        with pytest.raises(UnknownName, match="Did you mean 'mrpc'"):
            bank.get(ref)


def test_an_unknown_version_is_reported_with_the_existing_ones(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    with pytest.raises(BankError, match="has no version 7; its versions are 1, 2"):
        bank.get("sst2@7")


def test_a_copied_bank_is_the_same_bank(bank: Bank, tmp_path: Path) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    copy = Bank.open(shutil.copytree(bank.path, tmp_path / "copy"), BACKBONE)
    assert [package.manifest for package in copy.tasks()] == [package.manifest for package in bank.tasks()]
    assert all(package.verify() == [] for package in copy.tasks())


def test_a_package_moved_under_another_name_is_detected(bank: Bank) -> None:
    put(bank, "sst2")
    shutil.copytree(bank.path / "tasks" / "sst2", bank.path / "tasks" / "mrpc")
    with pytest.raises(PackageDamaged, match="it is the file of the task 'sst2'"):
        bank.get("mrpc")
    (bank.path / "tasks" / "mrpc" / "task.json").unlink()
    with pytest.raises(PackageDamaged, match="contains sst2@1"):
        bank.get("mrpc")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"default": "../../..", "previous": [], "last": 1}'])
def test_damaged_pointers_are_named_and_the_remedy_works(bank: Bank, text: str) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    file = bank.path / "tasks" / "sst2" / "task.json"
    file.write_text(text)
    with pytest.raises(PackageDamaged, match=r"task\.json is damaged \(.+\); delete it"):
        bank.get("sst2")
    assert bank.names() == ["mrpc", "sst2"]
    assert bank.gc(older_than_seconds=0) == []
    file.unlink()
    assert bank.get("sst2").ref == "sst2@2"
    assert bank.gc(older_than_seconds=0) == []


# --- listing


def test_a_damaged_package_does_not_stop_the_listing(bank: Bank) -> None:
    put(bank, "c", "a", "b")
    (bank.get("b").path / "manifest.json").write_text("{")
    (bank.path / "tasks" / "note.txt").write_text("not a task")
    packages, problems = bank.listing()
    assert [package.ref for package in packages] == ["a@1", "c@1"]
    assert len(problems) == 1
    assert str(bank.path / "tasks" / "b") in problems[0]
    assert bank.tasks() == packages
    assert bank.names() == ["a", "b", "c"]


def test_a_bank_of_a_thousand_tasks_is_listed(bank: Bank) -> None:
    names = [f"task{number:04}" for number in range(1000)]
    first = bank.put(draft(names[0]), TENSORS)
    for name in names[1:]:
        folder = bank.path / "tasks" / name / "1"
        folder.mkdir(parents=True)
        manifest = dataclasses.replace(first.manifest, name=name)
        (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
        (folder.parent / "task.json").write_text('{"default": 1, "previous": [], "last": 1}')
    packages, problems = bank.listing()
    assert [package.manifest.name for package in packages] == names == bank.names()
    assert problems == []
    with pytest.raises(UnknownName, match="Did you mean 'task0999'") as caught:
        bank.get("task0999x")
    assert len(caught.value.choices) == 20


def test_the_size_of_a_bank_counts_every_version(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "mrpc")
    assert bank.total_bytes() > 3 * bank.get("mrpc").manifest.bytes


# --- defaults, rollback, removal


def test_rollback_goes_back_one_default_at_a_time_and_reports_the_end(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    assert bank.rollback("sst2") == 2
    assert bank.rollback("sst2") == 1
    assert bank.get("sst2").ref == "sst2@1"
    with pytest.raises(BankError, match="no earlier default; name one of its versions: 1, 2, 3"):
        bank.rollback("sst2")
    assert bank.rollback("sst2", to=3) == 3
    assert bank.rollback("sst2") == 1


def test_rollback_to_a_version_forgets_the_defaults_after_it(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    assert bank.rollback("sst2", to=1) == 1
    assert pointers(bank) == {"default": 1, "previous": [], "last": 3}
    with pytest.raises(BankError, match="has no version 9"):
        bank.rollback("sst2", to=9)


def test_a_chosen_default_can_be_rolled_back(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    bank.set_default("sst2", 1)
    assert pointers(bank) == {"default": 1, "previous": [2, 3], "last": 3}
    bank.set_default("sst2", 1)
    assert pointers(bank) == {"default": 1, "previous": [2, 3], "last": 3}
    assert bank.rollback("sst2") == 3
    with pytest.raises(BankError, match="has no version 9"):
        bank.set_default("sst2", 9)


def test_versions_are_never_reused(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    bank.remove("sst2@2")
    assert bank.put(draft(), TENSORS).ref == "sst2@3"
    bank.remove("sst2")
    assert bank.put(draft(), TENSORS).ref == "sst2@4"
    bank.remove("sst2@4")
    bank.gc(older_than_seconds=0)
    assert bank.put(draft(), TENSORS).ref == "sst2@5"


def test_a_removed_task_leaves_only_its_last_number(bank: Bank) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    bank.remove("sst2")
    assert bank.names() == ["mrpc"]
    assert bank.listing() == ([bank.get("mrpc")], [])
    assert os.listdir(bank.path / "tasks" / "sst2") == ["task.json"]
    assert pointers(bank) == {"default": None, "previous": [], "last": 2}
    uses: list[Callable[[], object]] = [
        lambda: bank.get("sst2"),
        lambda: bank.versions("sst2"),
        lambda: bank.remove("sst2"),
        lambda: bank.rollback("sst2"),
    ]
    for use in uses:
        with pytest.raises(UnknownName):
            use()


def test_the_previous_default_replaces_a_removed_one(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    bank.remove("sst2@2")
    assert pointers(bank) == {"default": 3, "previous": [1], "last": 3}
    bank.remove("sst2@3")
    assert bank.get("sst2").ref == "sst2@1"


def test_the_highest_version_replaces_a_removed_default_without_a_previous_one(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    bank.rollback("sst2", to=1)
    bank.remove("sst2@1")
    assert bank.get("sst2").ref == "sst2@3"


def test_removing_the_last_version_removes_the_task(bank: Bank) -> None:
    put(bank, "sst2")
    bank.remove("sst2@1")
    assert bank.names() == []


def test_removing_a_missing_version_lists_the_existing_ones(bank: Bank) -> None:
    put(bank, "sst2")
    with pytest.raises(BankError, match="has no version 2; its versions are 1"):
        bank.remove("sst2@2")
    with pytest.raises(UnknownName):
        bank.remove("mrpc")


@given(st.lists(st.tuples(st.sampled_from(["put", "set", "back", "remove"]), st.integers(1, 9)), max_size=20))
def test_pointers_always_name_existing_versions(steps: list[tuple[str, int]]) -> None:
    there: set[int] = set()
    state = Pointers(None, (), 0)
    for step, version in steps:
        if step == "put":
            there.add(state.last + 1)
            state = state.moved_to(state.last + 1)
        elif version in there and step == "set":
            state = state.moved_to(version)
        elif version in there and step == "back":
            state = state.rolled_back_to(version)
        elif version in there and step == "remove":
            there.remove(version)
            state = state.without([version], there)
        assert (state.default in there) if there else (state.default is None)
        assert set(state.previous) <= there - {state.default}
        assert len(set(state.previous)) == len(state.previous)
        assert state.last >= max(there, default=0)


# --- gc


def test_gc_keeps_the_default_and_the_version_that_a_rollback_restores(bank: Bank) -> None:
    put(bank, *["sst2"] * 4, "mrpc")
    removed = bank.gc()
    assert [item.path.name for item in removed] == ["1", "2"]
    assert all(item.bytes > 0 and item.reason == "no pointer leads to it" for item in removed)
    assert bank.versions("sst2") == [3, 4]
    assert pointers(bank) == {"default": 4, "previous": [3], "last": 4}
    assert bank.gc() == []
    assert bank.rollback("sst2") == 3


def test_gc_removes_old_leftovers_but_nothing_that_may_still_be_written(bank: Bank) -> None:
    put(bank, "sst2")
    old, new = bank.path / "tasks" / ".tmp-old", bank.path / "tasks" / "sst2" / ".tmp-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"12345")
    past = time.time() - 7200
    for path in (old, old / "weights.safetensors"):
        os.utime(path, (past, past))
    removed = bank.gc()
    assert [(item.path, item.bytes) for item in removed] == [(old, 5)]
    assert not old.exists()
    assert new.exists()


def test_a_dry_run_of_gc_lists_versions_and_removes_none(bank: Bank) -> None:
    put(bank, *["sst2"] * 3)
    before = contents(bank)
    told = bank.gc(dry_run=True)
    assert contents(bank) == before
    assert told == bank.gc()


def test_gc_leaves_records_and_runs_alone(bank: Bank) -> None:
    for folder in (bank.records_path, bank.runs_path):
        folder.mkdir()
        (folder / ".tmp-x").write_text("")
    assert bank.gc(older_than_seconds=0) == []


def test_gc_finishes_a_removal_that_was_interrupted_by_a_crash(bank: Bank) -> None:
    put(bank, "sst2")
    files.write_json(bank.path / "tasks" / "sst2" / "task.json", {"default": None, "previous": [], "last": 1})
    assert bank.names() == []
    assert [item.path.name for item in bank.gc()] == ["1"]
    assert bank.put(draft(), TENSORS).ref == "sst2@2"


def test_importing_the_bank_loads_no_torch() -> None:
    names = ", ".join(f"adapterbank.storage.{name}" for name in ("bank", "package", "records"))
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(adapterbank.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
