"""`adapterbank gc`: remove from a bank what nothing points to."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import AsJson, BankPath, counted, print_json, say, size
from adapterbank.storage import files
from adapterbank.storage.bank import Bank, Removed

HELP = """Remove what nothing points to: versions older than a task's default, but for the one a rollback goes to, and
leftovers of writes that were cut off. States of unfinished runs only with --runs.

Example: adapterbank gc --bank bank --dry-run
"""


def command(
    bank: BankPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    runs: Annotated[
        bool, typer.Option("--runs", help="Also the states of unfinished runs, kept for --resume.")
    ] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    removed = opened.gc(dry_run=dry_run)
    unfinished = sorted(path for path in opened.runs_path.glob("*") if path.is_dir())
    for path in unfinished if runs else []:
        removed.append(Removed(path, files.size_of(path), "state of an unfinished run"))
        if not dry_run:
            files.discard(path)
    if unfinished and not runs:
        say(f"note: the states of {counted(len(unfinished), 'unfinished run')} are kept; --runs removes them too.")
    if json:
        print_json([{"path": str(r.path), "bytes": r.bytes, "reason": r.reason} for r in removed])
        return
    for r in removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {r.path} ({size(r.bytes)}): {r.reason}")
    typer.echo(f"{counted(len(removed), 'thing')}, {size(sum(r.bytes for r in removed))}")
