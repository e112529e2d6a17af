"""Claims about batches, packed and padded: inverse layouts, correct gradients, every row in one batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.encoder.batch import PackedBatch, PaddedBatch, Tokens, TokenStore, by_length, pack

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def rows_of(lengths: list[int]) -> list[Tokens]:
    """Return rows whose tokens are all different: 0, 1, 2, … through the whole batch."""
    ends = np.cumsum(lengths)
    return [
        Tokens(np.arange(end - n, end), np.full(n, i)) for i, (end, n) in enumerate(zip(ends, lengths, strict=True))
    ]


def packed(lengths: list[int]) -> PackedBatch:
    """Return a packed batch of rows of these lengths."""
    return pack(rows_of(lengths))


@given(LENGTHS)
def test_rows_are_packed_end_to_end_in_their_order(lengths: list[int]) -> None:
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
    grid = batch.grid.to_grid(x)
    assert grid.shape == (len(lengths), max(lengths), width)
    for row, part in zip(grid, x.split(lengths), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()


@given(LENGTHS, st.integers(1, 3))
def test_to_grid_and_to_packed_are_inverse(lengths: list[int], width: int) -> None:
    batch = packed(lengths)
    x = torch.randn(sum(lengths), width)
    assert torch.equal(batch.grid.to_packed(batch.grid.to_grid(x)), x)


def test_values_at_padding_are_not_packed() -> None:
    batch = packed([3, 1])
    grid = batch.grid.to_grid(torch.ones(4, 2))
    grid[1, 1:] = torch.nan
    assert torch.equal(batch.grid.to_packed(grid), torch.ones(4, 2))


@pytest.mark.parametrize("lengths", [[4, 1, 3], [2, 2], [5], [1, 1, 6]], ids=str)
def test_gradients_of_both_directions_are_correct(lengths: list[int]) -> None:
    batch = packed(lengths)
    x = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    grid = torch.randn(len(lengths), max(lengths), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(batch.grid.to_grid, (x,))
    assert torch.autograd.gradcheck(batch.grid.to_packed, (grid,))
    assert torch.autograd.gradcheck(lambda x: batch.grid.to_packed(batch.grid.to_grid(x).cumsum(1).tanh()), (x,))


def test_padding_gets_no_gradient() -> None:
    batch = packed([3, 1])
    grid = torch.randn(2, 3, 2, requires_grad=True)
    batch.grid.to_packed(grid).sum().backward()
    assert grid.grad is not None
    assert grid.grad[..., 0].tolist() == [[1, 1, 1], [1, 0, 0]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.integers(1, 12) | st.none())
def test_every_row_is_in_one_batch_within_the_budget(lengths: list[int], budget: int, most: int | None) -> None:
    batches = list(by_length(rows_of(lengths), budget, max_rows=most))
    assert most is None or all(len(batch) <= most for batch in batches)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        # A row that is longer than the budget is a batch of its own: it has to be computed somewhere.
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_run_from_long_rows_to_short_and_are_as_full_as_possible(lengths: list[int], budget: int) -> None:
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


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.integers(1, 16))
def test_rows_that_are_padded_to_one_length_keep_their_order(lengths: list[int], budget: int, unit: int) -> None:
    padded = [-(-length // unit) * unit for length in lengths]
    batches = list(by_length(rows_of(lengths), budget, padded=lambda length: -(-length // unit) * unit))
    order = [i for batch in batches for i in batch]
    assert order == sorted(range(len(lengths)), key=lambda i: -padded[i])
    assert all(len(batch) == 1 or len(batch) * padded[batch[0]] <= budget for batch in batches)


def test_no_rows_make_no_batches() -> None:
    assert list(by_length([], 8)) == []


# --- rows that are padded to one length

CHOICES = st.lists(st.integers(1, 9), min_size=1, max_size=7).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths), st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9), st.integers(0, 4)
    )
)
"""Lengths of the rows in a store, rows to take from it (any of them, in any order, more than once), room to spare."""


def padded_rows(lengths: list[int], rows: list[int], spare: int) -> tuple[PaddedBatch, torch.Tensor, int]:
    """Return padded rows of a store, the index of their tokens in it, and the length they are padded to."""
    longest = max(lengths[row] for row in rows) + spare
    batch, where = TokenStore.of(rows_of(lengths), torch.device("cpu")).batch(torch.tensor(rows), longest)
    return batch, where, longest


@given(LENGTHS)
def test_a_store_holds_all_rows_end_to_end(lengths: list[int]) -> None:
    store, batch = TokenStore.of(rows_of(lengths), torch.device("cpu")), packed(lengths)
    assert torch.equal(store.ids, batch.ids)
    assert torch.equal(store.types, batch.types)
    assert torch.equal(store.starts, batch.starts)
    assert store.lengths.tolist() == lengths


@given(CHOICES)
def test_a_batch_from_a_store_has_each_rows_tokens_and_is_masked_behind_them(
    choice: tuple[list[int], list[int], int],
) -> None:
    batch, _, longest = padded_rows(*choice)
    lengths, rows, _ = choice
    expected = pack([rows_of(lengths)[row] for row in rows])
    assert batch.longest == longest
    assert batch.mask.shape == (len(rows), 1, 1, longest)
    assert batch.mask[:, 0, 0].tolist() == [[place < lengths[row] for place in range(longest)] for row in rows]
    assert batch.counts.tolist() == [lengths[row] for row in rows]
    assert batch.counts.dtype == torch.float32
    real = batch.mask.flatten()
    for name in ("ids", "types", "positions", "rows"):
        mine = getattr(batch, name)
        assert mine.shape == (len(rows) * longest,)
        assert torch.equal(mine[real], getattr(expected, name)), name
    assert batch.positions.tolist() == list(range(longest)) * len(rows)
    assert batch.rows.tolist() == [k for k in range(len(rows)) for _ in range(longest)]


@given(CHOICES)
def test_a_store_returns_the_index_of_each_token_so_that_cached_states_are_found(
    choice: tuple[list[int], list[int], int],
) -> None:
    _, where, longest = padded_rows(*choice)
    lengths, rows, _ = choice
    kept = 10.0 * torch.arange(sum(lengths))  # a number for each token of the store
    found = kept[where].view(len(rows), longest)
    for mine, row in zip(found, rows, strict=True):
        start = sum(lengths[:row])
        assert mine[: lengths[row]].tolist() == kept[start : start + lengths[row]].tolist()
    assert where.max() < sum(lengths)  # padding is a look-up too, and must not lead outside


@given(CHOICES, st.integers(1, 3))
def test_padded_rows_are_laid_out_pooled_and_read_like_packed_ones(
    choice: tuple[list[int], list[int], int], width: int
) -> None:
    batch, _, longest = padded_rows(*choice)
    lengths, rows, _ = choice
    expected = pack([rows_of(lengths)[row] for row in rows])
    x = torch.randn(len(rows) * longest, width)
    x[~batch.mask.flatten()] = torch.nan  # whatever stands there
    real = x[batch.mask.flatten()]
    by_row = batch.by_row(x)
    assert by_row.shape == (len(rows), longest, width)
    assert torch.equal(by_row[:, : expected.longest], expected.by_row(real))
    assert not by_row[:, expected.longest :].any()
    assert torch.equal(batch.first(x), expected.first(real))
    assert torch.equal(batch.counts, expected.counts)
    grid = batch.grid.to_grid(x)
    assert grid.shape == (len(rows), longest, width)
    assert torch.equal(batch.grid.to_packed(grid).nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_adds_minus_infinity_where_there_is_no_token_and_nothing_elsewhere(dtype: torch.dtype) -> None:
    rows, wide = packed([3, 1, 5]), padded_rows([3, 1, 5], [0, 1, 2], 3)[0]
    narrow = rows.bias(dtype)
    assert narrow is not None
    assert narrow.dtype == wide.bias(dtype).dtype == dtype
    assert torch.equal(wide.bias(dtype)[..., :5], narrow)
    assert torch.equal(wide.bias(dtype) == 0, wide.mask)
    assert torch.equal(wide.bias(dtype) == -torch.inf, ~wide.mask)
    assert packed([4, 4]).bias(dtype) is None


def test_padding_gets_no_gradient_from_pooled_rows() -> None:
    batch = padded_rows([3, 1], [0, 1], 1)[0]
    x = torch.randn(8, 2, requires_grad=True)
    (batch.by_row(x).sum() + batch.first(x).sum()).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [2, 1, 1, 0, 2, 0, 0, 0]
