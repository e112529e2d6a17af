"""Tests of `adapterbank.storage.comparison`: a version below the default is told, and may not replace it."""

from __future__ import annotations

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.storage.comparison import compare, shortfall
from small_data import FAST, flags, reviews, shell, write

ROWS = reviews()
WRONG = [(text, ("positive", "negative")[i < 12]) for i, (text, _) in enumerate(ROWS)]
"""Labels that teach nothing about those of ROWS."""
GOOD = {**FAST, "epochs": 10}


@pytest.fixture
def bank(tmp_path, bert):
    opened = open_bank(tmp_path / "bank", bert, device="cpu")
    assert opened.train("s", ROWS, ROWS, **GOOD).record["metrics"]["dev"]["accuracy"] == 1
    return opened


def test_a_lower_score_is_told_and_replaces_the_default(bank):
    found = bank.train("s", WRONG, ROWS, **FAST)
    (note,) = [note for note in found.notes if "below" in note]
    assert note.startswith("The new version scores accuracy 0.")
    assert note.endswith(
        "on dev, below 1.0000 of s@1, which it replaces; rollback returns to it, and the option default=better would "
        "have kept it."
    )
    assert note in found.record["notes"]
    assert note in bank.show("s").notes
    assert (bank.bank.default("s"), bank.rollback("s")) == (2, 1)


def test_with_better_a_lower_score_does_not_become_the_default(bank):
    found = bank.train("s", WRONG, ROWS, **FAST, default="better")
    assert found.package.ref == "s@2"
    assert any(note.endswith("of s@1, which remains the default.") for note in found.notes)
    assert (bank.bank.default("s"), bank.bank.versions("s")) == (1, [1, 2])
    assert bank.gc() == []  # it is newer than the default, and may be made the default
    assert bank.rollback("s", to=2) == 2
    assert bank.train("s", ROWS, ROWS, **GOOD, default="better").package.ref == "s@3"
    assert bank.bank.default("s") == 3


def test_with_better_an_equal_score_and_a_first_version_become_the_default(bank):
    bank.train("s", ROWS, ROWS, **GOOD, default="better", seed=1)
    assert bank.bank.default("s") == 2
    bank.train("first", WRONG, ROWS, **FAST, default="better")
    assert bank.bank.default("first") == 1


def test_a_default_that_cannot_be_read_is_replaced(bank):
    (bank.path / "tasks" / "s" / "1" / "manifest.json").write_text("{}")
    bank.train("s", WRONG, ROWS, **FAST, default="better")
    assert bank.bank.default("s") == 2


def test_the_shell_tells_it_too(bank, tmp_path):
    data, dev = write(tmp_path / "wrong.csv", WRONG), write(tmp_path / "dev.csv", ROWS)
    words = ["train", "--bank", bank.path, "--task", "s", "--train", data, "--dev", dev, *flags(FAST)]
    found = shell(*words, "--default", "better")
    assert found.code == 0, found.err
    assert "which remains the default" in found.err
    assert bank.bank.default("s") == 1
    assert "it must be one of new, better" in shell(*words, "--default", "best").err


def test_versions_are_compared_on_the_same_rows_if_there_are_any_and_by_one_metric(bank):
    old = bank.show("s")
    other = bank.train("s", ROWS, WRONG[:20], ROWS, **FAST).package.manifest
    both = bank.train("s", ROWS, ROWS[:20], ROWS, **GOOD).package.manifest
    found = compare(both, other)
    assert (found.split, found.same_rows) == ("test", True)
    found = compare(other, old)
    assert (found.split, found.same_rows) == ("dev", False)
    assert "(on other rows)" in shortfall(other, old, "new")[0]
    f1 = bank.train("s", WRONG, ROWS, **FAST, metric="macro_f1").package.manifest
    assert compare(f1, old) is None
    assert shortfall(f1, old, "new") == []
