"""Claims about the protocol: the documents list every error code."""

from __future__ import annotations

from pathlib import Path

from adapterbank.serving.service.protocol import CODES

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"


def test_all_codes_are_in_the_docs_with_their_status():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    for code, status in CODES.items():
        assert any(f"`{code}`" in row.split("|")[1] and str(status) in row.split("|")[2] for row in rows), code
