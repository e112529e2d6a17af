"""`adapterbank cache`: its size, and clearing it."""

from __future__ import annotations

import numpy as np

from adapterbank.storage import cache
from small_data import shell


def test_the_cache_is_measured_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path / "kept"))
    cache.put("tokens-x", {"a": np.arange(3)})
    found = shell("cache", "--json").json
    assert (found["folder"], found["entries"], found["removed"]) == (str(tmp_path / "kept"), 1, False)
    assert shell("cache", "--clear").out.startswith("Removed 1 tokenised data set, ")
    assert shell("cache").out.startswith("0 tokenised data sets, 0 B in ")
