"""`adapterbank prune`: remove a task's idle adapters, as a new version."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import format_size, print_json, print_table, print_text
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

HELP = """Remove the adapters that a task does not need.

Goes through the layers from the lowest up and removes a layer's adapters if the score stays within the tolerance.
Nothing is retrained. The smaller task becomes a new version and the default; `adapterbank rollback` restores the
old one.

Example: adapterbank prune --bank bank --task sentiment --data dev.csv

A catalog task has its own data: adapterbank prune --bank bank --task glue/cola --tolerance 1

Python: adapterbank.open_bank("bank").prune("sentiment", "dev.csv")
"""


def command(
    bank: BankPath,
    task: TaskName,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Points of the metric that may be lost in total.")
    ] = 0.5,
    data: LabelledData = None,
    split: Split = "dev",
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Stages
    from adapterbank.studies.pruning import describe

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    with Stages(quiet=json) as stages:
        watch = stages.watcher(f"pruning {task}")
        found, result = opened.prune(task, data, split=split, tolerance=tolerance, watch=watch)
    if json:
        print_json({**found, "package": result.package.ref if result and result.package else None})
        return
    steps = [[str(s["layer"]), f"{s['score']:.4f}", "removed" if s["removed"] else "kept"] for s in found["steps"]]
    print_table(["layer", "score without", "adapters"], steps)
    print_text(describe(found))
    if result and result.package:
        was, now = opened.show(found["from"]), result.package.manifest
        print_text(
            f"{result.package.ref}  {now.params['trained']:,} parameters instead of {was.params['trained']:,}, "
            f"{format_size(now.bytes)} instead of {format_size(was.bytes)}"
        )
