"""`adapterbank remove`: a task or one version of it, after confirmation."""

from __future__ import annotations

import pytest

from adapterbank.storage.bank import Bank
from cli.invoke import run
from small_data import shell, snapshot


def test_remove_requires_yes_without_a_terminal(here):
    before = snapshot(here / "bank")
    found = shell("remove", "--bank", "bank", "--task", "sentiment@1", input="y\n")
    assert (found.code, found.out) == (2, "")
    assert found.err == "adapterbank: This would remove sentiment, version 1; add --yes to confirm.\n"
    assert snapshot(here / "bank") == before


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, [1, 2]), ("n\n", 1, [1, 2, 3]), ("", 130, [1, 2, 3])])
def test_remove_asks_on_a_terminal(here, answer, code, left):
    found = shell("remove", "--bank", "bank", "--task", "sentiment@3", input=answer, terminal=True)
    assert found.code == code
    assert "Remove sentiment, version 3? [y/N]: " in found.out
    assert Bank.open("bank").versions("sentiment") == left


def test_remove_takes_one_version_or_the_whole_task(here):
    assert run("remove", "--task", "sentiment@3", "--yes").out == "Removed sentiment, version 3.\n"
    assert Bank.open("bank").get("sentiment").ref == "sentiment@2"
    assert run("remove", "--task", "sentiment", "-y", "--json").json == {"removed": ["sentiment@1", "sentiment@2"]}
    assert "sentiment" not in Bank.open("bank").names()
