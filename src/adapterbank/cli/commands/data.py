"""`adapterbank data`: inspect a data set before training on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adapterbank.cli.console import print_json, print_table, print_text
from adapterbank.cli.options import AsJson, DataRoot, TextPairColumn
from adapterbank.errors import InputError

HELP = """Inspect a data set: sizes, label balance, token lengths, duplicates, problems.

Reports the size and label balance of each split, token lengths and how many rows --max-length would truncate, empty
rows, rows that occur in two splits, and labels that train and dev spell differently. TASK is a catalog task; for your
own files give --train, and --dev and --test if you have them.

Example: adapterbank data glue/mrpc --data-root data

Example: adapterbank data --train reviews.csv --dev dev.csv --max-length 64
"""


def command(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Catalog task.")] = None,
    train: Annotated[str | None, typer.Option("--train", help="Training data file, instead of TASK.")] = None,
    dev: Annotated[str | None, typer.Option("--dev", help="Dev data file.")] = None,
    test: Annotated[str | None, typer.Option("--test", help="Test data file.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Column with the text (default: found by name).")] = None,
    text_pair: TextPairColumn = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Column with the label (default: found by name).")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Kind of task (default: inferred from the labels).")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help="Longest text in tokens (default: as in training).", min=4),
    ] = None,
    backbone: Annotated[str, typer.Option("--backbone", help="Encoder whose tokenizer counts the tokens.")] = "minilm",
    data_root: DataRoot = None,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if (task is None) == (train is None):
        raise InputError("Give either a catalog TASK, or a file with --train.")
    files = {"train": train, "dev": dev, "test": test}
    columns = {"text": text, "text_pair": text_pair, "label": label, "kind": kind}
    spec, tables, source = _read(task, files, columns, data_root)
    from adapterbank import config
    from adapterbank.api.progress import Stages
    from adapterbank.encoder.backbone import locate_tokenizer
    from adapterbank.encoder.tokenizer import token_counts
    from adapterbank.tasks.examples import read_examples
    from adapterbank.tasks.profile import profile
    from adapterbank.training.dataset import defaults

    limit = max_length or config.parse(defaults(task or "", train)).max_length
    tokenizer = locate_tokenizer(backbone)
    lengths = {}
    with Stages(quiet=json) as stages:
        for name, table in tables.items():
            examples, _ = read_examples(table, spec, need_targets=False)
            watch = stages.watcher(f"counting the tokens of {name}")
            lengths[name] = token_counts(tokenizer, examples.texts, examples.pairs, watch)
    found = {**profile(spec, tables, lengths, limit), "source": source, "backbone": backbone}
    found["task"] = task or source
    if json:
        print_json(found)
    else:
        _print(found)


def _read(task: str | None, files: dict[str, str | None], columns: dict[str, str | None], root: str | None) -> Any:
    if task is not None:
        from adapterbank.tasks.catalog import load

        if any([*columns.values(), files["dev"], files["test"]]):
            raise InputError(f"{task!r} has its own columns and splits; for others, give a file with --train instead.")
        loaded = load(task, root)
        return loaded.task, dict(loaded.tables), loaded.source
    from adapterbank.tasks.columns import find_columns, infer_task
    from adapterbank.tasks.tables import table_from

    tables = {name: table_from(file, name) for name, file in files.items() if file is not None}
    found = find_columns(tables["train"], columns["text"], columns["text_pair"], columns["label"], columns["kind"])
    return infer_task(tables["train"], found, name="data", kind=columns["kind"]), tables, files["train"]


def _print(found: dict[str, Any]) -> None:
    print_text(f"{found['task']}: {found['kind']}, from {found['source']}\n")
    rows, limit = [], found["max_length"]
    for name, one in found["splits"].items():
        tokens = [str(value) for value in one.get("tokens", {}).values()] or [""] * 7
        counts = [f"{one['rows']:,}", str(one["empty"]), str(one["repeated"])]
        rows.append([name, *counts, *tokens, f"{one.get('longer', 0):,}"])
    places = ["5 %", "25 %", "50 %", "75 %", "95 %", "99 %", "longest"]
    print_table(["split", "rows", "empty", "repeated", *places, f"over {limit}"], rows)
    print_text(f"tokens counted by {found['backbone']}\n")
    _print_labels(found)
    for one in found["shared"]:
        print_text(f"{one['of']} rows that also occur in {one['in']}: {one['rows']:,}")
    for warning in found["warnings"]:
        print_text(f"warning: {warning}")


def _print_labels(found: dict[str, Any]) -> None:
    from adapterbank.kinds.table import KINDS

    splits = {name: one for name, one in found["splits"].items() if one["labelled"]}
    for name, one in splits.items():
        if line := KINDS[found["kind"]].profile_text(one):
            print_text(f"{name}: {line}")
    counts = {name: one["labels"] for name, one in splits.items() if "labels" in one}
    if counts:
        labels = list(dict.fromkeys(label for mine in counts.values() for label in mine))
        rows = []
        for label in labels[:30]:
            mine = [(one.get(label, 0), sum(one.values())) for one in counts.values()]
            rows.append([label, *(f"{n:,}" for n, _ in mine), *(f"{100 * n / every:.1f} %" for n, every in mine)])
        print_table(["label", *counts, *(f"{name} share" for name in counts)], rows)
        if len(labels) > 30:
            print_text(f"… and {len(labels) - 30} more labels; --json lists all")
        print_text("")
