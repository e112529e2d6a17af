"""`adapterbank glue-score`: the mean over the tasks that the bank has, and what makes it incomparable."""

from __future__ import annotations

import pytest

from small_data import shell


def test_glue_score_is_the_mean_over_the_tasks_of_the_bank(catalog_bank):
    found = shell("glue-score", "--bank", catalog_bank, "--json").json
    assert found["score"] == pytest.approx(sum(found["tasks"].values()) / 2)
    assert len(found["missing"]) == 7
    text = shell("glue-score", "--bank", catalog_bank).out
    assert "over 2 of 9 tasks (not comparable to the benchmark; missing: " in text
    assert "2 not on the official dev set)" in text
    assert "not the official dev set: glue/cola (dev has 24 rows, the official one 1,043)\n" in text
