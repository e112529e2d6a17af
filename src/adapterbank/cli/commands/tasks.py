"""`adapterbank tasks`: list the tasks of a bank."""

from __future__ import annotations

import typer

from adapterbank.cli.console import format_count, format_size, print_json, print_message, print_table
from adapterbank.cli.options import AsJson, BankPath
from adapterbank.methods import shown_fields
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Manifest

HELP = """List the tasks of a bank with their scores and sizes.

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
        return
    if not found:
        typer.echo("The bank has no tasks yet. See: adapterbank train --help")
        return
    rows = []
    for m in found:
        metric = m.task["metric"]
        method = " ".join([m.method["name"], *(str(value) for value in [*shown_fields(m.method).values()][:1])])
        score = f"{m.metrics['dev'][metric]:.4f}"
        rows.append([m.name, str(m.version), m.task["kind"], score, metric, method, f"{m.params['percent']:.2f} %",
                     format_size(m.bytes), m.created[:10]])  # fmt: skip
    print_table(["task", "version", "kind", "dev", "metric", "method", "trained", "size", "created"], rows)
    typer.echo(f"\n{total(found, opened.backbone['name'])}")


def total(found: list[Manifest], backbone: str) -> str:
    """Return a sentence that compares the size of all tasks with that of one fine-tuned encoder per task."""
    encoder = found[0].params["encoder"]
    times = (encoder + sum(m.params["trained"] for m in found)) / encoder
    return (
        f"{format_count(len(found), 'task')} on {backbone}: {times:.2f}× the encoder's parameters in total, "
        f"instead of {len(found)}× with one fine-tuned copy per task"
    )
