"""`adapterbank soup`: the average of versions of a task, as a new version."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import format_size, print_json, print_message, print_text
from adapterbank.cli.options import (
    AsJson,
    BackboneName,
    BankPath,
    DataRoot,
    Device,
    LabelledData,
    Precision,
    Split,
)

HELP = """Average versions of a task into a new one.

The versions must have one start: the same --start-from, or new tensors of one seed. Nothing is trained, and nothing is
scored unless --data names labelled rows, as of dev; these also calibrate the probabilities. The new version becomes
the default; `adapterbank rollback` restores the old one.

Example: adapterbank soup --bank bank sentiment@1 sentiment@2 sentiment@3 --data dev.csv

Python: adapterbank.open_bank("bank").soup(["sentiment@1", "sentiment@2", "sentiment@3"], data="dev.csv")
"""


def command(
    bank: BankPath,
    versions: Annotated[list[str], typer.Argument(help="What to average: name@version, two or more.")],
    name: Annotated[
        str | None, typer.Option("--as", help="Task of the new version (default: that of the versions).")
    ] = None,
    data: LabelledData = None,
    default: Annotated[
        str, typer.Option("--default", help="Which version is served afterwards: the new one, or the better one.")
    ] = "new",
    split: Split = "dev",
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.opened import open_bank

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    made = opened.soup(versions, name, data, split=split, default=default)
    if json:
        print_json({key: value for key, value in made.to_json().items() if key != "fingerprint"})
        return
    for note in made.notes[1:]:
        print_message(f"note: {note}")
    metric = made.task["metric"]
    score = f"  {metric} {made.metrics['dev'][metric]:.4f} on {split if data is None else data}" if made.metrics else ""
    print_text(
        f"{made.name}@{made.version}{score}  the average of {len(made.recipe['soup'])}, {format_size(made.bytes)}"
    )
