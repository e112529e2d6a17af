"""Claims about `adapterbank.bank`: packages are whole, checked, never renumbered, and stay inside."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import adapterbank
from adapterbank import storage
from adapterbank.bank import FORMAT, Array, Bank, Manifest, Pointers, check_name, parse_ref
from adapterbank.errors import (
    BackboneMismatch,
    BankError,
    InputError,
    PackageDamaged,
    StorageError,
    UnknownName,
)

BACKBONE = {"name": "tiny", "sha256": "a" * 64}
TENSORS: dict[str, Array] = {
    "head.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "head.bias": np.zeros(2, np.float16),
}


def draft(name: str = "sst2", **changes: Any) -> Manifest:
    """Return what a run hands to `put`."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "version": 0,
        "task": {"kind": "classification", "labels": ["négatif", "positif"]},
        "method": {"name": "adapter", "size": 64},
        "backbone": BACKBONE,
        "recipe": {"lr": 3e-4, "epochs": 3},
        "seed": 7,
        "data": {"sha256": "d" * 64},
        "metrics": {"validation": {"accuracy": 0.91}},
        "params": {"trained": 8, "total": 108},
        "bytes": 0,
        "weights_sha256": "",
        "library": "0.1.0",
        "created": "",
        "fingerprint": {"outputs": [[0.1, -0.25]]},
    }
    return Manifest(**values | changes)


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without flushing: it is for power cuts, which no test can make, and takes most of a put's time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    """Return a new, empty bank."""
    return Bank.open(tmp_path / "bank", BACKBONE, create=True)


def put(bank: Bank, *names: str) -> None:
    """Put a package for each name."""
    for name in names:
        bank.put(draft(name), TENSORS)


def files(bank: Bank) -> dict[str, bytes]:
    """Return every file and folder of the bank but the lock, to compare before and after."""
    found = (path for path in bank.path.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(bank.path)): path.read_bytes() if path.is_file() else b"" for path in found}


def pointers(bank: Bank, name: str = "sst2") -> dict[str, Any]:
    """Return task.json as it is on disk."""
    value: dict[str, Any] = storage.read_json(bank.path / "tasks" / name / "task.json")
    return value


# --- names and references


@pytest.mark.parametrize("name", ["a", "SST-2", "mrpc.v2", "0", "x" * 100, "a..b"])
def test_a_plain_name_is_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".tmp-x", "-x", "a b", "a\n", "a\0", "é", "x" * 101],
)
def test_a_name_that_could_lead_elsewhere_is_refused_and_named(bank: Bank, name: str) -> None:
    with pytest.raises(InputError, match="cannot be a task name; use") as caught:
        check_name(name)
    assert repr(name) in str(caught.value)
    before = files(bank)
    uses: list[Callable[[], object]] = [
        lambda: bank.put(draft(name), TENSORS),
        lambda: bank.versions(name),
        lambda: bank.set_default(name, 1),
        lambda: bank.rollback(name),
    ]
    for use in uses:
        with pytest.raises(InputError):
            use()
    assert files(bank) == before


@given(st.text(max_size=12) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}\n?", fullmatch=True))
@example("..")
@example("a/../..")
def test_an_accepted_name_is_one_folder_inside_the_bank(name: str) -> None:
    try:
        check_name(name)
    except InputError:
        return
    inside = Path("/bank/tasks")
    assert Path(os.path.normpath(inside / name)).parent == inside
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)


def test_a_reference_is_a_name_with_or_without_a_version() -> None:
    assert parse_ref("sst2") == ("sst2", None)
    assert parse_ref("sst2@13") == ("sst2", 13)


@pytest.mark.parametrize("ref", ["sst2@", "sst2@0", "sst2@-1", "sst2@1.5", "sst2@1@2", "sst2@²", "@1"])
def test_a_reference_with_a_strange_version_is_refused(ref: str) -> None:
    with pytest.raises(InputError):
        parse_ref(ref)


# --- opening


def test_a_missing_bank_is_not_made_by_accident(tmp_path: Path) -> None:
    with pytest.raises(BankError, match="does not exist; to make a bank there, open it with create=True"):
        Bank.open(tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_a_bank_is_made_once_and_then_only_opened(tmp_path: Path) -> None:
    Bank.open(tmp_path / "deep" / "bank", BACKBONE, create=True)
    head = (tmp_path / "deep" / "bank" / "bank.json").read_bytes()
    again = Bank.open(str(tmp_path / "deep" / "bank"), BACKBONE, create=True)
    assert again.backbone == BACKBONE
    assert (again.path / "bank.json").read_bytes() == head
    assert json.loads(head)["format"] == FORMAT
    assert Bank.open(again.path) == again


def test_making_a_bank_needs_a_whole_backbone(tmp_path: Path) -> None:
    for backbone in (None, {"name": "tiny"}):
        with pytest.raises(InputError, match="give its backbone"):
            Bank.open(tmp_path / "bank", backbone, create=True)
    assert not (tmp_path / "bank").exists()


def test_a_bank_may_start_in_a_folder_with_only_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("")
    assert Bank.open(tmp_path, BACKBONE, create=True).names() == []


@pytest.mark.parametrize("create", [False, True])
def test_a_folder_of_other_things_is_not_taken_for_a_bank(tmp_path: Path, create: bool) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(BankError, match=r"is not a bank|is no bank"):
        Bank.open(tmp_path, BACKBONE, create=create)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("create", [False, True])
def test_a_file_is_not_taken_for_a_bank(tmp_path: Path, create: bool) -> None:
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


def test_a_package_comes_back_as_it_was_put(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    assert package.ref == "sst2@1"
    assert bank.get("sst2") == bank.get("sst2@1") == package
    loaded = package.tensors()
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        np.testing.assert_array_equal(loaded[name], tensor)
    assert package.verify() == []


def test_put_fills_in_what_only_it_can_know(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    weights = package.path / "weights.safetensors"
    manifest = package.manifest
    assert manifest.version == 1
    assert manifest.bytes == weights.stat().st_size
    assert manifest.weights_sha256 == storage.sha256_file(weights)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)
    given = draft(version=1, bytes=manifest.bytes, weights_sha256=manifest.weights_sha256)
    assert manifest == dataclasses.replace(given, created=manifest.created)


def test_a_transposed_view_and_a_scalar_come_back_as_they_were(bank: Bank) -> None:
    tensors: dict[str, Array] = {
        "t": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "s": np.array(3.0),
        "e": np.zeros((0, 4)),
    }
    loaded = bank.put(draft(), tensors).tensors()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        np.testing.assert_array_equal(loaded[name], tensor)


def test_the_same_tensors_in_another_order_give_the_same_weights_file(bank: Bank) -> None:
    first = bank.put(draft(), TENSORS)
    second = bank.put(draft(), dict(reversed(TENSORS.items())))
    assert first.manifest.weights_sha256 == second.manifest.weights_sha256


@pytest.mark.parametrize("odd", [np.array(["text"]), np.array([1j]), np.array([1], np.longdouble)])
def test_tensors_that_could_not_be_read_back_are_refused(bank: Bank, odd: Any) -> None:
    with pytest.raises(InputError):
        bank.put(draft(), {"odd": odd})
    assert bank.names() == []


def test_a_manifest_that_json_cannot_hold_is_refused_and_nothing_is_left(bank: Bank) -> None:
    before = files(bank)
    with pytest.raises(InputError, match="null for a number that is nan"):
        bank.put(draft(metrics={"loss": float("nan")}), TENSORS)
    assert files(bank) == before


def test_tuples_and_number_keys_do_not_upset_the_checksum(bank: Bank) -> None:
    bank.put(draft(metrics={2: (1, 2), 10: ()}), TENSORS)
    assert bank.get("sst2").manifest.metrics == {"2": [1, 2], "10": []}


def test_each_put_is_a_new_version_and_the_default(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    assert bank.versions("sst2") == [1, 2, 3]
    assert bank.get("sst2").ref == "sst2@3"
    assert bank.get("sst2@1").ref == "sst2@1"
    assert pointers(bank) == {"default": 3, "previous": [1, 2], "last": 3}


def test_an_unknown_task_is_answered_with_near_names(bank: Bank) -> None:
    put(bank, "mrpc", "sst2")
    for ref in ("mprc", "mprc@1"):
        with pytest.raises(UnknownName, match="Did you mean 'mrpc'"):
            bank.get(ref)


def test_an_unknown_version_is_answered_with_those_there_are(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    with pytest.raises(BankError, match="has no version 7; its versions are 1, 2"):
        bank.get("sst2@7")


def test_a_copied_bank_is_the_same_bank(bank: Bank, tmp_path: Path) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    copy = Bank.open(shutil.copytree(bank.path, tmp_path / "copy"), BACKBONE)
    assert [package.manifest for package in copy.tasks()] == [package.manifest for package in bank.tasks()]
    assert all(package.verify() == [] for package in copy.tasks())


# --- many writers, full disks, interruptions

RACE = """
import sys
import numpy as np
from adapterbank.bank import Bank, Manifest
path, worker = sys.argv[1], int(sys.argv[2])
backbone = {"name": "tiny", "sha256": "a" * 64}
print("ready", flush=True)
sys.stdin.readline()
bank = Bank.open(path, backbone, create=True)
for _ in range(4):
    draft = Manifest(1, "sst2", 0, {}, {}, backbone, {}, worker, {}, {}, {}, 0, "", "0", "", {})
    package = bank.put(draft, {"w": np.full(100, worker, np.float32)})
    print(package.manifest.version, flush=True)
"""


def test_eight_processes_make_one_bank_and_each_put_gets_a_version_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    environment = os.environ | {"PYTHONPATH": str(Path(adapterbank.__file__).parents[1])}
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
    for worker in workers:  # all have imported what they need, so that they truly start together
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
    """Let `os.<call>` fail from the `count`-th time on, an interrupt only once; returns the calls made."""
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
def test_a_disk_that_fills_up_anywhere_in_a_put_leaves_the_bank_as_it_was(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, call: str, earlier: int
) -> None:
    told = []
    for count in range(1, 40):
        name = f"task{count}"
        put(bank, *[name] * earlier)
        before = files(bank)
        with monkeypatch.context() as patch:
            made = fail_from(patch, call, count, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            try:
                bank.put(draft(name), TENSORS)
            except StorageError as error:
                told.append(str(error))
                assert files(bank) == before
            else:  # only the flush of a folder was refused, or nothing
                assert bank.get(name).verify() == []
                assert bank.get(name).manifest.version == earlier + 1
        if made[0] < count:
            break
    assert told
    assert all("the disk is full; free some space" in sentence for sentence in told)


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir", "open"])
def test_an_interrupt_anywhere_in_a_put_leaves_nothing_or_the_whole_package(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    interrupted = 0
    for count in range(1, 30):
        before, served = files(bank), len(bank.names())
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
            assert files(bank) == before
        else:
            assert bank.get(f"task{count}").verify() == []
    assert interrupted >= 1


def test_a_process_killed_before_it_points_leaves_a_bank_that_works(bank: Bank) -> None:
    put(bank, "sst2", "sst2")
    storage.write_json(bank.path / "tasks" / "sst2" / "task.json", {"default": 1, "previous": [], "last": 1})
    assert bank.get("sst2").ref == "sst2@1"
    assert bank.put(draft(), TENSORS).ref == "sst2@3"


# --- damage


def test_damaged_weights_are_detected(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    file = package.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PackageDamaged, match=r"weights\.safetensors is not what was written.*restore"):
        package.tensors()
    assert len(package.verify()) == 1
    file.unlink()
    with pytest.raises(PackageDamaged, match=r"weights\.safetensors is missing"):
        package.tensors()


def test_an_edited_manifest_is_detected(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    file = package.path / "manifest.json"
    file.write_text(file.read_text().replace("0.91", "0.99"))
    with pytest.raises(PackageDamaged, match=r"manifest\.json was changed after it was written; restore"):
        bank.get("sst2")
    assert len(package.verify()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_manifest_that_is_none_is_detected(bank: Bank, text: str) -> None:
    package = bank.put(draft(), TENSORS)
    (package.path / "manifest.json").write_text(text)
    with pytest.raises(PackageDamaged, match=r"manifest\.json"):
        bank.get("sst2")


def resealed(package_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and make its checksum right again, as another release could have written it."""
    value = storage.read_json(package_path / "manifest.json")
    del value["checksum"]
    change(value)
    storage.write_json(package_path / "manifest.json", value | {"checksum": storage.sha256_json(value)})


def test_a_manifest_with_more_keys_than_this_release_knows_is_read(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.update(colour="blue"))
    assert bank.get("sst2") == package
    file = package.path / "manifest.json"
    file.write_text(file.read_text().replace("blue", "red"))
    with pytest.raises(PackageDamaged):
        bank.get("sst2")


def test_a_manifest_that_lacks_a_key_says_which(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.pop("recipe"))
    with pytest.raises(PackageDamaged, match="lacks recipe"):
        bank.get("sst2")


def test_a_manifest_of_a_later_format_asks_for_an_upgrade(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.update(format=FORMAT + 1))
    with pytest.raises(BankError, match="upgrade adapterbank") as caught:
        bank.get("sst2")
    assert not isinstance(caught.value, PackageDamaged)


def test_a_package_moved_under_another_name_is_detected(bank: Bank) -> None:
    put(bank, "sst2")
    shutil.copytree(bank.path / "tasks" / "sst2", bank.path / "tasks" / "mrpc")
    with pytest.raises(PackageDamaged, match="holds sst2@1"):
        bank.get("mrpc")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"default": "../../..", "previous": [], "last": 1}'])
def test_damaged_pointers_are_named_and_the_remedy_works(bank: Bank, text: str) -> None:
    put(bank, "mrpc", "sst2", "sst2")
    file = bank.path / "tasks" / "sst2" / "task.json"
    file.write_text(text)
    with pytest.raises(PackageDamaged, match=r"task\.json is damaged; delete it"):
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


def test_rollback_goes_back_one_default_at_a_time_and_then_says_so(bank: Bank) -> None:
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


def test_a_removed_task_is_gone_but_for_its_last_number(bank: Bank) -> None:
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


def test_when_the_default_goes_the_one_before_it_is_served(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    bank.remove("sst2@2")
    assert pointers(bank) == {"default": 3, "previous": [1], "last": 3}
    bank.remove("sst2@3")
    assert bank.get("sst2").ref == "sst2@1"


def test_when_there_was_none_before_it_the_highest_left_is_served(bank: Bank) -> None:
    put(bank, "sst2", "sst2", "sst2")
    bank.rollback("sst2", to=1)
    bank.remove("sst2@1")
    assert bank.get("sst2").ref == "sst2@3"


def test_removing_the_last_version_removes_the_task(bank: Bank) -> None:
    put(bank, "sst2")
    bank.remove("sst2@1")
    assert bank.names() == []


def test_removing_what_is_not_there_says_what_is(bank: Bank) -> None:
    put(bank, "sst2")
    with pytest.raises(BankError, match="has no version 2; its versions are 1"):
        bank.remove("sst2@2")
    with pytest.raises(UnknownName):
        bank.remove("mrpc")


@given(st.lists(st.tuples(st.sampled_from(["put", "set", "back", "remove"]), st.integers(1, 9)), max_size=20))
def test_pointers_always_lead_to_a_version_that_is_there(steps: list[tuple[str, int]]) -> None:
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


def test_gc_keeps_what_is_served_and_what_a_rollback_goes_to(bank: Bank) -> None:
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


def test_a_dry_run_of_gc_tells_and_touches_nothing(bank: Bank) -> None:
    put(bank, *["sst2"] * 3)
    before = files(bank)
    told = bank.gc(dry_run=True)
    assert files(bank) == before
    assert told == bank.gc()


def test_gc_leaves_records_and_runs_alone(bank: Bank) -> None:
    for folder in (bank.records_path, bank.runs_path):
        folder.mkdir()
        (folder / ".tmp-x").write_text("")
    assert bank.gc(older_than_seconds=0) == []


def test_gc_finishes_the_removal_that_a_crash_broke_off(bank: Bank) -> None:
    put(bank, "sst2")
    storage.write_json(
        bank.path / "tasks" / "sst2" / "task.json", {"default": None, "previous": [], "last": 1}
    )
    assert bank.names() == []
    assert [item.path.name for item in bank.gc()] == ["1"]
    assert bank.put(draft(), TENSORS).ref == "sst2@2"


def test_importing_the_bank_loads_no_torch() -> None:
    code = "import sys, adapterbank.bank, adapterbank.records; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(adapterbank.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
