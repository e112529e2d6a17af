"""Claims about `adapterbank.slots.mixture`: names of copies, their mean, a step's draws and slots."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from adapterbank.methods import Options
from adapterbank.slots.mixture import Mixture
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import Stacks

HEAD = Head("classification", 2)
DOWN, UP = (f"layers.1.attention.adapter.{module}.weight" for module in ("down", "up"))
OPTIONS = [Options(size=3), Options("lora", rank=3), Options("ia3")]


def mixture(copies=4, options=OPTIONS[0], layers=3):
    return Mixture(make_plan(options, depth=layers, head=HEAD), copies)


@pytest.fixture
def tensors(bert, new_slot):
    return lambda mix, seed=0: new_slot(bert, mix.whole, seed=seed)


def test_a_mixture_of_one_copy_is_the_plan_itself():
    alone = mixture(1)
    given = {DOWN: torch.ones(3, 32)}
    assert (alone.whole, alone.passes, alone.copies_of(DOWN)) == (alone.plan, 1, [DOWN])
    assert alone.merge(given) is given
    with alone.slots(Stacks({"x": torch.zeros(1)}), 7, seed=1, step=2) as slots:
        assert slots == (7,)


def test_the_copies_of_a_tensor_have_names_of_their_own_and_shared_tensors_do_not():
    assert mixture(3).copies_of(DOWN) == [DOWN, *(DOWN.replace("adapter", f"adapter-{k}") for k in (2, 3))]
    for shared in ("head.weight", "layers.1.attention.norm.weight"):
        assert mixture(3).copies_of(shared) == [shared]


def test_two_additions_of_one_type_keep_their_copies_apart():
    plan = mixture().plan
    both = Mixture(type(plan)(plan.method, plan.head, plan.additions * 2, plan.trains), 2)
    second = DOWN.replace("adapter", "adapter-2")
    assert both.copies_of(DOWN) == [DOWN, DOWN.replace("adapter", "adapter-3")]
    assert both.copies_of(second) == [second, DOWN.replace("adapter", "adapter-4")]
    assert both.names([DOWN, second, DOWN.replace("adapter", "adapter-3"), "head.bias"]) == [DOWN, second, "head.bias"]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.method)
def test_the_merged_tensors_are_those_of_a_plain_plan_and_the_mean_of_the_copies(options, tensors, bert, new_slot):
    mix = mixture(3, options)
    given = tensors(mix)
    merged = mix.merge(given)
    plain = new_slot(bert, mix.plan)
    assert {name: t.shape for name, t in merged.items()} == {name: t.shape for name, t in plain.items()}
    for name, tensor in merged.items():
        if mix.plan.split(name) is None:
            assert tensor is given[name]
        else:
            expected = sum(given[own].double() for own in mix.copies_of(name)) / 3
            torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
            assert not torch.equal(tensor, given[name])


def test_spread_tensors_are_in_every_copy_and_their_mean_is_they_themselves(bert, new_slot, tensors):
    mix = mixture(4)
    given = new_slot(bert, mix.plan)
    spread = mix.spread(given)
    assert spread.keys() == tensors(mix).keys()
    for name, tensor in mix.merge(spread).items():
        assert torch.equal(tensor, given[name])


# --- the draws


NAMES = [f"layers.{i}.{site}.adapter.{module}.{leaf}"
         for i in range(3) for site in ("attention", "feedforward")
         for module in ("down", "up") for leaf in ("weight", "bias")]  # fmt: skip


def drawn(mix, seed, step, names=NAMES):
    """Return the number of the copy of each name, for each pass."""
    return [
        {name: mix.copies_of(name).index(own) for name, own in chosen.items()} for chosen in mix.draw(names, seed, step)
    ]


def test_the_draws_follow_from_seed_step_and_site_alone():
    mix = mixture()
    assert drawn(mix, 5, 9) == drawn(mix, 5, 9)
    some = NAMES[8:14]
    assert drawn(mix, 5, 9, some) == [{name: each[name] for name in some} for each in drawn(mix, 5, 9)]
    assert len({str(drawn(mix, seed, step)) for seed in (5, 6) for step in (9, 10)}) == 4


def test_draws_are_the_same_with_every_release():
    found = ["".join(str(number) for number in each.values()) for each in drawn(mixture(), 0, 0, NAMES[::2])]
    assert found == ["102333020232", "100322211102"]


def test_weight_and_bias_of_a_module_are_drawn_together_and_shared_tensors_are_their_own():
    for chosen in drawn(mixture(), 0, 3):
        assert all(chosen[name] == chosen[name.replace(".weight", ".bias")] for name in NAMES)
    for chosen in mixture().draw(["head.weight", "layers.0.attention.norm.bias"], 0, 3):
        assert all(name == own for name, own in chosen.items())


def test_all_pairs_of_copies_are_drawn_about_as_often():
    """Between passes, between down and up, and between sites: 16 pairs, each expected 100 times of 1600."""
    mix, pairs = mixture(), {"passes": Counter(), "modules": Counter(), "sites": Counter()}
    other = DOWN.replace("attention", "feedforward")
    for step in range(1600):
        first, second = drawn(mix, 1, step, [DOWN, UP, other])
        pairs["passes"][first[DOWN], second[DOWN]] += 1
        pairs["modules"][first[DOWN], first[UP]] += 1
        pairs["sites"][first[DOWN], first[other]] += 1
    for counts in pairs.values():
        assert len(counts) == 16
        assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 37.7  # chi-squared, 15 degrees, 1 in 1000


# --- the slots of a step


def test_a_view_has_the_tensors_of_its_copies_and_gives_no_row_back(tensors, bert):
    mix = mixture(3)
    given = tensors(mix)
    stacks = Stacks(bert.tensors)
    slot = stacks.put(mix.whole, given)
    stacks.require_gradients(torch.float32)
    names = mix.names(given)
    with mix.slots(stacks, slot, seed=2, step=4) as views:
        for view, chosen in zip(views, mix.draw(names, 2, 4), strict=True):
            seen = stacks.slot(view)
            assert (seen.plan, set(seen.places)) == (mix.plan, set(names))
            for name, own in chosen.items():
                block, row = seen.places[name]
                shown = block.views[seen.stored.get(name, name)][row][tuple(slice(n) for n in given[own].shape)]
                assert torch.equal(shown, given[own])
                assert (block, row) == stacks.slot(slot).places[own]
    assert stacks.numbers == [slot]
    another = stacks.put(mix.whole, tensors(mix, seed=1))
    for name, tensor in stacks.take(slot).items():
        assert torch.equal(tensor, given[name])
    assert stacks.slot(another).rows != stacks.slot(slot).rows
