"""`adapterbank cache`: what is kept of tokenised data, and its removal."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import AsJson, counted, print_json, size

HELP = """Say how much tokenised data is kept, or remove it all; it is made again when it is needed.

It lies in the user's cache folder, or where ADAPTERBANK_CACHE says.

Example: adapterbank cache --clear
"""


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove it all.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.storage import cache

    entries, taken = cache.clear() if clear else cache.usage()
    if json:
        print_json({"folder": str(cache.folder()), "entries": entries, "bytes": taken, "removed": clear})
    else:
        what = f"{counted(entries, 'tokenised data set')}, {size(taken)}"
        typer.echo(f"{f'Removed {what} from' if clear else f'{what} in'} {cache.folder()}")
