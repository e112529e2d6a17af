"""`encoder.quickest`: the choice is one of the layouts that were measured: fp32 unless another is clearly quicker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapterbank.encoder import quickest
from adapterbank.encoder.quickest import choose_layout
from adapterbank.errors import ConfigError


def test_the_choice_is_measured_and_its_matrices_alone_are_kept(bert):
    backbone = replace(bert)
    choice = choose_layout(backbone, seconds=0.05)
    assert choice.layout in choice.seconds
    assert "fp32" in choice.seconds
    assert list(backbone._laid_out) == [choice.layout]


@pytest.mark.parametrize(("took", "wanted"), [(0.9, "fp32"), (0.5, "int8"), (1.5, "fp32")])
def test_a_coarser_layout_must_be_clearly_quicker(bert, monkeypatch, took, wanted):
    clock = [0.0]
    steps = {"fp32": 1.0, "int8": took}

    def passes(backbone, layout):
        backbone.laid_out(layout)

        def run():
            clock[0] += steps[layout]

        return run

    monkeypatch.setattr(quickest, "_passes", passes)
    monkeypatch.setattr(quickest, "_works", lambda layout: layout in steps)
    monkeypatch.setattr(quickest.time, "perf_counter", lambda: clock[0])
    assert choose_layout(replace(bert), seconds=5).layout == wanted


def test_a_layout_that_this_machine_cannot_compute_is_not_measured(bert, monkeypatch):
    def find(name, device):
        if name != "fp32":
            raise ConfigError([f"no {name}"])
        return torch.float32

    monkeypatch.setattr(quickest, "find_dtype", find)
    assert set(choose_layout(replace(bert), seconds=0.01).seconds) == {"fp32"}
