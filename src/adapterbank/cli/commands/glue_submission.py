"""`adapterbank glue-submission`: the zip that GLUE's server takes, from the tasks of a bank."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.commands.catalog import DataRoot
from adapterbank.cli.console import AsJson, BackboneName, BankPath, Device, Precision, print_json, print_table, say
from adapterbank.errors import InputError

HELP = """Write the zip that GLUE's test server takes, from the tasks of a bank.

Every file it wants: the nine tasks' test sets, WNLI by the majority class and the diagnostic set by the MNLI task. The
tasks are those trained by name (--task glue/mrpc); --use names others.

Example: adapterbank glue-submission --bank bank --data-root glue_data --output submission.zip

Example: adapterbank glue-submission --bank bank --data-root glue_data --output submission.zip --use glue/mnli=my-mnli@3
"""


def command(
    bank: BankPath,
    output: Annotated[str, typer.Option("--output", "-o", help="The zip to write.", show_default=False)],
    use: Annotated[
        list[str] | None, typer.Option("--use", help="glue/NAME=TASK: a task of the bank under another name.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what there is; the server refuses such a file.")
    ] = False,
    data_root: DataRoot = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    chosen = [word.partition("=") for word in use or []]
    odd = [f"{name}{mark}{task}" for name, mark, task in chosen if not (name and mark and task)]
    if odd:
        raise InputError(f"--use {odd[0]!r} does not say which task stands for which; write glue/mnli=my-mnli.")
    from adapterbank.api import open_bank
    from adapterbank.cli.progress import Stages

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    named: dict[str, str] = {name: task for name, _, task in chosen}
    gaps: list[str] = []
    with Stages(quiet=json) as stages:
        rows = opened.glue_submission(output, use=named, partial=partial, stage=stages.stage, note=gaps.append)
    for gap in gaps:
        say(f"note: {gap}")
    if gaps:
        say("note: The server refuses this zip, as it lacks a file or rows.")
    if json:
        print_json({"output": output, "files": rows, "missing": gaps})
    else:
        print_table(["file", "rows"], [[name, f"{count:,}"] for name, count in rows.items()])
        typer.echo(f"\n{output}")
