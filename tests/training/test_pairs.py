"""Tests of `adapterbank.training.pairs`: which rows meet, what their pairs cost, and the gradient in parts."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from adapterbank.encoder.dropout import row_keys
from adapterbank.encoder.placed import place
from adapterbank.inference.rows import Rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.training.optimizer import AdamSettings
from adapterbank.training.pairs import (
    SlotEncoder,
    _gradients,
    batches,
    contrastive_loss,
    count_steps,
    pair_loss,
    train_pairs,
)
from small_data import reviews

TEXTS = [text for text, _ in reviews(12)]
CLASSES = [row % 2 for row in range(12)]
SETTINGS = AdamSettings(bias_correction=True)
PLAN = make_plan(Options("adapter", size=4), depth=3, head=Head("classification", 2))


@pytest.fixture
def slot(bert, new_slot):
    return lambda **options: SlotEncoder(
        place(bert, torch.device("cpu"), torch.float32), PLAN, new_slot(bert, PLAN, **options), SETTINGS
    )


def plain_loss(vectors, classes, rows):
    near, far = [], []
    for i in range(len(vectors)):
        for j in range(len(vectors)):
            cosine = float(vectors[i] @ vectors[j] / np.linalg.norm(vectors[i]) / np.linalg.norm(vectors[j]))
            if classes[i] != classes[j]:
                far.append(cosine**2)
            elif rows[i] != rows[j]:
                near.append((1 - cosine) ** 2)
    return (np.mean(near) if near else 0) / 2 + (np.mean(far) if far else 0) / 2


@pytest.mark.parametrize("classes", [[0, 0, 1, 1, 2, 0], [0, 1, 2, 3, 4, 0], [1, 1, 1, 1, 1, 1]])
def test_the_contrastive_loss_is_that_of_each_row_among_the_others(classes):
    vectors, rows = np.random.RandomState(0).randn(6, 5), np.array([0, 1, 2, 3, 4, 0])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = []
    for i in range(6):
        others = [j for j in range(6) if rows[j] != rows[i]]
        near = [j for j in others if classes[j] == classes[i]]
        whole = np.log(sum(np.exp(unit[i] @ unit[j] / 0.1) for j in others))
        found += [np.mean([whole - unit[i] @ unit[j] / 0.1 for j in near])] if near else []
    loss = contrastive_loss(torch.from_numpy(vectors).requires_grad_(), np.array(classes), rows)
    assert loss.item() == pytest.approx(np.mean(found) if found else 0)
    loss.backward()


@pytest.mark.parametrize("classes", [[0, 0, 1, 1, 2, 0], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 0]])
def test_the_loss_is_that_of_every_two_rows(classes):
    vectors, rows = np.random.RandomState(0).randn(6, 5), np.array([0, 1, 2, 3, 4, 0])
    found = pair_loss(torch.from_numpy(vectors), np.array(classes), rows)
    assert found.item() == pytest.approx(plain_loss(vectors, classes, rows))


def test_a_batch_has_as_many_rows_of_each_of_its_classes_and_every_row_has_its_turn():
    classes = [one for one in range(20) for _ in range(5)]
    seen = Counter()
    for batch in islice(batches(classes, 32, seed=3), 25):  # 800 places for 100 rows
        of_a_class = Counter(classes[row] for row in batch)
        assert len(of_a_class) == 8
        assert set(of_a_class.values()) == {4}
        seen.update(batch.tolist())
    assert len(seen) == 100
    assert set(seen.values()) <= {6, 7, 8, 9, 10}


def test_batches_follow_from_the_seed_and_hold_classes_of_one_row():
    first, again, other = (list(islice(batches([0, 0, 0, 1, 2], 8, seed), 4)) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
    assert {row for batch in first for row in batch.tolist()} == {0, 1, 2, 3, 4}


def test_steps_grow_with_rows_and_not_with_their_square():
    assert count_steps(4, 32) == count_steps(16, 32) == 30
    assert count_steps(10_000, 32) == pytest.approx(2 * count_steps(5_000, 32), abs=2)


def test_vectors_are_the_mean_hidden_states_at_length_one(bert, slot, new_slot):
    frozen = SlotEncoder(
        place(bert, torch.device("cpu"), torch.float32), PLAN, new_slot(bert, PLAN, sigma=0.0), SETTINGS
    )
    assert np.linalg.norm(frozen.vectors(bert.tokenize(TEXTS)), axis=1) == pytest.approx(1)
    plan = make_plan(Options("feature"), depth=3, head=Head("classification", 2))
    bare = SlotEncoder(place(bert, torch.device("cpu"), torch.float32), plan, new_slot(bert, plan), SETTINGS)
    means = np.stack([hidden.mean(0) for hidden in bert.encode(TEXTS)])
    np.testing.assert_allclose(
        bare.vectors(bert.tokenize(TEXTS)), means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-5
    )


@pytest.mark.parametrize("loss_of", [pair_loss, contrastive_loss])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(bert, slot, loss_of):
    tokens, rows = bert.tokenize([*TEXTS, "the cat"]), np.arange(13)
    classes, keys = np.array([*CLASSES, 0]), row_keys(0, 3, torch.arange(13))
    found = []
    for limit in (10**6, 30):
        one = slot()
        one.adam.zero_grad()
        loss = _gradients(one, tokens, keys, rows, classes, limit, loss_of)
        found.append((loss, torch.cat([part.flatten() for part in one.adam.gradients.values()])))
    (loss, whole), (loss_in_parts, parts) = found
    assert loss == pytest.approx(loss_in_parts, rel=1e-5)
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_training_brings_rows_of_a_class_together_and_the_same_seed_the_same_weights(bert, slot):
    tokens, told = bert.tokenize(TEXTS), []
    results = []
    for _ in range(2):
        one = slot()
        before = one.vectors(tokens)
        steps = train_pairs(
            one,
            Rows(tokens, list(CLASSES)),
            rate=1e-2,
            batch=8,
            warmup=0.1,
            seed=0,
            watch=lambda *now: told.append(now),
        )
        results.append(one.vectors(tokens))
    assert (results[0] == results[1]).all()
    assert [now[:2] for now in told[:steps]] == [(step, steps) for step in range(1, steps + 1)]
    rows = np.arange(len(TEXTS))
    assert plain_loss(results[0], CLASSES, rows) < plain_loss(before, CLASSES, rows) / 2
