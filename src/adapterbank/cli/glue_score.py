"""`adapterbank glue-score`: the GLUE score of a bank's tasks on dev."""

from __future__ import annotations

import typer

from adapterbank.cli.console import AsJson, BankPath, print_json, print_table

HELP = """Compute the GLUE score of a bank's tasks on their dev sets, as the benchmark does.

The mean over the nine tasks; MRPC, QQP and STS-B count by the mean of their two metrics, MNLI by the mean of matched
and mismatched. The paper leaves WNLI out. What is missing is named, and the mean is then over the rest.

Example: adapterbank glue-score --bank bank
"""


def command(bank: BankPath, json: AsJson = False) -> None:
    """See `HELP`."""
    from adapterbank.bank import Bank
    from adapterbank.benchmarks import dev_score

    found = dev_score({package.manifest.name: package.manifest.metrics for package in Bank.open(bank).tasks()})
    if json:
        print_json(found)
        return
    print_table(["task", "dev"], [[name, f"{100 * score:.1f}"] for name, score in found["tasks"].items()])
    missing = f" (not the benchmark's: without {', '.join(found['missing'])})" if found["missing"] else ""
    typer.echo(f"\nGLUE score {100 * found['score']:.1f} over {len(found['tasks'])} of 9 tasks{missing}")
