"""What only a GPU can show; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapterbank.api import open_bank
from small_data import reviews

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

TEXTS = ["the big dog ran", "why", "a good film on the mat , was it ?"] * 7


@pytest.fixture
def trained(tmp_path, bert):
    """A bank of four tasks of several methods and sizes, trained on the GPU in bf16."""
    bank = open_bank(tmp_path / "bank", bert, device="cuda")
    for name, options in {
        "a": {"size": 8},
        "b": {"size": 3, "pooling": "first"},
        "c": {"method": "layernorm"},
        "d": {"method": "top"},
    }.items():
        bank.train(name, reviews(), epochs=2, max_length=32, **options)
    return bank


def test_an_audit_in_another_engine_on_the_same_gpu_agrees_to_the_bit(trained, bert):
    findings = list(open_bank(trained.path, bert, device="cuda").audit())
    assert [(f.ref, f.ok, f.how) for f in findings] == [(f"{n}@1", True, "to the bit") for n in "abcd"]


def test_an_audit_on_the_cpu_is_within_tolerance_and_says_so(trained, bert):
    findings = list(open_bank(trained.path, bert, device="cpu").audit())
    assert [(f.ref, f.ok, "within 0.1" in f.how) for f in findings] == [(f"{n}@1", True, True) for n in "abcd"]


def test_the_same_seed_gives_the_same_package_twice(tmp_path, bert):
    shas = []
    for place in ("one", "two"):
        bank = open_bank(tmp_path / place, bert, device="cuda")
        shas.append(bank.train("a", reviews(), epochs=2, size=8, max_length=32).package.manifest.weights_sha256)
    assert shas[0] == shas[1]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_mixed_rows_on_the_gpu_equal_each_task_alone_on_the_cpu(trained, bert, precision, tolerance):
    gpu = open_bank(trained.path, bert, device="cuda", precision=precision)
    cpu = open_bank(trained.path, bert, device="cpu")
    names = [["a", "b", "c", "d"][i % 4] for i in range(len(TEXTS))]
    for name, text, found in zip(names, TEXTS, gpu.predict(names, TEXTS), strict=True):
        (expected,) = cpu.predict(name, [text])
        assert found.probabilities == pytest.approx(expected.probabilities, abs=tolerance)


def test_rows_of_no_task_give_the_bare_encoders_mean(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert, device="cuda", precision="fp32")
    for found, hidden in zip(bank.predict(None, TEXTS), bert.encode(TEXTS), strict=True):
        np.testing.assert_allclose(found.embedding, hidden.mean(0), atol=1e-4)
