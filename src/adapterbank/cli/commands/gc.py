"""`adapterbank gc`: remove unused files from a bank."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import format_count, format_size, print_json, print_message, print_text
from adapterbank.cli.options import AsJson, BankPath
from adapterbank.storage import files
from adapterbank.storage.bank import Bank, Removed

HELP = """Remove old versions and leftover files from a bank.

Removes versions older than a task's default, except the one that a rollback would restore, and leftovers of interrupted
writes. States of unfinished runs are removed only with --runs, those of runs that are going on never.

Example: adapterbank gc --bank bank --dry-run
"""


def command(
    bank: BankPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")] = False,
    runs: Annotated[
        bool, typer.Option("--runs", help="Also remove the states of unfinished runs, which --resume needs.")
    ] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    removed = opened.gc(dry_run=dry_run)
    unfinished = sorted(path for path in opened.runs_path.glob("*") if path.is_dir())
    for path in unfinished if runs else []:
        with files.claimed(path) as ended:
            if not ended:
                print_message(f"note: {path} is kept, because its run is going on.")
                continue
            removed.append(Removed(path, files.size_of(path), "state of an unfinished run"))
            if not dry_run:
                files.discard(path)
    if unfinished and not runs:
        kept = format_count(len(unfinished), "unfinished run")
        print_message(f"note: The state of {kept} is kept; remove it with --runs.")
    if json:
        print_json([{"path": str(r.path), "bytes": r.bytes, "reason": r.reason} for r in removed])
        return
    for r in removed:
        print_text(f"{'would remove' if dry_run else 'removed'} {r.path} ({format_size(r.bytes)}): {r.reason}")
    print_text(f"{format_count(len(removed), 'item')}, {format_size(sum(r.bytes for r in removed))}")
