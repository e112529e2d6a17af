"""A split is seeded and stratified, keeps equal texts together, and leaves a row of every label in training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.errors import DataError, InputError
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.splitting import split

CLASSES = Task("t", "classification", ("text",), "label", ("neg", "pos"), "accuracy")
MANY = Task("m", "multilabel", ("text",), "label", ("x", "y", "z"), "micro_f1")
NUMBER = Task("n", "regression", ("text",), "label", (), "spearman")


def examples_of(targets: list[Any]) -> Examples:
    """Examples whose texts are their row numbers."""
    return Examples([str(row) for row in range(len(targets))], None, targets)


def test_a_split_uses_every_row_once_and_repeats_for_its_seed() -> None:
    whole = examples_of([n % 2 for n in range(100)])
    train, dev = split(whole, task=CLASSES, fraction=0.2, seed=3)
    assert sorted(train.texts + dev.texts) == sorted(whole.texts)
    assert Counter(dev.targets or []) == {0: 10, 1: 10}
    assert split(whole, task=CLASSES, fraction=0.2, seed=3) == (train, dev)
    assert split(whole, task=CLASSES, fraction=0.2, seed=4) != (train, dev)


def test_the_rows_chosen_for_a_seed_never_change() -> None:
    _, dev = split(examples_of([0] * 6 + [1] * 6), task=CLASSES, fraction=0.34, seed=0)
    assert dev.texts == ["2", "4", "6", "11"]


def test_which_rare_classes_reach_dev_is_random() -> None:
    task = Task("t", "classification", ("text",), "label", tuple("abcdefghij"), "accuracy")
    whole = examples_of([n // 2 for n in range(20)])
    seen = {place for seed in range(30) for place in split(whole, task=task, seed=seed)[1].targets or []}
    assert seen == set(range(10))


def test_very_many_small_classes_are_split_like_few() -> None:
    task = Task("many", "classification", ("text",), "label", tuple(map(str, range(30_000))), "accuracy")
    train, dev = split(examples_of([label for label in range(30_000) for _ in range(3)]), task=task, fraction=0.3)
    assert (len(train), len(dev)) == (63_000, 27_000)
    assert set(Counter(dev.targets).values()) == {1}


def test_too_few_rows_and_wrong_shares_are_refused() -> None:
    with pytest.raises(DataError, match="There are 1 rows; splitting off dev rows needs 2 or more"):
        split(examples_of([0]), task=CLASSES)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="must be between 0 and 1"):
            split(examples_of([0, 1]), task=CLASSES, fraction=fraction)


def test_kinds_without_a_single_label_and_rows_without_targets_are_not_stratified() -> None:
    for task, rows_ in (
        (NUMBER, examples_of([0.5] * 10)),
        (MANY, examples_of([(0,)] * 10)),
        (CLASSES, Examples(list("abcdefghij"))),
    ):
        train, dev = split(rows_, task=task, fraction=0.3)
        assert (len(train), len(dev)) == (7, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_every_class_of_two_rows_stays_in_training(targets: list[int], fraction: float, seed: int) -> None:
    task = Task("t", "classification", ("text",), "label", tuple("abcdef"), "accuracy")
    train, dev = split(examples_of(targets), task=task, fraction=fraction, seed=seed)
    assert min(len(train), len(dev)) > 0
    assert sorted(map(int, train.texts + dev.texts)) == list(range(len(targets)))
    assert {place for place, count in Counter(targets).items() if count > 1} <= set(train.targets or [])
    assert len(dev) <= max(1, round(len(targets) * fraction))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 9),
)
def test_equal_texts_stay_on_one_side(rows: list[tuple[int, int]], fraction: float, seed: int) -> None:
    task = Task("t", "classification", ("text",), "label", tuple("abcd"), "accuracy")
    whole = Examples([str(text) for text, _ in rows], None, [label for _, label in rows])
    if len(set(whole.texts)) == 1:
        with pytest.raises(DataError, match="All rows have the same text"):
            split(whole, task=task, fraction=fraction, seed=seed)
        return
    train, dev = split(whole, task=task, fraction=fraction, seed=seed)
    assert min(len(train), len(dev)) > 0
    assert not set(train.texts) & set(dev.texts)
    assert sorted(zip(train.texts + dev.texts, train.targets + dev.targets, strict=True)) == sorted(
        zip(whole.texts, whole.targets or [], strict=True)
    )
    assert split(whole, task=task, fraction=fraction, seed=seed) == (train, dev)


def test_pairs_are_equal_only_if_both_texts_are() -> None:
    whole = Examples(["a"] * 20, [str(n // 2) for n in range(20)], [n % 2 for n in range(20)])
    train, dev = split(whole, task=CLASSES, fraction=0.2)
    assert len(dev) == 4
    assert not set(train.pairs or []) & set(dev.pairs or [])


def test_the_only_row_of_a_label_is_not_held_out() -> None:
    for seed in range(20):
        targets = [(0,)] * 9 + [(0, 2)]
        assert (0, 2) in (split(examples_of(targets), task=MANY, fraction=0.5, seed=seed)[0].targets or [])
        train, dev = split(examples_of([0] * 9 + [1]), task=CLASSES, fraction=0.5, seed=seed)
        assert 1 in (train.targets or [])
        assert len(dev) == 5


def test_a_text_with_two_labels_is_not_held_out_if_it_has_the_last_row_of_one() -> None:
    whole = Examples([*map(str, range(8)), "same", "same"], None, [0] * 9 + [1])
    for seed in range(20):
        assert set(split(whole, task=CLASSES, fraction=0.5, seed=seed)[0].targets or []) == {0, 1}


def test_a_text_that_is_most_of_the_data_stays_in_training() -> None:
    whole = Examples(["often"] * 50 + [str(n) for n in range(50)], None, [n % 2 for n in range(100)])
    for seed in range(10):
        train, dev = split(whole, task=CLASSES, seed=seed)
        assert "often" in train.texts
        assert len(dev) == 10
