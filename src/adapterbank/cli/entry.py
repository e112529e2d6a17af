"""Entry point of the command `adapterbank`. It only handles Ctrl-C while the rest is still being imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from adapterbank.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before any command could handle it
        sys.exit(130)
