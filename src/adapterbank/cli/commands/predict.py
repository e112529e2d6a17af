"""`adapterbank predict`: predict texts with tasks of a bank."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from adapterbank.cli.console import format_count, json_text, print_message
from adapterbank.cli.options import BackboneName, BankPath, Device, OptionalTaskName, Precision
from adapterbank.errors import InputError, UnknownName

if TYPE_CHECKING:
    from adapterbank.api.opened import OpenBank
    from adapterbank.tasks.spec import Examples

HELP = """Predict texts with a task of the bank.

Prints one JSON object per row, in order.

Example: adapterbank predict --bank bank --task sentiment --text "What a film!"

Example: adapterbank predict --bank bank --task sentiment reviews.csv > predictions.jsonl

Example: cat lines.txt | adapterbank predict --bank bank --task sentiment -

Each word's share in the answer: adapterbank predict --bank bank --task sentiment --explain --text "What a film!"

Each row names its task: adapterbank predict --bank bank --task-column task mixed.jsonl
"""

_FORMATS = ("lines", "csv", "tsv", "jsonl")
ROWS_PER_WRITE = 2048
"""Predictions are written after so many rows, so that the first ones of a long file appear early."""


def command(
    bank: BankPath,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|-", help="Texts: one per line, or CSV, TSV, JSONL or Parquet; - is standard input."
        ),
    ] = None,
    task: OptionalTaskName = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="Text to predict; can be repeated.")] = None,
    text_pair: Annotated[
        list[str] | None, typer.Option("--text-pair", help="Second text, for tasks on pairs; one for each --text.")
    ] = None,
    task_column: Annotated[
        str | None, typer.Option("--task-column", help="Column of FILE with the task of each row.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Format of standard input: lines, csv, tsv or jsonl.")
    ] = "lines",
    best: Annotated[
        int, typer.Option("--best", help="Span tasks: also list this many of the best answers.", min=0)
    ] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add each word's share in the answer; a text takes a row for each word.")
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File to write (default: standard output).")
    ] = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON lines.")] = False,
) -> None:
    """See `HELP`."""
    _check_sources(source, text, text_pair, task, task_column)
    if form not in _FORMATS:
        raise UnknownName(form, "a format of standard input", _FORMATS)
    from adapterbank.api.opened import open_bank

    opened = open_bank(bank, backbone, device=device, precision=precision)
    if task_column is not None:
        assert source is not None
        names, texts, seconds = _mixed(opened, source, task_column)
    else:
        assert task is not None
        examples = _read(opened, task, source, form, text or [], text_pair)
        names, texts = [task] * len(examples), examples.texts
        seconds = list(examples.pairs) if examples.pairs is not None else [None] * len(texts)
    lines = _predictions(opened, names, texts, seconds, named=task_column is not None, best=best, explain=explain)
    if explain and not output and sys.stdout.isatty():
        lines = map(_with_summary, lines)
    if output:
        _write_file(lines, Path(output))
        print_message(f"Wrote {format_count(len(texts), 'prediction')} to {output}")
    else:
        _write(lines, sys.stdout)


def _check_sources(
    source: str | None, text: list[str] | None, text_pair: list[str] | None, task: str | None, task_column: str | None
) -> None:
    """Raise an `InputError` for options that exclude each other."""
    if (source is None) == (not text):
        raise InputError("Give either texts with --text, or one FILE (- for standard input).")
    if (task is None) == (task_column is None):
        raise InputError("Give either --task, or --task-column for a FILE whose rows name their tasks.")
    if task_column is not None and (source is None or source == "-"):
        raise InputError("--task-column needs a FILE with that column; standard input and --text have none.")
    if source is not None and text_pair:
        raise InputError("--text-pair requires --text; the second texts of a FILE belong in one of its columns.")


def _predictions(
    opened: OpenBank,
    names: Sequence[str | None],
    texts: list[str],
    seconds: list[str | None],
    *,
    named: bool,
    best: int,
    explain: bool,
) -> Iterator[str]:
    for at in range(0, len(texts), ROWS_PER_WRITE):
        part = slice(at, at + ROWS_PER_WRITE)
        predictions = opened.predict(names[part], texts[part], seconds[part], best=best, explain=explain)
        for name, found in zip(names[part], predictions, strict=True):
            yield json_text({**({"task": name} if named else {}), **found.to_json()})


def _with_summary(line: str) -> str:
    """Print the largest shares of a line's explanation for a person, and return the line."""
    from adapterbank.inference.explain import summary

    print_message(summary(json.loads(line)["explanation"]))
    return line


def _write(lines: Iterator[str], file: TextIO) -> None:
    for line in lines:
        file.write(line + "\n")
    file.flush()


def _write_file(lines: Iterator[str], path: Path) -> None:
    """Write all lines to a file; an existing file is replaced only once the last line is written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            _write(lines, file)
        unfinished.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the path that the user gave
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def _read(
    opened: OpenBank, task: str, source: str | None, form: str, texts: list[str], pairs: list[str] | None
) -> Examples:
    from adapterbank.tasks.examples import read_texts
    from adapterbank.tasks.spec import Examples, Task

    spec = Task.from_json(opened.show(task).task)
    if source == "-" and form != "lines":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"stdin.{form}"
            file.write_text(sys.stdin.read(), encoding="utf-8")
            return read_texts(file, spec)
    if source is not None:
        found = read_texts(sys.stdin if source == "-" else source, spec)
        if source == "-" and found.texts and all(text.startswith("{") and text.endswith("}") for text in found.texts):
            print_message("note: Standard input looks like JSON but is read as plain lines; add --format jsonl.")
        return found
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"There are {len(texts)} --text and {len(pairs)} --text-pair; give the same number of both.")
    return Examples(texts, pairs)


def _mixed(opened: OpenBank, source: str, column: str) -> tuple[list[str | None], list[str], list[str | None]]:
    """Read a file whose rows name their tasks; a row without a task is embedded by the bare encoder.

    A row's texts are in the columns that its task was trained on, or else in columns with the usual names.
    """
    from adapterbank.kinds.values import is_missing
    from adapterbank.tasks.columns import find_texts, require_column
    from adapterbank.tasks.examples import read_examples
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table, read_table

    table = read_table(source)
    require_column(table, column, "--task-column")
    names = [None if is_missing(name) else str(name) for name in table.columns[column]]
    rest = Table({name: values for name, values in table.columns.items() if name != column}, table.source)
    bare = Task("bare", "regression", find_texts(rest, count=1) if None in names else ("text",), "", (), "spearman")
    specs = {name: Task.from_json(opened.show(name).task) if name else bare for name in dict.fromkeys(names)}
    for name, spec in specs.items():
        if not all(text in rest.columns for text in spec.text):
            specs[name] = replace(spec, text=find_texts(rest, count=len(spec.text)))
    read = {spec.text: read_examples(rest, spec, need_targets=False)[0] for spec in specs.values()}
    mine = [read[specs[name].text] for name in names]
    seconds = [one.pairs[i] if one.pairs is not None else None for i, one in enumerate(mine)]
    return names, [one.texts[i] for i, one in enumerate(mine)], seconds
