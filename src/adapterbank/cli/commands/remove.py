"""`adapterbank remove`: remove a task, or one version of it, from a bank."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from adapterbank.cli.console import print_json, print_text
from adapterbank.cli.options import AsJson, BankPath, TaskName
from adapterbank.errors import InputError
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import parse_ref

HELP = """Remove a task, or one version of it.

Asks for confirmation on a terminal; elsewhere --yes is required.

Example: adapterbank remove --bank bank --task sentiment@2 --yes
"""


def command(
    bank: BankPath,
    task: TaskName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    name, version = parse_ref(task)
    versions = opened.versions(name)  # not `get`, which raises on a damaged package: one must be able to remove it
    if version is not None:
        versions = [version] if version in versions else [opened.get(task).manifest.version]
    what = f"{name}, version {', '.join(map(str, versions))}"
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"This would remove {what}; add --yes to confirm.")
        if not typer.confirm(f"Remove {what}?"):
            raise typer.Exit(1)
    opened.remove(task)
    if json:
        print_json({"removed": [f"{name}@{v}" for v in versions]})
    else:
        print_text(f"Removed {what}.")
