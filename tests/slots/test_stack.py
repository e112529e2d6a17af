"""`slots.stack`: slots are stored unchanged, padding is exact, and adding or removing one affects no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from additions import draw

HIDDEN = 8
FROZEN = {"embeddings.word.weight": torch.zeros(4, HIDDEN)}
"""The least that stacks need of an encoder when no pass runs."""
DOWN, UP = (f"layers.0.attention.adapter.{part}.weight" for part in ("down", "up"))


def adapter_plan(size, **options):
    return make_plan(Options(size=size, train_norms=False, **options), depth=2, head=Head("classification", 2))


def adapter_tensors(plan, seed=0, sigma=0.5):
    generator = torch.Generator().manual_seed(seed)
    made = draw(plan.additions[0], HIDDEN, sigma, seed) | heads.initial(plan.head, HIDDEN, seed)
    return {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in made.items()}


def blocks_with(stacks, name):
    return [block for block in stacks.blocks if name in block.layout.shapes]


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        assert torch.equal(found[name], expected[name]), name


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 65), depth=st.integers(1, 3), inner_norm=st.booleans(), seed=st.integers(0, 99))
def test_take_returns_what_was_put_at_its_true_size(size, depth, inner_norm, seed):
    plan = adapter_plan(size, depth=depth, inner_norm=inner_norm)
    tensors = adapter_tensors(plan, seed)
    stacks = Stacks(FROZEN)
    slot = stacks.put(plan, tensors)
    assert_same(stacks.take(slot), tensors)
    assert stacks.plan(slot) == plan


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.integers(1, 65), min_size=2, max_size=9), data=st.data())
def test_no_sequence_of_puts_and_removes_changes_a_resident_slot(sizes, data):
    stacks, stored = Stacks(FROZEN), {}
    for seed, size in enumerate(sizes):
        plan = adapter_plan(size)
        tensors = adapter_tensors(plan, seed)
        stored[stacks.put(plan, tensors)] = tensors
        if data.draw(st.booleans()):
            removed = data.draw(st.sampled_from(sorted(stored)))
            stacks.remove(removed)
            del stored[removed]
    assert len(stacks) == len(stored)
    for slot, tensors in stored.items():
        assert_same(stacks.take(slot), tensors)


@pytest.mark.parametrize("size", range(1, 66))
def test_padding_to_the_size_class_is_exact_up_to_rounding(size):
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
            expected = plan.additions[0].apply(y, x, [parts])
            torch.testing.assert_close(route.add(y, x, site), expected, atol=1e-6, rtol=1e-6)


def test_a_size_class_is_the_next_power_of_two():
    for size in range(1, 66):
        stacks = Stacks(FROZEN)
        slot = stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size)))
        wide = stacks.slot(slot).places[DOWN][0].layout.shapes[DOWN][0]
        assert wide >= size > wide // 2
        assert wide & (wide - 1) == 0


def test_one_wide_task_does_not_widen_a_thousand_narrow_ones():
    stacks = Stacks(FROZEN)
    for size in (2, 2, 2, 64):
        stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size)))
    assert {b.layout.shapes[UP]: b.owners for b in blocks_with(stacks, UP)} == {
        (HIDDEN, 2): [0, 1, 2],
        (HIDDEN, 64): [3],
    }
    narrow = Stacks(FROZEN)
    slot = narrow.put(adapter_plan(2), adapter_tensors(adapter_plan(2)))
    widths = [layout.width for layout in narrow.slot(slot).layouts]
    assert [[layout.width for layout in stacks.slot(k).layouts] for k in range(3)] == [widths] * 3
    assert sum(layout.width for layout in stacks.slot(3).layouts) > 4 * sum(widths)


def test_slots_in_several_blocks_share_a_pass_as_if_in_one():
    stacks, stored = Stacks(FROZEN), []
    for k in range(150):
        plan = adapter_plan(3)
        stored.append((plan, adapter_tensors(plan, k)))
        assert stacks.put(*stored[-1]) == k
    assert [len(block.owners) for block in blocks_with(stacks, UP)] == [64, 64, 22]
    chosen = [0, 63, 64, 127, 128, 149]
    y = torch.linspace(-1, 1, 18 * HIDDEN).view(18, HIDDEN)
    together = Route(stacks, segments([(k, 3) for k in chosen])).add(y, y.flip(0), "layers.0.attention")
    for k, shared, x in zip(chosen, together.split(3), y.flip(0).split(3), strict=True):
        alone = Stacks(FROZEN)
        part = y[3 * chosen.index(k) : 3 * chosen.index(k) + 3]
        found = Route(alone, segments([(alone.put(*stored[k]), 3)])).add(part, x, "layers.0.attention")
        torch.testing.assert_close(shared, found, atol=1e-6, rtol=1e-6)


def run(stacks, slot, site="layers.0.attention"):
    y = torch.linspace(-1, 1, 3 * HIDDEN).view(3, HIDDEN)
    return Route(stacks, segments([(slot, 3)])).add(y, y.flip(0), site)


@pytest.mark.parametrize("leftover", [float("nan"), 1e3])
def test_a_freed_row_is_reused_without_any_trace_of_the_old_slot(leftover):
    stacks = Stacks(FROZEN)
    kept = stacks.put(adapter_plan(8), adapter_tensors(adapter_plan(8), 1))
    old = stacks.put(
        adapter_plan(8), {n: torch.full_like(t, leftover) for n, t in adapter_tensors(adapter_plan(8)).items()}
    )
    stacks.remove(old)
    plan, tensors = adapter_plan(5), adapter_tensors(adapter_plan(5), 2)
    new = stacks.put(plan, tensors)
    assert new != old
    (block,) = blocks_with(stacks, DOWN)
    assert block.owners == [kept, new]
    fresh = Stacks(FROZEN)
    assert torch.equal(run(stacks, new), run(fresh, fresh.put(plan, tensors)))
    assert_same(stacks.take(new), tensors)
    padded = block.layout.views(block.tensor)[DOWN][1]
    assert padded.shape == (8, HIDDEN)
    assert not padded[5:].any()


def test_a_removed_slot_is_unknown_to_every_method():
    stacks = Stacks(FROZEN)
    slot = stacks.put(adapter_plan(4), adapter_tensors(adapter_plan(4)))
    stacks.remove(slot)
    assert len(stacks) == 0
    for method in (stacks.take, stacks.plan, stacks.remove):
        with pytest.raises(KeyError):
            method(slot)


def test_slots_of_one_size_class_keep_their_own_numbers():
    stacks = Stacks(FROZEN)
    stored = {}
    for seed in range(9):
        plan = adapter_plan(5 + seed % 4)
        tensors = adapter_tensors(plan, seed)
        stored[stacks.put(plan, tensors)] = tensors
    for slot, tensors in stored.items():
        assert_same(stacks.take(slot), tensors)


def test_put_and_take_copy_their_tensors():
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


@pytest.mark.parametrize("compute", [None, torch.float32, torch.bfloat16])
def test_write_changes_one_slot_in_place_and_no_other(compute):
    stacks = Stacks(FROZEN)
    a, b = (stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size), size)) for size in (5, 7))
    before = stacks.take(b)
    if compute:
        stacks.require_gradients(compute)
    leaves = {name: view for block in stacks.blocks for name, view in block.views.items()}
    other = adapter_tensors(adapter_plan(5), 99)
    stacks.write(a, other)
    assert_same(stacks.take(a), other)
    assert_same(stacks.take(b), before)
    for name, tensor in other.items():  # what the pass reads has changed too
        found = leaves[name][stacks.slot(a).places[name][1]][tuple(slice(n) for n in tensor.shape)]
        assert torch.equal(found, tensor if name.startswith("head.") or not compute else tensor.to(compute)), name
    part = {"head.bias": torch.tensor([3.0, 4.0])}
    stacks.write(a, part)
    assert_same(stacks.take(a), {**other, **part})


def test_other_tensors_of_the_same_layout_are_written_and_taken_like_the_slots_own():
    stacks = Stacks(FROZEN)
    slots = [stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size), size)) for size in (5, 7)]
    moments = {block: torch.zeros_like(block.tensor) for block in stacks.blocks}
    written = adapter_tensors(adapter_plan(7), 5)
    stacks.write(slots[1], written, moments)
    assert_same(stacks.take(slots[1], moments), written)
    assert not any(tensor.any() for tensor in stacks.take(slots[0], moments).values())
    assert_same(stacks.take(slots[1]), adapter_tensors(adapter_plan(7), 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_stored_in_the_chosen_dtype_and_heads_in_float32(dtype):
    stacks, tensors = Stacks(FROZEN, dtype=dtype), adapter_tensors(adapter_plan(4))
    taken = stacks.take(stacks.put(adapter_plan(4), tensors))
    kept = {name: t if name.startswith("head.") else t.to(dtype).float() for name, t in tensors.items()}
    assert_same(taken, kept)


# --- the memory layout of slots


def test_adding_a_slot_copies_at_most_one_block_of_64_and_never_a_full_one():
    stacks, tensors = Stacks(FROZEN), adapter_tensors(adapter_plan(3))
    largest = 0
    for _ in range(260):
        before = {block: block.tensor.data_ptr() for block in stacks.blocks}
        full = {block for block in stacks.blocks if len(block.owners) == 64}
        stacks.put(adapter_plan(3), tensors)
        moved = [block for block, place in before.items() if block.tensor.data_ptr() != place]
        assert full.isdisjoint(moved)
        assert len(moved) <= len(stacks.slot(0).rows)
        largest = max([largest, *(len(block.tensor) for block in stacks.blocks)])
    assert largest == 64
    assert [len(block.owners) for block in blocks_with(stacks, UP)] == [64, 64, 64, 64, 4]


class Traffic(TorchDispatchMode):
    """Count copies into rows of some blocks, and reads of whole rows."""

    def __init__(self, stacks):
        super().__init__()
        self.whole = {block.tensor.untyped_storage().data_ptr(): block.tensor.shape for block in stacks.blocks}
        self.written, self.read = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        first = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        if first is not None and first.untyped_storage().data_ptr() in self.whole:
            shape = self.whole[first.untyped_storage().data_ptr()]
            self.written += function is torch.ops.aten.copy_.default
            self.read += function is torch.ops.aten.select.int and first.shape == shape
        return function(*arguments, **(options or {}))


def test_a_slot_moves_with_one_copy_per_row_and_has_at_most_four_rows():
    plan = adapter_plan(5, depth=3, inner_norm=True)
    tensors = adapter_tensors(plan)
    stacks = Stacks(FROZEN)
    slots = [stacks.put(plan, tensors) for _ in range(2)]
    assert len(tensors) > 30
    assert len(stacks.slot(slots[1]).rows) == 4
    with Traffic(stacks) as out:
        taken = stacks.take(slots[1])
    assert out.read == 4
    stacks.remove(slots[1])
    with Traffic(stacks) as back:
        stacks.put(plan, taken)
    assert back.written == 4


def test_rows_separate_the_head_from_the_rest_and_decaying_tensors_from_others():
    plan = adapter_plan(5, inner_norm=True)
    tensors = adapter_tensors(plan)
    stacks = Stacks(FROZEN)
    slot = stacks.slot(stacks.put(plan, tensors))
    assert slot.places.keys() == tensors.keys()
    for name, (block, _) in slot.places.items():
        assert block.layout.head == name.startswith("head.")
        assert block.layout.decays == (name.endswith(".weight") and ".norm." not in name)
    for block, _ in slot.rows:
        starts, ends = zip(*sorted(block.layout.ranges.values()), strict=True)
        assert all(start % 64 == 0 for start in starts)
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= block.layout.width == block.tensor.shape[1]
        assert block.layout.width % 64 == 0


def test_similar_sizes_share_blocks_and_different_arithmetic_does_not():
    stacks = Stacks(FROZEN)
    plans = [adapter_plan(5), adapter_plan(8), adapter_plan(4), adapter_plan(7), adapter_plan(6, depth=2)]
    for plan in plans:
        stacks.put(plan, adapter_tensors(plan))
    assert [block.owners for block in blocks_with(stacks, UP)] == [[0, 1, 3], [2], [4]]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_require_gradients_makes_leaves_without_spare_rows_and_keeps_them_on_the_next_call(compute):
    stacks = Stacks(FROZEN)
    stored = {}
    for k, size in enumerate((5, 6, 8)):
        stored[stacks.put(adapter_plan(size), adapter_tensors(adapter_plan(size), k))] = (size, k)
    stacks.require_gradients(compute)
    leaves = {(block, name): view for block in stacks.blocks for name, view in block.views.items()}
    assert all(view.is_leaf and view.requires_grad and len(view) == 3 for view in leaves.values())
    assert all(view.dtype == (torch.float32 if block.layout.head else compute) for (block, _), view in leaves.items())
    stacks.require_gradients(compute)
    assert all(block.views[name] is view for (block, name), view in leaves.items())
    stored[stacks.put(adapter_plan(7), adapter_tensors(adapter_plan(7), 3))] = (7, 3)
    stacks.require_gradients(compute)
    for block in stacks.blocks:
        assert all(view.is_leaf and view.requires_grad and len(view) == 4 for view in block.views.values())
    for slot, (size, k) in stored.items():
        assert_same(stacks.take(slot), adapter_tensors(adapter_plan(size), k))


def test_tensors_in_any_order_share_blocks():
    stacks, plan = Stacks(FROZEN), adapter_plan(5)
    first, second = adapter_tensors(plan, 1), dict(reversed(adapter_tensors(plan, 2).items()))
    slots = [stacks.put(plan, tensors) for tensors in (first, second)]
    assert all(block.owners == slots for block in stacks.blocks)
    assert_same(stacks.take(slots[0]), first)
    assert_same(stacks.take(slots[1]), second)
