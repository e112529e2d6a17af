"""`adapterbank evaluate`: score a task on labelled data."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adapterbank.cli.console import format_count, print_json, print_message, print_table, print_text
from adapterbank.cli.options import (
    AsJson,
    BackboneName,
    BankPath,
    DataRoot,
    Device,
    DropUnlabelled,
    Header,
    LabelledData,
    Precision,
    Separator,
    Split,
    TaskName,
    TextPairColumn,
)

HELP = """Score a task on labelled data.

Prints the task's metric and the other metrics of its kind, each with its 95 % confidence interval. Classification
also has scores per label and a confusion matrix. If the task has probabilities, the calibration error is how far they
are from the share of right answers, on average.

How many answers of each probability are right, and how many are left with predict --abstain:
adapterbank evaluate --bank bank --task sentiment --data test.csv --confidence

Example: adapterbank evaluate --bank bank --task sentiment --data test.csv

A catalog task has its own data: adapterbank evaluate --bank bank --task glue/mrpc --data-root data
"""


def command(
    bank: BankPath,
    task: TaskName,
    data: LabelledData = None,
    split: Split = "dev",
    data_root: DataRoot = None,
    text: Annotated[str | None, typer.Option("--text", help="Column with the text (default: as in training).")] = None,
    text_pair: TextPairColumn = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Column with the label (default: as in training).")
    ] = None,
    separator: Separator = None,
    header: Header = None,
    drop_unlabelled: DropUnlabelled = False,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Also print the tables of reliability and coverage.")
    ] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Stages

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    about = opened.show(task).task
    with Stages(quiet=json) as stages:
        stages.stage(f"scoring {task}", 0, None)
        found = opened.evaluate(
            task,
            data,
            split=split,
            text=text,
            text_pair=text_pair,
            label=label,
            separator=separator,
            header=header,
            drop_unlabelled=drop_unlabelled,
        )
    for note in found["notes"]:
        print_message(f"note: {note}")
    if json:
        print_json(found)
    else:
        _print(found, about, confidence)


def _print(found: dict[str, Any], task: dict[str, Any], confidence: bool) -> None:
    from adapterbank.kinds.reliability import tables
    from adapterbank.kinds.table import KINDS

    rows = f" on {format_count(found['rows'], 'row')}" if "rows" in found else ""
    print_text(f"{found['task']}{rows}")
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    for name, value in sorted(numbers.items(), key=lambda item: item[0] != found["metric"]):
        low, high = found["intervals"].get(name, (None, None))
        interval = "" if low is None else f"  95 %: {low:.4f} to {high:.4f}"
        mark = "  (the task's metric)" if name == found["metric"] else ""
        print_text(f"  {name:<18} {value:.4f}{interval}{mark}")
    for table in (*KINDS[task["kind"]].tables(found, task["labels"]), *(tables(found) if confidence else ())):
        print_text(f"\n{table.title}" if table.title else "")
        if table.header:
            print_table(table.header, table.rows)
