"""`adapterbank predict`: predict texts, and the rows of files of any size, with tasks of a bank."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from adapterbank.api.plain_text import escaped
from adapterbank.cli.console import format_count, print_message
from adapterbank.cli.options import BackboneName, BankPath, Device, Precision
from adapterbank.errors import InputError, UnknownName
from adapterbank.tasks.streams import PIPED
from adapterbank.tasks.writers import ENCODERS

if TYPE_CHECKING:
    from adapterbank.api.files import FileOptions, FileReport
    from adapterbank.api.opened import OpenBank

HELP = """Predict texts, or the rows of a file, with one or more tasks of the bank.

Prints one JSON object per row, in order. With --output each row is written with its own columns, in the format of the
file's extension. A row that cannot be read or answered has an error instead, and the exit status is 1.

Example: adapterbank predict --bank bank --task sentiment --text "What a film!"

Example: adapterbank predict --bank bank --task sentiment,topic reviews.csv --output answered.csv

Example: adapterbank predict --bank bank --task sentiment --text-column body mails.parquet > predictions.jsonl

Example: cat lines.txt | adapterbank predict --bank bank --task sentiment -

Example: zcat big.csv.gz | adapterbank predict --bank bank --task sentiment - --format csv --output-format csv

No answer below 80 %: adapterbank predict --bank bank --task sentiment --abstain 0.8 reviews.csv

Each word's share in the answer: adapterbank predict --bank bank --task sentiment --explain --text "What a film!"

Each row names its task: adapterbank predict --bank bank --task-column task mixed.jsonl
"""

_SHOWN = 20
"""Bad rows that are printed; the output names all of them."""


Source = Annotated[
    str | None,
    typer.Argument(metavar="FILE|-", help="Texts: one per line, or CSV, TSV, JSONL or Parquet; - is standard input."),
]
TaskNames = Annotated[
    str | None, typer.Option("--task", help="Task name, or name@version; several as a,b,c.", show_default=False)
]
Texts = Annotated[list[str] | None, typer.Option("--text", help="Text to predict; can be repeated.")]
SecondTexts = Annotated[
    list[str] | None, typer.Option("--text-pair", help="Second text, for tasks on pairs; one for each --text.")
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", help="Column of FILE with the text (default: as in training, or a usual name)."),
]
SecondColumn = Annotated[str | None, typer.Option("--text-pair-column", help="Column of FILE with the second text.")]
TaskColumn = Annotated[str | None, typer.Option("--task-column", help="Column of FILE with the task of each row.")]
InputFormat = Annotated[
    str | None,
    typer.Option("--format", help=f"Format of the input: {', '.join(PIPED)} (default: FILE's extension, or lines)."),
]
Output = Annotated[
    str | None,
    typer.Option("--output", "--out", "-o", help="File to write, in the format of its extension, with all columns."),
]
OutputFormat = Annotated[
    str | None, typer.Option("--output-format", help=f"Format to write, with all columns: {', '.join(ENCODERS)}.")
]
Best = Annotated[int, typer.Option("--best", help="Span tasks: also list this many of the best answers.", min=0)]
Abstain = Annotated[
    float, typer.Option("--abstain", help="Answer null where the label is less probable than this.", min=0, max=1)
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Add each word's share in the answer; a text takes a row for each word.")
]
Json = Annotated[bool, typer.Option("--json", help="No effect: the output is JSON lines by default.")]


def command(
    bank: BankPath,
    source: Source = None,
    task: TaskNames = None,
    text: Texts = None,
    text_pair: SecondTexts = None,
    text_column: TextColumn = None,
    text_pair_column: SecondColumn = None,
    task_column: TaskColumn = None,
    form: InputFormat = None,
    best: Best = 0,
    abstain: Abstain = 0.0,
    explain: Explain = False,
    output: Output = None,
    output_form: OutputFormat = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """See `HELP`."""
    _check_sources(source, text, text_pair, task, task_column)
    if task_column is not None and (source is None or (source == "-" and form in (None, "lines"))):
        raise InputError("--task-column needs a FILE with that column, or --format for a table on standard input.")
    if source is None and (text_column or text_pair_column):
        raise InputError("--text-column and --text-pair-column name columns of a FILE; --text has none.")
    for name, what, choices in (
        (form, "a format of the input", PIPED),
        (output_form, "a format of the output", ENCODERS),
    ):
        if name is not None and name not in choices:
            raise UnknownName(name, what, choices)
    from adapterbank.api.files import FileOptions, predict_texts
    from adapterbank.api.opened import open_bank

    opened = open_bank(bank, backbone, device=device, precision=precision)
    names = list(dict.fromkeys(name.strip() for name in task.split(",") if name.strip())) if task else []
    columns: dict[str, Any] = {"text": text_column, "text_pair": text_pair_column, "task_column": task_column}
    kept = output is not None or output_form is not None
    answers: dict[str, Any] = {"best": best, "abstain": abstain, "explain": explain}
    options = FileOptions(**columns, form=form, output_form=output_form, keep_columns=kept, **answers)
    target: Any = _standard_output(output_form, explain) if output in (None, "-") else output
    if source is not None:
        report = _predict_file(opened, names, source, target, options)
    else:
        if text_pair is not None and len(text_pair) != len(text or ()):
            counts = f"{len(text or ())} --text and {len(text_pair)} --text-pair"
            raise InputError(f"There are {counts}; give the same number of both.")
        report = predict_texts(opened, names, text or [], text_pair, target, options)
    _end(report, names, target)


def _check_sources(
    source: str | None, text: list[str] | None, text_pair: list[str] | None, task: str | None, task_column: str | None
) -> None:
    """Raise an `InputError` for options that exclude each other."""
    if (source is None) == (not text):
        raise InputError("Give either texts with --text, or one FILE (- for standard input).")
    if (task is None) == (task_column is None):
        raise InputError("Give either --task, or --task-column for a FILE whose rows name their tasks.")
    if source is not None and text_pair:
        raise InputError("--text-pair requires --text; the second texts of a FILE belong in one of its columns.")


def _predict_file(opened: OpenBank, tasks: list[str], source: str, target: Any, options: FileOptions) -> FileReport:
    from adapterbank.api.files import FileReport, FileWatch, part_of, predict_file
    from adapterbank.api.progress import Stages

    report, started = FileReport(), time.monotonic()
    with Stages() as stages:

        def show(rows: int, done: int, total: int | None) -> None:
            pace = rows / max(1e-9, time.monotonic() - started)
            share = f", {done / total:.0%}" if total else ""
            stages.stage(f"{rows:,} rows, {pace:,.0f} rows/s{share}", done, total)

        def tell(problem: str) -> None:
            problems.append(problem)
            if len(problems) <= _SHOWN:
                print_message(f"adapterbank: {problem}")
            elif len(problems) == _SHOWN + 1:
                print_message("adapterbank: the output names further rows of this kind.")

        problems: list[str] = []
        watch = FileWatch(show, tell, lambda text: print_message(f"note: {text}"))
        try:
            given: Any = sys.stdin.buffer if source == "-" else source
            return predict_file(opened, tasks, given, target, options, watch, report)
        except KeyboardInterrupt:
            if report.rows:
                where = f"; they are in {part_of(Path(target))}" if isinstance(target, str) else ""
                print_message(f"adapterbank: wrote {format_count(report.rows, 'row')}{where}.")
            raise


def _end(report: FileReport, tasks: list[str], target: Any) -> None:
    """Print what was written; exit with 1 if a row has no prediction."""
    if isinstance(target, str):
        answered = report.rows - report.failed
        what = format_count(answered, "prediction") if len(tasks) < 2 else format_count(report.rows, "row")
        print_message(f"Wrote {what} to {target}")
    if report.failed:
        count = f"{report.failed} of {format_count(report.rows, 'row')}"
        print_message(f"adapterbank: there is no prediction for {count}; the output has the reasons.")
        raise typer.Exit(1)


def _standard_output(form: str | None, explain: bool) -> BinaryIO:
    """Return standard output for bytes; a terminal is not sent what it would obey."""
    if sys.stdout.isatty() and form in (None, "jsonl") and explain:
        return _ExplainedOutput()  # type: ignore[return-value]  # as much of a file as is needed
    if not sys.stdout.isatty() or form in (None, "jsonl"):
        return sys.stdout.buffer
    if form == "parquet":
        raise InputError("A terminal cannot show Parquet; name a file with --output, or redirect the output.")
    return _Terminal()  # type: ignore[return-value]  # as much of a file as is needed


class _Terminal:
    """Standard output with control characters written out."""

    def write(self, data: bytes) -> None:
        sys.stdout.write(escaped(data.decode(), keep="\n\t"))

    def flush(self) -> None:
        sys.stdout.flush()


class _ExplainedOutput:
    """Standard output of JSON lines, with the largest shares of each explanation printed for a person."""

    def write(self, data: bytes) -> None:
        from adapterbank.inference.explain import summary

        for line in data.decode().splitlines():
            if explanation := json.loads(line).get("explanation"):
                print_message(summary(explanation))
            sys.stdout.write(line + "\n")

    def flush(self) -> None:
        sys.stdout.flush()
