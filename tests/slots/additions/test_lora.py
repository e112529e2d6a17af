"""Low-rank parts against weights merged by hand: the same outputs, the same gradients, through the whole encoder."""

from __future__ import annotations

import math

import pytest
import torch

from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import Frozen, Within, forward, join_projections
from adapterbank.inference.runner import segments
from adapterbank.methods import PROJECTIONS, Options
from adapterbank.slots.additions.lora import Lora
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from additions import draw
from families import FAMILIES

TEXTS = ["the cat sat", "a big red fox jumps over the lazy dog", "why", "who ran in the house? the small dog was bad."]
CHOICES = {
    "query and value": {},
    "one": {"targets": "key", "rank": 1, "alpha": 3.0},
    "all": {"targets": ",".join(PROJECTIONS), "rank": 5, "alpha": 1.0},
    "feedforward of upper layers": {"targets": "up,down", "layers": "1-2", "rank": 3},
}


class Merged(Frozen):
    """The bare encoder with `W + B A alpha / r` in place of each chosen weight, layer by layer."""

    def __init__(self, tensors, own, shape):
        super().__init__(tensors)
        self.own, self.shape = own, shape

    def layer(self, weights, site):
        tensors = dict(self.tensors)
        for module in PROJECTIONS.values() if site.startswith("layers.") else ():
            if f"{site}.{module}.lora.a" in self.own:
                a, b = (self.own[f"{site}.{module}.lora.{leaf}"] for leaf in ("a", "b"))
                tensors[f"{weights}.{module}.weight"] = (
                    tensors[f"{weights}.{module}.weight"] + b @ a * self.shape.alpha / self.shape.rank
                )
        return Within(Frozen(tensors), weights, site)


def plan_of(backbone, **options):
    config = backbone.config
    head = Head("classification", 2)
    options = Options(method="lora", **options)
    return make_plan(options, depth=config.layers, head=head, shared_layers=config.shared_layers)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_parts_equal_a_merged_weight_in_outputs_and_gradients(family, choice, joined, tiny, new_slot):
    backbone = tiny(family)
    plan = plan_of(backbone, **CHOICES[choice])
    batch = pack(backbone.tokenize(TEXTS))
    own = {n: t.requires_grad_() for n, t in new_slot(backbone, plan).items() if ".lora." in n}
    expected = forward(backbone.config, Merged(backbone.tensors, own, plan.additions[0]), batch)
    stacks = Stacks(join_projections(backbone.tensors) if joined else backbone.tensors)
    slot = stacks.put(plan, {**new_slot(backbone, plan), **{n: t.detach() for n, t in own.items()}})
    stacks.require_gradients(torch.float32)
    found = forward(backbone.config, Route(stacks, segments([(slot, len(batch.ids))])), batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    bare = forward(backbone.config, Frozen(backbone.tensors), batch)
    assert not torch.allclose(found, bare, atol=1e-3)
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * pull).sum(), list(own.values()))
    leaves = {name: block.views[name] for block in stacks.blocks for name in block.views if name in own}
    given = torch.autograd.grad((found * pull).sum(), [leaves[name] for name in own])
    for name, ours, gradient in zip(own, given, wanted, strict=True):
        real = ours[0][tuple(slice(n) for n in gradient.shape)]
        scale = float(gradient.abs().max())
        assert scale > 1e-3
        close = {"atol": 1e-5 * max(1.0, scale), "rtol": 1e-4}
        torch.testing.assert_close(real, gradient, msg=lambda m, n=name: f"{n}: {m}", **close)
        assert ours.count_nonzero() == real.count_nonzero()  # the padding of the rank has no gradient


def test_a_new_slot_computes_exactly_what_the_frozen_encoder_computes(bert):
    plan = plan_of(bert)
    made = draw(plan.additions[0], bert.config, 0.0, 0)
    stacks = Stacks(bert.tensors)
    slot = stacks.put(plan, made)
    batch = pack(bert.tokenize(TEXTS))
    with torch.no_grad():
        found = forward(bert.config, Route(stacks, segments([(slot, len(batch.ids))])), batch)
        assert torch.equal(found, forward(bert.config, Route(stacks, segments([(None, len(batch.ids))])), batch))


def test_a_is_drawn_uniformly_within_one_over_root_inputs_and_b_is_zero(bert):
    shape = Lora(8, 16.0, (0, 1), ("query", "down"))
    made = draw(shape, bert.config, 0.0, 0)
    assert {name: tuple(t.shape) for name, t in made.items()} == {
        f"{site}.lora.{part}": size for (site, part), size in shape.shapes(bert.config).items()
    }
    for name, tensor in made.items():
        if name.endswith(".b"):
            assert not tensor.any()
        else:
            limit = 1 / math.sqrt(tensor.shape[1])
            assert 0.9 * limit < tensor.abs().max() <= limit
    again, other = (draw(shape, bert.config, 0.0, s) for s in (0, 1))
    assert all(torch.equal(again[name], tensor) for name, tensor in made.items())
    assert not torch.equal(other["layers.0.attention.query.lora.a"], made["layers.0.attention.query.lora.a"])


def test_the_shapes_match_the_linear_layers(bert):
    found = Lora(3, 16.0, (2,), tuple(PROJECTIONS)).shapes(bert.config)
    frozen = bert.config.shapes(pooler=True)
    for module in PROJECTIONS.values():
        outputs, inputs = frozen[f"layers.2.{module}.weight"]
        assert found[f"layers.2.{module}", "a"] == (3, inputs)
        assert found[f"layers.2.{module}", "b"] == (outputs, 3)
    assert len(found) == 12
