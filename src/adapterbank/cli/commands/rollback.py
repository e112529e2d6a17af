"""`adapterbank rollback`: make another version of a task the default."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import print_json, print_text
from adapterbank.cli.options import AsJson, BankPath
from adapterbank.storage.bank import Bank
from adapterbank.tasks.catalog import bank_name

HELP = """Make an earlier version of a task the default again.

Without --to, the previous default is restored.

Example: adapterbank rollback --bank bank --task sentiment

Example: adapterbank rollback --bank bank --task sentiment --to 3
"""


def command(
    bank: BankPath,
    task: Annotated[str, typer.Option("--task", help="Task name.", show_default=False)],
    to: Annotated[
        int | None, typer.Option("--to", help="Version to make the default (default: the previous one).")
    ] = None,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    version = Bank.open(bank).rollback(bank_name(task), to)
    if json:
        print_json({"task": task, "default": version})
    else:
        print_text(f"{task}@{version} is now the default.")
