"""`adapterbank catalog`: list the public tasks that are known by name, and which are available locally."""

from __future__ import annotations

from typing import Any

from adapterbank.cli.console import print_json, print_table, print_text
from adapterbank.cli.options import AsJson, DataRoot

HELP = """List the public tasks that can be trained by name, and which are available.

For each task: kind or number of classes, rows per split, metric, and where its data was found. Data is searched for in
--data-root (or $ADAPTERBANK_DATA) as Parquet, as the official GLUE download, as the official SQuAD JSON, or as the
public files of the other sets; then on the hub. No data is bundled.

Example: adapterbank catalog --data-root data

Example: adapterbank train --bank bank --task glue/mrpc --data-root data
"""


def command(data_root: DataRoot = None, json: AsJson = False) -> None:
    """See `HELP`."""
    from adapterbank.tasks import catalog

    root = catalog.data_root(data_root)
    found = [_row(entry, catalog.locate(entry, root)) for entry in catalog.CATALOG.values()]
    if json:
        print_json(found)
        return
    print_table(
        ["task", "kind", "train", "dev", "test", "metric", "available"],
        [
            [
                row["name"],
                f"{row['classes']} classes" if row["classes"] else row["kind"],
                *(f"{size:,}" if size else "" for size in row["sizes"].values()),
                row["metric"],
                _available(entry, row),
            ]
            for entry, row in zip(catalog.CATALOG.values(), found, strict=True)
        ],
    )
    print_text("")
    for row in found:
        if row["note"]:
            print_text(f"{row['name']}: {row['note']}")
    where = root if root else "none; set one with --data-root or ADAPTERBANK_DATA"
    print_text(f"\n{sum(row['layout'] is not None for row in found)} of {len(found)} found locally. Data root: {where}")
    print_text("parquet, files: layout in the data root, complete unless splits are listed; hub: will be downloaded")


def _available(entry: Any, row: dict[str, Any]) -> str:
    """Return where a task's data is, and which of its splits if some are missing."""
    if row["layout"] is None:
        return "hub" if row["hub"] else "no"
    here = [split for split in row["sizes"] if split in row["splits"]]
    # A set that was never split, or is split again here, has no splits of its own that could be missing.
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
