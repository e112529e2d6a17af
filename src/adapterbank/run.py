"""One run: a config and data in, a record and a package out. The only assembler; knows every room below it.

Everything that can be wrong with the input is found before the bank is touched; its tasks change in one atomic step at
the very end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapterbank import __version__, metrics, records, resume
from adapterbank.audit import fingerprint
from adapterbank.bank import Bank
from adapterbank.batches import Rows, make_rows
from adapterbank.config import Config, resolve
from adapterbank.data import Data, named, read_data
from adapterbank.encoder.checkpoint import Backbone
from adapterbank.engine import Engine, decide
from adapterbank.errors import ConfigError
from adapterbank.methods import Head, Plan, find_method, make_plan, trained
from adapterbank.optimizer import Settings
from adapterbank.package import FORMAT, Manifest, Package
from adapterbank.runtime import find_device, find_dtype, stamp
from adapterbank.slots import bottleneck, heads, lora
from adapterbank.spans import tune
from adapterbank.tasks.spec import Examples, Task
from adapterbank.train import Lesson, Progress, State, train


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    record: dict[str, Any] = field(repr=False)
    record_path: Path
    package: Package | None
    """None of a method that leaves a record alone."""
    notes: tuple[str, ...]


def make_run_plan(config: Config, backbone: Backbone, data: Data) -> Plan:
    """Say what a slot for this run adds and trains; finds what does not fit the backbone."""
    assert config.pooling is not None
    if config.pooling == "pooler" and not backbone.has_pooler:
        raise ConfigError([f"pooling is 'pooler', but {backbone.name!r} has none; use first or mean."])
    if config.max_length > backbone.anatomy.max_length:
        limit = backbone.anatomy.max_length
        raise ConfigError([f"max_length is {config.max_length}, but {backbone.name!r} has {limit} positions."])
    task = data.task
    head = Head(
        task.kind, {"regression": 1, "span": 2}.get(task.kind, len(task.labels)), config.pooling, config.head_hidden
    )
    if task.kind == "regression":
        targets = np.array(data.splits["train"].targets, dtype=float)
        head = replace(head, shift=float(targets.mean()), scale=float(targets.std()) or 1.0)
    anatomy = backbone.anatomy
    return make_plan(config.method_options(), depth=anatomy.layers, head=head, shared_layers=anatomy.shared_layers)


def initial_tensors(plan: Plan, backbone: Backbone, *, sigma: float, seed: int) -> dict[str, Tensor]:
    """Give every tensor that trains at its first value: new ones drawn, the encoder's copied."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: backbone.tensors[name] for name in trained(backbone.tensors, plan)}
    if plan.adapter:
        found |= bottleneck.initial(plan.adapter, backbone.anatomy.hidden, sigma, generator)
    if plan.lora:
        found |= lora.initial(plan.lora, backbone.anatomy, generator)
    return found | heads.initial(plan.head, backbone.anatomy.hidden, generator)


def run(
    config: Config,
    backbone: Backbone,
    bank_path: str | Path,
    *,
    data: Mapping[str, Any] | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
    stage: Callable[[str, int, int], None] = lambda what, done, total: None,
    resuming: bool = False,
) -> Result:
    """Train one task and put it into the bank, which is made if it is not there.

    `data` has splits as Python values; `watch` hears of steps and epochs, `stage` of the work before (what, done, of
    how many), `note` of what the user should know.
    """
    began = time.perf_counter()
    config = resolve(named(config, data))
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        note(text)

    ready = read_data(config, data)
    if not find_method(config.method).slot:
        about, bank = _search(config, backbone, ready, bank_path, tell, stage)
        record = {"config": _whole(config, backbone, ready), **about, "notes": notes}
        return Result(record, records.write(bank.records_path, record), None, tuple(notes))
    early = list(ready.notes)  # told once nothing can be refused any more: a mistake is one sentence
    plan = make_run_plan(config, backbone, ready)
    device = find_device(config.device)
    dtype = find_dtype(config.precision, device)
    lesson = _lesson(config, backbone, ready, plan, early.append, stage)
    whole = _whole(config, backbone, ready)
    bank = _open(bank_path, backbone)
    for text in early:
        tell(text)
    with resume.own_folder(bank.runs_path, records.config_hash(whole)) as kept:
        state = train(
            backbone,
            [lesson],
            device=device,
            dtype=dtype,
            dropout=config.dropout,
            watch=watch,
            keep=lambda _, state: resume.save(kept, state),
            resume=_resumed(kept, resuming, tell),
        )[0]
        package, scores = _finish(config, backbone, ready, plan, bank, state, tell)
        record = {
            "config": whole,
            **_about(package, state, scores),
            **_speed(state, len(lesson.train), time.perf_counter() - began),
            "stamp": stamp(device, dtype),
            "notes": notes,
        }
        path = records.write(bank.records_path, record)
        resume.forget(kept)
    return Result(record, path, package, tuple(notes))


def _search(
    config: Config,
    backbone: Backbone,
    data: Data,
    bank_path: str | Path,
    tell: Callable[[str], None],
    stage: Callable[[str, int, int], None],
) -> tuple[dict[str, Any], Bank]:
    """Do without the encoder: search for the best model of the texts; give what its record says, and where it goes."""
    from adapterbank.automl.search import check, search

    began, metric = time.perf_counter(), data.task.metric
    check(data.task)
    bank = _open(bank_path, backbone)
    for text in data.notes:
        tell(text)

    def watch(done: int, total: int, best: float | None) -> None:
        so_far = "" if best is None else f", best {metric} {best:.4f}"
        stage(f"model {done + 1}/{total}{so_far}", done, total)

    found = search(
        data.task,
        data.splits["train"],
        data.splits["dev"],
        trials=config.trials,
        minutes=config.minutes,
        seed=config.seed,
        watch=watch,
    )
    if found.stopped:
        tell(f"Stopped after {len(found.history)} of {config.trials} models; the best of them is kept.")
    about = found.about(data.task, data.splits, backbone.parameters)
    rest = {"package": None, "bytes": 0, "stamp": stamp(torch.device("cpu"), torch.float32)}
    return {**about, **rest, "seconds": time.perf_counter() - began}, bank


def _whole(config: Config, backbone: Backbone, data: Data) -> dict[str, Any]:
    """Give all that decides what a run gives."""
    return {**config.to_json(), "backbone_sha256": backbone.sha256, "data": data.about()}


def _open(path: str | Path, backbone: Backbone) -> Bank:
    return Bank.open(path, {"name": backbone.name, "sha256": backbone.sha256}, create=True)


def _finish(
    config: Config,
    backbone: Backbone,
    data: Data,
    plan: Plan,
    bank: Bank,
    state: State,
    tell: Callable[[str], None],
) -> tuple[Package, dict[str, Any]]:
    """Score the best epoch's weights and put them into the bank."""
    engine = Engine(backbone, device=config.device, precision=config.precision, programs=False)
    best = {name: tensor.numpy() for name, tensor in state.tensors["best"].items()}
    engine.put(config.task, data.task, plan, best, config.max_length, config.doc_stride)
    if data.task.threshold is not None:
        found = engine.read(config.task, data.splits["dev"], keep=True)
        data = replace(data, task=replace(data.task, threshold=tune(found, data.splits["dev"].targets or [])))
        engine.put(config.task, data.task, plan, best, config.max_length, config.doc_stride)
    scores = {name: _scores(engine, data, name, tell) for name in data.splits if name != "train"}
    draft = _draft(config, backbone, data, plan, scores, best, fingerprint(engine, config.task))
    return bank.put(draft, best), scores


def _lesson(
    config: Config,
    backbone: Backbone,
    data: Data,
    plan: Plan,
    tell: Callable[[str], None],
    stage: Callable[[str, int, int], None],
) -> Lesson:
    """Tokenise the data and put together what the training loop needs."""
    task = data.task

    def tokenised(name: str, examples: Examples) -> Rows:
        return make_rows(
            backbone,
            examples,
            kind=task.kind,
            max_length=config.max_length,
            stride=config.doc_stride,
            keep=True,
            watch=lambda done, total: stage(f"tokenising {name}", done, total),
        )

    rows = tokenised("train", data.splits["train"])
    dev = tokenised("dev", replace(data.splits["dev"], targets=None))
    _tell_of_lengths(config, rows, len(data.splits["train"]), tell)
    assert config.lr and config.epochs and config.epsilon is not None
    assert config.weight_decay is not None and config.bias_correction is not None
    return Lesson(
        plan,
        initial_tensors(plan, backbone, sigma=config.sigma, seed=config.seed),
        rows,
        dev,
        lambda given: metrics.score(
            task.metric,
            decide(task, data.splits["dev"], dev, given),
            data.splits["dev"].targets or [],
            task.labels,
        ),
        config.lr,
        config.epochs,
        batch=config.batch,
        warmup=config.warmup,
        settings=Settings(config.epsilon, config.weight_decay, config.bias_correction, config.clip),
        seed=config.seed,
        patience=config.patience,
        class_weights=_class_weights(config, task, rows),
    )


def _tell_of_lengths(config: Config, rows: Rows, examples: int, tell: Callable[[str], None]) -> None:
    if rows.cut:
        tell(f"{rows.cut} of {examples} training texts are longer than max_length {config.max_length} and are cut.")
    if rows.unreachable:
        tell(
            f"{rows.unreachable} training rows are left out: their answer fits no window of {config.max_length} tokens."
        )
    longer = sum(len(mine) > 1 for mine in rows.by_example(examples)) if rows.owners is not None else 0
    if longer:
        tell(
            f"{longer} of {examples} training documents are longer than {config.max_length} tokens with their "
            f"question and are cut into overlapping windows: {len(rows)} rows in all."
        )


def _scores(engine: Engine, data: Data, split_name: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Score a split with the weights that are kept, and say so if they give one answer to everything."""
    task, examples = data.task, data.splits[split_name]
    (said,) = engine.decide([(task.name, examples)], keep=True)
    targets = examples.targets or []
    if split_name == "dev" and task.kind == "classification" and len(set(said)) == 1 < len(set(targets)):
        tell(
            f"The model says {task.labels[said[0]]!r} to every dev row: it has learned the commonest answer only. "
            "Most often the learning rate is too high (try a tenth of it) or the epochs are too few."
        )
    return metrics.report(task.kind, said, targets, task.labels, task.metric)


def _class_weights(config: Config, task: Task, rows: Rows) -> tuple[float, ...] | None:
    """Weigh each class by the inverse of its share, as scikit-learn's `balanced` does."""
    if config.class_weights == "none":
        return None
    if task.kind != "classification":
        raise ConfigError([f"class_weights is {config.class_weights!r}, but the task is {task.kind}; leave it out."])
    counts = Counter(rows.targets or [])
    return tuple(len(rows) / (len(task.labels) * counts[i]) if counts[i] else 0.0 for i in range(len(task.labels)))


def _resumed(kept: Path, resuming: bool, tell: Callable[[str], None]) -> dict[int, State]:
    state = resume.load(kept) if resuming else None
    if state is not None:
        tell(f"Going on after epoch {state.epoch}.")
        return {0: state}
    if resuming:
        tell("There is no unfinished run of this config and data; it starts at the first epoch.")
    return {}


def _draft(
    config: Config,
    backbone: Backbone,
    data: Data,
    plan: Plan,
    scores: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, np.ndarray],
    outputs: dict[str, Any],
) -> Manifest:
    count = sum(array.size for array in tensors.values())
    new = sum(array.size for name, array in tensors.items() if name not in backbone.tensors)
    recipe = ("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout",
              "class_weights", "patience", "max_length", "doc_stride", "sigma")  # fmt: skip
    return Manifest(
        format=FORMAT,
        name=config.task,
        version=0,
        task=data.task.to_json(),
        method=plan.to_json(),
        backbone={"name": backbone.name, "sha256": backbone.sha256},
        recipe={name: getattr(config, name) for name in recipe},
        seed=config.seed,
        data=data.about(),
        metrics={name: {k: v for k, v in s.items() if isinstance(v, int | float)} for name, s in scores.items()},
        params={
            "trained": count,
            "encoder": backbone.parameters,
            "total": backbone.parameters + new,
            "percent": 100 * count / backbone.parameters,
        },
        bytes=0,
        weights_sha256="",
        library=__version__,
        created="",
        fingerprint=outputs,
    )


def _about(package: Package, state: State, scores: dict[str, Any]) -> dict[str, Any]:
    """Give what a record says of the package and of the way to it."""
    return {
        "package": package.ref,
        "task": package.manifest.task,
        "metrics": scores,
        "params": package.manifest.params,
        "bytes": package.manifest.bytes,
        "best_epoch": state.best_epoch,
        "history": state.history,
        "created": package.manifest.created,
    }


def _speed(state: State, rows: int, seconds: float) -> dict[str, float]:
    training = sum(epoch["seconds"] for epoch in state.history)
    return {"seconds": seconds, "examples_per_second": rows * len(state.history) / max(training, 1e-9)}
