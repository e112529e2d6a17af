"""Where the command `adapterbank` begins: nothing but Ctrl-C while the rest is still being loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from adapterbank.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before a command was there to say more
        sys.exit(130)
