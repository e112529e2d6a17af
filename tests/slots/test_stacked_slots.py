"""Slots that stand on others: computed as by hand, whatever is beside them, without a copy of what is below."""

from __future__ import annotations

import pytest
import torch

from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import forward
from adapterbank.inference.runner import outputs, segments
from adapterbank.methods import Options
from adapterbank.slots import heads, routing
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.slots.stacked import Each
from adapterbank.training.optimizer import AdamSettings, StackedAdam
from plain_bert import bottleneck, plain_bert

TEXTS = ("the cat was good", "a big dog", "it is a small red house", "the lazy fox was bad and the film was good")


def plan_of(method="adapter", outputs=2, **options):
    return make_plan(Options(method, **options), depth=3, head=Head("classification", outputs))


def by_hand(backbone, row, adapters, norms, head):
    """Return the head's outputs of one row, with adapters one after the other at each site."""

    def adapted(y, site):
        for own in adapters:
            y = y + bottleneck(y, own, site)
        return y

    return plain_bert(backbone, row, adapted, norms, head)


def norms_in(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".norm." in name}


def alone(backbone, rows, plans_and_tensors):
    """Return the outputs of rows through the last of slots that stand one on the other."""
    stacks, below = Stacks(backbone.tensors), []
    for plan, tensors in plans_and_tensors:
        below = [stacks.put(plan, tensors, *below)]
    return outputs(backbone.config, stacks, rows, below * len(rows))


@pytest.mark.parametrize("train_norms", [True, False])
def test_two_adapters_one_on_the_other_are_what_plain_torch_computes(bert, new_slot, train_norms):
    below, above = plan_of(size=6), plan_of(size=3, outputs=3, train_norms=train_norms)
    base, own = new_slot(bert, below, seed=1), new_slot(bert, above, seed=2)
    rows = bert.tokenize(TEXTS)
    found = alone(bert, rows, [(below, base), (above, own)])
    assert bool(norms_in(own)) == train_norms
    for row, output in zip(rows, found, strict=True):
        expected = by_hand(bert, row, [base, own], norms_in(base) | norms_in(own), own)
        torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-5, rtol=1e-5)
        without = by_hand(bert, row, [own], norms_in(own), own)
        assert (without - expected).abs().max() > 1e-2  # the base matters


def test_a_chain_of_three_is_what_plain_torch_computes(bert, new_slot):
    plans = [plan_of(size=4), plan_of(size=2, train_norms=False), plan_of(size=8)]
    parts = [new_slot(bert, plan, seed=seed) for seed, plan in enumerate(plans)]
    (row,) = bert.tokenize(TEXTS[:1])
    (found,) = alone(bert, [row], zip(plans, parts, strict=True))
    expected = by_hand(bert, row, parts, norms_in(parts[0]) | norms_in(parts[2]), parts[2])
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)


MIXED = [
    ("adapter", {"size": 4}),
    ("lora", {"rank": 2}),
    ("ia3", {}),
    ("layernorm", {}),
    ("bitfit", {}),
    ("feature", {}),
]


@pytest.mark.parametrize("below", [MIXED[0], MIXED[1], MIXED[2], MIXED[3], MIXED[4]], ids=lambda one: one[0])
@pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
def test_stacked_slots_of_every_method_are_beside_each_other_as_alone(tiny, new_slot, family, below):
    backbone = tiny(family)
    method, options = below
    layers = backbone.config.layers
    plans = [
        make_plan(Options(name, **chosen), depth=layers, head=Head("classification", 2 + k))
        for k, (name, chosen) in enumerate([(method, options), *MIXED])
    ]
    parts = [new_slot(backbone, plan, seed=seed) for seed, plan in enumerate(plans)]
    rows, stacks = backbone.tokenize(TEXTS), Stacks(backbone.tensors)
    base = stacks.put(plans[0], parts[0])
    slots = [base, None, *(stacks.put(plan, part, base) for plan, part in zip(plans[1:], parts[1:], strict=True))]
    slots.append(stacks.put(plans[1], parts[1]))  # the same numbers on the bare encoder
    mixed = [(slot, row) for row in rows for slot in slots]
    found = outputs(backbone.config, stacks, [row for _, row in mixed], [slot for slot, _ in mixed])
    own = zip(plans, parts, strict=True)
    first, *stacked = own
    chains = [[first], None, *([first, one] for one in stacked), [stacked[0]]]
    for k, row in enumerate(rows):
        for slot, (chain, output) in enumerate(zip(chains, found[k * len(slots) :], strict=False)):
            if chain is not None:
                (expected,) = alone(backbone, [row], chain)
                torch.testing.assert_close(
                    torch.from_numpy(output), torch.from_numpy(expected), atol=1e-5, rtol=1e-5, msg=str(slot)
                )


def test_any_number_of_slots_stands_on_one_copy(bert, new_slot):
    below, above = plan_of(size=16), plan_of(size=2, train_norms=False)
    stacks = Stacks(bert.tensors)
    base = stacks.put(below, new_slot(bert, below))

    def held():
        return sum(
            block.tensor.numel() for block in stacks.blocks if "layers.0.attention.adapter.up.weight" in block.views
        )

    before = held()
    slots = [stacks.put(above, new_slot(bert, above, seed=seed), base) for seed in range(5)]
    assert held() == before > 0
    assert len({stacks.slot(slot).places["layers.0.attention.adapter.up.weight"] for slot in (base, *slots)}) == 1


def test_rows_of_slots_on_one_base_share_its_products(bert, new_slot, monkeypatch):
    made = []
    monkeypatch.setattr(routing, "Each", lambda *given: made.append(given) or Each(*given))
    plan, rows, stacks = plan_of(size=4), bert.tokenize(TEXTS), Stacks(bert.tensors)
    first, second = (stacks.put(plan, new_slot(bert, plan, seed=seed)) for seed in (1, 2))
    slots = [stacks.put(plan, new_slot(bert, plan, seed=5 + k), base) for k, base in enumerate([first, first, second])]
    outputs(bert.config, stacks, [row for row in rows for _ in slots], slots * len(rows))
    tokens = sum(map(len, rows))
    assert {tuple(sizes) for _, sizes in made} == {(2 * tokens, tokens), (tokens, tokens, tokens)}


def test_what_was_put_is_taken_and_written_under_its_own_names(bert, new_slot):
    plan = plan_of(size=3)
    stacks = Stacks(bert.tensors)
    base = stacks.put(plan, new_slot(bert, plan, seed=1))
    own, other = (new_slot(bert, plan, seed=seed) for seed in (2, 3))
    slot = stacks.put(plan, own, base)
    before = stacks.take(base)
    assert stacks.plan(slot) == plan
    assert all(torch.equal(tensor, own[name]) for name, tensor in stacks.take(slot).items())
    stacks.write(slot, other)
    assert list(stacks.take(slot)) == list(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in stacks.take(slot).items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in stacks.take(base).items())


def test_only_the_own_tensors_have_a_gradient_and_change(bert, new_slot):
    plan, rows = plan_of(size=4), bert.tokenize(TEXTS)
    stacks = Stacks(bert.tensors)
    base = stacks.put(plan, new_slot(bert, plan, seed=1), frozen=True)
    slots = [stacks.put(plan, new_slot(bert, plan, seed=seed), base) for seed in (2, 3)]
    slots.append(stacks.put(plan, new_slot(bert, plan, seed=4)))
    adam = StackedAdam(stacks)
    for slot in slots:
        adam.admit(slot, AdamSettings())
    frozen = [block for block in stacks.blocks if block.layout.frozen]
    assert frozen
    assert not any(view.requires_grad for block in frozen for view in block.views.values())
    before = {slot: stacks.take(slot) for slot in (base, *slots)}
    for _ in range(2):
        adam.zero_grad()
        route = Route(stacks, segments([(slot, len(row)) for slot in slots for row in rows]))
        batch = pack([row for _ in slots for row in rows])
        losses = [out.square().mean() for out in heads.outputs(forward(bert.config, route, batch), batch, route)]
        adam.add_gradients(torch.autograd.grad(torch.stack(losses).sum(), adam.leaves(), allow_unused=True))
        adam.step(dict.fromkeys(slots, 0.01))
    assert all(torch.equal(tensor, before[base][name]) for name, tensor in stacks.take(base).items())
    for slot in slots:
        assert all(not torch.equal(tensor, before[slot][name]) for name, tensor in stacks.take(slot).items())


def test_a_gradient_is_that_of_plain_torch(bert, new_slot):
    plan = plan_of(size=4)
    base, own = new_slot(bert, plan, seed=1), new_slot(bert, plan, seed=2)
    (row,) = bert.tokenize(TEXTS[:1])
    stacks = Stacks(bert.tensors)
    slot = stacks.put(plan, own, stacks.put(plan, base, frozen=True))
    adam = StackedAdam(stacks)
    adam.admit(slot, AdamSettings())
    batch, route = pack([row]), Route(stacks, segments([(slot, len(row))]))
    (out,) = heads.outputs(forward(bert.config, route, batch), batch, route)
    adam.zero_grad()
    adam.add_gradients(torch.autograd.grad(out.square().sum(), adam.leaves(), allow_unused=True))
    found = stacks.take(slot, adam.gradients)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in own.items()}
    by_hand(bert, row, [base, leaves], norms_in(base) | norms_in(leaves), leaves).square().sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
