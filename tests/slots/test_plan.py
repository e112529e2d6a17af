"""`slots.plan`: additions are ordered, uniquely named and stored, and several can share a site."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapterbank.encoder.batch import TokenStore, pack
from adapterbank.encoder.forward import forward, join_projections
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.additions.ia3 import Ia3
from adapterbank.slots.additions.lora import Lora
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.slots.static_routing import StaticRoute
from adapterbank.slots.tensors import added_shapes, initial
from families import TEXTS

LAYERS = (0, 1, 2)
HEAD = Head("classification", 2)
ROLES = frozenset({"head", "adapter", "lora", "ia3"})
TWO = Plan("adapter", HEAD, (Adapter(5, LAYERS), Adapter(3, (1, 2), ("attention",), "tanh")), ROLES)
MANY = Plan("adapter", HEAD, (Lora(3, 16.0, LAYERS), Ia3(LAYERS), Adapter(5, LAYERS), Adapter(2, LAYERS)), ROLES)


def test_a_second_addition_of_the_same_type_has_its_own_key(bert):
    assert TWO.keys == ("adapter", "adapter-2")
    assert MANY.keys == ("lora", "ia3", "adapter", "adapter-2")
    names = added_shapes(TWO, bert.config)
    assert "layers.1.attention.adapter-2.down.weight" in names
    assert "layers.0.attention.adapter-2.down.weight" not in names
    assert TWO.split("layers.1.attention.adapter-2.down.weight") == ("layers.1.attention", 1, "down.weight")
    assert TWO.split("layers.1.attention.norm.weight") is None


@pytest.mark.parametrize("plan", [TWO, MANY, make_plan(Options(), depth=3, head=HEAD)])
def test_a_plan_survives_a_round_trip_through_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_the_order_of_additions_survives_sorted_json_keys():
    backwards = replace(MANY, additions=MANY.additions[::-1])
    stored = dict(sorted(backwards.to_json().items()))
    assert Plan.from_json(stored) == backwards


@pytest.mark.parametrize("order", [["adapter"], ["adapter-2", "adapter"], ["adapter", "lora"]])
def test_an_order_that_does_not_match_the_additions_is_refused(order):
    with pytest.raises(ValueError, match=r"order|numbered"):
        Plan.from_json({**TWO.to_json(), "order": order})


def test_a_single_addition_is_stored_in_the_original_format():
    stored = make_plan(Options(size=5), depth=3, head=HEAD).to_json()
    assert stored["adapter"]["size"] == 5
    assert stored["lora"] is None
    assert "order" not in stored


def test_two_adapters_at_one_site_apply_in_order(bert, new_slot):
    own = new_slot(bert, TWO)
    stacks = Stacks(bert.tensors)
    slot = stacks.put(TWO, own)
    route = Route(stacks, segments([(slot, 6)]))
    y, x = torch.randn(6, 32), torch.randn(6, 32)
    parts = [
        {part: own[f"layers.1.attention.{key}.{part}"] for part in addition.parts()}
        for key, addition in zip(TWO.keys, TWO.additions, strict=True)
    ]
    expected = TWO.additions[1].apply(TWO.additions[0].apply(y, x, parts[:1]), x, parts[1:])
    torch.testing.assert_close(route.add(y, x, "layers.1.attention"), expected, atol=1e-6, rtol=1e-6)
    once = TWO.additions[0].apply(y, x, [{p: own[f"layers.0.attention.adapter.{p}"] for p in parts[0]}])
    torch.testing.assert_close(route.add(y, x, "layers.0.attention"), once, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("plan", [TWO, MANY])
def test_slots_with_several_additions_share_a_batch_with_slots_that_have_one(bert, new_slot, plan):
    plans = [
        plan,
        make_plan(Options(size=5), depth=3, head=HEAD),
        plan,
        make_plan(Options(method="lora"), depth=3, head=HEAD),
    ]
    stacks = Stacks(join_projections(bert.tensors))
    slots = [stacks.put(one, new_slot(bert, one, seed=k)) for k, one in enumerate(plans)]
    rows = bert.tokenize(TEXTS)[:4]
    with torch.no_grad():
        together = forward(
            bert.config, Route(stacks, segments([(s, len(r)) for s, r in zip(slots, rows, strict=True)])), pack(rows)
        )
        for slot, row, shared in zip(slots, rows, together.split([len(row) for row in rows]), strict=True):
            alone = forward(bert.config, Route(stacks, segments([(slot, len(row))])), pack([row]))
            torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("plan", [TWO, MANY])
def test_several_additions_give_equal_results_on_padded_and_packed_rows(bert, new_slot, plan, slots):
    stacks = Stacks(join_projections(bert.tensors))
    numbers = [stacks.put(plan, new_slot(bert, plan, seed=seed)) for seed in range(slots)]
    rows = bert.tokenize(TEXTS)[: 2 * slots]
    lengths = [len(row) for row in rows]
    padded, _ = TokenStore.of(rows, torch.device("cpu")).batch(torch.arange(len(rows)), max(lengths))
    own = {name: view[:slots] for block in stacks.blocks for name, view in block.views.items()}
    with torch.no_grad():
        route = Route(stacks, segments([(numbers[i // 2], n) for i, n in enumerate(lengths)]))
        expected = forward(bert.config, route, pack(rows))
        found = forward(bert.config, StaticRoute(stacks.frozen, own, plan), padded)
    real = found.reshape(len(rows), max(lengths), -1)
    torch.testing.assert_close(
        torch.cat([row[:n] for row, n in zip(real, lengths, strict=True)]), expected, atol=1e-5, rtol=1e-5
    )


def test_initial_values_depend_on_the_seed_and_the_name_of_a_tensor_alone(bert):
    whole = initial(TWO, bert.config, 0.1, 0)
    parts = [initial(replace(TWO, additions=(one,)), bert.config, 0.1, 0) for one in TWO.additions]
    for part in parts:
        assert torch.equal(whole["head.weight"], part["head.weight"])
    assert torch.equal(
        whole["layers.0.attention.adapter.down.weight"], parts[0]["layers.0.attention.adapter.down.weight"]
    )
    assert not torch.equal(
        whole["layers.1.attention.adapter-2.down.weight"], parts[1]["layers.1.attention.adapter.down.weight"]
    )


def test_without_removes_only_removable_additions_from_the_chosen_layers():
    pruned = MANY.without([0, 2])
    assert pruned.removable_layers == (1,)
    assert pruned.additions[0] == MANY.additions[0]
    assert MANY.removes("layers.0.attention.adapter-2.down.weight", [0])
    assert not MANY.removes("layers.0.attention.query.lora.a", [0])
    assert not MANY.removes("layers.1.attention.adapter.down.weight", [0])
    assert not MANY.removes("layers.0.attention.norm.weight", [0])
