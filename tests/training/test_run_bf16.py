"""Promise: every way to train runs in the 16 bits of a GPU, too; here on the CPU, where a user cannot ask for it."""

from __future__ import annotations

import math

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.training import builder
from short_runs import quick
from small_data import reviews

ROWS = reviews()
WAYS = {
    "adapter": quick(size=4, average=True),
    "narrowed": quick(size="8to4", epochs=3, average=True),
    "mixture": quick(size=4, mix=2),
    "on a base": quick(size=4, on="base"),
    "started": quick(size=4, start_from="base"),
    "fused": quick("fusion", fuse="base,other", rank=4),
    "few labels": {**quick(size=4), "few": "always"},
    "few labels on a base": {**quick(size=4, on="base"), "few": "always"},
    **{method: quick(method) for method in ("layernorm", "lora", "ia3", "bitfit", "feature", "top", "full")},
}


@pytest.fixture
def bank(tmp_path, bert, monkeypatch):
    """Return a bank in which all runs compute in bf16, with two tasks."""
    monkeypatch.setattr(builder, "find_dtype", lambda name, device: torch.bfloat16)
    made = open_bank(tmp_path / "bank", bert, device="cpu")
    made.train("base", ROWS, ROWS, **quick(size=4))
    made.train("other", ROWS, ROWS, **quick(size=4, seed=1))
    return made


def works(record):
    """Return whether a run was fitted, or its losses are finite numbers."""
    losses = [epoch["loss"] for epoch in record["history"] if "loss" in epoch]
    return bool(losses or "fitted" in record or "strength" in record) and all(map(math.isfinite, losses))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train(bank, way):
    result = bank.train("task", ROWS, ROWS, **WAYS[way])
    assert works(result.record)
    assert bank.predict("task", [ROWS[0][0]])[0].label in ("negative", "positive")


def test_tasks_that_teach_together(bank):
    result = bank.teach_together({"one": ROWS, "two": reviews(30)}, "taught", **quick(size=4))
    assert works(result.record)
