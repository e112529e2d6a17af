"""`adapterbank glue-submission`: write a submission for GLUE's test server."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import print_json, print_message, print_table, print_text
from adapterbank.cli.options import AsJson, BackboneName, BankPath, DataRoot, Device, Precision
from adapterbank.errors import InputError

HELP = """Write the zip file of predictions that GLUE's test server accepts.

It contains predictions for the test sets of all nine tasks and for the diagnostic set; WNLI gets the majority class,
and the MNLI task answers the diagnostic set. The tasks are those trained by their catalog name (--task glue/mrpc);
--use selects others.

Example: adapterbank glue-submission --bank bank --data-root glue_data --output submission.zip

Example: adapterbank glue-submission --bank bank --data-root glue_data --output submission.zip --use glue/mnli=my-mnli@3
"""


def command(
    bank: BankPath,
    output: Annotated[str, typer.Option("--output", "-o", help="Zip file to write.", show_default=False)],
    use: Annotated[
        list[str] | None, typer.Option("--use", help="glue/NAME=TASK: use another task of the bank; can be repeated.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write an incomplete file, which the server rejects.")
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
        raise InputError(f"--use {odd[0]!r} is not of the form glue/NAME=TASK; write, for example, glue/mnli=my-mnli.")
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Stages

    opened = open_bank(bank, backbone, device=device, precision=precision, data_root=data_root)
    named: dict[str, str] = {name: task for name, _, task in chosen}
    gaps: list[str] = []
    with Stages(quiet=json) as stages:
        rows = opened.glue_submission(output, use=named, partial=partial, stage=stages.stage, note=gaps.append)
    for gap in gaps:
        print_message(f"note: {gap}")
    if gaps:
        print_message("note: The server will reject this zip file, because files or rows are missing.")
    if json:
        print_json({"output": output, "files": rows, "missing": gaps})
    else:
        print_table(["file", "rows"], [[name, f"{count:,}"] for name, count in rows.items()])
        print_text(f"\n{output}")
