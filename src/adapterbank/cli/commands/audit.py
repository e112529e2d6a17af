"""`adapterbank audit`: check that no task of a bank has changed."""

from __future__ import annotations

from dataclasses import asdict

import typer

from adapterbank.cli.console import format_count, print_json, print_text
from adapterbank.cli.options import AsJson, BackboneName, BankPath, Device, Precision

HELP = """Check that no task has changed: verify checksums, and outputs on fixed texts.

Every package's outputs on these texts are computed again and compared with those it was stored with. The exit status
is 1 if a package differs, and the output names it.

Example: adapterbank audit --bank bank
"""


def command(
    bank: BankPath,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.opened import open_bank

    findings = []
    for finding in open_bank(bank, backbone, device=device, precision=precision).audit():
        findings.append(finding)
        if not json:
            print_text(f"{'same     ' if finding.ok else 'DIFFERENT'} {finding.ref}: {finding.how}")
    wrong = [finding.ref for finding in findings if not finding.ok]
    if json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        names = f": {', '.join(wrong)}" if wrong else ""
        print_text(f"{format_count(len(findings), 'package')}, {len(wrong)} different{names}")
    if wrong:
        raise typer.Exit(1)
