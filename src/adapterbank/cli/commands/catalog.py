"""`adapterbank catalog`: the public tasks that are known by name, and which are at hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adapterbank.cli.console import AsJson, print_json, print_table

HELP = """List the tasks that can be trained by name: kind, classes, sizes, metric, source, and which are at hand.

Data is looked for in --data-root (or ADAPTERBANK_DATA): Parquet, the official GLUE download, the official SQuAD JSON
and the other sets' public files as they are handed out; then on the hub. Nothing is bundled.

Example: adapterbank catalog --data-root data

Example: adapterbank train --bank bank --task glue/mrpc --data-root data
"""

Split = Annotated[str, typer.Option("--split", help="Of the catalog's task.")]
ScoredData = Annotated[
    str | None, typer.Option("--data", help="Labelled data, or a task of the catalog (default: the task's own).")
]
DataRoot = Annotated[
    str | None, typer.Option("--data-root", help="Folder of data sets (default: ADAPTERBANK_DATA).", show_default=False)
]


def command(data_root: DataRoot = None, json: AsJson = False) -> None:
    """See `HELP`."""
    from adapterbank.tasks import catalog

    root = catalog.data_root(data_root)
    found = [_row(entry, catalog.locate(entry, root)) for entry in catalog.CATALOG.values()]
    if json:
        print_json(found)
        return
    print_table(
        ["task", "kind", "train", "dev", "test", "metric", "at hand"],
        [
            [
                row["name"],
                f"{row['classes']} classes" if row["classes"] else row["kind"],
                *(f"{size:,}" if size else "" for size in row["sizes"].values()),
                row["metric"],
                _at_hand(entry, row),
            ]
            for entry, row in zip(catalog.CATALOG.values(), found, strict=True)
        ],
    )
    typer.echo("")
    for row in found:
        if row["note"]:
            typer.echo(f"{row['name']}: {row['note']}")
    where = root if root else "none; name one with --data-root or ADAPTERBANK_DATA"
    typer.echo(f"\n{sum(row['layout'] is not None for row in found)} of {len(found)} at hand. Data root: {where}")
    typer.echo("parquet, files: how it lies there, whole unless splits are named; hub: would be fetched")


def _at_hand(entry: Any, row: dict[str, Any]) -> str:
    if row["layout"] is None:
        return "hub" if row["hub"] else "no"
    here = [split for split in row["sizes"] if split in row["splits"]]
    # What was never cut, or is cut anew, has no splits of its own that could be missing.
    if not here or entry.recut or all(split in here for split, size in row["sizes"].items() if size):
        return str(row["layout"])
    return f"{row['layout']}: {here[0]} only" if len(here) == 1 else f"{row['layout']}: {' '.join(here)}"


def _row(entry: Any, place: Any) -> dict[str, Any]:
    from adapterbank.tasks.layouts import Parquet

    files = [str(path) for paths in place[1].values() for path in paths] if place else []
    return {
        "name": entry.name,
        "kind": entry.kind,
        "classes": entry.classes or len(entry.labels),
        "sizes": dict(zip(("train", "dev", "test"), entry.sizes, strict=True)),
        "metric": entry.metric,
        "hub": entry.hub.path if entry.hub else None,
        "layout": ("parquet" if isinstance(place[0], Parquet) else "files") if place else None,
        "splits": sorted(place[1]) if place else [],
        "files": list(dict.fromkeys(files)),
        "note": entry.note,
    }
