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
    LabelledData,
    Precision,
    Split,
    TaskName,
    TextPairColumn,
)

HELP = """Score a task on labelled data.

Prints the task's metric and the other metrics of its kind. Classification also has scores per label and a confusion
matrix.

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
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Stages

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    about = opened.show(task).task
    with Stages(quiet=json) as stages:
        stages.stage(f"scoring {task}", 0, None)
        found = opened.evaluate(task, data, split=split, text=text, text_pair=text_pair, label=label)
    for note in found["notes"]:
        print_message(f"note: {note}")
    if json:
        print_json(found)
    else:
        _print(found, about)


def _print(found: dict[str, Any], task: dict[str, Any]) -> None:
    from adapterbank.kinds.table import KINDS

    rows = f" on {format_count(found['rows'], 'row')}" if "rows" in found else ""
    print_text(f"{found['task']}{rows}")
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    for name, value in sorted(numbers.items(), key=lambda item: item[0] != found["metric"]):
        mark = "  (the task's metric)" if name == found["metric"] else ""
        print_text(f"  {name:<16} {value:.4f}{mark}")
    for table in KINDS[task["kind"]].tables(found, task["labels"]):
        print_text(f"\n{table.title}" if table.title else "")
        if table.header:
            print_table(table.header, table.rows)
