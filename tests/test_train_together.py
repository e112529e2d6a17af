"""Runs beside runs: the same seed gives the same numbers, alone, in company, and in a queue."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from adapterbank import train as training
from adapterbank.eager import Eager
from adapterbank.encoder import prefix as prefixes
from adapterbank.methods import Options
from adapterbank.optimizer import Settings
from lessons import assert_close, assert_same_bits, learn, lesson_on, moved, scores

# --- the same again ---


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_the_same_seed_gives_the_same_bits_twice(family, tiny, new_slot):
    backbone = tiny(family)
    assert backbone.anatomy.dropout == backbone.anatomy.attention_dropout == 0.1
    lesson = lesson_on(backbone, new_slot)
    (a,), (b,) = learn(backbone, lesson), learn(backbone, lesson)
    assert_same_bits(a, b)
    assert moved(a, lesson) > 1e-4


def test_another_seed_gives_other_numbers(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    (a,), (b,) = learn(bert, lesson), learn(bert, dataclasses.replace(lesson, seed=1))
    assert scores(a) != scores(b)


def test_the_state_of_torchs_own_generator_changes_nothing(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (a,) = learn(bert, lesson)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    (b,) = learn(bert, lesson)
    assert_same_bits(a, b)


def test_dropout_is_on_unless_it_is_switched_off(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    (own,), (named,), (off,) = (learn(bert, lesson, dropout=rate) for rate in (None, 0.1, 0.0))
    assert_same_bits(own, named)
    assert scores(own) != scores(off)


def test_every_step_draws_other_masks(bert, new_slot):
    """One row, and a rate at which its weights all but stand still: only dropout can change its loss."""
    lesson = lesson_on(bert, new_slot, rows=1, batch=1, rate=1e-12, epochs=4)
    (on,), (off,) = learn(bert, lesson), learn(bert, lesson, dropout=0.0)
    losses = [epoch["loss"] for epoch in on.history]
    assert all(abs(a - b) > 1e-4 for a, b in itertools.combinations(losses, 2))
    assert [epoch["loss"] for epoch in off.history] == pytest.approx([off.history[0]["loss"]] * 4, abs=1e-6)


# --- beside others ---


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_a_run_beside_others_is_the_run_alone(family, tiny, new_slot):
    backbone = tiny(family)
    lessons = [
        lesson_on(backbone, new_slot, Options(size=4), seed=0, rate=1e-3, epochs=2),
        lesson_on(
            backbone, new_slot, Options(size=7, activation="relu"), seed=5, rate=3e-3, epochs=3, batch=4, rows=13
        ),
        lesson_on(backbone, new_slot, Options(method="layernorm"), seed=9, rate=1e-3, epochs=1, batch=9),
        lesson_on(backbone, new_slot, Options(size=3), seed=2, settings=Settings(bias_correction=True, clip=0.1)),
    ]
    together = learn(backbone, *lessons)
    for lesson, state in zip(lessons, together, strict=True):
        (alone,) = learn(backbone, lesson)
        assert state.step == alone.step == lesson.epochs * -(-len(lesson.train) // lesson.batch)
        assert moved(alone, lesson) > 1e-3
        assert_close(state, alone)


@pytest.mark.parametrize("order", list(itertools.permutations(["full", "adapter", "other full"])))
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_run_that_trains_the_whole_encoder_may_stand_anywhere_beside_others(family, order, tiny, new_slot):
    backbone = tiny(family)
    lessons = {
        "full": lesson_on(backbone, new_slot, Options(method="full"), seed=1, epochs=1, rate=1e-4),
        "other full": lesson_on(backbone, new_slot, Options(method="full"), seed=2, epochs=1, rate=1e-4),
        "adapter": lesson_on(backbone, new_slot, Options(size=4), seed=3, epochs=1),
    }
    together = learn(backbone, *(lessons[name] for name in order))
    for name, state in zip(order, together, strict=True):
        assert_close(state, learn(backbone, lessons[name])[0])


@pytest.mark.parametrize("method", ["full", "top"])
def test_rows_of_a_slot_that_changes_whole_layers_are_never_packed_with_anothers(method, bert, new_slot, monkeypatch):
    packed = []
    original = Eager._losses
    monkeypatch.setattr(Eager, "_losses", lambda self, *given: packed.append(given[-1]) or original(self, *given))
    options = Options(method=method, top=3)
    lessons = [
        lesson_on(bert, new_slot, o, seed=k, epochs=1) for k, o in enumerate((options, Options(size=4), options))
    ]
    learn(bert, *lessons)
    assert len(packed) == 12
    assert all(len({k for k, _ in part}) == 1 for part in packed)


def test_runs_that_start_at_different_layers_are_taught_apart_and_come_out_as_alone(bert, new_slot):
    lessons = [
        lesson_on(bert, new_slot, Options(layers=layers), seed=k) for k, layers in enumerate(("all", "2", "all"))
    ]
    for state, lesson in zip(learn(bert, *lessons), lessons, strict=True):
        assert_close(state, learn(bert, lesson)[0])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_run_that_ends_makes_room_for_the_next_and_none_notices(at_once, bert, new_slot):
    """Sizes of other classes, other labels, other numbers of epochs: entries are freed and taken again."""
    lessons = [
        lesson_on(bert, new_slot, Options(size=size), seed=k, epochs=epochs, rate=rate)
        for k, (size, epochs, rate) in enumerate(
            [(4, 1, 1e-2), (9, 3, 1e-3), (4, 2, 3e-3), (3, 1, 1e-3), (16, 2, 1e-2)]
        )
    ]
    together = learn(bert, *lessons, at_once=at_once)
    for state, lesson in zip(together, lessons, strict=True):
        assert state.epoch == lesson.epochs
        assert_close(state, learn(bert, lesson)[0])


@pytest.mark.parametrize("options", [Options(method="feature"), Options(method="top", top=1), Options(layers="2")])
def test_frozen_lower_layers_run_once_per_row_however_many_epochs_and_runs(options, bert, new_slot, monkeypatch):
    lessons = [lesson_on(bert, new_slot, options, seed=k, epochs=3) for k in range(2)]
    lessons[1] = dataclasses.replace(lessons[1], train=lessons[0].train, dev=lessons[0].dev)
    expected = [learn(bert, lesson)[0] for lesson in lessons]
    rows, original = [], prefixes.lower
    monkeypatch.setattr(
        prefixes, "lower", lambda a, s, batch, first: rows.append(len(batch.lengths)) or original(a, s, batch, first)
    )
    found = learn(bert, *lessons)
    assert sum(rows) <= 2 * len(lessons[0].train) + len(lessons[0].dev)  # a mixed batch may meet a row twice
    assert sum(rows) >= len(lessons[0].train)
    for state, alone in zip(found, expected, strict=True):
        assert_close(state, alone)


@pytest.mark.parametrize("budget", [{"memory": 0}, {"memory": 0, "disk": 0}])
def test_a_prefix_in_a_mapped_file_or_none_at_all_gives_the_same(budget, bert, new_slot, monkeypatch):
    lesson = lesson_on(bert, new_slot, Options(method="top", top=1), epochs=2)
    (expected,) = learn(bert, lesson)
    original = training.Prefixes
    monkeypatch.setattr(training, "Prefixes", lambda anatomy, frozen: original(anatomy, frozen, **budget))
    assert_close(learn(bert, lesson)[0], expected)
