"""`adapterbank backbones`: which encoders have a short name, and which are on this machine."""

from __future__ import annotations

import typer

from adapterbank.cli.console import AsJson, print_json, print_table

HELP = """List the encoders that have a short name, and say which are at hand.

Any folder with config.json, weights and a tokenizer, and any name on the hub, will do as well.

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
    print_table(["name", "at hand", "hub", "what it is"], rows)
    typer.echo(
        "\nA folder or another hub name (BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA, MPNet, ALBERT) will do."
    )
