"""Rows and batches: every row once in an epoch, and answer tokens that map back to the same characters."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapterbank.errors import DataError, InputError
from adapterbank.inference.rows import epoch_order, make_rows
from adapterbank.kinds import span as spans
from adapterbank.kinds.span import NO_ANSWER
from adapterbank.storage import cache
from adapterbank.tasks.spec import Examples
from families import FAMILIES

CONTEXT = "The cats jumped over a big, red house!  Who was   the lazy dog?"

LONG = " ".join(f"the {colour} {noun}, who was {size}" for colour in ("red", "lazy") for noun in ("cat", "dog", "fox")
                for size in ("big", "small"))  # fmt: skip

ANY_SCRIPT = ["the", "cat", "cats", "HOUSE", "x.y", "é", "Ünder", "日本", "🙂", "fox's", "12%"]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=200),
    batch=st.integers(1, 64),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 50),
)
def test_an_epoch_has_every_row_once(lengths, batch, seed, epoch):
    order = epoch_order(lengths, batch, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(order).tolist()) == list(range(len(lengths)))
    assert len(order) == -(-len(lengths) // batch)
    assert all(len(part) == batch for part in order[:-1])
    assert 1 <= len(order[-1]) <= batch


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = np.random.RandomState(5).randint(4, 60, 100)

    def order(seed, epoch):
        return np.concatenate(epoch_order(lengths, 7, seed=seed, epoch=epoch)).tolist()

    expected = order(3, 1)
    np.random.seed(0)  # must have no effect
    assert order(3, 1) == expected
    all_orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert all(a != b for a, b in itertools.combinations(all_orders, 2))
    assert list(range(100)) not in all_orders


def test_rows_of_a_batch_have_similar_lengths_and_batches_are_shuffled():
    lengths = np.random.RandomState(1).randint(4, 64, 2000)
    order = epoch_order(lengths, 32, seed=0, epoch=0)
    packed, grid = lengths.sum(), sum(len(part) * lengths[part].max() for part in order)
    plain = np.random.RandomState(2).permutation(2000).reshape(-1, 20)
    unsorted = sum(len(part) * lengths[part].max() for part in plain)
    assert grid / packed < 1.3 < 1.7 < unsorted / packed
    means = [lengths[part].mean() for part in order]
    assert means != sorted(means)
    assert np.mean(np.diff(means) > 0) < 0.7


def span_rows(backbone, answers, *, context=CONTEXT, question="who was it", max_length=64, stride=128):
    targets = [(start, end, (context[start:end],)) for start, end in answers]
    examples = Examples([question] * len(targets), [context] * len(targets), targets)
    return make_rows(backbone, examples, kind="span", max_length=max_length, stride=stride)


def answer_place(out, row, context=CONTEXT):
    """Return the characters of the answer that a row's outputs favour."""
    answer = spans.read([out], [row], context).answers[0]
    assert context[answer.start : answer.end] == answer.text
    return answer.start, answer.end


def pieces(text):
    """Return the start and end of every word and punctuation mark."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def certain(length, first, last):
    """Return span outputs that clearly favour one answer."""
    out = np.zeros((length, 2), dtype=np.float32)
    out[first, 0] = out[last, 1] = 9.0
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_found_through_its_tokens_is_the_same_characters(family, tiny):
    backbone = tiny(family)
    words = pieces(CONTEXT)
    answers = [(a[0], b[1]) for i, a in enumerate(words) for b in words[i:]]
    rows = span_rows(backbone, answers)
    assert len(rows) == len(answers)
    assert rows.unreachable == 0
    for row, (first, last), (start, end) in zip(rows.tokens, rows.targets, answers, strict=True):
        assert last - first < 30
        out = certain(len(row), first, last)
        assert answer_place(out, row) == (start, end)


@settings(deadline=None, max_examples=50)
@given(
    words=st.lists(st.sampled_from(ANY_SCRIPT), min_size=1, max_size=12),
    spaces=st.sampled_from([" ", "  ", "\n", "\t "]),
    data=st.data(),
)
def test_any_run_of_words_is_found_again_in_any_script(words, spaces, data, tiny):
    context, borders = "", []
    for word in words:
        borders.append((len(context), len(context) + len(word)))
        context += word + spaces
    i = data.draw(st.integers(0, len(words) - 1))
    j = data.draw(st.integers(i, len(words) - 1))
    answer = borders[i][0], borders[j][1]
    rows = span_rows(tiny("bert"), [answer], context=context)
    assume(rows.targets[0][1] - rows.targets[0][0] < 30)  # the longest answer a span head may give
    assert answer_place(certain(len(rows.tokens[0]), *rows.targets[0]), rows.tokens[0], context) == answer


def test_an_answer_inside_a_token_is_answered_with_the_whole_token(bert):
    start = CONTEXT.index("red")
    rows = span_rows(bert, [(start + 1, start + 2)])
    row = rows.tokens[0]
    assert answer_place(certain(len(row), *rows.targets[0]), row) == (start, start + 3)


def test_an_answer_with_spaces_around_it_is_found_without_them(bert):
    """An annotated answer may include the spaces around it."""
    start = CONTEXT.index("Who was") - 1
    rows = span_rows(bert, [(start, start + len(" Who was ")), pieces(CONTEXT)[0]])
    assert rows.unreachable == 0
    found = answer_place(certain(len(rows.tokens[0]), *rows.targets[0]), rows.tokens[0])
    assert CONTEXT[slice(*found)] == "Who was"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_length", [24, 32, 48])
def test_an_answer_is_found_again_in_every_window_that_contains_it(family, max_length, tiny):
    words = pieces(LONG)
    answers = [(words[i][0], words[min(i + k, len(words) - 1)][1]) for k in (0, 2) for i in range(len(words))]
    rows = span_rows(tiny(family), answers, context=LONG, max_length=max_length)
    assert rows.unreachable == 0
    assert len(rows) > len(answers)
    for windows, (start, end) in zip(rows.by_example(len(answers)), answers, strict=True):
        answered = [row for row in windows if rows.targets[row] != NO_ANSWER]
        assert answered
        for row in answered:
            assert answer_place(certain(len(rows.tokens[row]), *rows.targets[row]), rows.tokens[row], LONG) == (
                start,
                end,
            )
        outs = [certain(len(rows.tokens[row]), *rows.targets[row]) for row in windows]
        best = spans.read(outs, [rows.tokens[row] for row in windows], LONG).answers[0]
        assert (best.start, best.end) == (start, end)


def test_windows_without_the_whole_answer_point_at_the_first_token(bert):
    words = pieces(LONG)
    rows = span_rows(bert, [(words[0][0], words[1][1])], context=LONG, max_length=24)
    assert len(rows) > 3
    assert rows.targets == [rows.targets[0], *[NO_ANSWER] * (len(rows) - 1)]
    assert rows.targets[0] != NO_ANSWER


def test_a_question_without_an_answer_points_at_the_first_token_of_every_window(bert):
    examples = Examples(["who", "who"], [LONG, CONTEXT], [(-1, -1, ("",)), (0, 3, ("The",))])
    rows = make_rows(bert, examples, kind="span", max_length=24)
    assert rows.unreachable == 0
    by = rows.by_example(2)
    assert len(by[0]) > 1
    assert all(rows.targets[row] == NO_ANSWER for row in by[0])
    assert rows.targets[by[1][0]] != NO_ANSWER


def test_an_answer_that_fits_no_window_is_left_out_and_counted(bert):
    words = pieces(LONG)
    rows = span_rows(bert, [words[0], (words[0][0], words[-1][1])], context=LONG, max_length=24)
    assert rows.unreachable == 1
    assert set(rows.owners) == {0}
    with pytest.raises(DataError, match=r"No answer fits into a window of 24 tokens.*--max-length"):
        span_rows(bert, [(words[0][0], words[-1][1])], context=LONG, max_length=24)


def test_a_text_that_fits_is_one_window(bert):
    rows = span_rows(bert, pieces(CONTEXT))
    assert rows.owners == list(range(len(pieces(CONTEXT))))
    assert rows.by_example(len(rows)) == [[i] for i in range(len(rows))]


def test_the_error_for_a_question_over_the_limit_names_the_option(bert):
    with pytest.raises(InputError, match="--max-length"):
        span_rows(bert, [pieces(CONTEXT)[0]], question="the cat sat on the mat " * 3, max_length=8)


def test_only_rows_that_lost_their_end_count_as_cut(bert):
    texts = ["the cat", "the cat sat on", "the cat sat on a mat"]  # 4, 6 and 8 tokens with [CLS] and [SEP]
    rows = make_rows(bert, Examples(texts, None, [0, 1, 0]), kind="classification", max_length=6)
    assert [len(row) for row in rows.tokens] == [4, 6, 6]
    assert rows.cut == 1
    assert rows.targets == [0, 1, 0]
    assert rows.unreachable == 0


def test_examples_without_targets_become_rows(bert):
    for kind in ("classification", "span"):
        rows = make_rows(bert, Examples(["who", "why"], ["the cat", "a dog"]), kind=kind, max_length=16)
        assert rows.targets is None
        assert len(rows) == 2


def test_tokens_outside_the_context_can_never_be_an_answer(bert):
    row = span_rows(bert, [pieces(CONTEXT)[0]]).tokens[0]
    out = np.zeros((len(row), 2), dtype=np.float32)
    out[:4] = 100.0  # [CLS] and the question
    out[-1] = 100.0  # [SEP]
    start, end = answer_place(out, row)
    assert 0 <= start < end <= len(CONTEXT)


# --- cached tokens --------------------------------------------------------------------------------------------


def same(a, b):
    assert len(a) == len(b)
    assert a.owners == b.owners
    assert a.cut == b.cut
    for one, other in zip(a.tokens, b.tokens, strict=True):
        assert one.cut == other.cut
        for name in ("ids", "types", "offsets"):
            first, second = getattr(one, name), getattr(other, name)
            assert (first is None) == (second is None)
            if first is not None:
                assert first.dtype == second.dtype
                assert np.array_equal(first, second)


MANY = Examples([f"the cat {'sat ' * (i % 40)}{i}" for i in range(1000)], [LONG[: 5 + i % 200] for i in range(1000)])


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.mark.parametrize("kind", ["classification", "span"])
def test_cached_tokens_are_the_same_tokens(bert, kept, kind):
    options = {"kind": kind, "max_length": 60}
    new = make_rows(bert, MANY, **options)
    assert not kept.exists()
    first, second = (make_rows(bert, MANY, keep=True, **options) for _ in range(2))
    assert cache.usage()[0] == 1
    same(new, first)
    same(new, second)


def test_cached_examples_are_not_tokenised_again(bert, kept, monkeypatch):
    make_rows(bert, MANY, kind="classification", max_length=60, keep=True)
    monkeypatch.setattr("adapterbank.inference.rows.tokenize", None)
    seen = []
    make_rows(
        bert,
        MANY,
        kind="classification",
        max_length=60,
        keep=True,
        watch=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1000, 1000)]
    with pytest.raises(TypeError):  # another length is another entry
        make_rows(bert, MANY, kind="classification", max_length=50, keep=True)


def test_other_texts_tokenizers_lengths_and_strides_have_their_own_cache_entry(tiny, kept):
    one, other = tiny("bert"), tiny("roberta")
    moved = Examples([f"{text} " for text in MANY.texts], MANY.pairs)
    shifted = Examples([MANY.texts[0] + MANY.pairs[0], *MANY.texts[1:]], ["", *MANY.pairs[1:]])
    for backbone, examples, options in (
        (one, MANY, {"kind": "span", "max_length": 60}),
        (one, MANY, {"kind": "span", "max_length": 61}),
        (one, MANY, {"kind": "span", "max_length": 60, "stride": 8}),
        (one, MANY, {"kind": "classification", "max_length": 60}),
        (one, moved, {"kind": "span", "max_length": 60}),
        (one, shifted, {"kind": "span", "max_length": 60}),
        (other, MANY, {"kind": "span", "max_length": 60}),
    ):
        before = cache.usage()[0]
        make_rows(backbone, examples, keep=True, **options)
        assert cache.usage()[0] == before + 1


def test_a_cache_entry_of_another_format_is_ignored(bert, kept, monkeypatch):
    make_rows(bert, MANY, kind="classification", max_length=60, keep=True)
    monkeypatch.setattr("adapterbank.inference.rows.CACHE_FORMAT", 0)
    make_rows(bert, MANY, kind="classification", max_length=60, keep=True)
    assert cache.usage()[0] == 2


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_cache_entry_is_replaced(bert, kept, harm):
    options = {"kind": "span", "max_length": 60, "keep": True}
    new = make_rows(bert, MANY, **options)
    (file,) = kept.glob("*.npz")
    data = bytearray(file.read_bytes())
    if harm == "flipped":
        data[len(data) // 2] ^= 0xFF
    file.write_bytes({"cut": data[: len(data) // 3], "emptied": b"", "foreign": b"no archive"}.get(harm, bytes(data)))
    same(new, make_rows(bert, MANY, **options))
    assert cache.get(file.stem) is not None  # the entry is valid again


FORGED = {
    "length below zero": lambda known: known["lengths"].__setitem__(slice(0, 2), [-1, known["lengths"][:2].sum() + 1]),
    "length beyond the limit": lambda known: known["lengths"].__setitem__(slice(0, 2), [0, 10**6]),
    "token id": lambda known: known["ids"].__setitem__(3, 10**9),
    "negative token id": lambda known: known["ids"].__setitem__(3, -1),
    "type": lambda known: known["types"].__setitem__(3, -1),
    "owner": lambda known: known["owners"].__setitem__(3, 10**6),
    "order of owners": lambda known: known["owners"].__setitem__(0, 1),
    "last owner": lambda known: known["owners"].__setitem__(slice(-3, None), known["owners"][-1] - 3),
    "offset": lambda known: known["offsets"].__setitem__((3, 0), -7),
    "scalar": lambda known: known.update(lengths=np.array(7, np.int32)),
    "texts": lambda known: known.update(ids=known["ids"].astype(str)),
    "numbers": lambda known: known.update(ids=known["ids"].astype(float)),
    "levels": lambda known: known.update(cut=known["cut"][:, None]),
    "shape of offsets": lambda known: known.update(offsets=known["offsets"][:, :1]),
    "a row less": lambda known: known.update(cut=known["cut"][1:]),
    "nothing": lambda known: known.clear(),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_cache_entry_of_impossible_values_counts_as_absent(bert, kept, name):
    options = {"kind": "span", "max_length": 60, "keep": True}
    new = make_rows(bert, MANY, **options)
    (file,) = kept.glob("*.npz")
    known = cache.get(file.stem)
    FORGED[name](known)
    cache.put(file.stem, known)
    same(new, make_rows(bert, MANY, **options))


def test_few_rows_are_not_cached(bert, kept):
    make_rows(bert, Examples(["the cat"] * 999), kind="classification", max_length=60, keep=True)
    assert cache.usage() == (0, 0)
