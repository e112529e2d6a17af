"""`training.optimizer`: against torch's AdamW, against BERT's Adam in numpy, and several slots against one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import Stacks
from adapterbank.training.optimizer import AdamSettings, Schedule, StackedAdam
from additions import draw

HIDDEN = 8
DECAYING = {  # every tensor of the slots below that weight decay applies to
    *(
        f"layers.{i}.{s}.adapter.{p}.weight"
        for i in (0, 1)
        for s in ("attention", "feedforward")
        for p in ("down", "up")
    ),
    "layers.0.attention.query.weight",
    "embeddings.word.weight",
    "head.weight",
}
STEPS = 20


def new_slot(size, seed):
    """Return a plan and tensors of every type: adapters with an inner norm, LayerNorms, a layer, a table, a head."""
    plan = make_plan(Options(size=size, inner_norm=True), depth=2, head=Head("classification", 3))
    generator = torch.Generator().manual_seed(seed)
    tensors = draw(plan.additions[0], HIDDEN, 0.5, seed) | heads.initial(plan.head, HIDDEN, seed)
    shapes = {
        "embeddings.word.weight": (11, HIDDEN),
        "layers.0.attention.query.weight": (HIDDEN, HIDDEN),
        "layers.0.attention.query.bias": (HIDDEN,),
        "layers.0.attention.norm.weight": (HIDDEN,),
        "layers.0.attention.norm.bias": (HIDDEN,),
    }
    tensors |= {name: torch.zeros(shape) for name, shape in shapes.items()}
    return plan, {name: t + torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def gradients_of(tensors, seed, step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return {name: scale * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


class Run:
    """Slots (size, seed, settings) in one optimiser, with seeded gradients."""

    def __init__(self, *slots, compute=None):
        self.stacks = Stacks({"embeddings.word.weight": torch.zeros(11, HIDDEN)})
        self.tensors, self.seeds, settings_ = {}, {}, {}
        for size, seed, slot_settings in slots:
            plan, tensors = new_slot(size, seed)
            slot = self.stacks.put(plan, tensors)
            self.tensors[slot], self.seeds[slot], settings_[slot] = tensors, seed, slot_settings
        self.adam = StackedAdam(self.stacks, settings_, compute)

    def step(self, rates, step, scale=1.0):
        self.adam.zero_grad()
        self.add(rates, step, scale)
        return self.adam.step(rates)

    def add(self, slots, step, scale=1.0):
        """Add seeded gradients as autograd returns them: one for each leaf."""
        rows = {block: torch.zeros_like(block.tensor) for block in self.adam.first}
        for slot in slots:
            self.stacks.write(slot, gradients_of(self.tensors[slot], self.seeds[slot], step, scale), rows)
        self.adam.add_gradients([view for block in rows for view in block.layout.views(rows[block]).values()])

    def state(self, slot):
        return self.stacks.take(slot), self.stacks.take(slot, self.adam.first), self.stacks.take(slot, self.adam.second)


def rate_at(step):
    return 0.02 * (1 + step % 3)


def assert_close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name in expected:
        wanted = torch.as_tensor(expected[name], dtype=torch.float32)
        torch.testing.assert_close(
            found[name], wanted, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_with_bias_correction_the_result_equals_adamw_of_torch(decay, clip):
    run = Run((5, 3, AdamSettings(epsilon=1e-6, weight_decay=decay, bias_correction=True, clip=clip)))
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in run.tensors[0].items()}
    groups = [
        {"params": [p for n, p in theirs.items() if n in DECAYING], "weight_decay": decay},
        {"params": [p for n, p in theirs.items() if n not in DECAYING], "weight_decay": 0.0},
    ]
    assert len(groups[0]["params"]) == len(DECAYING)
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    for step in range(STEPS):
        run.step({0: rate_at(step)}, step)
        for name, gradient in gradients_of(run.tensors[0], 3, step).items():
            theirs[name].grad = gradient
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
        for group in adamw.param_groups:
            group["lr"] = rate_at(step)
        adamw.step()
    assert_close(run.state(0)[0], {name: p.detach() for name, p in theirs.items()}, 2e-6)


def berts_adam(tensors, seed, decay, epsilon):
    """Run BERT's public optimiser in float64: no bias correction, decay outside the moments."""
    p = {name: t.double().numpy().copy() for name, t in tensors.items()}
    m = {name: np.zeros_like(a) for name, a in p.items()}
    v = {name: np.zeros_like(a) for name, a in p.items()}
    for step in range(STEPS):
        for name, gradient in gradients_of(tensors, seed, step).items():
            g = gradient.double().numpy()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = m[name] / (np.sqrt(v[name]) + epsilon)
            if name in DECAYING:
                update = update + decay * p[name]
            p[name] = p[name] - rate_at(step) * update
    return p, m, v


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_without_bias_correction_the_result_equals_the_adam_of_bert(epsilon):
    run = Run((6, 4, AdamSettings(epsilon=epsilon, weight_decay=0.01, bias_correction=False, clip=0.0)))
    for step in range(STEPS):
        run.step({0: rate_at(step)}, step)
    for found, expected in zip(run.state(0), berts_adam(run.tensors[0], 4, 0.01, epsilon), strict=True):
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_clipping_equals_that_of_torch_and_step_returns_the_norm_before_it(scale):
    run = Run((5, 3, AdamSettings(clip=1.0)))
    norms = run.step({0: 0.1}, 0, scale)
    parameters = [torch.nn.Parameter(t) for t in run.tensors[0].values()]
    for parameter, gradient in zip(parameters, gradients_of(run.tensors[0], 3, 0, scale).values(), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert float(norms[0]) == pytest.approx(float(norm), rel=1e-5)
    expected = {name: 0.1 * p.grad for name, p in zip(run.tensors[0], parameters, strict=True)}
    assert_close(run.state(0)[1], expected, 1e-6)


def test_without_a_clip_large_gradients_are_unchanged():
    run = Run((5, 3, AdamSettings(clip=0.0)))
    run.step({0: 0.1}, 0, 100.0)
    assert_close(run.state(0)[1], {n: 0.1 * g for n, g in gradients_of(run.tensors[0], 3, 0, 100.0).items()}, 1e-5)


def test_a_zero_gradient_without_decay_changes_nothing():
    run = Run((5, 3, AdamSettings(weight_decay=0.0)))
    norms = run.step({0: 0.1}, 0, 0.0)
    assert norms.tolist() == [0.0]
    assert all(torch.equal(found, run.tensors[0][name]) for name, found in run.state(0)[0].items())


SLOTS = [
    (5, 1, AdamSettings(epsilon=1e-6, weight_decay=0.01, bias_correction=False, clip=1.0)),
    (7, 2, AdamSettings(epsilon=1e-4, weight_decay=0.2, bias_correction=True, clip=0.3)),
    (16, 3, AdamSettings(epsilon=1e-8, weight_decay=0.0, bias_correction=True, clip=0.0)),
]


def test_slots_with_different_settings_in_one_optimiser_equal_separate_optimisers():
    together = Run(*SLOTS)
    alone = [Run(slot) for slot in SLOTS]
    for step in range(STEPS):
        rates = {slot: rate_at(step) * (slot + 1) for slot in range(len(SLOTS))}
        norms = together.step(rates, step)
        for slot, single in enumerate(alone):
            alone_norm = float(single.step({0: rates[slot]}, step)[0])
            assert alone_norm == pytest.approx(float(norms[slot]), rel=1e-6)
    for slot, single in enumerate(alone):
        for found, expected in zip(together.state(slot), single.state(0), strict=True):
            assert_close(found, expected, 1e-6)


def test_a_slot_without_a_rate_does_not_change_and_its_steps_are_not_counted():
    run = Run(*SLOTS)
    for step in range(3):
        run.step({0: 0.1, 1: 0.1, 2: 0.1}, step)
    before = run.state(1)
    for step in range(3, 6):
        run.step({0: 0.1, 2: 0.1}, step)
    for found, expected in zip(run.state(1), before, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run.adam.steps == {0: 6, 1: 3, 2: 6}


def test_a_slot_that_paused_continues_as_if_it_had_not():
    waited, straight = Run(*SLOTS), Run(SLOTS[1])
    for step in range(3):
        waited.step({1: 0.1}, step)
        waited.step({0: 0.1, 2: 0.1}, step)
        straight.step({0: 0.1}, step)
    for found, expected in zip(waited.state(1), straight.state(0), strict=True):
        assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
def test_padding_stays_zero_through_any_number_of_steps(epsilon):
    run = Run((5, 1, replace(SLOTS[0][2], epsilon=epsilon)), (8, 2, replace(SLOTS[1][2], epsilon=epsilon)))
    for step in range(STEPS):
        run.step({0: 0.1, 1: 0.1}, step)
    sizes = {}
    for block in run.stacks.blocks:
        for rows in (block.tensor, run.adam.first[block], run.adam.second[block]):
            for name, view in block.layout.views(rows).items():
                if name.endswith("down.weight"):
                    assert not view[0, 5:].any()
                    assert view[1, 5:].any()
                elif name.endswith("up.weight"):
                    assert not view[0, :, 5:].any()
            for row, slot in enumerate(block.owners):
                rest = rows[row].clone()
                for name, (start, end) in block.layout.ranges.items():
                    true = run.tensors[slot][name].shape
                    rest[start:end].view(block.layout.shapes[name])[tuple(slice(n) for n in true)] = 0.0
                    sizes[name] = block.layout.shapes[name]
                assert not rest.any()
    assert sizes.keys() == run.tensors[0].keys()
    assert sizes["layers.0.attention.adapter.down.weight"] == (8, HIDDEN)


def test_a_rate_of_zero_updates_the_moments_and_not_the_weights():
    run = Run(SLOTS[0])
    run.step({0: 0.0}, 0)
    weights, first, _ = run.state(0)
    assert all(torch.equal(weights[name], run.tensors[0][name]) for name in weights)
    assert all(moment.any() for moment in first.values())
    assert run.adam.steps == {0: 1}


def test_zero_grad_clears_the_gradients():
    run = Run(SLOTS[0])
    run.step({0: 0.1}, 0)
    assert all(gradient.any() for gradient in run.stacks.take(0, run.adam.gradients).values())
    run.adam.zero_grad()
    assert not any(gradient.any() for gradient in run.adam.gradients.values())


def test_gradients_of_several_parts_add_up_and_none_leaves_a_leaf_unchanged():
    run = Run(*SLOTS[:2])
    run.add([0, 1], 0)  # of an unfinished step
    run.adam.zero_grad()
    for step in (1, 2, 3):
        run.add([0, 1], step)
    run.adam.add_gradients([None] * len(run.adam.leaves()))
    for slot in (0, 1):
        parts = [gradients_of(run.tensors[slot], run.seeds[slot], step) for step in (1, 2, 3)]
        expected = {name: sum(part[name] for part in parts) for name in parts[0]}
        assert_close(run.stacks.take(slot, run.adam.gradients), expected)
    run.adam.zero_grad()
    run.adam.add_gradients([None] * len(run.adam.leaves()))
    assert not any(gradient.any() for gradient in run.adam.gradients.values())


def test_leaves_are_what_the_pass_reads_and_gradients_have_their_order():
    run = Run(*SLOTS[:2])
    leaves = run.adam.leaves()
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)
    read = [view for block in run.stacks.blocks for view in block.views.values()]
    assert [id(leaf) for leaf in leaves] == [id(view) for view in read]
    run.adam.add_gradients(torch.autograd.grad(sum((leaf**2).sum() for leaf in leaves), leaves))
    for slot in (0, 1):
        assert_close(run.stacks.take(slot, run.adam.gradients), {n: 2 * t for n, t in run.tensors[slot].items()})
    run.adam.step({0: 0.1, 1: 0.1})
    assert all(torch.equal(a, b) for a, b in zip(leaves, run.adam.leaves(), strict=True))
    weights = run.stacks.take(0)
    assert not torch.equal(weights["head.bias"], run.tensors[0]["head.bias"])


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_pass_reads_updated_numbers_in_its_own_dtype_and_heads_in_float32(compute):
    run = Run(*SLOTS[:2], compute=compute)
    for step in range(2):
        run.step({0: 0.1, 1: 0.1}, step)
        for block in run.stacks.blocks:
            kept = torch.float32 if block.layout.head else compute
            assert block.tensor.dtype == torch.float32
            for name, view in block.layout.views(block.tensor).items():
                assert block.views[name].dtype == kept
                assert torch.equal(block.views[name], view.to(kept))


def test_a_slot_in_a_reused_place_starts_with_zero_moments_and_its_own_settings():
    run, alone = Run(*SLOTS[:2]), Run((8, 9, SLOTS[2][2]))
    for step in range(3):
        run.step({0: 0.1, 1: 0.1}, step)
    before = run.state(1)
    run.stacks.remove(0)
    run.adam.release(0)
    plan, tensors = new_slot(8, 9)
    new = run.stacks.put(plan, tensors)
    run.tensors[new], run.seeds[new] = tensors, 9
    run.adam.admit(new, SLOTS[2][2])
    assert run.adam.steps == {1: 3, new: 0}
    assert {len(block.owners) for block in run.stacks.blocks} == {2}
    assert run.adam.table({1: 0.1}).shape == (3, 7)  # two slots and the row for no slot
    for step in range(4):
        run.step({new: 0.1}, step)
        alone.step({0: 0.1}, step)
    for found, expected in zip(run.state(new), alone.state(0), strict=True):
        assert_close(found, expected, 1e-6)
    for found, expected in zip(run.state(1), before, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_table_has_the_numbers_of_each_slot():
    run = Run(*SLOTS)
    run.step({0: 0.1, 1: 0.1, 2: 0.1}, 0)
    table = run.adam.table({0: 0.5, 1: 0.25})
    still = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    wanted = [
        [1.0, 0.5, 0.01, 1e-6, 1.0, 1.0, 1.0],
        [1.0, 0.25, 0.2, 1e-4, 1 - 0.9**2, 1 - 0.999**2, 0.3],
        still,
        still,
    ]
    np.testing.assert_allclose(table, wanted, rtol=1e-6)
    assert run.adam.table({2: 0.5})[2, 6] == np.inf  # no limit


def test_the_learning_rate_rises_for_a_tenth_of_the_steps_and_then_falls_to_zero():
    schedule = Schedule(0.5, 100)
    rates = [schedule.at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.05 * k for k in range(1, 11)])
    assert max(rates) == rates[9] == 0.5
    falling = rates[10:]
    assert falling == pytest.approx([0.5 * (100 - step) / 90 for step in range(10, 101)])
    assert rates[99] > 0
    assert rates[100] == 0.0


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 1.0])
def test_a_single_step_has_the_peak_rate(warmup):
    assert Schedule(0.3, 1, warmup).at(0) == 0.3


def test_no_warmup_starts_at_the_peak():
    rates = [Schedule(1.0, 4, 0.0).at(step) for step in range(5)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_schedule_of_only_warmup_ends_at_the_peak():
    rates = [Schedule(1.0, 4, 1.0).at(step) for step in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.0])


@settings(deadline=None)
@given(steps=st.integers(1, 500), percent=st.integers(0, 100))
def test_every_step_has_a_rate_above_zero_and_none_above_the_peak(steps, percent):
    schedule = Schedule(2.0, steps, percent / 100)
    rates = [schedule.at(step) for step in range(steps)]
    assert max(rates) == 2.0
    assert min(rates) > 0
    assert schedule.at(steps) == 0.0
    assert schedule.at(steps + 5) == 0.0
    top = rates.index(2.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_the_warmup_lasts_exactly_its_share_of_the_steps():
    """p per cent of 100 steps are p steps, whatever p / 100 * 100 is in floating point."""
    wrong = {}
    for percent in range(1, 101):
        rates = [Schedule(1.0, 100, percent / 100).at(step) for step in range(100)]
        if rates.index(1.0) + 1 != percent:
            wrong[percent] = rates.index(1.0) + 1
    assert wrong == {}
