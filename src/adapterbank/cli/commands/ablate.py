"""`adapterbank ablate`: what a task loses without the adapters of each span of layers."""

from __future__ import annotations

import csv as tables
import sys
from typing import Annotated, Any

import typer

from adapterbank.cli.commands.catalog import DataRoot, ScoredData, Split
from adapterbank.cli.console import (
    AsJson,
    BackboneName,
    BankPath,
    Device,
    Precision,
    TaskName,
    counted,
    print_json,
    print_table,
)
from adapterbank.errors import InputError

HELP = """Score a task without the adapters of every span of layers, nothing trained again (the paper's figure 6).

Every span goes through the encoder in the same batches. What is found is also kept beside the bank's records, for
`adapterbank figures` and `adapterbank report`.

Example: adapterbank ablate --bank bank --task sentiment --data dev.csv

A task of the catalog brings its own data: adapterbank ablate --bank bank --task glue/cola

Python: adapterbank.open_bank("bank").ablate("sentiment", "dev.csv")
"""


def command(
    bank: BankPath,
    task: TaskName,
    data: ScoredData = None,
    split: Split = "dev",
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    csv: Annotated[bool, typer.Option("--csv", help="Print a CSV line a span instead.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if csv and json:
        raise InputError("Give --csv or --json, not both.")
    from adapterbank.api import open_bank
    from adapterbank.cli.progress import Stages

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
    typer.echo(
        f"{found['package']} on {counted(found['data']['rows'], 'row')}, {counted(len(found['spans']), 'span')}, "
        f"{found['seconds']:.0f} s"
    )
    for name in dict.fromkeys(names):
        typer.echo(f"\n{name} {found['whole'][name]:.4f}; change in % without the adapters of layers first … last")
        cells = {(s["first"], s["last"]): s["change"][name] for s in found["spans"]}
        print_table(
            ["first", *map(str, found["layers"])],
            [[str(i), *(_cell(cells.get((i, j))) for j in found["layers"])] for i in found["layers"]],
        )


def _cell(change: float | None) -> str:
    return "" if change is None else f"{change:.1f}"
