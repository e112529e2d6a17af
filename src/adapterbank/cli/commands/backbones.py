"""`adapterbank backbones`: list the encoders that have a short name, and which of them are on this machine."""

from __future__ import annotations

from adapterbank.cli.console import print_json, print_table, print_text
from adapterbank.cli.options import AsJson

HELP = """List the encoders that have a short name, and which are available locally.

Any folder with config.json, weights and a tokenizer works too, and so does any hub name of a supported architecture.

Example: adapterbank backbones
"""


def command(json: AsJson = False) -> None:
    """See `HELP`."""
    from adapterbank.encoder.sources import SOURCES, at_hand

    found = {name: at_hand(name) for name in SOURCES}
    if json:
        print_json([
            {"name": n, "hub": s.hub, "summary": s.summary, "folder": str(found[n]) if found[n] else None}
            for n, s in SOURCES.items()
        ])  # fmt: skip
        return
    rows = [[n, "yes" if found[n] else "on the hub", s.hub, s.summary] for n, s in SOURCES.items()]
    print_table(["name", "local", "hub", "description"], rows)
    print_text(
        "\n--backbone also takes a folder or another hub name, of the architectures BERT, RoBERTa, XLM-R, CamemBERT, "
        "DistilBERT, ELECTRA, MPNet and ALBERT."
    )
