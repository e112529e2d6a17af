"""Fixtures of the tests of serving."""

from __future__ import annotations

import pytest

from adapterbank.serving.jobs.queue import JobQueue
from serving.small_bank import SmallBank
from serving.training import new_bank


@pytest.fixture
def small(tmp_path, bert, new_slot, no_flush):
    """An empty bank for the small encoder."""
    return SmallBank(tmp_path / "bank", bert, new_slot)


@pytest.fixture
def idle(tmp_path, bert):
    """A queue of an empty bank whose runs are not started."""
    return JobQueue(new_bank(tmp_path / "bank", bert), threads=1)
