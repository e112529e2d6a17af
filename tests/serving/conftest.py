"""What the tests of serving share."""

from __future__ import annotations

import pytest

from adapterbank.serving.jobs.queue import JobQueue
from serving.small_bank import SmallBank
from serving.training import new_bank


@pytest.fixture
def small(tmp_path, bert, new_slot, no_flush):
    """Give an empty bank for the small encoder."""
    return SmallBank(tmp_path / "bank", bert, new_slot)


@pytest.fixture
def idle(tmp_path, bert):
    """Give jobs of an empty bank that nobody works on."""
    return JobQueue(new_bank(tmp_path / "bank", bert), threads=1)
