"""`StaticRoute` on padded rows gives what `Route` gives on packed ones."""

from __future__ import annotations

import pytest
import torch

from adapterbank.encoder.batch import TokenStore, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import Within, forward, join_projections
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.slots.static_routing import StaticRoute, apply_linear, apply_norm
from families import FAMILIES, TEXTS

ROWS, LONGEST = 4, 24
METHODS = {
    "adapter": Options(size=5),
    "adapter without norms": Options(size=8, train_norms=False, activation="silu"),
    "adapter of all sorts": Options(size=3, placement="parallel", combine="multiply", depth=3, inner_norm=True),
    "adapter after attention": Options(size=5, sites="attention", activation="tanh"),
    "adapter here and there": Options(size=5, layers="0,2", activation="relu"),
    "layernorm": Options(method="layernorm"),
    "layernorm above": Options(method="layernorm", layers="2"),
    "lora": Options(method="lora", rank=3),
    "lora of one": Options(method="lora", rank=4, targets="value", alpha=1.0),
    "lora here and there": Options(method="lora", rank=5, targets="key,output,up,down", layers="0,2"),
    "ia3": Options(method="ia3"),
    "ia3 above": Options(method="ia3", layers="2"),
    "bitfit": Options(method="bitfit"),
    "bitfit above": Options(method="bitfit", layers="2"),
    "feature": Options(method="feature"),
    "top": Options(method="top", top=2),
    "full": Options(method="full"),
}


class Both:
    """Slots of one plan in one stack, and rows for each: `Route` on packed rows, `StaticRoute` on padded ones."""

    def __init__(self, backbone, new_slot, options, slots, head=None, joined=True):
        config = backbone.config
        head = head or Head("classification", 3, "pooler" if backbone.has_pooler else "first")
        plan = make_plan(options, depth=config.layers, head=head, shared_layers=config.shared_layers)
        self.config, self.plan, self.slots = config, plan, slots
        self.stacks = Stacks(join_projections(backbone.tensors) if joined else backbone.tensors)
        for seed in range(slots):
            assert self.stacks.put(plan, new_slot(backbone, plan, seed=seed)) == seed
        self.stacks.learn(torch.float32)
        texts = backbone.tokenize(TEXTS)
        rows = [texts[(3 * slot + k) % len(texts)] for slot in range(slots) for k in range(ROWS)]
        self.lengths = [len(row) for row in rows]
        self.packed = pack(rows)
        self.route = Route(self.stacks, segments([(i // ROWS, n) for i, n in enumerate(self.lengths)]))
        self.padded, _ = TokenStore.of(rows, torch.device("cpu")).batch(torch.arange(len(rows)), LONGEST)
        self.leaves = {name: view for block in self.stacks.blocks for name, view in block.views.items()}
        self.uniform = StaticRoute(self.stacks.frozen, self.leaves, plan)

    def dropout(self, batch, rate):
        keys = torch.cat([row_keys(slot, 5, torch.arange(ROWS)) for slot in range(self.slots)])
        return Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=rate) if rate else None

    def by_route(self, rate=0.0):
        drop = self.dropout(self.packed, rate)
        hidden = forward(self.config, self.route, self.packed, drop)
        return hidden, torch.cat(heads.outputs(hidden, self.packed, self.route, drop))

    def by_uniform(self, rate=0.0, uniform=None):
        uniform = uniform or self.uniform
        drop = self.dropout(self.padded, rate)
        hidden = forward(self.config, uniform, self.padded, drop)
        x = heads.reads(hidden, self.padded, self.plan.head, self.uniform.linear, drop)
        out = heads.apply(x.view(self.slots, -1, x.shape[-1]).squeeze(0), self.plan.head, self.uniform.own)
        return self.real(hidden), self.real(out) if self.plan.head.kind == "span" else out.flatten(0, -2)

    def real(self, x):
        """Give the real tokens of filled-up rows, end to end."""
        rows = x.reshape(len(self.lengths), LONGEST, -1)
        return torch.cat([row[:n] for row, n in zip(rows, self.lengths, strict=True)])

    def gradients(self, out):
        found = torch.autograd.grad(out.square().mean(), list(self.leaves.values()), allow_unused=True)
        return dict(zip(self.leaves, found, strict=True))


def assert_both_alike(both, rate):
    (hidden, out), (mine, given) = both.by_route(rate), both.by_uniform(rate)
    torch.testing.assert_close(mine, hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given, out, atol=1e-5, rtol=1e-5)
    expected, found = both.gradients(out), both.gradients(given)
    for name, gradient in expected.items():
        if gradient is None:  # nobody has read it
            assert found[name] is None
        else:
            close = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}", **close)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_filled_up_rows_is_what_a_route_gives(method, slots, rate, bert, new_slot):
    assert_both_alike(Both(bert, new_slot, METHODS[method], slots), rate)


@pytest.mark.parametrize("method", ["adapter", "lora", "ia3", "bitfit"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_filled_up_rows_is_what_a_route_gives(family, slots, method, tiny, new_slot):
    assert_both_alike(Both(tiny(family), new_slot, METHODS[method], slots), 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_encoder_of_every_family_too(family, tiny, new_slot):
    assert_both_alike(Both(tiny(family), new_slot, Options(method="full"), 1), 0.1)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    "head",
    [
        Head("classification", 3, "first"),
        Head("classification", 3, "mean", hidden=4),
        Head("multilabel", 3, "mean"),
        Head("regression", 1, "mean", shift=3.0, scale=2.0),
        Head("span", 2),
        Head("span", 2, hidden=4),
    ],
)
def test_every_head_on_filled_up_rows_is_what_a_route_gives(head, slots, bert, new_slot):
    assert_both_alike(Both(bert, new_slot, Options(size=3), slots, head), 0.1)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", ["adapter", "top", "lora", "bitfit"])
def test_query_key_and_value_may_lie_joined_or_apart(method, slots, bert, new_slot):
    together, apart = (Both(bert, new_slot, METHODS[method], slots, joined=joined) for joined in (True, False))
    for mine, other in zip(together.by_uniform(), apart.by_uniform(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


class ByFullNames:
    """A `StaticRoute` whose layers look everything up by full names, as `Route`'s do."""

    def __init__(self, uniform):
        self.uniform = uniform

    def __getattr__(self, name):
        return getattr(self.uniform, name)

    def layer(self, weights, site):
        return Within(self.uniform, weights, site)


@pytest.mark.parametrize("method", ["adapter", "adapter here and there", "layernorm", "lora", "bitfit", "top"])
def test_short_names_within_a_layer_find_what_full_names_find(method, bert, new_slot):
    both = Both(bert, new_slot, METHODS[method], 3)
    for mine, other in zip(both.by_uniform(), both.by_uniform(uniform=ByFullNames(both.uniform)), strict=True):
        assert torch.equal(mine, other)


def test_what_stands_in_the_padding_reaches_no_real_token(bert, new_slot):
    both = Both(bert, new_slot, Options(size=5), 3)
    hidden, out = both.by_uniform(0.3)
    real = both.padded.mask.expand(-1, -1, 1, -1).flatten()
    both.padded.ids[~real] = 17
    both.padded.types[~real] = 1
    again, given = both.by_uniform(0.3)
    torch.testing.assert_close(again, hidden, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(given, out, atol=1e-6, rtol=1e-6)


def test_a_slots_rows_feel_no_other_slot(bert, new_slot):
    both = Both(bert, new_slot, Options(size=5), 3)
    _, out = both.by_uniform()
    with torch.no_grad():
        for leaf in both.leaves.values():
            leaf[1] += 0.5
    _, moved = both.by_uniform()
    assert torch.equal(moved[:ROWS], out[:ROWS])
    assert torch.equal(moved[2 * ROWS :], out[2 * ROWS :])
    assert not torch.isclose(moved[ROWS : 2 * ROWS], out[ROWS : 2 * ROWS]).any()


@pytest.mark.parametrize("own_weight", [False, True])
@pytest.mark.parametrize("own_bias", [False, True])
def test_a_module_may_have_its_weight_its_bias_both_or_neither_of_its_own(own_weight, own_bias):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4)  # two slots with three rows of five tokens each
    weight = torch.randn(*([2] if own_weight else []), 7, 4)
    bias = torch.randn(*([2] if own_bias else []), 7)
    gain, shift = torch.randn(*([2] if own_weight else []), 4), torch.randn(*([2] if own_bias else []), 4)
    for flat in (False, True):
        given = x.flatten(0, 1) if flat else x
        linear, norm = apply_linear(given, weight, bias), apply_norm(given, gain, shift, 1e-5)
        assert (linear.shape, norm.shape) == ((*given.shape[:-1], 7), given.shape)
        for k, mine in enumerate(x.split(3)):
            w, b = weight[k] if own_weight else weight, bias[k] if own_bias else bias
            g, s = gain[k] if own_weight else gain, shift[k] if own_bias else shift
            expected = torch.nn.functional.linear(mine, w, b)
            torch.testing.assert_close(linear.view(6, 5, 7)[3 * k : 3 * k + 3], expected, atol=1e-6, rtol=1e-5)
            expected = torch.nn.functional.layer_norm(mine, (4,), g, s, 1e-5)
            torch.testing.assert_close(norm.view(6, 5, 4)[3 * k : 3 * k + 3], expected, atol=1e-6, rtol=1e-5)
