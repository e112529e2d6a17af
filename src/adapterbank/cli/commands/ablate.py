"""`adapterbank ablate`: measure what a task loses without the adapters of each span of layers."""

from __future__ import annotations

import csv as tables
import sys
from typing import Annotated, Any

import typer

from adapterbank.cli.console import format_count, print_json, print_table, print_text
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
)
from adapterbank.errors import InputError

HELP = """Score a task without the adapters of each span of layers.

This is the paper's figure 6. Nothing is retrained, and all spans share the same batches. The result is also saved with
the bank's records, for `adapterbank figures` and `adapterbank report`.

Example: adapterbank ablate --bank bank --task sentiment --data dev.csv

A catalog task has its own data: adapterbank ablate --bank bank --task glue/cola

Python: adapterbank.open_bank("bank").ablate("sentiment", "dev.csv")
"""


def command(
    bank: BankPath,
    task: TaskName,
    data: LabelledData = None,
    split: Split = "dev",
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line per span.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if csv and json:
        raise InputError("--csv and --json exclude each other; give one of them.")
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Stages

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    with Stages(quiet=json or csv) as stages:
        found = opened.ablate(task, data, split=split, watch=stages.watcher(f"ablating {task}"))
    if json:
        print_json(found)
    elif csv:
        _print_csv(found)
    else:
        _print(found)


def _print_csv(found: dict[str, Any]) -> None:
    names = list(found["whole"])
    writer = tables.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["first", "last", *names, *(f"{name} change %" for name in names if name != "majority")])
    writer.writerow(["", "", *found["whole"].values(), *(0.0 for name in names if name != "majority")])
    for span in found["spans"]:
        writer.writerow([span["first"], span["last"], *span["scores"].values(), *span["change"].values()])


def _print(found: dict[str, Any]) -> None:
    names = [name for name in ("accuracy", found["metric"]) if name in found["whole"]]
    rows, spans = format_count(found["data"]["rows"], "row"), format_count(len(found["spans"]), "span")
    print_text(f"{found['package']} on {rows}, {spans}, {found['seconds']:.0f} s")
    for name in dict.fromkeys(names):
        whole = f"{name} {found['whole'][name]:.4f} with all adapters"
        print_text(f"\n{whole}; change in % without those of layers first (row) to last (column):")
        cells = {(s["first"], s["last"]): s["change"][name] for s in found["spans"]}
        print_table(
            ["first", *map(str, found["layers"])],
            [[str(i), *(_cell(cells.get((i, j))) for j in found["layers"])] for i in found["layers"]],
        )


def _cell(change: float | None) -> str:
    return "" if change is None else f"{change:.1f}"
