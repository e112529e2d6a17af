"""`adapterbank squad`: answer SQuAD questions, write prediction files and compute the official scores."""

from __future__ import annotations

import json as text_json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank.cli.console import print_json, print_text
from adapterbank.cli.options import (
    AsJson,
    BackboneName,
    DataRoot,
    Device,
    OptionalBankPath,
    OptionalTaskName,
    Precision,
    Split,
)
from adapterbank.errors import InputError

HELP = """Answer SQuAD questions with a span task and print the official EM and F1.

With --predictions, an existing prediction file is scored instead.

Example: adapterbank squad --bank bank --task squad/v1 --data-root data --output predictions.json

Example: adapterbank squad --bank bank --task squad/v2 --data data/dev-v2.0.json --output predictions.json --nbest nbest.json --null-odds odds.json

Example: adapterbank squad --predictions predictions.json --data data/dev-v1.1.json
"""  # noqa: E501


def command(
    bank: OptionalBankPath = None,
    task: OptionalTaskName = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="SQuAD JSON file, or a catalog task (default: the task's catalog data)."),
    ] = None,
    split: Split = "dev",
    predictions: Annotated[
        str | None, typer.Option("--predictions", help="Prediction file to score, instead of a task.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the predictions to this file.")] = None,
    nbest: Annotated[
        str | None, typer.Option("--nbest", help="Write the best answers to each question to this file.")
    ] = None,
    null_odds: Annotated[
        str | None,
        typer.Option("--null-odds", help='File of the odds of "no answer": written, or read with --predictions.'),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="SQuAD version: 1.1 or 2.0 (default: from the data).")
    ] = None,
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if predictions is not None:
        if bank or task or output or nbest or not data:
            raise InputError("--predictions requires --data and excludes --bank, --task, --output and --nbest.")
        scores = _scored(predictions, null_odds, data, split, data_root, version)
    elif not bank or not task:
        raise InputError("Give --bank and --task, or a prediction file with --predictions.")
    else:
        from adapterbank.api.opened import open_bank
        from adapterbank.api.progress import Stages
        from adapterbank.kinds.table import KINDS

        opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
        kept = opened.show(task).task
        if null_odds and KINDS[kept["kind"]].readings and kept.get("threshold") is None:
            raise InputError(f'{task!r} always answers, so it has no odds of "no answer"; leave out --null-odds.')
        with Stages(quiet=json) as stages:
            stages.stage(f"answering with {task}", 0, None)
            found = opened.squad(task, data, split=split, version=version)
        scores = found.scores
        for path, value in ((output, found.predictions), (nbest, found.best), (null_odds, found.null_odds)):
            if path:
                _write(Path(path), value)
    if json:
        print_json(scores)
    else:
        for name, value in scores.items():
            print_text(f"{name:<18} {value:.4f}" if isinstance(value, float) else f"{name:<18} {value}")


def _scored(
    predictions: str, null_odds: str | None, data: str, split: str, root: str | None, version: str | None
) -> dict[str, Any]:
    from adapterbank.benchmarks import squad
    from adapterbank.storage.reading import read_json
    from adapterbank.training.dataset import scored_table

    table = scored_table(data, data, split, root)
    gold = squad.gold_answers(table, "answers" if "answers" in table.columns else "label")
    answers, odds = (_mapping(path, read_json) if path else None for path in (predictions, null_odds))
    assert answers is not None
    odd = [key for key, value in (odds or {}).items() if type(value) not in (int, float) or not math.isfinite(value)]
    if odds and odd:
        raise InputError(
            f"{null_odds} has {odds[odd[0]]!r} for {odd[0]!r}, which is not a number; give one for each id."
        )
    chosen = squad.check_version(version, gold)
    if odds is not None and chosen == "1.1":
        raise InputError('SQuAD 1.1 has no odds of "no answer"; leave out --null-odds, or give --version 2.0.')
    return squad.evaluate(gold, {key: str(value) for key, value in answers.items()}, version=chosen, null_odds=odds)


def _mapping(path: str, read: Any) -> dict[str, Any]:
    try:
        found = read(Path(path))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}; check the path.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object that maps question ids to values.")
    return found


def _write(path: Path, value: Any) -> None:
    from adapterbank.storage.files import atomic_write

    atomic_write(path, (text_json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())
