"""Shared updates: one package that several tasks teach together, for others to stand on. Knows no shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError
from adapterbank.inference.engine import Engine
from adapterbank.methods import parse_size
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import check_name
from adapterbank.training.builder import PreparedRun, RunBuilder
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader, canonical
from adapterbank.training.run import Result, finish_run, own_folder
from adapterbank.training.together import Taught, shares, teach


def teach_together(
    tasks: Sequence[tuple[Config, DatasetReader]],
    name: str,
    backbone: Backbone,
    bank_path: str | Path,
    *,
    callbacks: Callbacks,
    recompute: str = "auto",
) -> Result:
    """Train one slot on several tasks and add it to the bank as the task `name`, which answers as the first of them.

    Each task is a config, all of one recipe, and a reader of its data. The bank is created if it does not exist.
    """
    check_name(name)
    _check([config for config, _ in tasks])
    configs = [canonical(replace(config, few="never"), reader.splits) for config, reader in tasks]
    runs = []
    for config, (_, reader) in zip(configs, tasks, strict=True):
        builder = RunBuilder(backbone, callbacks.stage, reader, recompute, bank_path)
        resolved = builder.resolve(config)
        if resolved.plan.alone or resolved.plan.only_head:
            what = f"method is {config.method!r}, which leaves nothing that other tasks can stand on"
            raise ConfigError([f"{what}; use another, such as adapter."])
        runs.append(builder.prepare(resolved))
        for note in runs[-1].notes:
            callbacks.note(f"{config.task}: {note}")
    bank = Bank.open(bank_path, backbone.reference, create=True)
    first = runs[0].resolved
    placed = place(backbone, first.device, first.dtype, first.layout, recompute=first.recompute)
    with own_folder(bank.runs_path, first):
        taught = teach(placed, [run.job for run in runs], dropout=first.config.dropout, watch=callbacks.watch)
        prepared = _named(runs, name, taught)
        outcome = finish_run(prepared, backbone, taught.state, Engine(backbone, programs=False, placed=placed), bank)
    path = records.write(bank.records_path, outcome.record)
    return Result(outcome.record, path, outcome.package, tuple(prepared.notes))


def _check(configs: Sequence[Config]) -> None:
    """Refuse what cannot be taught together, before any data is read."""
    names, first = [config.task for config in configs], configs[0] if configs else Config()
    mistakes = []
    if len(names) < 2 or len({*names}) < len(names):
        mistakes.append(
            f"tasks is {','.join(names) or 'empty'}; name two tasks or more to teach together, each of them once."
        )
    if first.few == "always":
        mistakes.append("few is 'always', but tasks are taught together in epochs; leave it out.")
    if first.average:
        mistakes.append("average is True, but epochs of tasks that are taught together are not averaged; leave it out.")
    if first.mix > 1:
        mistakes.append(f"mix is {first.mix}, but tasks that are taught together share one slot; leave it out.")
    if parse_size(first.size).mean:
        what = f"size is {first.size!r}, but adapters that tasks teach together are not narrowed"
        mistakes.append(f"{what}; use one width, or widths by layer.")
    if mistakes:
        raise ConfigError(mistakes)


def _named(runs: Sequence[PreparedRun], name: str, taught: Taught) -> PreparedRun:
    """Return the first task's run under another name, with what is recorded of all tasks."""
    first, best = runs[0], taught.scores[taught.state.best_epoch - 1]
    parts = shares([run.job.train.units for run in runs])
    together = [
        {
            "task": run.resolved.config.task,
            "metric": run.resolved.data.task.metric,
            "score": score,
            "share": float(share),
            "data": run.resolved.data.about(),
        }
        for run, score, share in zip(runs, best, parts, strict=True)
    ]
    taught.state.about = {"together": together}
    resolved = first.resolved
    data = replace(resolved.data, task=replace(resolved.data.task, name=name))
    whole = {**resolved.identity, "task": name, "together": [[one["task"], one["data"]] for one in together]}
    told = ", ".join(f"{one['task']} ({one['metric']} {one['score']:.4f} on dev)" for one in together)
    note = f"Taught together: {told}. Its head is that of {together[0]['task']}; other tasks can stand on it (--on)."
    resolved = replace(resolved, config=replace(resolved.config, task=name), data=data, identity=whole)
    return replace(first, resolved=resolved, notes=[*first.notes, note])
