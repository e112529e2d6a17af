"""`adapterbank backbones`: the encoders with short names, and which are available locally."""

from __future__ import annotations

import pytest

from adapterbank.encoder.sources import SOURCES
from small_data import shell


def test_backbones_lists_the_short_names_and_which_are_local():
    found = shell("backbones")
    assert (found.code, found.err) == (0, "")
    rows = {line.split()[0]: line for line in found.out.splitlines()[1:] if line}
    assert set(SOURCES) <= set(rows)
    listed = {item["name"]: item for item in shell("backbones", "--json").json}
    assert set(listed) == set(SOURCES)
    for name, item in listed.items():
        assert item["hub"] in rows[name]
        assert ("yes" if item["folder"] else "on the hub") in rows[name]


@pytest.mark.minilm
def test_the_packaged_encoder_is_local(minilm):
    listed = {item["name"]: item["folder"] for item in shell("backbones", "--json").json}
    assert listed["minilm"] == str(minilm.folder)
