"""Claims about cached hidden states: the same bits for every caller, and no failure on a full disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapterbank.encoder import prefix_cache as prefixes
from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import Frozen, forward
from adapterbank.encoder.prefix_cache import PrefixCache

TEXTS = ["the", "a big red fox jumps over the lazy dog", "why was it good", "cats sat on the mat in a house"] * 6


@pytest.fixture
def rows(bert):
    return bert.tokenize(TEXTS)


def test_the_states_of_a_row_do_not_depend_on_the_rows_it_is_first_requested_with(bert, rows):
    orders = [np.random.RandomState(k).permutation(len(rows)) for k in range(2)]
    found = []
    for order in orders:
        known = PrefixCache(bert.config, bert.tensors).get(rows, 2)
        states = {}
        for chosen in order.reshape(-1, 4):
            batch = pack([rows[i] for i in chosen])
            states |= dict(zip(chosen.tolist(), known.rows(chosen, batch).split(list(batch.lengths)), strict=True))
        found.append(states)
    assert all(torch.equal(found[0][i], found[1][i]) for i in range(len(rows)))


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("budget", [{}, {"memory": 0}, {"memory": 0, "disk": 0}])
def test_starting_from_cached_states_equals_the_whole_pass(bert, rows, first, budget):
    batch = pack(rows)
    known = PrefixCache(bert.config, bert.tensors, **budget).get(rows, first)
    expected = forward(bert.config, Frozen(bert.tensors), batch)
    states = known.rows(range(len(rows)), batch)
    found = forward(bert.config, Frozen(bert.tensors), batch, first=first, prefix=states)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_equal_rows_share_one_prefix_and_others_do_not(bert, rows):
    known = PrefixCache(bert.config, bert.tensors)
    assert known.get(rows, 2) is known.get(bert.tokenize(TEXTS), 2)
    assert known.get(rows, 2) is not known.get(rows, 1)
    assert known.get(rows, 2) is not known.get(rows[:-1], 2)


def test_without_disk_space_states_are_computed_instead_of_cached(bert, rows, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefixes.os, "posix_fallocate", full)
    owner = PrefixCache(bert.config, bert.tensors, memory=0)
    batch = pack(rows)
    assert owner.get(rows, 2).rows(range(len(rows)), batch).shape == (sum(batch.lengths), 32)
    assert owner.disk == PrefixCache(bert.config, bert.tensors).disk
