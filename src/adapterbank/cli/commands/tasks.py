"""`adapterbank tasks`: list the tasks of a bank."""

from __future__ import annotations

import typer

from adapterbank.api.display import TASKS, task_row, total
from adapterbank.cli.console import print_json, print_message, print_table, print_text
from adapterbank.cli.options import AsJson, BankPath
from adapterbank.storage.bank import Bank
from adapterbank.storage.requirements import below

HELP = """List the tasks of a bank with their scores and sizes.

A task that cannot be read is named on standard error; the others are listed, and the exit status is 1.

Example: adapterbank tasks --bank bank
"""


def command(bank: BankPath, json: AsJson = False) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    packages, problems = opened.listing()
    for problem in problems:
        print_message(f"adapterbank: {problem}")
    found = [package.manifest for package in packages]
    if json:
        print_json([{k: v for k, v in m.to_json().items() if k != "fingerprint"} for m in found])
    elif found:
        print_table(TASKS, [task_row(manifest) for manifest in found])
        print_text(f"\n{total(found, opened.backbone['name'], below(packages))}")
    elif not problems:
        print_text("The bank has no tasks yet. See: adapterbank train --help")
    if problems:
        raise typer.Exit(1)
