"""Promise: a package whose checksums are right and whose content is not is refused, or answers with finite numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import adapterbank
from adapterbank.errors import PackageDamaged
from adapterbank.storage import files, reading
from small_data import shell

FIXTURE = Path(__file__).parents[1] / "old_bank"


@pytest.fixture
def bank(tmp_path, monkeypatch):
    """Return a copy of a bank with packages of every kind and method."""
    place = shutil.copytree(FIXTURE, tmp_path / "old", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(place)
    return adapterbank.open_bank("bank", device="cpu")


def forge(name: str, change: Any = lambda value: None, tensors: Any = lambda tensors: tensors) -> None:
    """Change a package's manifest and tensors, with checksums that fit."""
    folder = Path("bank", "tasks", name, "1")
    data = safetensors.numpy.save(tensors(safetensors.numpy.load((folder / "weights.safetensors").read_bytes())))
    (folder / "weights.safetensors").write_bytes(data)
    value = json.loads((folder / "manifest.json").read_text())
    del value["checksum"]
    value |= {"bytes": len(data), "weights_sha256": files.sha256_bytes(data)}
    change(value)
    files.write_json(folder / "manifest.json", reading.seal(value))


def adapter(**changes: Any) -> Any:
    return lambda value: value["method"]["adapter"].update(changes)


def head(**changes: Any) -> Any:
    return lambda value: value["method"]["head"].update(changes)


def task(**changes: Any) -> Any:
    return lambda value: value["task"].update(changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (adapter(depth=10**8), r"adapter\.depth is 100000000, not from 1 to 8"),
        (adapter(size=10**9), r"adapter\.size is 1000000000"),
        (adapter(size=True), r"adapter\.size is True"),
        (adapter(layers=[0, 1, 2]), "it adds to layers that"),
        (adapter(layers=[0, 0]), "layers has an item twice"),
        (adapter(layers=10**5 * [0]), "layers has an item twice"),
        (adapter(sites=["attention", "elsewhere"]), "not one of attention, feedforward"),
        (adapter(activation=["gelu"]), "activation is a list of 1, not text"),
        (lambda value: value["method"].update(adapter=7), "method.adapter is not a mapping"),
        (lambda value: value["method"].update({f"adapter-{n}": {} for n in range(2, 1000)}), "1000|999 additions"),
        (lambda value: value["method"].update(trains=5), "trains is 5, not a list"),
        (head(outputs=10**12), r"head\.outputs is 1000000000000"),
        (head(outputs=3), "its head has 3 outputs"),
        (head(kind="regression", outputs=1), "its head has 1 outputs of kind 'regression'"),
        (head(kind="nothing"), "of kind 'nothing'"),
        (head(scale=None), r"head\.scale is None, not a finite number"),
        (head(pooling="top"), "pooling is 'top', not one of"),
        (task(labels=["a", "a"]), "names the label 'a' twice"),
        (task(labels=["a", ["b"]]), r"task\.labels\[1\] is a list of 1, not text"),
        (task(labels=[str(n) for n in range(100_000)]), "its head has 2 outputs"),
        (task(threshold="x"), "threshold is 'x'"),
        (task(kind="mind-reading"), "mind-reading"),
        (lambda value: value["recipe"].update(max_length=10**9), "max_length is 1000000000"),
        (lambda value: value["recipe"].update(max_length="16"), "recipe.max_length is '16', not a whole number"),
        (lambda value: value["recipe"].update(doc_stride=-3), "recipe.doc_stride is -3, not at least 0"),
    ],
)
def test_a_forged_field_is_refused_and_the_other_tasks_answer(bank, change, problem):
    before = bank.predict("lora", ["the cat sat"])
    forge("adapter", change)
    with pytest.raises(PackageDamaged, match=problem):
        bank.predict("adapter", ["the cat sat"])
    assert bank.predict("lora", ["the cat sat"]) == before


def test_weights_that_are_larger_than_the_plan_are_not_read(bank):
    forge("adapter", tensors=lambda tensors: tensors | {"more": np.zeros(10**6, np.float32)})
    with pytest.raises(PackageDamaged, match="more than its method can need"):
        bank.predict("adapter", ["the cat sat"])


def test_tensors_of_other_names_or_shapes_are_refused(bank):
    forge("adapter", tensors=lambda tensors: {name.replace("head", "hand"): t for name, t in tensors.items()})
    with pytest.raises(PackageDamaged, match="other tensors than its method"):
        bank.predict("adapter", ["the cat sat"])


def overflowing(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.full_like(tensor, 3e38) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["adapter", "span", "regression", "multilabel", "lora", "full"])
def test_finite_weights_that_overflow_are_refused_and_rows_of_other_tasks_in_the_batch_are_not(bank, name):
    texts, pairs = ["the cat sat"], ["on a mat"] if name == "span" else None
    before = bank.predict("layernorm", texts)
    forge(name, tensors=overflowing)
    with pytest.raises(PackageDamaged, match="computes numbers that are not finite"):
        bank.predict(name, texts, pairs=pairs)
    assert bank.predict("layernorm", texts) == before


def test_the_command_prints_no_nan_and_fails(bank):
    forge("adapter", tensors=overflowing)
    found = shell("predict", "--bank", "bank", "--task", "adapter", "--device", "cpu", "--text", "the cat sat")
    assert (found.code, found.out) == (2, "")
    assert "computes numbers that are not finite" in found.err
