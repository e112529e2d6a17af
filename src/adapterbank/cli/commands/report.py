"""`adapterbank report`: one HTML page of all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapterbank.cli.commands.figures import Records, tell
from adapterbank.cli.console import AsJson, counted, print_json
from adapterbank.errors import InputError

HELP = """Write one self-contained HTML page of your runs: tables beside the paper's, figures, every record.

It opens without a server. What there are no records for is said in its place. Needs matplotlib:
pip install 'adapterbank[plot]'

Example: adapterbank report --records bank/records --out report.html
"""


def command(
    records: Records,
    out: Annotated[str, typer.Option("--out", "-o", help="The page to write.", show_default=False)],
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.analysis import figures, report
    from adapterbank.analysis.run_table import load
    from adapterbank.storage import files

    if Path(out).is_dir():
        raise InputError(f"{out} is a folder, and the page is a file; name one such as {Path(out, 'report.html')}.")
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
    typer.echo(f"{out}: {counted(len(study.rows), 'run')}, {counted(drawn, 'figure')}, {len(page) / 1e6:.1f} MB")
    tell(study, records, missing)
