"""`slots.static_routing`: `StaticRoute` on padded rows computes what `Route` computes on packed rows."""

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
    "adapter with all variants": Options(size=3, placement="parallel", combine="multiply", depth=3, inner_norm=True),
    "adapter after attention": Options(size=5, sites="attention", activation="tanh"),
    "adapter in some layers": Options(size=5, layers="0,2", activation="relu"),
    "layernorm": Options(method="layernorm"),
    "layernorm in the last layer": Options(method="layernorm", layers="2"),
    "lora": Options(method="lora", rank=3),
    "lora of one target": Options(method="lora", rank=4, targets="value", alpha=1.0),
    "lora in some layers": Options(method="lora", rank=5, targets="key,output,up,down", layers="0,2"),
    "ia3": Options(method="ia3"),
    "ia3 in the last layer": Options(method="ia3", layers="2"),
    "bitfit": Options(method="bitfit"),
    "bitfit in the last layer": Options(method="bitfit", layers="2"),
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
        self.stacks.require_gradients(torch.float32)
        texts = backbone.tokenize(TEXTS)
        rows = [texts[(3 * slot + k) % len(texts)] for slot in range(slots) for k in range(ROWS)]
        self.lengths = [len(row) for row in rows]
        self.packed = pack(rows)
        self.route = Route(self.stacks, segments([(i // ROWS, n) for i, n in enumerate(self.lengths)]))
        self.padded, _ = TokenStore.of(rows, torch.device("cpu")).batch(torch.arange(len(rows)), LONGEST)
        self.leaves = {name: view for block in self.stacks.blocks for name, view in block.views.items()}
        self.static_route = StaticRoute(self.stacks.frozen, self.leaves, plan)

    def dropout(self, batch, rate):
        keys = torch.cat([row_keys(slot, 5, torch.arange(ROWS)) for slot in range(self.slots)])
        return Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=rate) if rate else None

    def by_route(self, rate=0.0):
        drop = self.dropout(self.packed, rate)
        hidden = forward(self.config, self.route, self.packed, drop)
        return hidden, torch.cat(heads.outputs(hidden, self.packed, self.route, drop))

    def by_static_route(self, rate=0.0, route=None):
        route = route or self.static_route
        drop = self.dropout(self.padded, rate)
        hidden = forward(self.config, route, self.padded, drop)
        x = heads.reads(hidden, self.padded, self.plan.head, self.static_route.linear, drop)
        out = heads.apply(x.view(self.slots, -1, x.shape[-1]).squeeze(0), self.plan.head, self.static_route.own)
        return self.real(hidden), self.real(out) if self.plan.head.kind == "span" else out.flatten(0, -2)

    def real(self, x):
        """Return the real tokens of padded rows, end to end."""
        rows = x.reshape(len(self.lengths), LONGEST, -1)
        return torch.cat([row[:n] for row, n in zip(rows, self.lengths, strict=True)])

    def gradients(self, out):
        found = torch.autograd.grad(out.square().mean(), list(self.leaves.values()), allow_unused=True)
        return dict(zip(self.leaves, found, strict=True))


def assert_both_equal(both, rate):
    (hidden, out), (static_hidden, static_out) = both.by_route(rate), both.by_static_route(rate)
    torch.testing.assert_close(static_hidden, hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(static_out, out, atol=1e-5, rtol=1e-5)
    expected, found = both.gradients(out), both.gradients(static_out)
    for name, gradient in expected.items():
        if gradient is None:  # not used in the pass
            assert found[name] is None
        else:
            close = {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}", **close)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_equal_results_on_padded_and_packed_rows(method, slots, rate, bert, new_slot):
    assert_both_equal(Both(bert, new_slot, METHODS[method], slots), rate)


@pytest.mark.parametrize("method", ["adapter", "lora", "ia3", "bitfit"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_equal_results_on_padded_and_packed_rows(family, slots, method, tiny, new_slot):
    assert_both_equal(Both(tiny(family), new_slot, METHODS[method], slots), 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fully_trained_encoder_of_every_family_gives_equal_results_on_padded_and_packed_rows(family, tiny, new_slot):
    assert_both_equal(Both(tiny(family), new_slot, Options(method="full"), 1), 0.1)


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
def test_every_head_gives_equal_results_on_padded_and_packed_rows(head, slots, bert, new_slot):
    assert_both_equal(Both(bert, new_slot, Options(size=3), slots, head), 0.1)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", ["adapter", "top", "lora", "bitfit"])
def test_joined_and_separate_query_key_and_value_give_equal_results(method, slots, bert, new_slot):
    together, apart = (Both(bert, new_slot, METHODS[method], slots, joined=joined) for joined in (True, False))
    for joined, separate in zip(together.by_static_route(), apart.by_static_route(), strict=True):
        torch.testing.assert_close(joined, separate, atol=1e-5, rtol=1e-5)


class ByFullNames:
    """A `StaticRoute` whose layers use full names, like those of `Route`."""

    def __init__(self, route):
        self.route = route

    def __getattr__(self, name):
        return getattr(self.route, name)

    def layer(self, weights, site):
        return Within(self.route, weights, site)


@pytest.mark.parametrize("method", ["adapter", "adapter in some layers", "layernorm", "lora", "bitfit", "top"])
def test_short_names_within_a_layer_and_full_names_find_the_same_tensors(method, bert, new_slot):
    both = Both(bert, new_slot, METHODS[method], 3)
    full_names = ByFullNames(both.static_route)
    for short, full in zip(both.by_static_route(), both.by_static_route(route=full_names), strict=True):
        assert torch.equal(short, full)


def test_the_content_of_the_padding_affects_no_real_token(bert, new_slot):
    both = Both(bert, new_slot, Options(size=5), 3)
    hidden, out = both.by_static_route(0.3)
    real = both.padded.mask.expand(-1, -1, 1, -1).flatten()
    both.padded.ids[~real] = 17
    both.padded.types[~real] = 1
    again, again_out = both.by_static_route(0.3)
    torch.testing.assert_close(again, hidden, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(again_out, out, atol=1e-6, rtol=1e-6)


def test_a_change_to_one_slot_affects_no_rows_of_other_slots(bert, new_slot):
    both = Both(bert, new_slot, Options(size=5), 3)
    _, out = both.by_static_route()
    with torch.no_grad():
        for leaf in both.leaves.values():
            leaf[1] += 0.5
    _, moved = both.by_static_route()
    assert torch.equal(moved[:ROWS], out[:ROWS])
    assert torch.equal(moved[2 * ROWS :], out[2 * ROWS :])
    assert not torch.isclose(moved[ROWS : 2 * ROWS], out[ROWS : 2 * ROWS]).any()


@pytest.mark.parametrize("own_weight", [False, True])
@pytest.mark.parametrize("own_bias", [False, True])
def test_the_weight_and_bias_of_a_module_can_each_be_shared_or_per_slot(own_weight, own_bias):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4)  # two slots with three rows of five tokens each
    weight = torch.randn(*([2] if own_weight else []), 7, 4)
    bias = torch.randn(*([2] if own_bias else []), 7)
    gain, shift = torch.randn(*([2] if own_weight else []), 4), torch.randn(*([2] if own_bias else []), 4)
    for flat in (False, True):
        inputs = x.flatten(0, 1) if flat else x
        linear, norm = apply_linear(inputs, weight, bias), apply_norm(inputs, gain, shift, 1e-5)
        assert (linear.shape, norm.shape) == ((*inputs.shape[:-1], 7), inputs.shape)
        for k, part in enumerate(x.split(3)):
            w, b = weight[k] if own_weight else weight, bias[k] if own_bias else bias
            g, s = gain[k] if own_weight else gain, shift[k] if own_bias else shift
            expected = torch.nn.functional.linear(part, w, b)
            torch.testing.assert_close(linear.view(6, 5, 7)[3 * k : 3 * k + 3], expected, atol=1e-6, rtol=1e-5)
            expected = torch.nn.functional.layer_norm(part, (4,), g, s, 1e-5)
            torch.testing.assert_close(norm.view(6, 5, 4)[3 * k : 3 * k + 3], expected, atol=1e-6, rtol=1e-5)
