"""The engine: rows of any tasks, in any order, through one encoder. Knows no files, no HTTP and no training.

`outputs` is the one way from tokens to head outputs: training's dev scores, `predict`, `evaluate` and `audit` all come
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.anatomy import Anatomy
from adapterbank.encoder.checkpoint import Backbone
from adapterbank.encoder.forward import forward, join_projections
from adapterbank.encoder.packed import Tokens, by_length, pack
from adapterbank.encoder.prefix import Prefix
from adapterbank.encoder.tokenizer import tokenize
from adapterbank.errors import BackboneMismatch, InputError, PackageDamaged, UnknownName
from adapterbank.methods import ACTIVATIONS, POOLINGS, Plan, trained
from adapterbank.mixed import Mixed
from adapterbank.package import RESTORE, Package
from adapterbank.program import Programs
from adapterbank.residency import Residency
from adapterbank.runtime import find_device, find_dtype
from adapterbank.slots import bottleneck, heads
from adapterbank.slots.route import Route, Segment
from adapterbank.slots.stack import Stacks
from adapterbank.tasks.spec import Examples, Task

TOKENS_AT_ONCE = 4096
"""Padded tokens of one batch: fills two CPU cores, and fits any memory."""
_GPU_TOKENS = 16384
"""The same for a GPU that runs programs."""
_WORTH = 32
"""Calls from which on an engine on a GPU runs programs: a few rows are answered sooner than one is compiled."""


def place(backbone: Backbone, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Give the encoder's tensors on a device in the type the pass computes in; the backbone's own stay untouched."""
    return join_projections({name: tensor.to(device, dtype) for name, tensor in backbone.tensors.items()})


def outputs(
    anatomy: Anatomy,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: Sequence[int | None],
    prefix: Prefix | None = None,
    mixed: Mixed | None = None,
) -> list[np.ndarray]:
    """Give each row's head outputs through its own slot, in the order of the rows; `prefix` is of these very rows.

    `[outputs]` a row, `[tokens, 2]` for spans, and the mean hidden state `[hidden]` for rows of no slot (None). With
    `mixed`, batches run as programs, but for those of a slot that changes most of the encoder.
    """
    found: dict[int, np.ndarray] = {}
    groups = _groups(stacks, slots, mixed)
    with torch.inference_mode():
        for chosen in by_length(tokens, _GPU_TOKENS if mixed else TOKENS_AT_ONCE, groups):
            order = sorted(chosen, key=lambda i: _number(slots[i]))
            mine, theirs = [tokens[i] for i in order], [slots[i] for i in order]
            if mixed and not prefix and not _alone(stacks, theirs[0]):
                found |= zip(order, mixed.outputs(mine, theirs), strict=True)
                continue
            batch = pack(mine, stacks.device)
            route = Route(stacks, segments([(slots[i], len(tokens[i])) for i in order]))
            known = prefix.rows(order, batch) if prefix else None
            hidden = forward(anatomy, route, batch, first=prefix.first if prefix else 0, prefix=known)
            given = heads.outputs(hidden, batch, route)
            found |= zip(order, _by_row(given, route.segments, stacks, batch.lengths), strict=True)
    return [found[i] for i in range(len(tokens))]


def segments(rows: Sequence[tuple[int | None, int]]) -> list[Segment]:
    """Join adjacent rows (slot, length) of one slot."""
    joined = ((slot, [length for _, length in group]) for slot, group in groupby(rows, key=lambda row: row[0]))
    return [Segment(slot, len(lengths), sum(lengths)) for slot, lengths in joined]


def _number(slot: int | None) -> int:
    return -1 if slot is None else slot


def _alone(stacks: Stacks, slot: int | None) -> bool:
    return slot is not None and stacks.plan(slot).alone


def _groups(stacks: Stacks, slots: Sequence[int | None], mixed: Mixed | None) -> list[int]:
    """Number the groups of rows that may share a batch.

    Rows of a slot that changes most of the encoder are by themselves; all others may mix, in a program those of one
    family.
    """
    found = []
    for slot in slots:
        if slot is None:
            found.append(-1)
        elif _alone(stacks, slot):
            found.append(-2 - slot)
        else:
            found.append(stacks.slot(slot).family if mixed else -1)
    return found


def _by_row(
    given: Sequence[Tensor], parts: Sequence[Segment], stacks: Stacks, lengths: Sequence[int]
) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for tensor, part in zip(given, parts, strict=True):
        array = tensor.float().cpu().numpy()
        if part.slot is not None and stacks.plan(part.slot).head.kind == "span":
            mine = lengths[len(rows) : len(rows) + part.rows]
            rows.extend(np.split(array, np.cumsum(mine)[:-1]))
        else:
            rows.extend(array)
    return rows


@dataclass(frozen=True)
class Prediction:
    """What a task says of one row; the fields that its kind has are set."""

    label: str | None = None
    """Classification: the likeliest label."""
    labels: tuple[str, ...] | None = None
    """Multi-label: every label more likely than not."""
    value: float | None = None
    """Regression."""
    answer: str | None = None
    """Span: the answer's text, with its first and last-plus-one character in the context."""
    start: int | None = None
    end: int | None = None
    probabilities: dict[str, float] | None = None
    embedding: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Bare backbone: the mean of the last hidden states."""

    def to_json(self) -> dict[str, Any]:
        """Give the fields that are set."""
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        if self.probabilities is not None:  # more digits than these are rounding, and differ between machines
            found["probabilities"] = {name: round(p, 6) for name, p in self.probabilities.items()}
        return found | ({"embedding": self.embedding.tolist()} if self.embedding is not None else {})


@dataclass(frozen=True)
class Resident:
    """A task that the engine knows."""

    task: Task
    plan: Plan
    max_length: int


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
    ) -> None:
        """Put the encoder on the device; tasks are added with `put` and `load`.

        Slots take at most `budget` bytes: beyond, the least recently used are dropped and loaded again on demand.
        Without `programs`, a GPU computes each batch afresh, so that the same rows always give the same bits.
        """
        self.backbone = backbone
        self.device = find_device(device)
        self.dtype = find_dtype(precision, self.device)
        self.stacks = Stacks(place(backbone, self.device, self.dtype), dtype=self.dtype)
        self.slots = Residency(self.stacks, budget)
        self.residents: dict[str, Resident] = {}
        self._mixed: Mixed | None = None
        self._calls_left = _WORTH if programs and self.device.type == "cuda" else None

    def prepare(self) -> None:
        """Run programs from the next call on: for an engine that is going to answer many."""
        if self._calls_left is not None:
            self._calls_left = None
            self._mixed = Mixed(self.backbone.anatomy, self.stacks, Programs(self.device))

    def put(
        self,
        name: str,
        task: Task,
        plan: Plan,
        tensors: Mapping[str, np.ndarray],
        max_length: int,
        source: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """Add a task, or replace the one of that name; `source` gives its tensors again after they were dropped."""
        self.slots.put(name, plan, tensors, source)
        self.residents[name] = Resident(task, plan, max_length)

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
            self._check_plan(plan, tensors, max_length)
        except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
            raise PackageDamaged(f"{package.ref} does not hold what its manifest says ({error}); {RESTORE}.") from error
        self.put(name or package.ref, task, plan, tensors, max_length, package.tensors)
        return name or package.ref

    def _check_plan(self, plan: Plan, tensors: Mapping[str, np.ndarray], max_length: int) -> None:
        """Refuse a plan that the pass cannot run, or tensors that are not the plan's; checksums prove neither."""
        anatomy = self.backbone.anatomy
        known = {"kind": heads.KINDS, "pooling": POOLINGS, "activation": ACTIVATIONS}
        said = {"kind": plan.head.kind, "pooling": plan.head.pooling}
        expected = heads.shapes(plan.head, anatomy.hidden)
        if plan.adapter:
            said["activation"] = plan.adapter.activation
            expected |= bottleneck.shapes(plan.adapter, anatomy.hidden)
        wrong = [f"{key} {value!r}" for key, value in said.items() if value not in known[key]]
        if not 0 < max_length <= anatomy.max_length:
            wrong.append(f"max_length {max_length}")
        frozen = anatomy.shapes(self.backbone.has_pooler)
        expected |= {name: frozen[name] for name in trained(frozen, plan)}
        if {name: tuple(array.shape) for name, array in tensors.items()} != expected:
            wrong.append("other tensors than its plan's")
        if wrong:
            raise ValueError(", ".join(wrong))

    def remove(self, name: str) -> None:
        """Drop a task; its place is used again."""
        self._find(name)
        self.slots.remove(name)
        del self.residents[name]

    def tokens(self, name: str | None, examples: Examples) -> list[Tokens]:
        """Tokenise rows as a task was trained on them; None is the bare backbone."""
        if name is None:
            return self.backbone.tokenize(examples.texts, examples.pairs)
        resident = self._find(name)
        span = resident.task.kind == "span"
        return tokenize(self.backbone.tokenizer, examples.texts, examples.pairs, resident.max_length, offsets=span)

    def outputs(self, tokens: Sequence[Tokens], names: Sequence[str | None]) -> list[np.ndarray]:
        """Give each row's head outputs; see `outputs` of this module."""
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left < 0:
                self.prepare()
        wanted = list(dict.fromkeys(name for name in names if name is not None))
        for name in wanted:
            self._find(name)
        found: dict[int, np.ndarray] = {}
        for part in self.slots.within_budget(wanted) if wanted else [[]]:
            here = {*part, None}  # rows of no task go with the first part
            mine = [i for i, name in enumerate(names) if name in here and i not in found]
            with self.slots.using(part) as numbers, self.slots.lock:
                slots = [numbers[name] if name is not None else None for name in (names[i] for i in mine)]
                rows = [tokens[i] for i in mine]
                given = outputs(self.backbone.anatomy, self.stacks, rows, slots, mixed=self._mixed)
            found |= zip(mine, given, strict=True)
        return [found[i] for i in range(len(tokens))]

    def predict(self, requests: Sequence[tuple[str | None, Examples]]) -> list[list[Prediction]]:
        """Answer requests (task or None, rows) of any tasks in one go, each in the order of its rows."""
        return [
            [self._predict(name, examples, i, row, out) for i, (row, out) in enumerate(given)]
            for (name, examples), given in zip(requests, self._run(requests), strict=True)
        ]

    def decide(self, requests: Sequence[tuple[str, Examples]]) -> list[list[Any]]:
        """Give what a metric compares: class numbers, sets of them, numbers, or answer texts; as `predict` does."""
        found = []
        for (name, examples), given in zip(requests, self._run(requests), strict=True):
            contexts = examples.pairs or [""] * len(given)
            kind = self._find(name).task.kind
            found.append([decide(kind, out, row, text) for (row, out), text in zip(given, contexts, strict=True)])
        return found

    def _run(self, requests: Sequence[tuple[str | None, Examples]]) -> list[list[tuple[Tokens, np.ndarray]]]:
        """Send the rows of all requests through the encoder together; give each its own back."""
        tokens = [self.tokens(name, examples) for name, examples in requests]
        names = [name for (name, _), mine in zip(requests, tokens, strict=True) for _ in mine]
        given = iter(self.outputs([row for mine in tokens for row in mine], names))
        return [[(row, next(given)) for row in mine] for mine in tokens]

    def _predict(self, name: str | None, examples: Examples, i: int, row: Tokens, out: np.ndarray) -> Prediction:
        if name is None:
            return Prediction(embedding=out)
        task = self._find(name).task
        decision = decide(task.kind, out, row, examples.pairs[i] if examples.pairs else "")
        if task.kind == "classification":
            return Prediction(label=task.labels[decision], probabilities=_named(task, _softmax(out)))
        if task.kind == "multilabel":
            chosen = tuple(task.labels[k] for k in decision)
            likely = 0.5 * (1 + np.tanh(0.5 * out.astype(np.float64)))  # the sigmoid, without overflow
            return Prediction(labels=chosen, probabilities=_named(task, likely))
        if task.kind == "regression":
            return Prediction(value=decision)
        start, end = answer_place(out, row)
        return Prediction(answer=decision, start=start, end=end)

    def _find(self, name: str) -> Resident:
        if name not in self.residents:
            raise UnknownName(name, "a task in this engine", self.residents)
        return self.residents[name]


def decide(kind: str, out: np.ndarray, row: Tokens, context: str) -> Any:
    """Turn one row's outputs into what a metric compares."""
    if kind == "span":
        start, end = answer_place(out, row)
        return context[start:end]
    return heads.KINDS[kind].decide(out)


def answer_place(out: np.ndarray, row: Tokens) -> tuple[int, int]:
    """Give the first and last-plus-one character of the best answer within the second text."""
    assert row.offsets is not None
    inside = np.flatnonzero(row.offsets[:, 0] >= 0)
    if len(inside) == 0:
        return 0, 0
    first, last = heads.KINDS["span"].decide(out[inside])
    return int(row.offsets[inside[first], 0]), int(row.offsets[inside[last], 1])


def _softmax(out: np.ndarray) -> np.ndarray:
    shifted = np.exp(out.astype(np.float64) - out.max())
    return np.asarray(shifted / shifted.sum())


def _named(task: Task, probabilities: np.ndarray) -> dict[str, float]:
    return {label: float(p) for label, p in zip(task.labels, probabilities, strict=True)}
