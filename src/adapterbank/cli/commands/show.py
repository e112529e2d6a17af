"""`adapterbank show`: print a package's manifest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adapterbank.api.plain_text import escaped
from adapterbank.cli.console import LONGEST, format_size, print_json, print_text
from adapterbank.cli.options import AsJson, BankPath, TaskName
from adapterbank.kinds.values import short
from adapterbank.methods import shown_fields
from adapterbank.storage.bank import Bank

HELP = """Show a task's labels, scores, method, recipe, data and versions.

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
    shown = [f"{name} {_plain(value)}" for name, value in shown_fields(m.method).items()]
    made_with = m.fingerprint.get("stamp", {}).get("torch", "unknown")
    lines = {
        "task": f"{package.ref}, {m.task['kind']}, reads {_joined(m.task['text'], ' and ')}",
        "labels": _joined(m.task["labels"]) or "-",
        **{
            f"{s} scores": _joined(f"{k} {v:.4f}" for k, v in got.items() if k != "rows")
            for s, got in m.metrics.items()
        },
        "method": _joined([m.method["name"], *shown]),
        "pooling": m.method["head"]["pooling"],
        "trained": f"{m.params['trained']:,} parameters, {m.params['percent']:.2f} % of the encoder",
        "size": format_size(m.bytes),
        "backbone": f"{m.backbone['name']} ({m.backbone['sha256'][:12]})",
        "recipe": _joined(f"{k} {v}" for k, v in m.recipe.items() if v is not None and k != "pruned")
        + f", seed {m.seed}",
        **_pruned(m.recipe.get("pruned")),
        "data": _joined(f"{s} {d['rows']} rows ({d['sha256'][:12]})" for s, d in m.data.items()),
        "created": f"{m.created} by adapterbank {m.library}, torch {made_with}",
        "versions": ", ".join(versions),
        "files": str(package.path),
    }
    for name, value in lines.items():
        print_text(f"{escaped(name):<12} {escaped(value)}")


def _joined(parts: Iterable[str], between: str = ", ") -> str:
    return between.join(short(part, LONGEST) for part in parts)


def _pruned(found: dict[str, Any] | None) -> dict[str, str]:
    if not found:
        return {}
    layers = ", ".join(map(str, found["removed"]))
    scores = f"{found['metric']} {found['before']:.4f} before, {found['after']:.4f} after"
    return {"pruned": f"{found.get('from', 'an earlier version')} without the adapters of layers {layers}: {scores}"}


def _plain(value: Any) -> str:
    """Write an option's value as a user would give it."""
    return (
        ",".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
