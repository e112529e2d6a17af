"""`adapterbank rollback`: another version becomes the default, and that can be undone."""

from __future__ import annotations

import json

from adapterbank.storage.bank import Bank
from cli.invoke import run


def test_rollback_restores_the_previous_version_or_the_one_named(here):
    assert run("rollback", "--task", "sentiment").out == "sentiment@2 is now the default.\n"
    assert run("rollback", "--task", "sentiment", "--to", "3", "--json").json == {"task": "sentiment", "default": 3}
    assert Bank.open("bank").get("sentiment").ref == "sentiment@3"


def test_a_rollback_can_be_undone_after_gc(here):
    versions = json.loads(run("show", "--task", "sentiment", "--json").out)["version"]
    run("rollback", "--task", "sentiment", "--to", "1")
    run("gc")
    assert run("rollback", "--task", "sentiment", "--to", versions).out == f"sentiment@{versions} is now the default.\n"
