"""`adapterbank cache`: show or clear the cache of tokenised data."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank.cli.console import format_count, format_size, print_json, print_text
from adapterbank.cli.options import AsJson

HELP = """Show the size of the cache of tokenised data, or clear it.

Cleared data is tokenised again when it is needed. The cache is in the user's cache folder, or in the folder that
ADAPTERBANK_CACHE names.

Example: adapterbank cache --clear
"""


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.storage import cache

    entries, taken = cache.clear() if clear else cache.usage()
    if json:
        print_json({"folder": str(cache.folder()), "entries": entries, "bytes": taken, "removed": clear})
    else:
        what = f"{format_count(entries, 'tokenised data set')}, {format_size(taken)}"
        print_text(f"{f'Removed {what} from' if clear else f'{what} in'} {cache.folder()}")
