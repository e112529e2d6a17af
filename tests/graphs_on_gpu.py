"""Fixtures of the tests that run captured graphs on a GPU."""

from __future__ import annotations

import pytest
import torch

from adapterbank.encoder.backbone import load
from adapterbank.inference import graph_runner
from families import save_random


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Return an encoder whose heads fit the attention kernel, and one whose heads are too narrow for it."""
    found = {}
    for name, heads in (("kernel", 2), ("composed", 4)):
        folder = tmp_path_factory.mktemp(name)
        save_random("bert", folder, num_attention_heads=heads)
        found[name] = load(str(folder))
    return found


@pytest.fixture
def replays(monkeypatch):
    """Record the graph of each replay; the second batch of a shape is captured."""
    monkeypatch.setattr(graph_runner, "USES_WORTH_A_GRAPH", 1)
    seen, original = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: seen.append(graph) or original(graph))
    return seen
