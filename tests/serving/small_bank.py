"""A bank of small random tasks on a small random encoder, and a service over it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import asynccontextmanager

import pytest

from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.serving.service.protocol import Ask
from adapterbank.serving.service.service import BankService
from adapterbank.slots.plan import Head, make_plan
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, Manifest
from adapterbank.storage.requirements import reference
from adapterbank.tasks.spec import Task
from families import WORDS

PATIENCE = 120.0
"""Seconds after which what takes milliseconds has failed, however busy the machine is."""
KINDS = {
    "classification": (("north", "east", "south"), "accuracy", 3),
    "multilabel": (("red", "big"), "micro_f1", 2),
    "regression": ((), "spearman", 1),
    "span": ((), "span_f1", 2),
}


def text_of(draw: random.Random, words=12):
    return " ".join(draw.choices(WORDS.split(), k=draw.randint(1, words)))


class SmallBank:
    """A bank whose tasks are drawn by number."""

    def __init__(self, path, backbone, new_slot):
        self.backbone, self.new_slot = backbone, new_slot
        self.about = {"name": backbone.name, "sha256": backbone.sha256}
        self.bank = Bank.open(path, self.about, create=True)

    def put(self, name, seed=0, kind="classification", pair=False, size=4, on=None, fuse=()):
        """Put a task, or a new version of it, which stands on the package `on` or fuses some."""
        labels, metric, outputs = KINDS[kind]
        columns = ("text", "other") if pair or kind == "span" else ("text",)
        task = Task(name, kind, columns, "label", labels, metric)
        options = Options("fusion", rank=2) if fuse else Options(size=size)
        plan = make_plan(options, depth=self.backbone.config.layers, head=Head(kind, outputs))
        tensors = {key: t.numpy() for key, t in self.new_slot(self.backbone, plan, seed=seed).items()}
        trained = sum(array.size for array in tensors.values())
        params = {"trained": trained, "encoder": 1000, "total": 1000 + trained, "percent": trained / 10}
        return self.bank.put(
            Manifest(
                **{"format": FORMAT, "name": name, "version": 0, "task": task.to_json(), "method": plan.to_json()},
                **{"backbone": self.about, "recipe": {"max_length": 64}, "seed": seed, "data": {}},
                **{"metrics": {"dev": {metric: 0.5}}, "params": params, "bytes": 0, "weights_sha256": ""},
                **{
                    "library": "0.1.0",
                    "created": "",
                    "fingerprint": {},
                    "requires": [*map(reference, [on] if on else fuse)],
                },
            ),
            tensors,
        )

    def engine(self, **options):
        return Engine(self.backbone, device="cpu", precision="fp32", **options)

    def alone(self, *refs):
        """Return a plain engine with the packages, to compare with."""
        engine = self.engine()
        for ref in refs:
            engine.load(self.bank.get(ref), ref)
        return engine


@asynccontextmanager
async def running(bank: SmallBank, *, budget=None, **options):
    """Start a service and wait until it has loaded the bank."""
    service = BankService(bank.bank, bank.engine(budget=budget), **{"lanes": 1, **options})
    await service.start()
    try:
        await until(lambda: service.ready)
        yield service
    finally:
        await service.stop()


async def until(true):
    """Wait for something that takes milliseconds, unless the machine is busy."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


class Gate:
    """Holds the device back from its first batch on, until it is opened."""

    def __init__(self, service):
        self.busy, self.opened = threading.Event(), threading.Event()
        self._launch, service.engine.launch = service.engine.launch, self._wait

    def _wait(self, *given):
        self.busy.set()
        assert self.opened.wait(PATIENCE)
        return self._launch(*given)


async def occupied(service):
    """Put a row of the task `a` on the device and block it there; return the gate and the request."""
    gate = Gate(service)
    first = asyncio.ensure_future(service.predict([Ask("a", ["why"])]))
    await until(gate.busy.is_set)
    return gate, first


def assert_same(found, wanted):
    """Compare answers over HTTP with the engine's predictions."""
    assert len(found) == len(wanted)
    for mine, expected in zip(found, wanted, strict=True):
        theirs = expected.to_json()
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, (str, list, tuple)) or key in ("start", "end"):
                assert list(mine[key]) == list(value) if isinstance(value, (list, tuple)) else mine[key] == value
            else:
                assert mine[key] == pytest.approx(value, abs=1e-5)


def damage(package):
    file = package.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    rewrite(file, data)


def rewrite(file, data):
    """Write a file anew, at another time than it has: some clocks of files tick a hundred times a second."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        file.write_bytes(data)
