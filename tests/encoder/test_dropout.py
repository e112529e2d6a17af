"""Claims about dropout: rate and scale are right, and a mask depends on seed, step, row, token and place alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from adapterbank.encoder.batch import PackedBatch, Tokens, pack
from adapterbank.encoder.dropout import Dropout, LayerDropout, mix, row_keys, step_keys

SEED, STEP = 7, 3


def batch_of(lengths: Sequence[int]) -> PackedBatch:
    """Return a packed batch of rows of these lengths."""
    return pack([Tokens(np.zeros(n, np.int64), np.zeros(n, np.int64)) for n in lengths])


def dropout(
    lengths: Sequence[int], rows: Sequence[int], *, seed: int = SEED, step: int = STEP, rate: float = 0.5
) -> Dropout:
    """Return the masks of a batch whose rows have these numbers in their run."""
    batch, keys = batch_of(lengths), row_keys(seed, step, torch.tensor(rows))
    return Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=rate)


def hidden_mask(masks: Dropout, width: int = 64, place: int = 2) -> Tensor:
    """Return which of `[T, width]` hidden states are kept."""
    return masks.hidden(torch.ones(len(masks.tokens), width), place) > 0


def layer_of(masks: Dropout, longest: int, heads: int = 4, layer: int = 0, hidden: int = 64) -> LayerDropout:
    """Return the masks of one layer."""
    return masks.layer(layer, hidden=hidden, heads=heads, longest=longest)


def attention_mask(masks: Dropout, longest: int, heads: int = 4, layer: int = 0) -> Tensor:
    """Return which of `[B, heads, longest, longest]` attention weights are kept."""
    weights = torch.ones(len(masks.keys), heads, longest, longest)
    return layer_of(masks, longest, heads, layer).attention(weights) > 0


def correlation(one: Tensor, other: Tensor) -> float:
    """Return the correlation of two masks."""
    return float(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1])


# --- rate and scale


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["hidden", "attention", "pooled"])
def test_the_kept_share_matches_the_rate(kind: str, rate: float) -> None:
    masks = dropout([64] * 16, range(16), rate=rate)
    if kind == "hidden":
        kept = hidden_mask(masks, 200)
    elif kind == "attention":
        kept = attention_mask(masks, 64)
    else:
        kept = torch.cat([masks.pooled(torch.ones(16, 500), place) for place in range(20)]) > 0
    sigma = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.float().mean() - (1 - rate)) < 5 * sigma


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_kept_elements_are_scaled_so_that_the_mean_stays(rate: float) -> None:
    masks = dropout([64] * 8, range(8), rate=rate)
    x = torch.randn(len(masks.tokens), 128)
    given = masks.hidden(x, 2)
    kept = hidden_mask(masks, 128)
    torch.testing.assert_close(given[kept], x[kept] / (1 - rate))
    assert not given[~kept].any()
    ones = masks.hidden(torch.ones_like(x), 2)
    assert abs(ones.mean() - 1) < 5 * (rate / (1 - rate) / x.numel()) ** 0.5


def test_a_rate_of_zero_returns_its_input() -> None:
    masks = dropout([5, 3], [0, 1], rate=0.0)
    x = torch.randn(8, 6)
    assert masks.hidden(x, 0) is x
    assert masks.pooled(x, 0) is x
    weights, layer = torch.rand(2, 2, 5, 5), layer_of(masks, 5, heads=2, hidden=6)
    assert layer.attention(weights) is weights
    assert layer.after_attention.drop(x) is x
    assert layer.after_feedforward.drop(x) is x


def test_gradients_pass_where_elements_pass() -> None:
    masks = dropout([9, 4], [0, 1], rate=0.25)
    x = torch.randn(13, 16, requires_grad=True)
    masks.hidden(x, 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, hidden_mask(masks, 16) / 0.75)


def test_the_dtype_stays() -> None:
    masks = dropout([9, 4], [0, 1])
    assert masks.hidden(torch.ones(13, 4, dtype=torch.bfloat16), 0).dtype == torch.bfloat16


# --- what a mask depends on


def test_a_row_has_the_same_masks_alone_and_in_any_batch() -> None:
    alone = dropout([6], [4])
    hidden, attention = hidden_mask(alone), attention_mask(alone, 6)[0]
    for lengths, rows in (([6, 6], [4, 5]), ([3, 6, 11], [1, 4, 9]), ([30, 2, 6], [0, 7, 4])):
        at, longest = rows.index(4), max(lengths)
        beside = dropout(lengths, rows)
        assert torch.equal(hidden_mask(beside).split(lengths)[at], hidden)
        assert torch.equal(attention_mask(beside, longest)[at, :, :6, :6], attention)


def test_a_longer_text_has_the_same_masks_where_both_have_tokens() -> None:
    short, long = dropout([6], [4]), dropout([20], [4])
    assert torch.equal(hidden_mask(long)[:6], hidden_mask(short))


def test_a_pooled_vector_has_its_rows_mask_in_any_batch() -> None:
    x = torch.ones(3, 40)
    whole = dropout([2, 5, 3], [8, 4, 6]).pooled(x, 50)
    assert torch.equal(dropout([5], [4]).pooled(x[:1], 50), whole[1:2])
    assert torch.equal(dropout([3, 2], [6, 8]).pooled(x[:2], 50), whole[[2, 0]])


def test_masks_are_the_same_on_every_machine() -> None:
    """Numbers by a plain-Python copy of the hash, so that a change that breaks resumed runs does not go unseen."""

    def wrap(x: int) -> int:
        return x & 0xFFFFFFFF

    def hashed(x: int) -> int:
        x = wrap((x ^ (x >> 16)) * 0x85EBCA6B)
        x = wrap((x ^ (x >> 13)) * 0xC2B2AE35)
        return x ^ (x >> 16)

    numbers = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    found = mix(torch.tensor(numbers, dtype=torch.int32)).tolist()
    assert [wrap(x) for x in found] == [hashed(wrap(x)) for x in numbers]
    golden = 0x9E3779B9
    run, now = (hashed(wrap(x * golden + 1)) for x in (SEED, STEP))
    keys = row_keys(SEED, STEP, torch.tensor([0, 5])).tolist()
    assert [wrap(x) for x in keys] == [hashed(hashed(wrap(row * golden + run)) ^ now) for row in (0, 5)]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": SEED + 1},
        {"seed": SEED + 2**16},
        {"step": STEP + 1},
        {"step": STEP + 1000},
        {"seed": STEP, "step": SEED},  # the two must not be exchangeable
        {"rows": range(16, 32)},
        {"rows": range(1, 17)},
    ],
    ids=str,
)
def test_another_seed_step_or_row_has_an_unrelated_mask(other: dict[str, int | range]) -> None:
    lengths = [32] * 16
    one = dropout(lengths, range(16))
    two = dropout(lengths, **{"rows": range(16), **other})  # type: ignore[arg-type]
    limit = 5 / (512 * 128) ** 0.5
    assert abs(correlation(hidden_mask(one, 128), hidden_mask(two, 128))) < limit
    assert abs(correlation(attention_mask(one, 32), attention_mask(two, 32))) < 5 / (16 * 4 * 32 * 32) ** 0.5
    x = torch.ones(16, 4096)
    pooled = [masks.pooled(x, 9) > 0 for masks in (one, two)]
    assert abs(correlation(*pooled)) < limit


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_any_two_places_have_unrelated_masks(rate: float) -> None:
    masks = dropout([32] * 8, range(8), rate=rate)
    hidden = [hidden_mask(masks, 64, place) for place in range(38)]
    attention = [attention_mask(masks, 32, 2, layer)[:, 0, :, :].flatten() for layer in range(38)]
    for kept in (hidden, attention):
        matrix = np.corrcoef(torch.stack([mask.flatten() for mask in kept]).numpy())
        assert np.abs(matrix - np.eye(38)).max() < 5.5 / kept[0].numel() ** 0.5  # the largest of 703


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_any_two_tokens_heads_and_columns_have_unrelated_masks(rate: float) -> None:
    few, many = dropout([64] * 4, range(4), rate=rate), dropout([64] * 64, range(64), rate=rate)
    by_token = hidden_mask(few, 4096).numpy()
    by_column = hidden_mask(many, 128).numpy().T
    by_head = attention_mask(few, 64, 12).transpose(0, 1).flatten(1).numpy()  # from [rows, heads, queries, keys]
    by_query = attention_mask(many, 64, 2).permute(2, 0, 1, 3).flatten(1).numpy()
    by_key = attention_mask(many, 64, 2).permute(3, 0, 1, 2).flatten(1).numpy()
    for kept in (by_token, by_column, by_head, by_query, by_key):
        matrix = np.corrcoef(kept)
        assert np.abs(matrix - np.eye(len(kept))).max() < 6 / kept.shape[1] ** 0.5  # the largest of up to 32,640


def test_the_mask_of_attention_is_not_that_of_hidden_states_at_any_place() -> None:
    masks = dropout([64] * 4, range(4))
    for layer, other in itertools.product(range(7), range(1, 8)):
        attention = attention_mask(masks, 64, 1, layer)[:, 0].reshape(256, 64)
        assert abs(correlation(attention, hidden_mask(masks, 64, other))) < 5 / (256 * 64) ** 0.5


# --- a layer's masks, and those of several runs


def test_a_layers_masks_are_those_of_its_places_in_the_pass() -> None:
    """A resumed run must have the same masks: a layer has three places, the first is the attention's."""
    masks = dropout([6, 3, 11], [1, 4, 9])
    x = torch.ones(20, 64)
    for i in range(4):
        layer = layer_of(masks, 11, layer=i)
        assert torch.equal(layer.after_attention.drop(x), masks.hidden(x, 3 * i + 2))
        assert torch.equal(layer.after_feedforward.drop(x), masks.hidden(x, 3 * i + 3))


def test_tokens_side_by_side_have_the_masks_of_tokens_end_to_end() -> None:
    lengths, rows, longest = [6, 3, 11], [1, 4, 9], 16
    packed, keys = dropout(lengths, rows), row_keys(SEED, STEP, torch.tensor(rows))
    places = torch.arange(longest).expand(3, longest)
    padded = Dropout(keys, torch.arange(3)[:, None].expand(3, longest), places, rate=0.5, attention_rate=0.5)
    laid, ones = layer_of(padded, longest), torch.ones(3, longest, 64)
    layer, flat = layer_of(packed, 11), torch.ones(20, 64)
    for wide, narrow in (
        (padded.hidden(ones, 2), packed.hidden(flat, 2)),
        (laid.after_attention.drop(ones), layer.after_attention.drop(flat)),
        (laid.after_feedforward.drop(ones), layer.after_feedforward.drop(flat)),
    ):
        for mine, n, expected in zip(wide, lengths, narrow.split(lengths), strict=True):
            assert torch.equal(mine[:n], expected)
    wide, narrow = attention_mask(padded, longest), attention_mask(packed, 11)
    for k, n in enumerate(lengths):
        assert torch.equal(wide[k, :, :n, :n], narrow[k, :, :n, :n])
    assert torch.equal(padded.pooled(torch.ones(3, 40), 50), packed.pooled(torch.ones(3, 40), 50))


def test_the_keys_of_several_runs_are_each_runs_own() -> None:
    clocks, rows = [(0, 0), (7, 3), (3, 7), (2**31 - 1, 12), (2**40 + 7, 5), (-3, 2)], torch.tensor([0, 1, 2, 9])
    sent = torch.tensor([[number & 0x7FFFFFFF for number in clock] for clock in clocks])
    assert torch.equal(step_keys(sent, rows), torch.cat([row_keys(*clock, rows) for clock in clocks]))
