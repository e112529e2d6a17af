"""`adapterbank figures`: the paper's figures and tables drawn from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapterbank.cli.console import AsJson, print_json, say

if TYPE_CHECKING:
    from adapterbank.analysis.run_table import RunTable

HELP = """Draw the paper's figures and tables from the records of your own runs: SVG, PNG and the numbers as CSV.

What there are no records for is left out and told. Needs matplotlib: pip install 'adapterbank[plot]'

Example: adapterbank figures --records bank/records --out figures
"""

Records = Annotated[
    list[str], typer.Option("--records", help="Folder of records; may be given several times.", show_default=False)
]


def command(
    records: Records,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for the files.", show_default=False)],
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
        typer.echo(str(path))
    tell(study, records, missing)


def tell(study: RunTable, folders: Sequence[str], missing: Mapping[str, str]) -> None:
    """Say what could not be used and what is not drawn, and why; of nothing at all say that alone."""
    for problem in study.problems:
        say(f"note: {problem}")
    if not study.rows and not study.ablations:
        say(f"note: There are no runs in {', '.join(folders)}; make some with adapterbank train or adapterbank sweep.")
        return
    for name, why in missing.items():
        say(f"note: {name} is not drawn: {why}.")
