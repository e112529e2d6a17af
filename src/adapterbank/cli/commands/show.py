"""`adapterbank show`: print a package's manifest."""

from __future__ import annotations

from adapterbank.api.display import manifest_facts
from adapterbank.api.plain_text import escaped
from adapterbank.cli.console import print_json, print_text
from adapterbank.cli.options import AsJson, BankPath, TaskName
from adapterbank.storage.bank import Bank

HELP = """Show a task's labels, confidence (temperature and thresholds), scores, method, recipe, data and versions.

Example: adapterbank show --bank bank --task sentiment
"""


def command(bank: BankPath, task: TaskName, json: AsJson = False) -> None:
    """See `HELP`."""
    opened = Bank.open(bank)
    package = opened.get(task)
    m = package.manifest
    if json:
        print_json(m.to_json())
        return
    default = opened.get(m.name).manifest.version
    versions = [f"{v} (default)" if v == default else str(v) for v in opened.versions(m.name)]
    lines = {**manifest_facts(m), "versions": ", ".join(versions), "files": str(package.path)}
    for name, value in lines.items():
        print_text(f"{escaped(name):<12} {escaped(value)}")
