"""Promise: the short trial campaign against a server finds nothing. A file of its own, so that workers share it."""

from __future__ import annotations

import pytest

import campaign

SERVER = ("hostile_http", "served_training", "faults", "soak")


@pytest.mark.slow
def test_a_short_campaign_against_a_server_finds_nothing(tmp_path):
    found = campaign.short(tmp_path, *SERVER)
    assert [(one["trial"], one["failures"]) for one in found] == [(name, []) for name in SERVER]
    assert all(one["tries"] for one in found)
