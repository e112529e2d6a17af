"""Windows: the rows that BERT's own loop would cut, nothing lost, and every token at its characters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.tokenizer import tokenize
from adapterbank.encoder.windows import STRIDE, tokenize_parts, tokenize_windows, window_starts
from adapterbank.errors import InputError
from families import FAMILIES

LONG = " ".join(["the big red cat's house"] * 8)


@given(st.integers(0, 600), st.integers(1, 400), st.integers(1, 400))
def test_windows_cover_the_text_and_overlap_by_half_or_more(length: int, room: int, stride: int) -> None:
    starts = list(window_starts(length, room, stride))
    assert starts[0] == 0
    assert starts[-1] + room >= length
    assert len(starts) == 1 or starts[-2] + room < length  # no window more than needed
    steps = set(np.diff(starts).tolist())
    assert steps <= {min(stride, max(1, room // 2))}


def test_a_stride_below_half_a_window_is_used_as_it_is() -> None:
    assert STRIDE == 128
    # with 369 tokens of room, windows from 0 and 128 reach to token 497, and the next one is the last
    assert list(window_starts(497, 369, 128)) == [0, 128]
    assert list(window_starts(498, 369, 128)) == [0, 128, 256]
    assert list(window_starts(100, 20, 128)) == [0, 10, 20, 30, 40, 50, 60, 70, 80]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [12, 20, 33, 64])
def test_windows_contain_the_question_and_the_whole_document_in_order(
    family: str, limit: int, tiny: Callable[[str], Backbone]
) -> None:
    backbone = tiny(family)
    (whole,) = tokenize(backbone.tokenizer, ["who was it"], [LONG], 10_000)
    rows, owners = tokenize_windows(backbone.tokenizer, ["who was it"], [LONG], limit, 7)
    assert owners == [0] * len(rows)
    assert all(len(row) <= limit for row in rows)
    seen: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        assert row.offsets is not None
        inside = row.offsets[:, 0] >= 0
        first = int(np.flatnonzero(inside)[0])
        np.testing.assert_array_equal(row.ids[:first], whole.ids[:first])  # the question, and what stands around it
        assert row.ids[-1] == whole.ids[-1]
        for place, number in zip(row.offsets[inside].tolist(), row.ids[inside].tolist(), strict=True):
            seen.setdefault(tuple(place), set()).add(number)
    # every token of the document is in a window, and windows agree on what stands where
    (alone,), _ = tokenize_windows(backbone.tokenizer, ["who was it"], [LONG], 10_000, 7)
    assert alone.offsets is not None
    np.testing.assert_array_equal(alone.ids, whole.ids)
    np.testing.assert_array_equal(alone.types, whole.types)
    inside = alone.offsets[:, 0] >= 0
    assert seen == {
        tuple(place): {
            int(other)
            for spot, other in zip(alone.offsets[inside].tolist(), alone.ids[inside], strict=True)
            if spot == place
        }
        for place in alone.offsets[inside].tolist()
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 30), st.integers(16, 40))
def test_only_the_second_text_has_character_offsets(bert: Backbone, first: int, second: int, limit: int) -> None:
    text = " ".join(["dog's"] * second)
    rows, _ = tokenize_windows(bert.tokenizer, ["why " * first], [text], limit, 128)
    for found in rows:
        assert found.offsets is not None
        assert found.offsets.shape == (len(found), 2)
        assert not found.cut
        assert found.ids.tolist()[1 : first + 1] == [bert.tokenizer.token_to_id("why")] * first
        inside = (found.types == 1) & (found.offsets[:, 0] >= 0)
        assert (found.offsets[~inside] == -1).all()
        spelled = [bert.tokenizer.id_to_token(int(i)) for i in found.ids[inside]]
        assert [text[start:end] for start, end in found.offsets[inside]] == spelled
    assert int(((rows[0].types == 1) & (rows[0].offsets[:, 0] >= 0)).sum()) == min(3 * second, limit - first - 3)


def test_rows_have_the_number_of_their_pair_from_any_start(bert: Backbone) -> None:
    rows, owners = tokenize_windows(bert.tokenizer, ["who"] * 3, ["the cat", LONG, ""], 16, 128, start=40)
    assert owners == sorted(owners)
    assert owners.count(40) == owners.count(42) == 1
    assert len(rows) == len(owners) > 5
    assert (rows[-1].offsets == -1).all()


def test_a_question_that_alone_is_too_long_is_refused(bert: Backbone) -> None:
    with pytest.raises(InputError, match=r"longer than max_length 10.*Raise --max-length"):
        tokenize_windows(bert.tokenizer, ["why " * 50], ["the cat"], 10, 128)
    assert bert.tokenizer.truncation is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [12, 20, 33])
def test_parts_cover_a_text_with_as_few_rows_as_possible(
    family: str, limit: int, tiny: Callable[[str], Backbone]
) -> None:
    tokenizer = tiny(family).tokenizer
    (whole,) = tokenize(tokenizer, [LONG], None, 10_000)
    special = tokenizer.num_special_tokens_to_add(False)
    rows, owners = tokenize_parts(tokenizer, [LONG, "the cat"], None, limit, 99)
    mine = [row for row, owner in zip(rows, owners, strict=True) if owner == 0]
    assert len(mine) == -(-(len(whole) - special) // (limit - special))
    assert {len(row) for row in mine} == {limit}
    assert set(np.concatenate([row.ids for row in mine])) == set(whole.ids)
    assert not any(row.cut for row in rows)
    assert owners[-1] == 1
    assert np.array_equal(rows[-1].ids, tokenize(tokenizer, ["the cat"], None, limit)[0].ids)


def test_of_a_text_with_too_many_windows_the_beginning_and_the_end_are_read(tiny: Callable[[str], Backbone]) -> None:
    tokenizer = tiny("bert").tokenizer
    (whole,) = tokenize(tokenizer, [LONG], None, 10_000)
    rows, _ = tokenize_parts(tokenizer, [LONG], None, 12, 2)
    assert [row.cut for row in rows] == [True, True]
    assert np.array_equal(rows[0].ids[1:-1], whole.ids[1:11])
    assert np.array_equal(rows[1].ids[1:-1], whole.ids[-11:-1])


@pytest.mark.parametrize("texts", [("the cat", LONG), (LONG, "the cat"), (LONG, LONG)])
def test_the_longer_text_of_a_pair_is_divided(texts: tuple[str, str], tiny: Callable[[str], Backbone]) -> None:
    tokenizer = tiny("bert").tokenizer
    (whole,) = tokenize(tokenizer, [texts[0]], [texts[1]], 10_000)
    rows, _ = tokenize_parts(tokenizer, [texts[0]], [texts[1]], 24, 99)
    assert all(len(row) <= 24 and set(row.types) == {0, 1} for row in rows)
    assert [row.cut for row in rows] == [texts[0] == texts[1]] * len(rows)
    divided = int(len(texts[1]) > len(texts[0]))
    wanted = whole.ids[whole.types == divided]
    assert set(np.concatenate([row.ids[row.types == divided] for row in rows])) == set(wanted)


def test_a_limit_without_room_for_a_text_is_refused_with_windows_too(tiny: Callable[[str], Backbone]) -> None:
    with pytest.raises(InputError, match="max_length 2 leaves no room"):
        tokenize_parts(tiny("bert").tokenizer, ["the cat"], None, 2, 4)
