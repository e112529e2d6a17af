"""Claims about packed batches: there and back without loss, true gradients, and every row in one batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.encoder.packed import Packed, Tokens, by_length, pack

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def rows_of(lengths: list[int]) -> list[Tokens]:
    """Give rows whose tokens are all different: 0, 1, 2, … through the whole batch."""
    ends = np.cumsum(lengths)
    return [
        Tokens(np.arange(end - n, end), np.full(n, i)) for i, (end, n) in enumerate(zip(ends, lengths, strict=True))
    ]


def packed(lengths: list[int]) -> Packed:
    """Give a packed batch of rows of these lengths."""
    return pack(rows_of(lengths))


@given(LENGTHS)
def test_rows_stand_end_to_end_in_their_order(lengths: list[int]) -> None:
    batch = packed(lengths)
    assert batch.lengths == tuple(lengths)
    assert batch.longest == max(lengths)
    assert batch.ids.tolist() == list(range(sum(lengths)))
    assert batch.rows.tolist() == batch.types.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert batch.positions.tolist() == [place for n in lengths for place in range(n)]
    assert batch.starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
    assert batch.ids.dtype == batch.types.dtype == batch.positions.dtype == torch.int64


@given(LENGTHS)
def test_the_mask_is_true_exactly_at_real_tokens(lengths: list[int]) -> None:
    batch = packed(lengths)
    if len(set(lengths)) == 1:
        assert batch.mask is None
        assert batch.grid.cells is None
    else:
        assert batch.mask is not None
        assert batch.mask.shape == (len(lengths), 1, 1, max(lengths))
        assert batch.mask[:, 0, 0].tolist() == [[place < n for place in range(max(lengths))] for n in lengths]


@given(LENGTHS, st.integers(1, 3))
def test_a_grid_has_each_row_from_its_left_edge_and_zeros_behind(lengths: list[int], width: int) -> None:
    batch = packed(lengths)
    x = 1.0 + torch.arange(sum(lengths) * width).reshape(-1, width)
    grid = batch.to_grid(x)
    assert grid.shape == (len(lengths), max(lengths), width)
    for row, part in zip(grid, x.split(lengths), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()


@given(LENGTHS, st.integers(1, 3))
def test_the_way_to_a_grid_and_back_loses_nothing(lengths: list[int], width: int) -> None:
    batch = packed(lengths)
    x = torch.randn(sum(lengths), width)
    assert torch.equal(batch.to_packed(batch.to_grid(x)), x)


def test_what_lies_on_padding_does_not_come_back() -> None:
    batch = packed([3, 1])
    grid = batch.to_grid(torch.ones(4, 2))
    grid[1, 1:] = torch.nan
    assert torch.equal(batch.to_packed(grid), torch.ones(4, 2))


@pytest.mark.parametrize("lengths", [[4, 1, 3], [2, 2], [5], [1, 1, 6]], ids=str)
def test_gradients_there_and_back_are_true(lengths: list[int]) -> None:
    batch = packed(lengths)
    x = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    grid = torch.randn(len(lengths), max(lengths), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(batch.to_grid, (x,))
    assert torch.autograd.gradcheck(batch.to_packed, (grid,))
    assert torch.autograd.gradcheck(lambda x: batch.to_packed(batch.to_grid(x).cumsum(1).tanh()), (x,))


def test_padding_gets_no_gradient() -> None:
    batch = packed([3, 1])
    grid = torch.randn(2, 3, 2, requires_grad=True)
    batch.to_packed(grid).sum().backward()
    assert grid.grad is not None
    assert grid.grad[..., 0].tolist() == [[1, 1, 1], [1, 0, 0]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_every_row_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(by_length(rows_of(lengths), budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        # A row that is longer than the budget is a batch of its own: it has to be computed somewhere.
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_go_from_long_rows_to_short_and_are_as_full_as_they_can_be(lengths: list[int], budget: int) -> None:
    batches = list(by_length(rows_of(lengths), budget))
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(lengths, reverse=True)
    for batch in batches[:-1]:
        assert (len(batch) + 1) * lengths[batch[0]] > budget


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20), st.integers(1, 40))
def test_no_batch_mixes_groups(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    batches = list(by_length(rows_of(lengths), budget, groups))
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    assert all(len({groups[i] for i in batch}) == 1 for batch in batches)
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


def test_no_rows_are_no_batches() -> None:
    assert list(by_length([], 8)) == []
