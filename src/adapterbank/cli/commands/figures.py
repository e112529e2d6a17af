"""`adapterbank figures`: draw the paper's figures and tables from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterbank.cli.console import print_json, print_message, print_text
from adapterbank.cli.options import AsJson, RecordFolders
from adapterbank.install import extra_command

if TYPE_CHECKING:
    from adapterbank.analysis.run_table import RunTable

HELP = f"""Draw the paper's figures and tables from the records of your runs.

Writes SVG, PNG and the numbers as CSV. A figure without records is left out, with a note. Requires matplotlib:
{extra_command("plot")}

Example: adapterbank figures --records bank/records --out figures
"""


def command(
    records: RecordFolders,
    out: Annotated[str, typer.Option("--out", "-o", help="Output folder.", show_default=False)],
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.analysis import figures, tables
    from adapterbank.analysis.run_table import load
    from adapterbank.storage import files

    study = load(records)
    drawings = figures.draw_all(study)
    files.make_folder(Path(out))
    written = [path for drawing in drawings for path in drawing.write(Path(out))]
    for backbone in study.backbones:
        for table in tables.with_ours(study.of(backbone)):
            written.append(Path(out, f"{table.name}{study.suffix(backbone)}.csv"))
            files.atomic_write(written[-1], table.csv().encode())
    missing = {drawing.name: drawing.missing for drawing in drawings if drawing.missing}
    if json:
        print_json({"runs": len(study.rows), "files": [str(path) for path in written], "missing": missing})
        return
    for path in written:
        print_text(str(path))
    print_notes(study, records, missing)


def print_notes(study: RunTable, folders: Sequence[str], missing: Mapping[str, str]) -> None:
    """Print which records could not be used and which figures are missing, and why; if there are no runs, only that."""
    for problem in study.problems:
        print_message(f"note: {problem}")
    if not study.rows and not study.ablations:
        where = ", ".join(folders)
        print_message(f"note: There are no runs in {where}; create some with adapterbank train or adapterbank sweep.")
        return
    for name, why in missing.items():
        print_message(f"note: {name} is not drawn: {why}.")
