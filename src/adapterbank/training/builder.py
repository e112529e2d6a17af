"""From a config to a run that is ready to train: data, plan, tokens, initial tensors. Writes nothing.

What several runs have in common (a data set, its tokens) is read and tokenised once. Those runs share the same object,
by which the training loop sees that they can share work.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.recompute import check_recompute
from adapterbank.encoder.tokenizer import token_counts
from adapterbank.errors import ConfigError, DataError
from adapterbank.inference.predictions import decide
from adapterbank.inference.rows import MEAN, WEIGHTS, Rows, Windows, make_rows
from adapterbank.kinds import scoring
from adapterbank.kinds.table import KINDS
from adapterbank.methods import find_method, parse_size
from adapterbank.runtime import find_device, find_dtype, find_layout
from adapterbank.slots import tensors
from adapterbank.slots.mixture import Mixture
from adapterbank.slots.plan import Head, Plan, make_plan, trained
from adapterbank.storage import records
from adapterbank.tasks.profile import LONG_SHARE, lose_much
from adapterbank.tasks.spec import Examples, Task
from adapterbank.training.bases import Base, Bases, Members
from adapterbank.training.dataset import Dataset, DatasetReader
from adapterbank.training.job import Narrowing, TrainingJob
from adapterbank.training.narrowing import Units, narrow_plan
from adapterbank.training.notes import few_labels, note_lengths, without_effect
from adapterbank.training.optimizer import AdamSettings
from adapterbank.training.start import Start, Starts

_COUNTED = 1000
"""Of many long texts, so many are tokenised to find whether they should be read in windows."""

RECIPE = (
    *("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout"),
    *("class_weights", "patience", "max_length", "doc_stride", "sigma"),
)
"""The options that a package's recipe has."""
FEWEST_DEV_ROWS = 10
"""Dev rows below which no epoch is chosen on them."""
STILL_FALLING = 0.95
"""A run learns if an epoch's loss is below this share of that of the epoch before, which has the same rows.

A tagger that gives one tag has learned more than the tags' shares if its loss is below this share of their entropy.
"""


class UnloadedEncoder(NamedTuple):
    """What a record names of the encoder beside which a method without one ran."""

    sha256: str = ""
    """Empty if there is no bank yet, which would know it."""
    parameters: int | None = None


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose options match its data and its backbone; its data is not tokenised yet."""

    config: Config
    """With every default filled in."""
    data: Dataset = field(repr=False)
    plan: Plan
    identity: dict[str, Any] = field(repr=False)
    """The config of the record: every option, the backbone's sha256 and the data's fingerprints."""
    device: torch.device
    dtype: torch.dtype
    layout: str
    """How a CPU keeps the frozen matrices."""
    windows: int
    """The most windows of a text, as `make_rows` takes it."""
    start: Start | None
    """What its tensors start from; None if they are new."""
    base: Base | Members | None
    """What its slot stands on; None if that is the bare encoder."""
    recompute: str
    """Whether its steps compute outputs again; changes no gradient, so it is not part of the identity."""

    @cached_property
    def hash(self) -> str:
        """The name of its record."""
        return records.config_hash(self.identity)

    def narrowed(self, units: Units) -> ResolvedRun:
        """Return the run with the plan of narrowed adapters."""
        return replace(self, plan=narrow_plan(self.plan, units))

    @property
    def narrows(self) -> bool:
        """Whether its adapters are narrowed in training."""
        return bool(parse_size(self.config.size).mean)

    @property
    def recipe(self) -> dict[str, Any]:
        """What its package says of how it was trained."""
        found = {name: getattr(self.config, name) for name in RECIPE}
        found |= {"windows": self.windows} if self.windows else {}
        found |= {"average": True} if self.config.average else {}
        found |= {"mix": self.config.mix} if self.config.mix > 1 else {}
        found |= {"size": self.config.size, "narrow_after": self.config.narrow_after} if self.narrows else {}
        return found | ({"start_from": self.start.about()} if self.start else {})


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to train."""

    resolved: ResolvedRun
    job: TrainingJob = field(repr=False)
    rows: Mapping[str, Rows] = field(repr=False)
    """The splits that are scored at the end, without their targets."""
    notes: list[str]
    seconds: float
    """The time that the preparation took."""


def same_epochs(runs: Sequence[PreparedRun], resumed: Collection[int]) -> list[list[int]]:
    """Group the runs that train in epochs by what they train: those of a group differ only in whether they average.

    `resumed` has the numbers of the runs with a state. The first of a group averages, if any does, and its state is
    resumed. A run is alone if it has a state and the first of its group has none.
    """
    groups: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    for number in sorted(range(len(runs)), key=lambda number: not runs[number].job.averages):
        if runs[number].job.fitted:
            continue
        own = {name: value for name, value in runs[number].resolved.identity.items() if name != "average"}
        group = groups.setdefault(records.config_hash(own), [])
        if number in resumed and group and group[0] not in resumed:
            alone.append([number])
        else:
            group.append(number)
    return sorted([*groups.values(), *alone])


class RunBuilder:
    """Prepares runs of one backbone; data and tokens that several runs use are created once."""

    def __init__(
        self,
        backbone: Backbone,
        stage: Callable[[str, int, int], None] = lambda what, done, total: None,
        reader: DatasetReader | None = None,
        recompute: str = "auto",
        bank: str | Path | None = None,
    ) -> None:
        """Create a builder; it calls `stage` with the progress of tokenising: what, how much is done, of how much.

        `bank` is the folder of the bank whose tasks runs may start from.
        """
        check_recompute(recompute)
        self._recompute, self._starts, self._bases = recompute, Starts(backbone, bank), Bases(backbone, bank)
        self.backbone, self._stage, self._reader = backbone, stage, reader or DatasetReader()
        self._rows: dict[tuple[Any, ...], tuple[Any, Rows]] = {}
        self._are_long: dict[tuple[int, int], tuple[Examples, bool]] = {}

    def read(self, config: Config) -> Dataset:
        """Read a run's data, once for all runs that use it."""
        return self._reader.read(config)

    def resolve(self, config: Config, start_from: str = "") -> ResolvedRun:
        """Read a run's data and check a canonical config against it and against the backbone.

        `start_from` is a package in place of the one that the config's name leads to now.
        """
        if not find_method(config.method).slot:
            raise ConfigError([f"method is {config.method!r}, which trains no slot; run it on its own with train."])
        data = self.read(config)
        windows = self._windows(config, data)
        plan = make_run_plan(config, self.backbone, data, windows)
        device = find_device(config.device)
        dtype, layout = find_dtype(config.precision, device), find_layout(config.precision, device)
        base = self._bases.find(config, plan)
        start = self._starts.find(start_from or config.start_from, plan, base)
        own = identity(config, self.backbone, data.about()) | ({"start_from_sha256": start.sha256} if start else {})
        own |= base.identity() if base else {}
        return ResolvedRun(config, data, plan, own, device, dtype, layout, windows, start, base, self._recompute)

    def prepare(self, resolved: ResolvedRun) -> PreparedRun:
        """Tokenise the data and build the training loop's job."""
        began = time.perf_counter()
        config, data = resolved.config, resolved.data
        notes = list(data.notes)
        rows = {name: self._tokenised(resolved, name) for name in data.splits}
        note_lengths(config, rows["train"], len(data.splits["train"]), notes.append)
        if data.few:
            notes.append(few_labels(resolved.plan, resolved.start or resolved.base, rows, config.batch))
        if _is_fitted(config, resolved.plan, data) and len(set(rows["train"].targets or [])) < 2:
            raise DataError(f"The training rows have only one class of {data.task.name!r}; add rows of another one.")
        job = _make_job(resolved, self.backbone, rows["train"], rows.get("dev", rows["train"]))
        scored = {name: split for name, split in rows.items() if name != "train"}
        if not job.fitted and not job.chooses:
            notes.append(
                f"{len(data.splits['dev'])} dev rows are too few to choose an epoch; the last one is kept"
                f"{without_effect(config)}."
            )
        if job.fitted and config.average:
            notes.append("The head is fitted, not trained in epochs, so that there is no average of their weights.")
        return PreparedRun(resolved, job, scored, notes, time.perf_counter() - began)

    def _windows(self, config: Config, data: Dataset) -> int:
        """Return the most windows of a text: those of the config if it asks for windows, or if many texts are long."""
        examples, limit = data.splits["train"], config.max_length
        if KINDS[data.task.kind].windows:
            return int(config.long == "cut")
        key = (id(examples), limit)
        if config.long == "auto" and key not in self._are_long:
            self._are_long[key] = examples, are_long(self.backbone, examples, limit)
        reads = config.long == "windows" or (config.long == "auto" and self._are_long[key][1])
        return config.max_windows if reads else 0

    def _tokenised(self, resolved: ResolvedRun, split: str) -> Rows:
        """Return a split's rows; only training rows have targets."""
        config, data, weighs = resolved.config, resolved.data, resolved.plan.head.weighs
        examples = data.splits[split]
        key = (id(examples), split == "train", config.max_length, config.doc_stride, resolved.windows, weighs)
        if key not in self._rows:
            rows = make_rows(
                self.backbone,
                examples if split == "train" else replace(examples, targets=None),
                kind=data.task.kind,
                max_length=config.max_length,
                stride=config.doc_stride,
                windows=Windows(resolved.windows, WEIGHTS if weighs else MEAN),
                keep=True,
                watch=lambda done, total: self._stage(f"tokenising {split}", done, total),
            )
            self._rows[key] = examples, rows  # with the examples: an `id` is unique only while its object is alive
        return self._rows[key][1]


def identity(config: Config, backbone: Backbone | UnloadedEncoder, about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what identifies a run; `about` has the fingerprints of its data, None if the data could not be read."""
    return {**config.to_json(), "backbone_sha256": backbone.sha256, "data": about}


def make_run_plan(config: Config, backbone: Backbone, data: Dataset, windows: int = 0) -> Plan:
    """Return the plan of a run's slot, after checking the config against the backbone and the task."""
    assert config.pooling is not None
    if config.pooling == "pooler" and not backbone.has_pooler:
        raise ConfigError([f"pooling is 'pooler', but {backbone.name!r} has no pooler; use first or mean."])
    if config.max_length > backbone.config.max_length:
        limit = backbone.config.max_length
        mistake = f"max_length is {config.max_length}, but {backbone.name!r} has {limit} positions; lower it."
        raise ConfigError([mistake])
    task, kind = data.task, KINDS[data.task.kind]
    if config.class_weights != "none" and not kind.single_label:
        raise ConfigError([f"class_weights is {config.class_weights!r}, but the task is {task.kind}; leave it out."])
    head = Head(task.kind, kind.outputs(len(task.labels)), config.pooling, config.head_hidden)
    if kind.standardize:
        shift, scale = kind.standardize(data.splits["train"].targets or [])
        head = replace(head, shift=shift, scale=scale)
    encoder = backbone.config
    plan = make_plan(config.method_options(), depth=encoder.layers, head=head, shared_layers=encoder.shared_layers)
    fitted = _is_fitted(config, plan, data)
    if config.window_pooling == WEIGHTS and fitted:
        mistake = f"window_pooling is {config.window_pooling!r}, but a fitted head cannot weigh windows; leave it out"
        raise ConfigError([f"{mistake}{', or use --few never' if data.few else ''}."])
    weighs = config.window_pooling != MEAN and windows > 1 and not kind.windows and not fitted
    return replace(plan, head=replace(head, unit=fitted, weighs=weighs))


def _is_fitted(config: Config, plan: Plan, data: Dataset) -> bool:
    """Return whether a run's head is fitted: with few labels, and where nothing but a linear classifier trains."""
    linear = KINDS[data.task.kind].single_label and not config.head_hidden
    return data.few or (plan.only_head and linear)


def are_long(backbone: Backbone, examples: Examples, limit: int) -> bool:
    """Return whether so many texts would lose so much at a limit that they should be read in windows."""
    sizes = [len(text.encode("utf-8", "surrogatepass")) for text in examples.texts]
    if examples.pairs is not None:
        pairs = (len(text.encode("utf-8", "surrogatepass")) for text in examples.pairs)
        sizes = [one + two for one, two in zip(sizes, pairs, strict=True)]
    rows = [row for row, size in enumerate(sizes) if size > limit]  # a token has a byte or more
    if len(rows) < LONG_SHARE * len(sizes):
        return False
    some = examples.select(rows[:: -(-len(rows) // _COUNTED)])
    counts = token_counts(backbone.tokenizer, some.texts, some.pairs)
    return lose_much(counts, limit) / len(counts) * len(rows) >= LONG_SHARE * len(sizes)


def initial_tensors(plan: Plan, backbone: Backbone, *, sigma: float, seed: int) -> dict[str, Tensor]:
    """Return the initial value of every tensor that trains: new tensors are drawn, the encoder's are copied."""
    own = {name: backbone.tensors[name] for name in trained(backbone.tensors, plan)}
    return own | tensors.initial(plan, backbone.config, sigma, seed)


def first_tensors(resolved: ResolvedRun, backbone: Backbone) -> dict[str, Tensor]:
    """Return the first value of every tensor that trains: new, or that of the task it starts from or stands on.

    New copies of a mixture differ. Those that start from a task are equal at first, so that their mean is that task's;
    the steps that draw them set them apart.
    """
    config = resolved.config
    mixture = Mixture(resolved.plan, config.mix)
    new = initial_tensors(mixture.whole, backbone, sigma=config.sigma, seed=config.seed)
    given = mixture.spread(resolved.start.tensors) if resolved.start else {}
    given = (resolved.base.replaced if resolved.base else {}) | given
    return new | {name: tensor for name, tensor in given.items() if name in new}


def _make_job(resolved: ResolvedRun, backbone: Backbone, rows: Rows, dev: Rows) -> TrainingJob:
    config, task, splits = resolved.config, resolved.data.task, resolved.data.splits
    dev_examples = splits.get("dev", splits["train"])
    assert config.lr and config.epochs and config.epsilon is not None
    assert config.weight_decay is not None and config.bias_correction is not None
    return TrainingJob(
        resolved.plan,
        first_tensors(resolved, backbone),
        rows,
        dev,
        lambda outputs: scoring.score(task, decide(task, dev_examples, dev, outputs), dev_examples.targets or []),
        config.lr,
        config.epochs,
        batch=config.batch,
        warmup=config.warmup,
        settings=AdamSettings(config.epsilon, config.weight_decay, config.bias_correction, config.clip),
        seed=config.seed,
        patience=config.patience,
        class_weights=_class_weights(config, task, rows),
        collapsed=_collapse_check(config, task, rows, dev, dev_examples),
        chooses=len(dev_examples) >= FEWEST_DEV_ROWS,
        averages=config.average and len(dev_examples) >= FEWEST_DEV_ROWS,
        narrowing=Narrowing(parse_size(config.size).mean, config.narrow_after) if resolved.narrows else None,
        fitted=_is_fitted(config, resolved.plan, resolved.data),
        mix=config.mix,
        base=resolved.base,
    )


def _collapse_check(
    config: Config, task: Task, rows: Rows, dev: Rows, examples: Examples
) -> Callable[[list[np.ndarray], Sequence[float]], bool]:
    """Return a function that tells from dev outputs and the epochs' losses if a run learns nothing but the prior.

    A run whose loss still falls learns something, whatever it answers yet.
    """
    kind = KINDS[task.kind]
    weighted = config.class_weights != "none" or config.mix > 1  # then the prior's loss, or the loss, is another
    prior = kind.prior_loss(rows.targets or [], len(task.labels)) if kind.prior_loss and not weighted else math.inf

    def collapsed(outputs: list[np.ndarray], losses: Sequence[float]) -> bool:
        if len(losses) > 1 and losses[-1] < STILL_FALLING * losses[-2]:
            return False
        if losses[-1] >= prior:
            return True
        if kind.per_token and losses[-1] < STILL_FALLING * prior:
            return False  # most words have one tag, which is for long the answer to all of them
        return bool(kind.collapsed(task, decide(task, examples, dev, outputs), examples.targets or []))

    return collapsed


def _class_weights(config: Config, task: Task, rows: Rows) -> tuple[float, ...] | None:
    """Weight each class by the inverse of its share, like scikit-learn's `balanced`."""
    if config.class_weights == "none":
        return None
    counts = Counter(rows.targets or [])
    return tuple(rows.units / (len(task.labels) * counts[i]) if counts[i] else 0.0 for i in range(len(task.labels)))
