"""The engine: runs rows of any tasks, by name, through one encoder. Knows no files, no HTTP and no training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import PlacedEncoder, place
from adapterbank.encoder.windows import STRIDE
from adapterbank.errors import UnknownName
from adapterbank.inference.graph_runner import GraphRunner, Wait, make_graph_runner
from adapterbank.inference.graphs import runs_graphs
from adapterbank.inference.loading import Source, content_name, open_package
from adapterbank.inference.predictions import Prediction, check_abstain, decide, predict, predict_json
from adapterbank.inference.resident import Resident
from adapterbank.inference.rows import MEAN, WEIGHTS, Rows, Windows, make_rows
from adapterbank.inference.runner import launch, tokens_at_once
from adapterbank.inference.slot_cache import SlotCache, TaskHandle
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.span import Reading
from adapterbank.kinds.table import KINDS
from adapterbank.runtime import find_device, find_dtype, find_layout
from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import Stacks
from adapterbank.storage.package import Package
from adapterbank.tasks.spec import Examples, Task

LOG = logging.getLogger("adapterbank.load")
CALLS_WORTH_A_GRAPH = 32
"""Calls after which an engine on a GPU uses graphs: a few calls take less time than a compilation."""
AHEAD = 3
"""Batches in flight on a GPU while the host tokenises: they take longer than the host takes for the next one."""

_TRIES = 3
"""How often what a task stands on is loaded again if others remove it meanwhile."""


@dataclass(frozen=True)
class Prepared:
    """A tokenised request."""

    handle: TaskHandle | None
    """Its task at the time of the request; None is the bare backbone."""
    examples: Examples
    rows: Rows


class Engine:
    """One encoder on one device, and any number of tasks by name."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        device: str = "auto",
        precision: str = "auto",
        budget: int | None = None,
        programs: bool = True,
        placed: PlacedEncoder | None = None,
    ) -> None:
        """Put the encoder on the device; add tasks with `put` and `load`.

        Slots take at most `budget` bytes: the least recently used are evicted and loaded again on demand. Without
        `programs`, a GPU runs no captured graphs, so that the same rows always give the same bits. `placed` is an
        encoder that is on its device already; `device` and `precision` are ignored then.
        """
        self.backbone = backbone
        if placed is None:
            target = find_device(device)
            placed = place(backbone, target, find_dtype(precision, target), find_layout(precision, target))
        self.device, self.dtype, self.layout = placed.device, placed.dtype, placed.layout
        self.stacks = Stacks(placed.tensors, dtype=self.dtype)
        self.slots = SlotCache(self.stacks, budget)
        self.residents: dict[str, Resident] = {}
        self._asked: set[str] = set()
        self.graph_runner: GraphRunner | None = None
        self._computing = threading.Lock()
        self._calls_left = CALLS_WORTH_A_GRAPH if programs and runs_graphs(self.device) else None

    @property
    def tokens_at_once(self) -> int:
        """The most padded tokens of one batch; more tokens are split into several."""
        return tokens_at_once(self.device)

    @property
    def lanes(self) -> int:
        """The number of batches that can run at once: 1 on a GPU, one for each core on a CPU."""
        return 1 if self.device.type == "cuda" else torch.get_num_threads()

    @property
    def ahead(self) -> int:
        """The number of batches to launch before waiting for the first; without graphs `launch` computes all."""
        return AHEAD if self.graph_runner else 0

    def use_graphs(self) -> None:
        """Run captured graphs from the next call on, if possible; for an engine that will serve many requests."""
        if self._calls_left is None:
            return
        with self.slots.lock:
            self._calls_left = None
            self.graph_runner = make_graph_runner(self.backbone.config, self.stacks)

    def warm(self) -> None:
        """Compile and capture what the tasks in memory need, if graphs are used, so that no request waits for it."""
        if self.graph_runner:
            with torch.inference_mode(), self._alone():
                self.graph_runner.warm()

    def put(
        self,
        name: str,
        task: Task,
        plan: Plan,
        tensors: Mapping[str, np.ndarray],
        max_length: int,
        stride: int = STRIDE,
        windows: int = 0,
        source: Source | None = None,
    ) -> None:
        """Add a task, or replace the one of that name; `source` loads its tensors again after an eviction."""
        self.enter(name, Resident(task, plan, max_length, stride, windows), tensors, source)

    def enter(
        self,
        name: str,
        resident: Resident,
        tensors: Mapping[str, np.ndarray],
        source: Source | None = None,
        *,
        asked: bool = True,
    ) -> None:
        """Add a task, or replace the one of that name; what it stands on must be in the engine.

        One that nobody has `asked` for replaces none, and leaves the engine with the last one that stands on it.
        """
        with self.slots.lock:
            if not asked and name in self.residents:
                return
            bases = [base for base in map(self._find, resident.bases) if base]
            self.slots.put(name, resident.plan, tensors, source, resident, bases)
            old, self.residents[name] = self.residents.get(name), resident
            self._asked |= {name} if asked else set()
            self.release(old.bases if old else ())

    def load(self, package: Package, name: str | None = None, *, asked: bool = True) -> str:
        """Add a task from its package, by default under its own `name@version`; return the name.

        What it stands on is loaded with it, once for all tasks, under its `content_name`; see `enter` for `asked`.
        """
        resident, source, below = open_package(package, self.backbone)
        name = name or package.ref
        if name in self.residents and name == content_name(package):  # others stand on it
            if asked:
                self.ask(name)
            return name
        tensors = source()
        try:
            for tries_left in reversed(range(_TRIES)):
                for one in below:
                    self.load(one, content_name(one), asked=False)
                try:
                    self.enter(name, resident, tensors, source, asked=asked)
                    break
                except UnknownName:  # another thread has just removed the last task that stood there
                    if not tries_left:
                        raise
        finally:
            self.release([content_name(one) for one in reversed(below)])
        LOG.debug("loaded %s from %s: %s bytes", package.ref, package.path, f"{package.manifest.bytes:,}")
        return name

    def ask(self, name: str) -> None:
        """Keep a task that is here for others, until it is removed and they are too."""
        with self.slots.lock:
            self._find(name)
            self._asked.add(name)

    def remove(self, name: str) -> None:
        """Remove a task, once no other stands on it; calls that have started still complete."""
        with self.slots.lock:
            self._find(name)
            self._asked.discard(name)
            self.release([name])

    def release(self, names: Iterable[str]) -> None:
        """Remove those tasks that nobody has asked for and on which none stands, and then what they stood on."""
        with self.slots.lock:
            for name in names:
                needed = name in self._asked or any(name in other.bases for other in self.residents.values())
                if name in self.residents and not needed:
                    self.slots.remove(name)
                    self.release(self.residents.pop(name).bases)

    def rows(self, name: str | None, examples: Examples, keep: bool = False) -> Rows:
        """Tokenise rows as for the training of a task; with `keep`, cache them. None is the bare backbone."""
        return self._rows(self._find(name), examples, keep)

    def outputs(self, tokens: Sequence[Tokens], names: Sequence[str | None]) -> list[np.ndarray]:
        """Return each row's head outputs; see `runner.outputs`."""
        handles = {name: self._find(name) for name in dict.fromkeys(names)}
        return self.compute(tokens, [handles[name] for name in names])

    def predict(
        self, requests: Sequence[tuple[str | None, Examples]], best: int = 0, abstain: float = 0.0
    ) -> list[list[Prediction]]:
        """Predict for requests (task or None, rows) of any tasks together, each in the order of its rows.

        With `best`, span tasks also list that many of their best answers; an answer less certain than `abstain` is
        None. The steps are `prepare`, `compute`, `finish`.
        """
        self._check_abstain(requests, abstain)
        return [self.finish(request, outputs, best, abstain) for request, outputs in self._run(requests)]

    def predict_json(
        self, requests: Sequence[tuple[str | None, Examples]], best: int = 0, abstain: float = 0.0
    ) -> list[list[dict[str, Any]]]:
        """Return the predictions as JSON values, in less time than the `to_json` of each takes."""
        self._check_abstain(requests, abstain)
        return [self.finish_json(request, outputs, best, abstain) for request, outputs in self._run(requests)]

    def _check_abstain(self, requests: Sequence[tuple[str | None, Examples]], abstain: float) -> None:
        """Refuse to abstain for a task whose answers have no probabilities."""
        for handle in dict.fromkeys(self._find(name) for name, _ in requests) if abstain else ():
            if handle is not None:
                check_abstain(handle.about.task, abstain)

    def prepare(self, requests: Sequence[tuple[str | None, Examples]], keep: bool = False) -> list[Prepared]:
        """Look up each request's task and tokenise its texts.

        Each task is looked up once, so that a request is not affected if its task is replaced later.
        """
        tasks = [self._find(name) for name, _ in requests]
        return self.tokenise([(handle, examples) for handle, (_, examples) in zip(tasks, requests, strict=True)], keep)

    def tokenise(self, requests: Sequence[tuple[TaskHandle | None, Examples]], keep: bool = False) -> list[Prepared]:
        """Tokenise the texts of handles; those with one length limit are tokenised together.

        Requests of tasks with one length limit that name the same `Examples` share their tokens.
        """
        if len(requests) == 1:
            ((handle, examples),) = requests
            return [Prepared(handle, examples, self._rows(handle, examples, keep))]
        groups: dict[Any, dict[int, list[int]]] = {}
        for i, (handle, examples) in enumerate(requests):
            about = handle.about if handle else None
            windows = about is not None and about.in_windows
            alone = id(examples) if about is None or windows or keep else None
            limits = about.reading if about else None
            groups.setdefault((limits, examples.pairs is None, alone), {}).setdefault(id(examples), []).append(i)
        rows: dict[int, Rows] = {}
        for group in groups.values():
            firsts = [requests[shared[0]] for shared in group.values()]
            if len(group) == 1:
                found = [self._rows(*firsts[0], keep)]
            else:
                joined = self._rows(firsts[0][0], _joined([examples for _, examples in firsts]), keep)
                found = joined.split(len(examples) for _, examples in firsts)
            rows |= {i: own for own, shared in zip(found, group.values(), strict=True) for i in shared}
        return [Prepared(handle, examples, rows[i]) for i, (handle, examples) in enumerate(requests)]

    def compute(self, tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> list[np.ndarray]:
        """Run rows of any tasks through the encoder together; return each row's head outputs."""
        return self.launch(tokens, tasks)()

    def launch(self, tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> Wait:
        """Start to compute; return a function that waits for the outputs. See `ahead` for when this helps.

        Tasks may be added and removed before the wait: a device works in order, so it reads a slot's numbers before
        another slot overwrites them.
        """
        with self.slots.lock:
            if self._calls_left is not None:
                self._calls_left -= 1
                if self._calls_left < 0:
                    self.use_graphs()
        parts = list(self.slots.within_budget([handle for handle in dict.fromkeys(tasks) if handle])) or [[]]
        if len(parts) == 1:
            return self._launch(parts[0], tokens, tasks)
        launched: list[tuple[list[int], Wait]] = []
        remaining = list(range(len(tasks)))
        for part in parts:
            handles = {*part, None}  # rows without a task run with the first part
            chosen = [i for i in remaining if tasks[i] in handles]
            remaining = [i for i in remaining if tasks[i] not in handles]
            launched.append((chosen, self._launch(part, [tokens[i] for i in chosen], [tasks[i] for i in chosen])))

        def wait() -> list[np.ndarray]:
            outputs = {i: out for rows, collect in launched for i, out in zip(rows, collect(), strict=True)}
            return [outputs[i] for i in range(len(tokens))]

        return wait

    def _launch(self, used: Sequence[TaskHandle], tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> Wait:
        """Start to compute rows of tasks that fit into memory together."""
        with self.slots.using(used) as numbers, self._alone():
            slots = [numbers[handle] if handle else None for handle in tasks]
            return launch(self.backbone.config, self.stacks, tokens, slots, graph_runner=self.graph_runner)

    def finish(
        self, prepared: Prepared, outputs: Sequence[np.ndarray], best: int = 0, abstain: float = 0.0
    ) -> list[Prediction]:
        """Turn the outputs of a request's rows into predictions."""
        if prepared.handle is None:
            rows = zip(outputs, prepared.rows.tokens, strict=True)
            return [Prediction(embedding=out, truncated=tokens.cut or None) for out, tokens in rows]
        return predict(_head_outputs(prepared, prepared.handle, outputs), best, abstain)

    def finish_json(
        self, prepared: Prepared, outputs: Sequence[np.ndarray], best: int = 0, abstain: float = 0.0
    ) -> list[dict[str, Any]]:
        """Turn the outputs of a request's rows into predictions as JSON values."""
        if prepared.handle is None:
            return [prediction.to_json() for prediction in self.finish(prepared, outputs, best)]
        return predict_json(_head_outputs(prepared, prepared.handle, outputs), best, abstain)

    def head_outputs(self, requests: Sequence[tuple[str, Examples]], keep: bool = False) -> list[HeadOutputs]:
        """Return the head's outputs for the rows of each request."""
        return [
            _head_outputs(request, request.handle, outputs)
            for request, outputs in self._run(requests, keep)
            if request.handle
        ]

    def decide(self, requests: Sequence[tuple[str, Examples]], keep: bool = False) -> list[list[Any]]:
        """Return the predictions as metrics compare them: class indices, sets of them, numbers, or answer texts."""
        return [
            decide(given.task, given.examples, given.rows, given.outputs) for given in self.head_outputs(requests, keep)
        ]

    def read(self, name: str, examples: Examples, count: int = 1, keep: bool = False) -> list[Reading]:
        """Return the readings of a span task for each row: its best answers and the score of "no answer"."""
        ((request, outputs),) = self._run([(name, examples)], keep)
        assert request.handle is not None
        task = request.handle.about.task
        read = KINDS[task.kind].readings
        assert read is not None  # `OpenBank.read` refuses other kinds
        return read(HeadOutputs(task, examples, request.rows, outputs), count)

    def _run(
        self, requests: Sequence[tuple[str | None, Examples]], keep: bool = False
    ) -> list[tuple[Prepared, list[np.ndarray]]]:
        """Run the rows of all requests through the encoder together; return each request with its outputs."""
        prepared = self.prepare(requests, keep)
        handles = [request.handle for request in prepared for _ in request.rows.tokens]
        outputs = iter(self.compute([row for request in prepared for row in request.rows.tokens], handles))
        return [(request, [next(outputs) for _ in request.rows.tokens]) for request in prepared]

    def _rows(self, handle: TaskHandle | None, examples: Examples, keep: bool) -> Rows:
        if handle is None:
            return Rows(self.backbone.tokenize(examples.texts, examples.pairs), None)
        resident, unlabelled = handle.about, replace(examples, targets=None)
        return make_rows(
            self.backbone,
            unlabelled,
            kind=resident.task.kind,
            max_length=resident.max_length,
            stride=resident.stride,
            windows=Windows(resident.windows, WEIGHTS if resident.plan.head.weighs else MEAN),
            keep=keep,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run one batch at a time on a GPU; on a CPU every caller runs its own.

        Tasks may be added and removed meanwhile, because rows of slots in use are copied, not moved. Captured graphs
        depend on fixed addresses, so that no task is added or removed while one is launched.
        """
        if self.device.type == "cpu":
            yield
            return
        with self._computing, self.slots.lock if self.graph_runner else nullcontext(), torch.cuda.device(self.device):
            yield

    def _find(self, name: str | None) -> TaskHandle | None:
        if name is None:
            return None
        handle = self.slots.find(name)
        if handle is None:
            raise UnknownName(name, "a task in this engine", list(self.residents))
        return handle


def _head_outputs(prepared: Prepared, handle: TaskHandle, outputs: Sequence[np.ndarray]) -> HeadOutputs:
    return HeadOutputs(handle.about.task, prepared.examples, prepared.rows, outputs)


def _joined(parts: Sequence[Examples]) -> Examples:
    pairs = None if parts[0].pairs is None else [pair for part in parts for pair in part.pairs or ()]
    return Examples([text for part in parts for text in part.texts], pairs)
