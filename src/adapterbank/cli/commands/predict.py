"""`adapterbank predict`: ask tasks of the bank about texts."""

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

from adapterbank.cli.console import BackboneName, BankPath, Device, Precision, counted, say
from adapterbank.errors import InputError, UnknownName

if TYPE_CHECKING:
    from adapterbank.api import OpenBank
    from adapterbank.tasks.spec import Examples

HELP = """Predict texts with a task of the bank; prints one JSON object a row, in order.

Example: adapterbank predict --bank bank --task sentiment --text "What a film!"

Example: adapterbank predict --bank bank --task sentiment reviews.csv > answers.jsonl

Example: cat lines.txt | adapterbank predict --bank bank --task sentiment -

Rows of many tasks in one go, each naming its own: adapterbank predict --bank bank --task-column task mixed.jsonl
"""

_FORMATS = ("lines", "csv", "tsv", "jsonl")
_AT_ONCE = 2048
"""Rows between two writes: answers appear while a long file is still being read through."""


def command(
    bank: BankPath,
    source: Annotated[
        str | None, typer.Argument(metavar="FILE|-", help="Texts: a line each, or CSV, TSV, JSONL, Parquet.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Name of the task, or name@version.")] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="A text; may be given again.")] = None,
    text_pair: Annotated[
        list[str] | None, typer.Option("--text-pair", help="Its second text, for tasks on pairs.")
    ] = None,
    task_column: Annotated[
        str | None, typer.Option("--task-column", help="Column of FILE that names each row's task.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Of standard input: lines, csv, tsv or jsonl.")] = "lines",
    best: Annotated[
        int, typer.Option("--best", help="Span tasks: also list this many of the best answers.", min=0)
    ] = 0,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write here instead of standard output.")] = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="No change: answers are JSON lines already.")] = False,
) -> None:
    """See `HELP`."""
    _check_words(source, text, text_pair, task, task_column)
    if form not in _FORMATS:
        raise UnknownName(form, "a format of standard input", _FORMATS)
    from adapterbank.api import open_bank

    opened = open_bank(bank, backbone, device=device, precision=precision)
    if task_column is not None:
        assert source is not None
        names, texts, seconds = _mixed(opened, source, task_column)
    else:
        assert task is not None
        examples = _read(opened, task, source, form, text or [], text_pair)
        names, texts = [task] * len(examples), examples.texts
        seconds = list(examples.pairs) if examples.pairs is not None else [None] * len(texts)
    lines = _answers(opened, names, texts, seconds, named=task_column is not None, best=best)
    if output:
        _write_file(lines, Path(output))
        say(f"{counted(len(texts), 'answer')} in {output}")
    else:
        _write(lines, sys.stdout)


def _check_words(
    source: str | None, text: list[str] | None, text_pair: list[str] | None, task: str | None, task_column: str | None
) -> None:
    """Say which words of the command do not go together."""
    if (source is None) == (not text):
        raise InputError("Give either texts with --text, or one FILE (or - for standard input).")
    if (task is None) == (task_column is None):
        raise InputError("Give either --task, or --task-column for a file whose rows name their tasks.")
    if task_column is not None and (source is None or source == "-"):
        raise InputError("--task-column needs a FILE with such a column.")
    if source is not None and text_pair:
        raise InputError("--text-pair goes with --text; the second texts of a FILE stand in the FILE.")


def _answers(
    opened: OpenBank,
    names: Sequence[str | None],
    texts: list[str],
    seconds: list[str | None],
    *,
    named: bool,
    best: int,
) -> Iterator[str]:
    for at in range(0, len(texts), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        answers = opened.predict(names[part], texts[part], seconds[part], best=best)
        for name, found in zip(names[part], answers, strict=True):
            yield json.dumps({**({"task": name} if named else {}), **found.to_json()}, ensure_ascii=False)


def _write(lines: Iterator[str], file: TextIO) -> None:
    for line in lines:
        file.write(line + "\n")
    file.flush()


def _write_file(lines: Iterator[str], path: Path) -> None:
    """Write all answers, or leave what was there: the file is replaced when the last one is written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            _write(lines, file)
        unfinished.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the file the user named
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
            say("note: standard input is read as plain lines, and these look like JSON; add --format jsonl.")
        return found
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"There are {len(texts)} --text and {len(pairs)} --text-pair; give as many of each.")
    return Examples(texts, pairs)


def _mixed(opened: OpenBank, source: str, column: str) -> tuple[list[str | None], list[str], list[str | None]]:
    """Read a file whose rows name their tasks, or none for the bare encoder.

    A row's texts stand in its task's own columns, or in those with usual names.
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
