"""The engine: rows of any tasks by name, in any order, through one encoder. Knows no files, no HTTP and no training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import PlacedEncoder, place
from adapterbank.encoder.windows import STRIDE
from adapterbank.errors import BackboneMismatch, InputError, PackageDamaged, UnknownName
from adapterbank.inference.graph_runner import GraphRunner, Wait
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.inference.predictions import Prediction, decide, predict, predict_json
from adapterbank.inference.rows import Rows, make_rows
from adapterbank.inference.runner import launch, tokens_at_once
from adapterbank.inference.slot_cache import SlotCache, TaskHandle
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.span import Reading
from adapterbank.kinds.table import KINDS
from adapterbank.runtime import find_device, find_dtype
from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import Stacks
from adapterbank.slots.tensors import problems
from adapterbank.storage.package import RESTORE, Package
from adapterbank.tasks.spec import Examples, Task

CALLS_WORTH_A_GRAPH = 32
"""Calls from which on an engine on a GPU runs programs: a few rows are answered sooner than one is compiled."""
AHEAD = 3
"""Batches that a GPU has before it while the host turns to texts: they take it longer than the host takes for one."""


@dataclass(frozen=True)
class Resident:
    """A task that the engine knows."""

    task: Task
    plan: Plan
    max_length: int
    stride: int = STRIDE


@dataclass(frozen=True)
class Prepared:
    """A request whose texts are tokens."""

    known: TaskHandle | None
    """Its task as it was when the request came; None is the bare backbone."""
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
        """Put the encoder on the device; tasks are added with `put` and `load`.

        Slots take at most `budget` bytes: beyond, the least recently used are dropped and loaded again on demand.
        Without `programs`, a GPU computes each batch afresh, so that the same rows always give the same bits.
        `placed` is the encoder where it is on its device already; `device` and `precision` are then not asked for.
        """
        self.backbone = backbone
        if placed is None:
            found = find_device(device)
            placed = place(backbone, found, find_dtype(precision, found))
        self.device, self.dtype = placed.device, placed.dtype
        self.stacks = Stacks(placed.tensors, dtype=self.dtype)
        self.slots = SlotCache(self.stacks, budget)
        self.residents: dict[str, Resident] = {}
        self.graph_runner: GraphRunner | None = None
        self._computing = threading.Lock()
        self._calls_left = CALLS_WORTH_A_GRAPH if programs and runs_graphs(self.device) else None

    @property
    def tokens_at_once(self) -> int:
        """Tokens that one batch takes at most; more are cut into several."""
        return tokens_at_once(self.device)

    @property
    def lanes(self) -> int:
        """How many batches may be computed at once to the use of all: on a CPU one for each of its cores."""
        return 1 if self.device.type == "cuda" else torch.get_num_threads()

    @property
    def ahead(self) -> int:
        """How many batches may be launched to the use of all before the first is waited for.

        A GPU that runs programs works by itself meanwhile; else to launch is to compute.
        """
        return AHEAD if self.graph_runner else 0

    def run_programs(self) -> None:
        """Run programs from the next call on: for an engine that is going to answer many."""
        if self._calls_left is None:
            return
        with self.slots.lock:
            self._calls_left = None
            self.graph_runner = GraphRunner(self.backbone.config, self.stacks, GraphCompiler(self.device))

    def warm(self) -> None:
        """Compile what the tasks in memory need, if programs are run: without, the first rows wait for that."""
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
        source: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """Add a task, or replace the one of that name; `source` gives its tensors again after they were dropped."""
        resident = Resident(task, plan, max_length, stride)
        with self.slots.lock:
            self.slots.put(name, plan, tensors, source, resident)
            self.residents[name] = resident

    def load(self, package: Package, name: str = "") -> str:
        """Add a task from its package, under its own `name@version` unless another is given; gives that name."""
        manifest = package.manifest
        if manifest.backbone["sha256"] != self.backbone.sha256:
            raise BackboneMismatch(
                f"{package.ref} was trained on backbone {manifest.backbone['name']!r} "
                f"({manifest.backbone['sha256'][:12]}), not on {self.backbone.name!r} ({self.backbone.sha256[:12]})."
            )
        tensors = package.tensors()
        try:
            task, plan = Task.from_json(manifest.task), Plan.from_json(manifest.method)
            max_length = int(manifest.recipe["max_length"])
            stride = max(1, int(manifest.recipe.get("doc_stride", STRIDE)))
            self._check_plan(plan, tensors, max_length)
        except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
            raise PackageDamaged(f"{package.ref} does not hold what its manifest says ({error}); {RESTORE}.") from error
        self.put(name or package.ref, task, plan, tensors, max_length, stride, package.tensors)
        return name or package.ref

    def _check_plan(self, plan: Plan, tensors: Mapping[str, np.ndarray], max_length: int) -> None:
        """Refuse a plan that the pass cannot run, or tensors that are not the plan's; checksums prove neither."""
        config = self.backbone.config
        shapes = {name: tuple(array.shape) for name, array in tensors.items()}
        wrong = [] if plan.head.kind in KINDS else [f"kind {plan.head.kind!r}"]
        if not 0 < max_length <= config.max_length:
            wrong.append(f"max_length {max_length}")
        wrong += problems(plan, shapes, config, has_pooler=self.backbone.has_pooler)
        if wrong:
            raise ValueError(", ".join(wrong))

    def remove(self, name: str) -> None:
        """Drop a task; its place is used again. Calls that have begun are still answered by it."""
        with self.slots.lock:
            self._find(name)
            self.slots.remove(name)
            del self.residents[name]

    def rows(self, name: str | None, examples: Examples, keep: bool = False) -> Rows:
        """Tokenise rows as a task was trained on them, kept in the cache if asked; None is the bare backbone."""
        return self._rows(self._find(name), examples, keep)

    def outputs(self, tokens: Sequence[Tokens], names: Sequence[str | None]) -> list[np.ndarray]:
        """Return each row's head outputs; see `evaluate.outputs`."""
        found = {name: self._find(name) for name in dict.fromkeys(names)}
        return self.compute(tokens, [found[name] for name in names])

    def predict(self, requests: Sequence[tuple[str | None, Examples]], best: int = 0) -> list[list[Prediction]]:
        """Answer requests (task or None, rows) of any tasks in one go, each in the order of its rows.

        With `best` span tasks also list as many of their best answers. `prepare`, `compute` and `finish` are its steps.
        """
        return [self.finish(one, given, best) for one, given in self._run(requests)]

    def prepare(self, requests: Sequence[tuple[str | None, Examples]], keep: bool = False) -> list[Prepared]:
        """Look each request's task up and tokenise its texts.

        Each task is looked up once: one that is replaced meanwhile answers as it was.
        """
        tasks = [self._find(name) for name, _ in requests]
        return self.tokenise([(known, examples) for known, (_, examples) in zip(tasks, requests, strict=True)], keep)

    def tokenise(self, requests: Sequence[tuple[TaskHandle | None, Examples]], keep: bool = False) -> list[Prepared]:
        """Tokenise the texts of tasks that were looked up before, those of one length limit in one go."""
        alike: dict[Any, list[int]] = {}
        for i, (known, examples) in enumerate(requests):
            joins = known is not None and not KINDS[known.about.task.kind].windows and not keep
            alike.setdefault((known.about.max_length, examples.pairs is None) if known and joins else i, []).append(i)
        found: dict[int, Rows] = {}
        for mine in alike.values():
            if len(mine) == 1:
                found[mine[0]] = self._rows(*requests[mine[0]], keep)
                continue
            rows = iter(self._rows(requests[mine[0]][0], _joined([requests[i][1] for i in mine]), keep).tokens)
            for i in mine:
                found[i] = Rows([next(rows) for _ in requests[i][1].texts], None)
        return [Prepared(known, examples, found[i]) for i, (known, examples) in enumerate(requests)]

    def compute(self, tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> list[np.ndarray]:
        """Send rows of any tasks through the encoder together; gives each one's head outputs."""
        return self.launch(tokens, tasks)()

    def launch(self, tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> Wait:
        """Begin to compute; what is given waits for the outputs. See `ahead` for what is gained by it.

        Tasks may come and go meanwhile: a device does in turn what it is asked, so it has read a slot's numbers before
        it writes another's over them.
        """
        with self.slots.lock:
            if self._calls_left is not None:
                self._calls_left -= 1
                if self._calls_left < 0:
                    self.run_programs()
        parts = list(self.slots.within_budget([known for known in dict.fromkeys(tasks) if known])) or [[]]
        if len(parts) == 1:
            return self._launch(parts[0], tokens, tasks)
        launched: list[tuple[list[int], Wait]] = []
        left = list(range(len(tasks)))
        for part in parts:
            here = {*part, None}  # rows of no task go with the first part
            mine = [i for i in left if tasks[i] in here]
            left = [i for i in left if tasks[i] not in here]
            launched.append((mine, self._launch(part, [tokens[i] for i in mine], [tasks[i] for i in mine])))

        def wait() -> list[np.ndarray]:
            found = {i: out for mine, land in launched for i, out in zip(mine, land(), strict=True)}
            return [found[i] for i in range(len(tokens))]

        return wait

    def _launch(self, held: Sequence[TaskHandle], tokens: Sequence[Tokens], tasks: Sequence[TaskHandle | None]) -> Wait:
        """Begin to compute rows of tasks that fit into memory together."""
        with self.slots.using(held) as numbers, self._alone():
            slots = [numbers[known] if known else None for known in tasks]
            return launch(self.backbone.config, self.stacks, tokens, slots, mixed=self.graph_runner)

    def finish(self, prepared: Prepared, given: Sequence[np.ndarray], best: int = 0) -> list[Prediction]:
        """Turn the outputs of a request's rows into what its task says of them."""
        if prepared.known is None:
            return [Prediction(embedding=out) for out in given]
        return predict(HeadOutputs(prepared.known.about.task, prepared.examples, prepared.rows, given), best)

    def tell(self, prepared: Prepared, given: Sequence[np.ndarray], best: int = 0) -> list[dict[str, Any]]:
        """Do as `finish`, and give what is said as JSON knows it."""
        if prepared.known is None:
            return [one.to_json() for one in self.finish(prepared, given, best)]
        return predict_json(HeadOutputs(prepared.known.about.task, prepared.examples, prepared.rows, given), best)

    def decide(self, requests: Sequence[tuple[str, Examples]], keep: bool = False) -> list[list[Any]]:
        """Return what a metric compares: class numbers, sets of them, numbers, or answer texts; as `predict` does."""
        return [
            decide(one.known.about.task, one.examples, one.rows, given)
            for one, given in self._run(requests, keep)
            if one.known
        ]

    def read(self, name: str, examples: Examples, count: int = 1, keep: bool = False) -> list[Reading]:
        """Return all that a span task makes of each row: its best answers and the score of "no answer"."""
        ((one, given),) = self._run([(name, examples)], keep)
        assert one.known is not None
        task = one.known.about.task
        read = KINDS[task.kind].readings
        assert read is not None  # `OpenBank.read` refuses other kinds
        return read(HeadOutputs(task, examples, one.rows, given), count)

    def _run(
        self, requests: Sequence[tuple[str | None, Examples]], keep: bool = False
    ) -> list[tuple[Prepared, list[np.ndarray]]]:
        """Send the rows of all requests through the encoder together; give each its own back."""
        prepared = self.prepare(requests, keep)
        each = [one.known for one in prepared for _ in one.rows.tokens]
        given = iter(self.compute([row for one in prepared for row in one.rows.tokens], each))
        return [(one, [next(given) for _ in one.rows.tokens]) for one in prepared]

    def _rows(self, known: TaskHandle | None, examples: Examples, keep: bool) -> Rows:
        if known is None:
            return Rows(self.backbone.tokenize(examples.texts, examples.pairs), None)
        held, bare = known.about, replace(examples, targets=None)
        return make_rows(
            self.backbone, bare, kind=held.task.kind, max_length=held.max_length, stride=held.stride, keep=keep
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Compute one batch at a time on a GPU; a CPU may compute as many as there are callers.

        Tasks may come and go meanwhile, as rows of slots in use are copied, not moved. But programs know the addresses
        of what they read: while one runs nothing may come or go.
        """
        if self.device.type == "cpu":
            yield
            return
        with self._computing, self.slots.lock if self.graph_runner else nullcontext(), torch.cuda.device(self.device):
            yield

    def _find(self, name: str | None) -> TaskHandle | None:
        if name is None:
            return None
        known = self.slots.find(name)
        if known is None:
            raise UnknownName(name, "a task in this engine", list(self.residents))
        return known


def _joined(parts: Sequence[Examples]) -> Examples:
    pairs = None if parts[0].pairs is None else [pair for part in parts for pair in part.pairs or ()]
    return Examples([text for part in parts for text in part.texts], pairs)
