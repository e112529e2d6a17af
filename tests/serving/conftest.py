"""What the tests of serving share."""

from __future__ import annotations

import pytest

from serving.small_bank import SmallBank


@pytest.fixture
def small(tmp_path, bert, new_slot, no_flush):
    """Give an empty bank for the small encoder."""
    return SmallBank(tmp_path / "bank", bert, new_slot)
