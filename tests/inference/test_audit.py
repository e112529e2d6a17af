"""`inference.audit`: an unchanged bank passes, and every change is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adapterbank.api.opened import open_bank
from adapterbank.inference import audit as audits
from adapterbank.inference.engine import Engine
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import read_manifest
from families import save_random
from small_data import FAST, answers, pairs, reviews, scores, shell, tags

ROWS = reviews()
SHORT = {name: value for name, value in FAST.items() if name != "size"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """Return a folder with a bank of two tasks, one with two versions, and its encoder; tests use copies."""
    folder = tmp_path_factory.mktemp("audit")
    encoder = shutil.copytree(checkpoint("bert")[0], folder / "encoder")
    bank = open_bank(folder / "bank", str(encoder), device="cpu")
    bank.train("sentiment", ROWS, ROWS, **FAST)
    bank.train("sentiment", ROWS, ROWS, **FAST, seed=1)
    bank.train("score", scores(), scores(), **FAST)
    return folder


@pytest.fixture
def bank(made, tmp_path):
    return shutil.copytree(made / "bank", tmp_path / "bank")


def audited(path):
    return {finding.ref: finding for finding in open_bank(path, device="cpu").audit()}


def package(path, ref):
    name, version = ref.split("@")
    return path / "tasks" / name / version


def rewrite(path, ref, **fingerprint):
    """Rewrite a manifest with another fingerprint and a matching checksum."""
    folder = package(path, ref)
    manifest = read_manifest(folder)
    changed = replace(manifest, fingerprint={**manifest.fingerprint, **fingerprint})
    files.write_json(folder / "manifest.json", changed.to_json())


def shifted(path, ref, by):
    outputs = read_manifest(package(path, ref)).fingerprint["outputs"]
    return [[*out[:-1], out[-1] + by] for out in outputs]


def test_an_unchanged_bank_is_the_same_to_the_bit(bank):
    found = audited(bank)
    assert list(found) == ["score@1", "sentiment@1", "sentiment@2"]
    for finding in found.values():
        assert (finding.ok, finding.how, finding.difference) == (True, "to the bit", 0.0)


def test_the_shell_prints_the_findings(bank):
    found = shell("audit", "--bank", bank)
    assert (found.code, found.err) == (0, "")
    assert found.out.splitlines() == [
        "same      score@1: to the bit",
        "same      sentiment@1: to the bit",
        "same      sentiment@2: to the bit",
        "3 packages, 0 different",
    ]
    answer = shell("audit", "--bank", bank, "--json").json
    assert answer["ok"] is True
    assert [finding["ref"] for finding in answer["findings"]] == ["score@1", "sentiment@1", "sentiment@2"]


def flip_weights(path):
    file = package(path, "sentiment@1") / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_weights(path):
    (package(path, "sentiment@1") / "weights.safetensors").unlink()


def edit_manifest(path):
    file = package(path, "sentiment@1") / "manifest.json"
    value = json.loads(file.read_text())
    value["metrics"]["dev"]["accuracy"] = 1.0
    file.write_text(json.dumps(value))


def break_manifest(path):
    file = package(path, "sentiment@1") / "manifest.json"
    file.write_text(file.read_text()[:100])


def change_outputs(path):
    rewrite(path, "sentiment@1", outputs=shifted(path, "sentiment@1", 1e-6))


@pytest.mark.parametrize(
    ("tamper", "how"),
    [
        (flip_weights, "its sha256 differs"),
        (lose_weights, "is missing"),
        (edit_manifest, "was changed after it was written"),
        (break_manifest, "is not JSON"),
        (change_outputs, "outputs on the probe texts differ by"),
    ],
)
def test_only_a_package_that_was_tampered_with_is_reported(bank, tamper, how):
    tamper(bank)
    found = audited(bank)
    assert [ref for ref, finding in found.items() if not finding.ok] == ["sentiment@1"]
    assert len(found) == 3
    assert how in found["sentiment@1"].how
    reported = shell("audit", "--bank", bank)
    assert reported.code == 1
    assert reported.out.splitlines()[-1] == "3 packages, 1 different: sentiment@1"
    assert shell("audit", "--bank", bank, "--json").json["ok"] is False


def test_a_missing_default_version_is_reported(bank):
    shutil.rmtree(package(bank, "sentiment@2"))
    reported = shell("audit", "--bank", bank)
    assert reported.code == 1
    assert "DIFFERENT sentiment: 'sentiment' has no version 2; its versions are 1." in reported.out
    assert "same      sentiment@1" in reported.out


def test_a_task_without_any_version_is_reported(bank):
    shutil.rmtree(package(bank, "score@1"))
    assert shell("audit", "--bank", bank).out.splitlines()[-1] == "3 packages, 1 different: score"


def test_a_damaged_task_file_is_reported(bank):
    (bank / "tasks" / "score" / "task.json").write_text("{")
    found = audited(bank)
    assert not found["score"].ok
    assert "task.json is damaged" in found["score"].how
    assert found["sentiment@2"].ok


def test_a_changed_encoder_is_reported_for_every_package(bank, tmp_path, checkpoint):
    encoder = tmp_path / "encoder"
    shutil.copytree(checkpoint("bert")[0], encoder)
    own = open_bank(tmp_path / "own", str(encoder), device="cpu")
    own.train("a", ROWS, ROWS, **FAST)
    own.train("b", ROWS, ROWS, method="feature", **SHORT)
    assert shell("audit", "--bank", own.path).code == 0
    save_random("bert", encoder, seed=1)
    reported = shell("audit", "--bank", own.path)
    assert reported.code == 1
    assert reported.out.splitlines()[-1] == "2 packages, 2 different: a@1, b@1"
    assert "a@1 was trained on backbone" in reported.out


@pytest.mark.parametrize(("by", "ok"), [(5e-5, True), (2e-4, False)])
def test_a_stamp_of_another_torch_version_is_compared_within_a_tolerance(bank, by, ok):
    stamp = read_manifest(package(bank, "sentiment@1")).fingerprint["stamp"]
    rewrite(bank, "sentiment@1", stamp={**stamp, "torch": "1.0"}, outputs=shifted(bank, "sentiment@1", by))
    finding = audited(bank)["sentiment@1"]
    assert finding.ok is ok
    assert finding.difference == pytest.approx(by, rel=0.1)
    wanted = "within 0.0001, because the library or the machine may" if ok else "outputs on the probe texts differ"
    assert finding.how.startswith(wanted)


@pytest.mark.parametrize("key", ["library", "device", "cpu", "threads", "precision", "products", "arithmetic"])
def test_everything_that_may_change_the_last_bit_is_part_of_the_stamp(bank, key):
    stamp = read_manifest(package(bank, "sentiment@1")).fingerprint["stamp"]
    rewrite(bank, "sentiment@1", stamp={**stamp, key: "another"}, outputs=shifted(bank, "sentiment@1", 1e-6))
    assert audited(bank)["sentiment@1"].how.startswith("within 0.0001")


def test_a_package_from_before_the_arithmetic_was_stored_is_compared_within_a_tolerance(bank):
    stamp = read_manifest(package(bank, "sentiment@1")).fingerprint["stamp"]
    old = {key: value for key, value in stamp.items() if key != "arithmetic"}
    rewrite(bank, "sentiment@1", stamp=old)
    assert audited(bank)["sentiment@1"].how == "to the bit"  # nothing differs
    rewrite(bank, "sentiment@1", stamp=old, outputs=shifted(bank, "sentiment@1", 1e-6))
    assert audited(bank)["sentiment@1"].how.startswith("within 0.0001")


@pytest.mark.parametrize("limit", [{"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"MKL_CBWR": "COMPATIBLE"}])
def test_a_library_below_torch_that_rounds_otherwise_is_no_sign_of_forgetting(bank, limit):
    # On processors for which the limit changes nothing, the outputs are equal to the bit.
    words = [sys.executable, "-c", "from adapterbank.cli.entry import main; main()", "audit", "--bank", str(bank)]
    found = subprocess.run(words, env={**os.environ, **limit}, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, "3 packages, 0 different"), found.stdout


def test_bf16_on_either_side_is_compared_within_its_own_tolerance(bank):
    stamp = read_manifest(package(bank, "sentiment@1")).fingerprint["stamp"]
    rewrite(bank, "sentiment@1", stamp={**stamp, "precision": "bf16"}, outputs=shifted(bank, "sentiment@1", 0.05))
    finding = audited(bank)["sentiment@1"]
    assert finding.ok
    assert finding.how.startswith("within 0.1")


def test_int8_is_compared_within_its_own_tolerance_which_the_audit_names(bank):
    found = {finding.ref: finding for finding in open_bank(bank, device="cpu", precision="int8").audit()}
    finding = found["sentiment@1"]
    assert finding.ok
    assert finding.difference > 1e-4
    assert finding.how == "within 0.5, because it was trained in fp32 and is computed in int8"
    stamp = read_manifest(package(bank, "sentiment@1")).fingerprint["stamp"]
    rewrite(bank, "sentiment@1", stamp=stamp, outputs=shifted(bank, "sentiment@1", 2.0))
    found = {finding.ref: finding for finding in open_bank(bank, device="cpu", precision="int8").audit()}
    assert not found["sentiment@1"].ok


@pytest.mark.parametrize(("off", "ok"), [(1e-3, True), (1.0, False)])
def test_outputs_on_the_scale_of_large_labels_are_compared_on_that_scale(off, ok):
    """A regression of prices: rounding alone changes the last digit of 10,000 by a thousandth."""
    stored = {"stamp": {"torch": "1", "precision": "fp32"}, "outputs": [[10_000.0], [900.0]]}
    package = SimpleNamespace(ref="price@1", manifest=SimpleNamespace(fingerprint=stored))
    found = audits._compare(package, [[10_000.0 + off], [900.0]], {"torch": "2", "precision": "fp32"})
    assert found.ok is ok


def test_outputs_of_another_shape_are_reported(bank):
    outputs = read_manifest(package(bank, "sentiment@1")).fingerprint["outputs"]
    for wrong in (outputs[:-1], [out[:-1] for out in outputs]):
        rewrite(bank, "sentiment@1", outputs=wrong)
        assert "another shape" in audited(bank)["sentiment@1"].how


def test_a_nan_output_never_matches(bank, monkeypatch):
    real = Engine.outputs
    monkeypatch.setattr(Engine, "outputs", lambda *arguments: [*real(*arguments)[:-1], np.full(2, np.nan)])
    assert not audited(bank)["sentiment@1"].ok


def test_the_first_tasks_outputs_are_bit_identical_after_five_more_tasks(tmp_path, bert):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    first = bank.train("first", ROWS, ROWS, **FAST).package
    weights = (first.path / "weights.safetensors").read_bytes()
    texts = [text for text, _ in ROWS]
    before = [answer.probabilities for answer in bank.predict("first", texts)]
    bank.train("score", scores(), scores(), **{**FAST, "size": 9})
    bank.train("tags", tags(), tags(), method="layernorm", **SHORT)
    bank.train("pair", pairs(), pairs(), method="top", **SHORT)
    bank.train("span", answers(), answers(), **FAST)
    bank.train("whole", ROWS, ROWS, method="full", **SHORT)
    kept = Bank.open(bank.path).get("first").manifest.fingerprint
    fresh = open_bank(bank.path, bert, device="cpu")
    assert kept == first.manifest.fingerprint
    assert audits.fingerprint(fresh.engine, fresh.engine.load(first)) == kept
    for opened in (bank, fresh):  # one that has seen all six tasks, and a new one
        assert [answer.probabilities for answer in opened.predict("first", texts)] == before
    assert (first.path / "weights.safetensors").read_bytes() == weights
    assert all(finding.how == "to the bit" for finding in bank.audit())
    assert len(list(bank.audit())) == 6


def test_a_fingerprint_has_exact_float32_outputs_for_every_probe(made):
    manifest = read_manifest(package(made / "bank", "sentiment@1"))
    outputs = manifest.fingerprint["outputs"]
    assert len(outputs) == len(audits.PROBES)
    assert all(np.float32(value) == value for out in outputs for value in out)
    assert set(manifest.fingerprint["stamp"]) >= {"torch", "device", "cpu", "threads", "precision"}


def test_a_task_with_a_short_max_length_has_a_fingerprint(tmp_path, bert):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    options = {**FAST, "max_length": 16}
    bank.train("span", answers(), answers(), **options)
    bank.train("pair", pairs(), pairs(), **options)
    assert [finding.how for finding in bank.audit()] == ["to the bit"] * 2
