"""Stacks: what is put in comes out, padding is exact, and a row's slot is the only one that it feels."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import forward
from adapterbank.encoder.packed import pack
from adapterbank.evaluate import outputs, segments
from adapterbank.methods import Head, Options, make_plan
from adapterbank.slots import bottleneck, heads
from adapterbank.slots.route import Route
from adapterbank.slots.stack import Stacks
from families import FAMILIES

TEXTS = [
    "the cat sat",
    "a big red fox jumps over the lazy dog",
    "why",
    "who ran in the house? the small dog was bad.",
    "is it a good film",
    "what",
    "the the the a a a on in mat house",
]
HIDDEN = 8
FROZEN = {"embeddings.word.weight": torch.zeros(4, HIDDEN)}
"""Enough of an encoder for stacks that no pass is made over."""


def adapter_plan(size, **options):
    return make_plan(Options(size=size, train_norms=False, **options), depth=2, head=Head("classification", 2))


def adapter_tensors(plan, seed=0, sigma=0.5):
    generator = torch.Generator().manual_seed(seed)
    made = bottleneck.initial(plan.adapter, HIDDEN, sigma, generator) | heads.initial(plan.head, HIDDEN, generator)
    return {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in made.items()}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        assert torch.equal(found[name], expected[name]), name


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 65), depth=st.integers(1, 3), inner_norm=st.booleans(), seed=st.integers(0, 99))
def test_what_is_put_in_comes_out_at_its_true_size(size, depth, inner_norm, seed):
    plan = adapter_plan(size, depth=depth, inner_norm=inner_norm)
    tensors = adapter_tensors(plan, seed)
    stacks = Stacks(FROZEN)
    slot = stacks.put(plan, tensors)
    assert_same(stacks.take(slot), tensors)
    assert stacks.plan(slot) == plan


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(1, 65), min_size=2, max_size=9), data=st.data())
def test_any_puts_and_removes_leave_every_resident_slot_as_it_was_put(sizes, data):
    stacks, held = Stacks(FROZEN), {}
    for seed, size in enumerate(sizes):
        plan = adapter_plan(size)
        tensors = adapter_tensors(plan, seed)
        held[stacks.put(plan, tensors)] = tensors
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            stacks.remove(gone)
            del held[gone]
    assert len(stacks) == len(held)
    for slot, tensors in held.items():
        assert_same(stacks.take(slot), tensors)


@pytest.mark.parametrize("size", range(1, 66))
def test_padding_to_the_size_class_is_exact_but_for_rounding(size):
    for options in (
        {},
        {"depth": 3, "inner_norm": True, "activation": "silu"},
        {"placement": "parallel", "combine": "multiply", "activation": "tanh"},
    ):
        plan = adapter_plan(size, **options)
        tensors = adapter_tensors(plan, sigma=0.2)
        stacks = Stacks(FROZEN)
        route = Route(stacks, segments([(stacks.put(plan, tensors), 6)]))
        torch.manual_seed(size)
        y, x = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
        for site in ("layers.0.attention", "layers.1.feedforward"):
            parts = {name.removeprefix(f"{site}.adapter."): t for name, t in tensors.items() if name.startswith(site)}
            expected = bottleneck.bottleneck(y, x, plan.adapter, parts)
            torch.testing.assert_close(route.add(y, x, site), expected, atol=1e-6, rtol=1e-6)


def test_a_size_class_is_the_next_power_of_two():
    name = "layers.0.attention.adapter.down.weight"
    for size in range(1, 66):
        stacks = Stacks(FROZEN)
        stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size)))
        ((_, shape, _),) = [key for key in stacks.trainable() if key[0] == name]
        wide = shape[0]
        assert wide >= size > wide // 2
        assert wide & (wide - 1) == 0


def test_one_wide_task_does_not_widen_a_thousand_narrow_ones():
    stacks = Stacks(FROZEN)
    for size in (2, 2, 2, 64):
        stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size)))
    shapes = {
        key: len(tensor)
        for key, tensor in stacks.trainable().items()
        if key[0].endswith("0.attention.adapter.up.weight")
    }
    assert {shape: count for (_, shape, _), count in shapes.items()} == {(HIDDEN, 2): 3, (HIDDEN, 64): 1}


def test_many_slots_lie_in_several_stacks_and_share_a_pass_as_if_in_one():
    stacks, held = Stacks(FROZEN), []
    for k in range(150):
        plan = adapter_plan(3)
        held.append((plan, adapter_tensors(plan, k)))
        assert stacks.put(*held[-1]) == k
    stacked = [k for k in stacks.trainable() if k[0] == "layers.0.attention.adapter.up.weight"]
    assert [len(stacks.owners(key)) for key in stacked] == [64, 64, 22]
    chosen = [0, 63, 64, 127, 128, 149]
    y = torch.linspace(-1, 1, 18 * HIDDEN).view(18, HIDDEN)
    together = Route(stacks, segments([(k, 3) for k in chosen])).add(y, y.flip(0), "layers.0.attention")
    for k, mine, x in zip(chosen, together.split(3), y.flip(0).split(3), strict=True):
        alone = Stacks(FROZEN)
        part = y[3 * chosen.index(k) : 3 * chosen.index(k) + 3]
        found = Route(alone, segments([(alone.put(*held[k]), 3)])).add(part, x, "layers.0.attention")
        torch.testing.assert_close(mine, found, atol=1e-6, rtol=1e-6)


def run(stacks, slot, site="layers.0.attention"):
    y = torch.linspace(-1, 1, 3 * HIDDEN).view(3, HIDDEN)
    return Route(stacks, segments([(slot, 3)])).add(y, y.flip(0), site)


@pytest.mark.parametrize("left", [float("nan"), 1e3])
def test_a_freed_place_is_used_again_and_nothing_of_the_old_slot_is_left_in_it(left):
    stacks = Stacks(FROZEN)
    kept = stacks.put(adapter_plan(8), adapter_tensors(adapter_plan(8), 1))
    old = stacks.put(
        adapter_plan(8), {n: torch.full_like(t, left) for n, t in adapter_tensors(adapter_plan(8)).items()}
    )
    stacks.remove(old)
    plan, tensors = adapter_plan(5), adapter_tensors(adapter_plan(5), 2)
    new = stacks.put(plan, tensors)
    assert new != old
    key = ("layers.0.attention.adapter.down.weight", (8, HIDDEN), 0)
    assert stacks.owners(key) == [kept, new]
    fresh = Stacks(FROZEN)
    assert torch.equal(run(stacks, new), run(fresh, fresh.put(plan, tensors)))
    assert_same(stacks.take(new), tensors)
    padded = stacks.trainable()[key][1]
    assert not padded[5:].any()


def test_a_removed_slot_can_be_asked_for_nothing():
    stacks = Stacks(FROZEN)
    slot = stacks.put(adapter_plan(4), adapter_tensors(adapter_plan(4)))
    stacks.remove(slot)
    assert len(stacks) == 0
    for ask in (stacks.take, stacks.plan, stacks.remove):
        with pytest.raises(KeyError):
            ask(slot)


def test_many_slots_in_one_class_keep_their_own_numbers():
    stacks = Stacks(FROZEN)
    held = {}
    for seed in range(9):
        plan = adapter_plan(5 + seed % 4)
        tensors = adapter_tensors(plan, seed)
        held[stacks.put(plan, tensors)] = tensors
    for slot, tensors in held.items():
        assert_same(stacks.take(slot), tensors)


def test_put_copies_so_that_a_later_change_of_what_was_given_changes_nothing():
    stacks, tensors = Stacks(FROZEN), adapter_tensors(adapter_plan(4))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    slot = stacks.put(adapter_plan(4), tensors)
    for tensor in tensors.values():
        tensor.fill_(9.0)
    taken = stacks.take(slot)
    assert_same(taken, before)
    for tensor in taken.values():
        tensor.fill_(9.0)
    assert_same(stacks.take(slot), before)


@pytest.mark.parametrize("trainable", [False, True])
def test_write_changes_one_slot_in_place_and_no_other(trainable):
    stacks = Stacks(FROZEN)
    a, b = (stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size), size)) for size in (5, 7))
    before = stacks.take(b)
    leaves = stacks.trainable() if trainable else None
    other = adapter_tensors(adapter_plan(5), 99)
    stacks.write(a, other)
    assert_same(stacks.take(a), other)
    assert_same(stacks.take(b), before)
    if leaves is not None:
        key = ("head.bias", (2,), 0)
        assert torch.equal(leaves[key][stacks.owners(key).index(a)], other["head.bias"])
    part = {"head.bias": torch.tensor([3.0, 4.0])}
    stacks.write(a, part)
    assert_same(stacks.take(a), {**other, **part})


def test_tensors_stacked_alike_are_written_and_taken_like_the_slots_own():
    stacks = Stacks(FROZEN)
    slots = [stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size), size)) for size in (5, 7)]
    moments = {key: torch.zeros_like(tensor) for key, tensor in stacks.trainable().items()}
    mine = adapter_tensors(adapter_plan(7), 5)
    stacks.write(slots[1], mine, moments)
    assert_same(stacks.take(slots[1], moments), mine)
    assert not any(tensor.any() for tensor in stacks.take(slots[0], moments).values())
    assert_same(stacks.take(slots[1]), adapter_tensors(adapter_plan(7), 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_kept_in_the_type_that_was_asked_for_but_heads_in_float32(dtype):
    stacks, tensors = Stacks(FROZEN, dtype=dtype), adapter_tensors(adapter_plan(4))
    taken = stacks.take(stacks.put(adapter_plan(4), tensors))
    kept = {name: t if name.startswith("head.") else t.to(dtype).float() for name, t in tensors.items()}
    assert_same(taken, kept)


def kinds_of_slots(backbone):
    """Give plans that differ in all that a plan may differ in."""
    anatomy = backbone.anatomy
    pooler = "pooler" if backbone.has_pooler else "first"
    wanted = [
        (Options(size=3), Head("classification", 2, "mean")),
        (Options(size=4, activation="silu"), Head("classification", 7, "first")),
        (
            Options(size=8, activation="relu", placement="parallel", combine="multiply", depth=2, inner_norm=True),
            Head("classification", 5, pooler),
        ),
        (
            Options(size=33, activation="tanh", layers="1-2", sites="feedforward", train_norms=False),
            Head("regression", 1, "mean", shift=2.0, scale=1.5),
        ),
        (Options(size=1, sites="attention", activation="gelu"), Head("span", 2)),
        (Options(method="layernorm"), Head("multilabel", 4, "mean")),
        (Options(method="feature"), Head("classification", 3, pooler, hidden=6)),
        (Options(method="feature"), Head("span", 2)),
        (Options(method="full"), Head("classification", 2, pooler)),
        (Options(method="full"), Head("regression", 1, "first")),
    ]
    if not anatomy.shared_layers:
        wanted.append((Options(method="top", top=1), Head("classification", 3, pooler)))
        wanted.append((Options(method="layernorm", layers="2"), Head("classification", 2, "first")))
    return [
        make_plan(options, depth=anatomy.layers, head=head, shared_layers=anatomy.shared_layers)
        for options, head in wanted
    ]


def one_row_alone(backbone, plan, tensors, row):
    """Send one row through the pass with no other slot, or no slot, in sight."""
    stacks = Stacks(backbone.tensors)
    slot = None if plan is None else stacks.put(plan, tensors)
    route, batch = Route(stacks, segments([(slot, len(row))])), pack([row])
    with torch.no_grad():
        (found,) = heads.outputs(forward(backbone.anatomy, route, batch), batch, route)
    return found if plan is not None and plan.head.kind == "span" else found[0]


@pytest.fixture(scope="module")
def crowd(tiny, new_slot):
    """Give a family's stacks with one slot of each kind, and rows of every slot with what each gives alone."""
    made = {}

    def get(family):
        if family not in made:
            backbone = tiny(family)
            stacks, requests = Stacks(backbone.tensors), []
            rows = backbone.tokenize(TEXTS)
            plans = [*kinds_of_slots(backbone), None]
            for seed, plan in enumerate(plans):
                tensors = None if plan is None else new_slot(backbone, plan, seed=seed)
                slot = None if plan is None else stacks.put(plan, tensors)
                for row in (rows[(seed + k) % len(rows)] for k in (0, 2, 5)):
                    requests.append((slot, row, one_row_alone(backbone, plan, tensors, row).numpy()))
            made[family] = backbone, stacks, requests
        return made[family]

    return get


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_in_any_order_gives_each_row_what_its_task_gives_alone(family, seed, crowd):
    backbone, stacks, requests = crowd(family)
    mixed = requests * 2
    random.Random(seed).shuffle(mixed)
    tokens, slots = [row for _, row, _ in mixed], [slot for slot, _, _ in mixed]
    found = outputs(backbone.anatomy, stacks, tokens, slots, torch.float32)
    for (slot, _, expected), mine in zip(mixed, found, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5, rtol=1e-5, err_msg=f"slot {slot}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_may_hold_slots_of_every_method_in_segments_of_any_order(family, seed, crowd):
    backbone, stacks, requests = crowd(family)
    mixed = list(requests)
    if family == "mpnet":  # rows that bring their own table of distances are a batch of their own
        full = {slot for slot, _, _ in mixed if slot is not None and stacks.plan(slot).method == "full"}
        mixed = [request for request in mixed if request[0] not in full]
    random.Random(seed).shuffle(mixed)
    batch = pack([row for _, row, _ in mixed])
    route = Route(stacks, segments([(slot, len(row)) for slot, row, _ in mixed]))
    with torch.no_grad():
        given_ = heads.outputs(forward(backbone.anatomy, route, batch), batch, route)
    waiting = iter(mixed)
    for segment, out in zip(route.segments, given_, strict=True):
        mine = list(itertools.islice(waiting, segment.rows))
        expected = np.concatenate([np.atleast_2d(alone) for _, _, alone in mine])
        np.testing.assert_allclose(out.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_rows_with_different_tables_of_distances_cannot_share_a_pass(crowd):
    backbone, stacks, requests = crowd("mpnet")
    full = next(r for r in requests if r[0] is not None and stacks.plan(r[0]).method == "full")
    mixed = [requests[0], full]
    route = Route(stacks, segments([(slot, len(row)) for slot, row, _ in mixed]))
    with pytest.raises(ValueError, match="relative"):
        forward(backbone.anatomy, route, pack([row for _, row, _ in mixed]))


def test_other_slots_coming_and_going_change_no_bit_of_a_slots_answer(bert, new_slot):
    plans = kinds_of_slots(bert)
    stacks, rows = Stacks(bert.tensors), bert.tokenize(TEXTS)
    slot = stacks.put(plans[0], new_slot(bert, plans[0], seed=1))

    def answer():
        return outputs(bert.anatomy, stacks, rows, [slot] * len(rows), torch.float32)

    before = answer()
    others = [stacks.put(plan, new_slot(bert, plan, seed=k)) for k, plan in enumerate(plans)]
    during = answer()
    for other in others[::2]:
        stacks.remove(other)
    stacks.put(plans[1], new_slot(bert, plans[1], seed=77))
    after = answer()
    for a, b, c in zip(before, during, after, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def training_gradients(backbone, lessons, rate=0.1):
    """Give each slot's gradient of its own mean loss when all are in one batch, with dropout; lessons by seed."""
    stacks = Stacks(backbone.tensors)
    slots = [stacks.put(plan, tensors) for _, plan, tensors, _ in lessons]
    leaves = stacks.trainable()
    rows = [(slot, row) for slot, (_, _, _, mine) in zip(slots, lessons, strict=True) for row in mine]
    batch, route = pack([row for _, row in rows]), Route(stacks, segments([(slot, len(row)) for slot, row in rows]))
    keys = torch.cat([row_keys(seed, 5, torch.arange(len(mine))) for seed, _, _, mine in lessons])
    drop = Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=rate)
    found = heads.outputs(forward(backbone.anatomy, route, batch, drop), batch, route, drop)
    torch.stack([0.1 * out.square().mean() for out in found]).sum().backward()
    gradients = {key: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for key, leaf in leaves.items()}
    return [stacks.take(slot, gradients) for slot in slots]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slots_gradient_beside_other_slots_is_its_gradient_alone(family, tiny, new_slot):
    backbone = tiny(family)
    rows = backbone.tokenize(TEXTS)
    plans = [plan for plan in kinds_of_slots(backbone) if plan.method in ("adapter", "layernorm", "feature")]
    plans.append(dataclasses.replace(plans[0], head=Head("classification", 6)))
    lessons = [
        (seed, plan, new_slot(backbone, plan, seed=seed), [rows[(seed + k) % len(rows)] for k in range(3)])
        for seed, plan in enumerate(plans)
    ]
    together = training_gradients(backbone, lessons)
    for lesson, mine in zip(lessons, together, strict=True):
        (alone,) = training_gradients(backbone, [lesson])
        assert any(gradient.abs().max() > 1e-3 for gradient in alone.values())
        for name in alone:
            torch.testing.assert_close(mine[name], alone[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("method", ["full", "top"])
def test_a_slot_that_changes_whole_layers_gets_its_own_gradient_beside_others_too(method, bert, new_slot):
    rows = bert.tokenize(TEXTS)
    options = [Options(method=method), Options(size=3), Options(method=method)]
    plans = [make_plan(option, depth=3, head=Head("classification", 2, "pooler")) for option in options]
    lessons = [(seed, plan, new_slot(bert, plan, seed=seed), rows[seed : seed + 3]) for seed, plan in enumerate(plans)]
    together = training_gradients(bert, lessons)
    for lesson, mine in zip(lessons, together, strict=True):
        (alone,) = training_gradients(bert, [lesson])
        for name in alone:
            torch.testing.assert_close(mine[name], alone[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_slot_without_rows_in_the_batch_gets_no_gradient(bert, new_slot):
    plan = make_plan(Options(size=3), depth=3, head=Head("classification", 2))
    stacks = Stacks(bert.tensors)
    busy, idle = (stacks.put(plan, new_slot(bert, plan, seed=seed)) for seed in (0, 1))
    leaves = stacks.trainable()
    rows = bert.tokenize(TEXTS[:2])
    batch, route = pack(rows), Route(stacks, segments([(busy, len(row)) for row in rows]))
    heads.outputs(forward(bert.anatomy, route, batch), batch, route)[0].square().sum().backward()
    gradients = {key: leaf.grad for key, leaf in leaves.items()}
    assert all(gradient.any() for gradient in stacks.take(busy, gradients).values())
    assert not any(gradient.any() for gradient in stacks.take(idle, gradients).values())
