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
        ["task", "kind", "classes", "train", "dev", "test", "metric", "at hand", "hub", "note"],
        [
            [
                row["name"],
                row["kind"],
                str(row["classes"] or ""),
                *(f"{size:,}" if size else "" for size in row["sizes"].values()),
                row["metric"],
                row["layout"] or "no",
                row["hub"] or "",
                row["note"],
            ]
            for row in found
        ],
    )
    where = root if root else "none; name one with --data-root or ADAPTERBANK_DATA"
    typer.echo(f"\n{sum(row['layout'] is not None for row in found)} of {len(found)} at hand. Data root: {where}")


def _row(entry: Any, place: Any) -> dict[str, Any]:
    files = [str(path) for paths in place[1].values() for path in paths] if place else []
    return {
        "name": entry.name,
        "kind": entry.kind,
        "classes": entry.classes or len(entry.labels),
        "sizes": dict(zip(("train", "dev", "test"), entry.sizes, strict=True)),
        "metric": entry.metric,
        "hub": entry.hub.path if entry.hub else None,
        "layout": type(place[0]).__name__ if place else None,
        "splits": sorted(place[1]) if place else [],
        "files": list(dict.fromkeys(files)),
        "note": entry.note,
    }
