"""`adapterbank tasks`: list the tasks of a bank."""

from __future__ import annotations

import typer

from adapterbank.cli.console import (
    LONGEST,
    format_count,
    format_size,
    print_json,
    print_message,
    print_table,
    print_text,
)
from adapterbank.cli.options import AsJson, BankPath
from adapterbank.kinds.values import short
from adapterbank.methods import shown_fields
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Manifest

HEADER = ["task", "version", "kind", "dev", "metric", "method", "trained", "size", "created"]
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
        print_table(HEADER, [_row(manifest) for manifest in found])
        print_text(f"\n{total(found, opened.backbone['name'])}")
    elif not problems:
        print_text("The bank has no tasks yet. See: adapterbank train --help")
    if problems:
        raise typer.Exit(1)


def _row(m: Manifest) -> list[str]:
    metric = m.task["metric"]
    score = m.metrics.get("dev", {}).get(metric)
    method = " ".join([m.method["name"], *(str(value) for value in [*shown_fields(m.method).values()][:1])])
    cells = [m.name, str(m.version), m.task["kind"], "-" if score is None else f"{score:.4f}", metric, method,
             f"{m.params['percent']:.2f} %", format_size(m.bytes), m.created[:10]]  # fmt: skip
    return [short(cell, LONGEST) for cell in cells]


def total(found: list[Manifest], backbone: str) -> str:
    """Return a sentence that compares the size of all tasks with that of one fine-tuned encoder per task."""
    encoder = found[0].params["encoder"]
    times = (encoder + sum(m.params["trained"] for m in found)) / encoder
    return (
        f"{format_count(len(found), 'task')} on {backbone}: {times:.2f}× the encoder's parameters in total, "
        f"instead of {len(found)}× with one fine-tuned copy per task"
    )
