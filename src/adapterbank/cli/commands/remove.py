"""`adapterbank remove`: take a task, or one version of it, out of a bank."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from adapterbank.cli.console import AsJson, BankPath, TaskName, print_json
from adapterbank.errors import InputError
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import parse_ref

HELP = """Remove a task, or one version of it.

Asks first on a terminal; elsewhere it wants --yes.

Example: adapterbank remove --bank bank --task sentiment@2 --yes
"""


def command(
    bank: BankPath,
    task: TaskName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    name, version = parse_ref(task)
    versions = opened.versions(name)  # not `get`, which refuses a damaged package: that one must be removable
    if version is not None:
        versions = [version] if version in versions else [opened.get(task).manifest.version]
    what = f"{name}, version {', '.join(map(str, versions))}"
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(f"This would remove {what}. Add --yes to do it.")
        if not typer.confirm(f"Remove {what}?"):
            raise typer.Exit(1)
    opened.remove(task)
    if json:
        print_json({"removed": [f"{name}@{v}" for v in versions]})
    else:
        typer.echo(f"Removed {what}.")
