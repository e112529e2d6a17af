"""Tasks of a bank scored on labelled data. Knows no shell and no HTTP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from adapterbank.api.handle import BankHandle
from adapterbank.api.results import Evaluation, Evaluations
from adapterbank.kinds import scoring
from adapterbank.kinds.reliability import reliability
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.dialects import FileForm
from adapterbank.tasks.examples import labelled_as, read_examples
from adapterbank.tasks.spec import Task
from adapterbank.training.dataset import scored_table

LOG = logging.getLogger("adapterbank.load")


def evaluate_tasks(
    bank: BankHandle,
    wanted: Mapping[str, Any],
    split: str,
    text: str | None,
    text_pair: str | None,
    label: str | None,
    form: FileForm,
    drop: bool,
) -> Evaluations:
    """Score tasks on labelled data, all of them through the encoder together; see `OpenBank.evaluate`."""
    specs, requests, notes = [], [], []
    for name, data in wanted.items():
        package = bank._package(name)
        spec = Task.from_json(package.manifest.task)
        table = scored_table(name, data, split, bank.data_root, form)
        here = labelled_as(table, spec, text, text_pair, label)
        examples, report = read_examples(table, here, drop_unlabelled=drop)
        LOG.debug("%s: %d rows of %s", name, len(examples), table.source)
        specs.append((package.ref, spec))
        requests.append((bank._load(package), examples))
        own = [] if data is not None else [f"No data was given: scored on the data of the catalog, {table.source}."]
        notes.append([*own, *report.notes])
    reports = Evaluations()
    for name, (ref, spec), given, task_notes in zip(
        wanted, specs, bank.engine.head_outputs(requests, keep=True), notes, strict=True
    ):
        predicted = KINDS[spec.kind].decide(given) if given.outputs else []
        targets = given.examples.targets or []
        scores = scoring.report(spec, predicted, targets)
        intervals = {"intervals": scoring.intervals(spec, predicted, targets)}
        found = {"task": ref, "metric": spec.metric, **scores, **intervals, **reliability(given, targets)}
        reports[name] = Evaluation({**found, "notes": list(task_notes)}, spec.kind, spec.labels)
    return reports
