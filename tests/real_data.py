"""Where tests find real data sets: ADAPTERBANK_DATA, or a folder beside the project."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(os.environ.get("ADAPTERBANK_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
"""Read before any test runs: a fixture unsets the variable, so that no other test depends on it."""
MISSING = "no real data: point ADAPTERBANK_DATA at a folder that has the data sets"
"""The reason of every test that is skipped for lack of them: one, so that the list of skips stays short."""
