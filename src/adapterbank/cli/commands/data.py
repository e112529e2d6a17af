"""`adapterbank data`: inspect a data set before training on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterbank.cli.console import print_json, print_table, print_text
from adapterbank.cli.options import AsJson, DataRoot, DropUnlabelled, Header, Separator, TextPairColumn
from adapterbank.errors import InputError

if TYPE_CHECKING:
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

HELP = """Inspect a data set: columns, what would be dropped and held out, label balance, token lengths, problems.

Reports which columns are read, which rows training would drop, hold out for dev or refuse, the size and label balance
of each split, token lengths and how many rows --max-length would truncate, repeated rows, rows that occur in two
splits, and labels with two spellings. TASK is a catalog task, or a file of your own; --dev and --test name further
files.

Example: adapterbank data reviews.csv

Example: adapterbank data tickets.csv --text title,body --label urgent,refund,bug

Example: adapterbank data glue/mrpc --data-root data

Example: adapterbank data --train reviews.csv --dev dev.csv --max-length 64
"""

Labels = Annotated[str | None, typer.Option("--labels", help="Names of labels stored as numbers, in their order.")]
_DROPPED = {"empty": "an empty text", "unlabelled": "no label"}


def command(
    task: Annotated[str | None, typer.Argument(metavar="TASK|FILE", help="Catalog task, or training data.")] = None,
    train: Annotated[str | None, typer.Option("--train", help="Training data file, instead of FILE.")] = None,
    dev: Annotated[str | None, typer.Option("--dev", help="Dev data file.")] = None,
    test: Annotated[str | None, typer.Option("--test", help="Test data file.")] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Column with the text; a,b joins two (default: found by name).")
    ] = None,
    text_pair: TextPairColumn = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Column with the label; a,b,c for one each (default: found by name)."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Kind of task (default: inferred from the labels).")
    ] = None,
    labels: Labels = None,
    label_separator: Annotated[
        str | None, typer.Option("--label-separator", help="Between the labels of a cell; none for one label.")
    ] = None,
    drop_unlabelled: DropUnlabelled = False,
    separator: Separator = None,
    header: Header = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help="Longest text in tokens (default: as in training).", min=4),
    ] = None,
    backbone: Annotated[str, typer.Option("--backbone", help="Encoder whose tokenizer counts the tokens.")] = "minilm",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the rows held out for dev.", min=0)] = 0,
    data_root: DataRoot = None,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if (task is None) == (train is None):
        raise InputError("Give either a catalog TASK, or a FILE.")
    if task is not None and _is_file(task):
        task, train = None, task
    columns: dict[str, Any] = {"text": text, "text_pair": text_pair, "label": label, "kind": kind, "labels": labels}
    columns |= {"label_separator": label_separator, "separator": separator, "header": header, "dev": dev, "test": test}
    stated = {name: value for name, value in columns.items() if value is not None}
    options = {**stated, "train": train, "drop_unlabelled": drop_unlabelled, "seed": seed}
    spec, tables, source, plan = _read(task, options, data_root)
    from adapterbank import config
    from adapterbank.tasks.profile import profile
    from adapterbank.training.dataset import defaults

    limit = max_length or config.parse(defaults(task or "", train)).max_length
    lengths = _lengths(spec, tables, backbone, quiet=json)
    found = {**profile(spec, tables, lengths, limit), **plan, "source": source, "backbone": backbone}
    found |= {"task": task or source, "seed": seed}
    if json:
        print_json(found)
    else:
        _print(found)


def _lengths(spec: Task, tables: dict[str, Table], backbone: str, *, quiet: bool) -> dict[str, Any]:
    """Return the number of tokens of each row."""
    from adapterbank.api.progress import Stages
    from adapterbank.encoder.backbone import locate_tokenizer
    from adapterbank.encoder.tokenizer import token_counts
    from adapterbank.tasks.examples import read_examples

    tokenizer = locate_tokenizer(backbone)
    lengths = {}
    with Stages(quiet=quiet) as stages:
        for name, table in tables.items():
            examples, _ = read_examples(table, spec, need_targets=False)
            watch = stages.watcher(f"counting the tokens of {name}")
            lengths[name] = token_counts(tokenizer, examples.texts, examples.pairs, watch)
    return lengths


def _is_file(name: str) -> bool:
    """Return whether a name is that of a file, by its extension if there is no such file."""
    from adapterbank.tasks.catalog import is_named
    from adapterbank.tasks.tables import READERS

    if is_named(name):
        return False
    return Path(name).exists() or name.lower().removesuffix(".gz").endswith(tuple(READERS))


def _read(task: str | None, options: dict[str, Any], root: str | None) -> Any:
    """Return the task, its tables, where they are from, and what training would do with them."""
    from adapterbank import config as configs
    from adapterbank.training.dataset import preview, read_tables

    if task is not None:
        from adapterbank.tasks.catalog import load

        if set(options) - {"train", "drop_unlabelled", "seed"}:
            raise InputError(f"{task!r} has its own columns and splits; for others, name a FILE instead.")
        loaded = load(task, root)
        config = configs.parse({"drop_unlabelled": options["drop_unlabelled"], "seed": options["seed"]})
        return loaded.task, dict(loaded.tables), loaded.source, preview(loaded.task, loaded.labelled(), config)
    config = configs.parse({**options, "task": "data"})
    spec, tables = read_tables(config, {})
    return spec, tables, options["train"], preview(spec, tables, config)


def _print(found: dict[str, Any]) -> None:
    print_text(f"{found['task']}: {found['kind']}, from {found['source']}")
    _print_plan(found)
    rows, limit = [], found["max_length"]
    for name, one in found["splits"].items():
        tokens = [str(value) for value in one.get("tokens", {}).values()] or [""] * 7
        counts = [f"{one['rows']:,}", str(one["empty"]), str(one["repeated"])]
        rows.append([name, *counts, *tokens, f"{one.get('longer', 0):,}"])
    places = ["5 %", "25 %", "50 %", "75 %", "95 %", "99 %", "longest"]
    print_table(["split", "rows", "empty", "repeated", *places, f"over {limit}"], rows)
    print_text(f"tokens counted by {found['backbone']}")
    train = found["splits"].get("train", {})
    if train.get("longer"):
        what = "read in windows" if train["windows"] else "cut (--long windows reads them whole)"
        print_text(f"texts over {limit} tokens are {what}")
    print_text("")
    _print_labels(found)
    for one in found["shared"]:
        print_text(f"{one['of']} rows that also occur in {one['in']}: {one['rows']:,}")
    for warning in found["warnings"]:
        print_text(f"warning: {warning}")
    for note in found["notes"]:
        print_text(f"note: {note}")
    for reason in found["refused"]:
        print_text(f"train would refuse it: {reason}")


def _print_plan(found: dict[str, Any]) -> None:
    """Print the columns, the rows that would be dropped, and those that would be held out."""
    read = [("text", "text pair")[place] + f": {name}" for place, name in enumerate(found["columns"]["text"])]
    print_text("; ".join([*read, f"label: {found['columns']['label']}"]))
    for name, dropped in found["dropped"].items():
        parts = [f"{dropped[why]} with {words}" for why, words in _DROPPED.items() if dropped[why]]
        if parts:
            print_text(f"{name}: rows left out: {', '.join(parts)}")
    rows = ", ".join(f"{name} {count:,}" for name, count in found["rows"].items())
    held = f" (dev held out of train, seed {found['seed']})" if found["held_out"] else ""
    held = " (few labels: no row is held out)" if found["few"] and "dev" not in found["rows"] else held
    print_text(f"rows used: {rows}{held}\n")


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
