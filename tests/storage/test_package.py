"""Claims about `adapterbank.storage.package`: names stay inside the bank, and changed packages are refused."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from adapterbank.errors import BankError, InputError, PackageDamaged
from adapterbank.storage import files, reading
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import STACKED, Array, check_name, is_package_path, parse_ref
from packages import STRANGE_NAMES, TENSORS, contents, draft

pytestmark = pytest.mark.usefixtures("no_flush")


# --- names and references


@pytest.mark.parametrize("name", ["a", "SST-2", "mrpc.v2", "0", "x" * 100, "a..b"])
def test_a_plain_name_is_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("text", "path"),
    [
        *(("mnli", False), ("mnli@2", False), ("glue/mnli", False), ("glue/mnli@2", False)),
        *((".", True), ("..", True), ("./mnli", True), ("a@b/tasks/mnli/2", True), ("bank/tasks/mnli/2", True)),
    ],
)
def test_a_name_of_the_catalog_is_no_path_with_or_without_a_version(text: str, path: bool) -> None:
    assert is_package_path(text) is path


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_a_name_that_could_lead_elsewhere_is_refused_and_named(name: str) -> None:
    with pytest.raises(InputError, match="cannot be a task name; use") as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


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


# --- there and back


def test_a_package_is_read_back_as_it_was_written(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    assert package.ref == "sst2@1"
    assert bank.get("sst2") == bank.get("sst2@1") == package
    loaded = package.tensors()
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        np.testing.assert_array_equal(loaded[name], tensor)
    assert package.verify() == []


def test_put_fills_in_size_checksum_and_date(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    weights = package.path / "weights.safetensors"
    manifest = package.manifest
    assert manifest.version == 1
    assert manifest.bytes == weights.stat().st_size
    assert manifest.weights_sha256 == reading.sha256_file(weights)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)
    given = draft(version=1, bytes=manifest.bytes, weights_sha256=manifest.weights_sha256)
    assert manifest == dataclasses.replace(given, created=manifest.created)


def test_a_transposed_view_and_a_scalar_are_read_back_unchanged(bank: Bank) -> None:
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
def test_tensors_of_a_type_that_cannot_be_stored_are_refused(bank: Bank, odd: Any) -> None:
    with pytest.raises(InputError):
        bank.put(draft(), {"odd": odd})
    assert bank.names() == []


def test_a_manifest_that_is_not_json_is_refused_and_leaves_nothing(bank: Bank) -> None:
    before = contents(bank)
    with pytest.raises(InputError, match="null for a number that is nan"):
        bank.put(draft(recipe={"max_length": 16, "lr": float("nan")}), TENSORS)
    with pytest.raises(InputError, match=r"metrics\.dev\.loss is nan, not a finite number"):
        bank.put(draft(metrics={"dev": {"loss": float("nan")}}), TENSORS)
    assert contents(bank) == before


def test_tuples_and_numeric_keys_do_not_change_the_checksum(bank: Bank) -> None:
    bank.put(draft(recipe={"max_length": 16, 2: (1, 2), 10: ()}), TENSORS)
    assert bank.get("sst2").manifest.recipe == {"max_length": 16, "2": [1, 2], "10": []}


# --- damage


def test_damaged_weights_are_detected(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    file = package.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(PackageDamaged, match=r"weights\.safetensors has been changed: its sha256 differs; restore"):
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
def test_a_file_that_is_not_a_manifest_is_detected(bank: Bank, text: str) -> None:
    package = bank.put(draft(), TENSORS)
    (package.path / "manifest.json").write_text(text)
    with pytest.raises(PackageDamaged, match=r"manifest\.json"):
        bank.get("sst2")


def resealed(package_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and update its checksum, as another release could have written it."""
    value = reading.read_json(package_path / "manifest.json")
    del value["checksum"]
    change(value)
    files.write_json(package_path / "manifest.json", value | {"checksum": files.sha256_json(value)})


def test_a_manifest_with_more_keys_than_this_release_knows_is_read(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.update(colour="blue"))
    assert bank.get("sst2") == package
    file = package.path / "manifest.json"
    file.write_text(file.read_text().replace("blue", "red"))
    with pytest.raises(PackageDamaged):
        bank.get("sst2")


def test_a_missing_key_of_a_manifest_is_named(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.pop("recipe"))
    with pytest.raises(PackageDamaged, match="lacks recipe"):
        bank.get("sst2")


def test_a_manifest_of_a_later_format_asks_for_an_upgrade(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    resealed(package.path, lambda value: value.update(format=STACKED + 1))
    with pytest.raises(BankError, match="upgrade adapterbank") as caught:
        bank.get("sst2")
    assert not isinstance(caught.value, PackageDamaged)


# --- what a checksum does not exclude


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"metrics": []}, r"metrics is \[\], not a mapping"),
        ({"metrics": {"dev": {"accuracy": "high"}}}, r"metrics\.dev\.accuracy is 'high', not a finite number"),
        ({"params": None}, "params is None, not a mapping"),
        ({"backbone": "x"}, "backbone is 'x', not a mapping"),
        ({"fingerprint": None}, "fingerprint is None, not a mapping"),
        ({"seed": True}, "seed is True, not a whole number"),
        ({"bytes": -1}, "bytes is -1, not at least 0"),
        ({"name": ["sst2"]}, "name is a list of 1, not text"),
        ({"created": 5}, "created is 5, not text"),
        ({"version": 10**30}, "version is a huge number, not a whole number"),
    ],
)
def test_a_manifest_with_a_field_of_another_type_is_refused_though_its_checksum_is_right(
    bank: Bank, changes: dict[str, Any], problem: str
) -> None:
    package = bank.put(draft(), TENSORS)
    bank.put(draft("other"), TENSORS)
    resealed(package.path, lambda value: value.update(changes))
    packages, problems = bank.listing()
    assert [found.manifest.name for found in packages] == ["other"]
    assert re.search(problem, problems[0])
    with pytest.raises(PackageDamaged, match=problem):
        bank.get("sst2")


def test_what_could_not_be_read_back_is_not_written(bank: Bank) -> None:
    with pytest.raises(InputError, match="The package 'sst2' cannot be stored: metrics is None, not a mapping"):
        bank.put(dataclasses.replace(draft(), metrics=None), TENSORS)  # type: ignore[arg-type]
    assert bank.names() == []


BAD_TENSORS: list[tuple[Array, str]] = [
    (np.array([1.0, np.nan], np.float32), "holds a number that is not finite"),
    (np.array([np.inf], np.float32), "holds a number that is not finite"),
    (np.array([1e300]), "holds a number that is not finite"),
    (np.array([1], np.int64), "is int64, not floating point"),
    (np.array([True]), "is bool, not floating point"),
]


@pytest.mark.parametrize(("tensor", "problem"), BAD_TENSORS)
def test_tensors_that_are_not_finite_floats_are_refused_when_they_are_put_and_when_they_are_read(
    bank: Bank, tensor: Array, problem: str
) -> None:
    with pytest.raises(InputError, match=f"head.bias {problem}"):
        bank.put(draft(), TENSORS | {"head.bias": tensor})
    package = bank.put(draft(), TENSORS)
    data = safetensors.numpy.save({"head.bias": tensor})
    (package.path / "weights.safetensors").write_bytes(data)
    resealed(package.path, lambda value: value.update(bytes=len(data), weights_sha256=files.sha256_bytes(data)))
    with pytest.raises(PackageDamaged, match=f"head.bias {problem}"):
        bank.get("sst2").tensors()


def test_weights_of_another_size_are_refused_before_they_are_read(bank: Bank) -> None:
    package = bank.put(draft(), TENSORS)
    os.truncate(package.path / "weights.safetensors", 10 << 30)
    with pytest.raises(PackageDamaged, match="it has 10,737,418,240 bytes instead of"):
        package.tensors()
    resealed(package.path, lambda value: value.update(bytes=10 << 30))
    with pytest.raises(PackageDamaged, match="more than its method can need"):
        bank.get("sst2").tensors(largest=1 << 20)
