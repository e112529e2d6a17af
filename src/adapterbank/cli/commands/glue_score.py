"""`adapterbank glue-score`: compute the GLUE score of a bank's tasks on dev."""

from __future__ import annotations

from adapterbank.cli.console import print_json, print_table, print_text
from adapterbank.cli.options import AsJson, BankPath

HELP = """Compute the GLUE score of a bank's tasks on their dev sets.

The score is the mean over the nine tasks, as in the benchmark: MRPC, QQP and STS-B count with the mean of their two
metrics, MNLI with the mean of matched and mismatched. The paper leaves out WNLI. If tasks are missing, the mean is over
the others, and the output names the missing tasks and every task whose dev set is not the official one.

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
    gaps = [f"missing: {', '.join(found['missing'])}"] if found["missing"] else []
    gaps += [f"{len(found['unofficial'])} not on the official dev set"] if found["unofficial"] else []
    other = f" (not comparable to the benchmark; {'; '.join(gaps)})" if gaps else ""
    print_text(f"\nGLUE score {100 * found['score']:.1f} over {len(found['tasks'])} of 9 tasks{other}")
    for name, why in found["unofficial"].items():
        print_text(f"not the official dev set: {name} ({why})")
