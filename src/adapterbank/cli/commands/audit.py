"""`adapterbank audit`: prove that no task of a bank has changed."""

from __future__ import annotations

from dataclasses import asdict

import typer

from adapterbank.cli.console import AsJson, BackboneName, BankPath, Device, Precision, counted, print_json

HELP = """Prove that nothing was forgotten: recompute every package's checksums and its outputs on fixed texts.

Exits with 1 and names what differs, if anything does.

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
    from adapterbank.api import open_bank

    findings = []
    for finding in open_bank(bank, backbone, device=device, precision=precision).audit():
        findings.append(finding)
        if not json:
            typer.echo(f"{'same     ' if finding.ok else 'DIFFERENT'} {finding.ref}: {finding.how}")
    wrong = [finding.ref for finding in findings if not finding.ok]
    if json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        typer.echo(
            f"{counted(len(findings), 'package')}, {len(wrong)} different" + (f": {', '.join(wrong)}" if wrong else "")
        )
    if wrong:
        raise typer.Exit(1)
