"""`adapterbank gc`: remove from a bank what nothing points to."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.bank import Bank
from adapterbank.cli.console import AsJson, BankPath, counted, print_json, size

HELP = """Remove what nothing points to: versions that are neither a task's default nor where a rollback would go, and
leftovers of writes that were cut off.

Example: adapterbank gc --bank bank --dry-run
"""


def command(
    bank: BankPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    removed = Bank.open(bank).gc(dry_run=dry_run)
    if json:
        print_json([{"path": str(r.path), "bytes": r.bytes, "reason": r.reason} for r in removed])
        return
    for r in removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {r.path} ({size(r.bytes)}): {r.reason}")
    typer.echo(f"{counted(len(removed), 'thing')}, {size(sum(r.bytes for r in removed))}")
