"""`adapterbank squad`: answer a SQuAD file, write official prediction files, score them as the official script does."""

from __future__ import annotations

import json as text_json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank.cli.commands.catalog import DataRoot, Split
from adapterbank.cli.console import AsJson, BackboneName, Device, Precision, print_json
from adapterbank.errors import InputError

HELP = """Answer SQuAD's questions with a task of a bank, or take a prediction file; print the official EM and F1.

Example: adapterbank squad --bank bank --task squad/v1 --data-root data --output predictions.json

Example: adapterbank squad --bank bank --task squad/v2 --data data/dev-v2.0.json --output predictions.json --nbest nbest.json --null-odds odds.json

Example: adapterbank squad --predictions predictions.json --data data/dev-v1.1.json
"""  # noqa: E501


def command(
    bank: Annotated[str | None, typer.Option("--bank", help="The bank's folder.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option("--task", help="Name of the task, or name@version.")] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="A SQuAD JSON file, or a name of the catalog (default: the task's own)."),
    ] = None,
    split: Split = "dev",
    predictions: Annotated[str | None, typer.Option("--predictions", help="Score this file instead.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the predictions here.")] = None,
    nbest: Annotated[str | None, typer.Option("--nbest", help="Write the best answers here.")] = None,
    null_odds: Annotated[
        str | None, typer.Option("--null-odds", help='Write here (read, with --predictions) the odds of "no answer".')
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="1.1 or 2.0 (default: by the data).")] = None,
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if predictions is not None:
        if bank or task or output or nbest or not data:
            raise InputError("--predictions takes --data and --null-odds beside it, and no bank, task or output.")
        scores = _scored(predictions, null_odds, data, split, data_root, version)
    elif not bank or not task:
        raise InputError("Give --bank and --task, or a file of answers with --predictions.")
    else:
        from adapterbank.api import open_bank
        from adapterbank.cli.progress import Stages
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
            typer.echo(f"{name:<18} {value:.4f}" if isinstance(value, float) else f"{name:<18} {value}")


def _scored(
    predictions: str, null_odds: str | None, data: str, split: str, root: str | None, version: str | None
) -> dict[str, Any]:
    from adapterbank.benchmarks import squad
    from adapterbank.storage.files import read_json
    from adapterbank.training.dataset import scored_table

    table = scored_table(data, data, split, root)
    gold = squad.gold_answers(table, "answers" if "answers" in table.columns else "label")
    said, odds = (_mapping(path, read_json) if path else None for path in (predictions, null_odds))
    assert said is not None
    odd = [key for key, value in (odds or {}).items() if type(value) not in (int, float) or not math.isfinite(value)]
    if odds and odd:
        raise InputError(f"{null_odds} has {odds[odd[0]]!r} for {odd[0]!r}, which is no number; write one for each id.")
    chosen = squad.check_version(version, gold)
    if odds is not None and chosen == "1.1":
        raise InputError('SQuAD 1.1 knows no odds of "no answer"; leave out --null-odds, or give --version 2.0.')
    return squad.evaluate(gold, {key: str(value) for key, value in said.items()}, version=chosen, null_odds=odds)


def _mapping(path: str, read: Any) -> dict[str, Any]:
    try:
        found = read(Path(path))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}; check the path.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object of values by question id; write one.")
    return found


def _write(path: Path, value: Any) -> None:
    from adapterbank.storage.files import atomic_write

    atomic_write(path, (text_json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())
