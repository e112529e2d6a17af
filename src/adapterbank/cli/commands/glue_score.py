"""`adapterbank glue-score`: the GLUE score of a bank's tasks on dev."""

from __future__ import annotations

import typer

from adapterbank.cli.console import AsJson, BankPath, print_json, print_table

HELP = """Compute the GLUE score of a bank's tasks on their dev sets, as the benchmark does.

The mean over the nine tasks; MRPC, QQP and STS-B count by the mean of their two metrics, MNLI by the mean of matched
and mismatched. The paper leaves WNLI out. What is missing is named, and the mean is then over the rest; so is every
task whose dev set is not the official one, such as a sample of it.

Example: adapterbank glue-score --bank bank
"""


def command(bank: BankPath, json: AsJson = False) -> None:
    """See `HELP`."""
    from adapterbank.benchmarks.submissions import dev_score
    from adapterbank.storage.bank import Bank

    found = dev_score(package.manifest for package in Bank.open(bank).tasks())
    if json:
        print_json(found)
        return
    print_table(["task", "dev"], [[name, f"{100 * score:.1f}"] for name, score in found["tasks"].items()])
    gaps = [f"without {', '.join(found['missing'])}"] if found["missing"] else []
    gaps += [f"{len(found['unofficial'])} not on the official dev set"] if found["unofficial"] else []
    other = f" (not the benchmark's: {'; '.join(gaps)})" if gaps else ""
    typer.echo(f"\nGLUE score {100 * found['score']:.1f} over {len(found['tasks'])} of 9 tasks{other}")
    for name, why in found["unofficial"].items():
        typer.echo(f"not the official dev set: {name} ({why})")
