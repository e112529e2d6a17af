"""Benchmark results of a bank: GLUE's zip and score, SQuAD's prediction files. Knows no encoder and no shell.

The caller provides the function that predicts rows with a task of the bank; `benchmarks.glue` and `benchmarks.squad`
have the files and the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterbank.benchmarks import glue, squad
from adapterbank.errors import BankError, ConfigError, DataError, InputError, UnknownName
from adapterbank.kinds.span import Reading
from adapterbank.kinds.values import listed
from adapterbank.storage.package import Manifest
from adapterbank.tasks.catalog import CATALOG, Loaded, bank_name, load
from adapterbank.tasks.examples import labelled_as, read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table

_AT_ONCE = 2048
"""Rows between two progress reports; QQP's test set has 390,965."""


@dataclass(frozen=True)
class SquadAnswers:
    """The answers to a SQuAD file."""

    predictions: dict[str, str]
    """The answer of each question by its id: what the official scripts read."""
    best: dict[str, list[dict[str, Any]]]
    """The best answers of each question with their probabilities."""
    null_odds: dict[str, float]
    """By how much "no answer" scores above the best answer; empty for tasks that always answer."""
    scores: dict[str, float]
    """The official scores in per cent."""
    version: str
    """The version of the official script."""


def submit(
    path: Path,
    tasks: Collection[str],
    predict: Callable[[str, Examples], list[Any]],
    *,
    root: str | None,
    use: Mapping[str, str],
    partial: bool,
    stage: Callable[[str, int, int], None],
    note: Callable[[str], None],
) -> dict[str, int]:
    """Predict every test set of GLUE and write the zip; report everything that is missing at once."""
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} to write {path.name} to; create it, or choose another.")
    for name in use:
        if name not in {sheet.predicted_by for sheet in glue.SHEETS}:
            raise UnknownName(name, "a task of GLUE", dict.fromkeys(sheet.predicted_by for sheet in glue.SHEETS))
    missing: list[str] = []
    ready = [(sheet, found) for sheet in glue.SHEETS if (found := _test_set(sheet, tasks, root, use, missing))]
    if missing and not partial:
        raise ConfigError(["The server refuses a zip that lacks a file or rows; --partial writes it anyway.", *missing])
    if not any(found[0] for _, found in ready):  # WNLI alone needs no task
        raise ConfigError(["There is nothing to write.", *missing])
    for sentence in missing:
        note(sentence)
    files, rows = {}, {}
    for sheet, (task, examples, numbers) in ready:
        predictions: list[Any] = [glue.MAJORITY] * len(examples) if task is None else []
        for start in range(0, len(examples) if task is not None else 0, _AT_ONCE):
            assert task is not None
            part = examples.select(range(start, min(start + _AT_ONCE, len(examples))))
            predictions += predict(task, part)
            stage(sheet.file, len(predictions), len(examples))
        files[sheet.file] = glue.sheet_text(sheet, predictions, numbers)
        rows[sheet.file] = len(predictions)
    glue.write_zip(path, files)
    return rows


def _test_set(
    sheet: glue.Sheet, tasks: Collection[str], root: str | None, use: Mapping[str, str], missing: list[str]
) -> tuple[str | None, Examples, Sequence[Any] | None] | None:
    """Return the task that predicts a file's rows (None for WNLI), the rows, and their numbers; or add to `missing`."""
    if sheet.task == "glue/wnli":
        return None, Examples([""] * sheet.rows, [""] * sheet.rows), None
    task = use.get(sheet.predicted_by, bank_name(sheet.predicted_by))
    if task.partition("@")[0] not in tasks:
        missing.append(f"{sheet.file} needs the task {task!r} in the bank.")
        return None
    try:
        found = load(sheet.task, root)
    except DataError as error:
        missing.append(f"{sheet.file}: {error}")
        return None
    if sheet.split not in found.tables:
        missing.append(f"{sheet.file} needs the {sheet.split} split of {sheet.task!r}, not found in {found.source}.")
        return None
    return _rows_of(sheet, found, task, missing)


def _rows_of(
    sheet: glue.Sheet, found: Loaded, task: str, missing: list[str]
) -> tuple[str, Examples, Sequence[Any] | None] | None:
    table = found.tables[sheet.split]
    if table.rows != sheet.rows:
        missing.append(f"{sheet.file} needs {sheet.rows} rows, and {table.source} has {table.rows}.")
    examples, _ = read_examples(table, found.task, need_targets=False)
    return task, examples, table.columns.get("index")


def dev_score(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """Return the GLUE score of the tasks that a bank has under the catalog's names.

    `unofficial` lists those that were not scored on the official dev sets.
    """
    names, stored = {name: bank_name(name) for name in glue.TASKS}, {one.name: one for one in manifests}
    found = {name: stored[own].metrics for name, own in names.items() if own in stored}
    if not found:
        raise BankError(f"The bank has none of {listed(names.values())}. See: adapterbank train --task glue/cola")
    other = [name for name, mine in found.items() if CATALOG[name].metric not in mine.get("dev", {})]
    if other:
        raise BankError(
            f"{names[other[0]]!r} was not scored by {CATALOG[other[0]].metric!r}, which GLUE uses; train it again."
        )
    parts = {name: glue.task_score(name, mine) for name, mine in found.items()}
    score, missing = glue.glue_score(parts)
    rows = {name: {split: one["rows"] for split, one in stored[names[name]].data.items()} for name in found}
    odd = {name: how for name in found if (how := glue.unofficial(name, rows[name]))}
    return {"score": score, "tasks": parts, "missing": list(missing), "unofficial": odd}


def answer_squad(
    table: Table, task: Task, read: Callable[[Examples], list[Reading]], version: str | None = None
) -> SquadAnswers:
    """Answer the questions of a table with ids, and score the answers as the official script does.

    Without a version it is 2.0 if any question has no answer, else 1.1.
    """
    here = labelled_as(table, task)
    gold = squad.gold_answers(table, here.label)
    version = squad.check_version(version, gold)
    examples, _ = read_examples(table, here, need_targets=False)
    ids, found = table.columns["id"], read(examples)
    predictions = squad.prediction_file(ids, [one.choose(task.threshold).text for one in found])
    best = {str(key): one.listed(task.threshold) for key, one in zip(ids, found, strict=True)}
    odds = {str(key): one.null_odds for key, one in zip(ids, found, strict=True)} if task.threshold is not None else {}
    scores = squad.evaluate(gold, predictions, version=version)
    if version == "2.0" and odds:
        raw = squad.prediction_file(ids, [one.answers[0].text for one in found])
        every = squad.evaluate(gold, raw, version=version, null_odds=odds, threshold=float("inf"))
        scores |= {name: value for name, value in every.items() if name.startswith("best_")}
    return SquadAnswers(predictions, best, odds, scores, version)
