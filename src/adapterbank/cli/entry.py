"""Entry point of the command `adapterbank`: Ctrl-C while the rest is still being imported, and the garbage collector.

A thousand modules of torch are a lot to search for garbage, while they are imported and again when Python ends. They
live as long as the process, so the search is made seldom, and left out at the end.
"""

from __future__ import annotations

import gc
import sys

_RARELY = 20_000
"""New objects between two searches for garbage; Python's own number is 700."""


def main() -> None:
    """Run the command line."""
    gc.set_threshold(_RARELY)
    try:
        from adapterbank.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before any command could handle it
        sys.exit(130)
    finally:
        gc.freeze()  # the system takes back all memory at once
