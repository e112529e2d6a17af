"""`adapterbank report`: write one HTML page about all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapterbank.cli.commands.figures import print_notes
from adapterbank.cli.console import format_count, print_json, print_text
from adapterbank.cli.options import AsJson, RecordFolders
from adapterbank.errors import InputError
from adapterbank.install import extra_command

HELP = f"""Write one self-contained HTML page about your runs.

It starts with your study: scores with intervals, settings, cost, curves. Then come the paper's tables and figures, as
far as your runs have their tasks, and every record.
The page opens without a server, and names the figures for which records are missing.
Requires matplotlib: {extra_command("plot")}

Example: adapterbank report --records bank/records --out report.html
"""


def command(
    records: RecordFolders,
    out: Annotated[str, typer.Option("--out", "-o", help="HTML file to write.", show_default=False)],
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.analysis import figures, report
    from adapterbank.analysis.run_table import load
    from adapterbank.storage import files

    if Path(out).is_dir():
        raise InputError(f"{out} is a folder; give the path of a file, such as {Path(out, 'report.html')}.")
    study = load(records)
    drawings = figures.draw_all(study)
    page = report.page(study, drawings, records)
    files.make_folder(Path(out).resolve().parent)
    files.atomic_write(Path(out), page.encode())
    missing = {drawing.name: drawing.missing for drawing in drawings if drawing.missing}
    if json:
        print_json({"page": out, "runs": len(study.rows), "missing": missing, "problems": list(study.problems)})
        return
    drawn = len(drawings) - len(missing)
    print_text(
        f"{out}: {format_count(len(study.rows), 'run')}, {format_count(drawn, 'figure')}, {len(page) / 1e6:.1f} MB"
    )
    print_notes(study, records, missing)
