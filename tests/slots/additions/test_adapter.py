"""The adapter's arithmetic against modules of torch, and whole encoders with adapters against `transformers`."""

from __future__ import annotations

import copy
import itertools
from contextlib import ExitStack

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from adapterbank.encoder.batch import pack
from adapterbank.encoder.families import checkpoint_names
from adapterbank.encoder.forward import Frozen, forward
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from additions import draw
from families import FAMILIES

ACTIVATIONS = {
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "gelu": nn.GELU(),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "tanh": nn.Tanh(),
}
TEXTS = ["the cat sat on the mat", "why", "a big red fox jumps over the lazy dog in the house", "who was bad?"]


class Reference(nn.Module):
    """The paper's adapter, with its variants, in plain torch: f(v) = up(act(... act(down(norm(v)))))."""

    def __init__(self, hidden, size, *, activation="gelu_tanh", inner_norm=False, depth=1):
        super().__init__()
        self.norm = nn.LayerNorm(hidden) if inner_norm else nn.Identity()
        self.down = nn.Linear(hidden, size)
        self.middle = nn.ModuleDict({str(k): nn.Linear(size, size) for k in range(1, depth)})
        self.up = nn.Linear(size, hidden)
        self.activation = ACTIVATIONS[activation]

    def forward(self, v):
        v = self.activation(self.down(self.norm(v)))
        for linear in self.middle.values():
            v = self.activation(linear(v))
        return self.up(v)


def filled(adapter, hidden, seed=0):
    """Return tensors for every part without a zero or one, as after training."""
    torch.manual_seed(seed)
    made = draw(adapter, hidden, 0.3, seed)
    return {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in made.items()}


def at_site(tensors, site):
    return {name.removeprefix(f"{site}.adapter."): t for name, t in tensors.items() if name.startswith(f"{site}.")}


def reference(adapter, hidden, parts):
    module = Reference(
        hidden, adapter.size, activation=adapter.activation, inner_norm=adapter.inner_norm, depth=adapter.depth
    )
    module.load_state_dict(parts)
    return module


def plan_of(backbone, adapter_options, **head):
    return make_plan(adapter_options, depth=backbone.config.layers, head=Head("classification", 2, **head))


def through_slot(backbone, plan, tensors, rows):
    stacks = Stacks(backbone.tensors)
    slot = stacks.put(plan, tensors)
    with torch.no_grad():
        return forward(backbone.config, Route(stacks, segments([(slot, len(row)) for row in rows])), pack(rows))


@pytest.mark.parametrize(
    ("placement", "combine", "inner_norm", "depth", "activation"),
    list(itertools.product(["sequential", "parallel"], ["add", "multiply"], [False, True], [1, 2, 3], ACTIVATIONS)),
)
def test_a_variant_equals_its_formula_in_torch_modules(placement, combine, inner_norm, depth, activation):
    adapter = Adapter(5, (0,), ("attention",), activation, placement, combine, inner_norm, depth)
    parts = at_site(filled(adapter, 16), "layers.0.attention")
    y, x = torch.randn(7, 16), torch.randn(7, 16)
    f = reference(adapter, 16, parts)(x if placement == "parallel" else y)
    expected = y + f if combine == "add" else y * (1 + f)
    torch.testing.assert_close(adapter.apply(y, x, [parts]), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("combine", ["add", "multiply"])
@pytest.mark.parametrize("placement", ["sequential", "parallel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_up_projection_leaves_the_encoders_outputs_unchanged_to_the_bit(family, placement, combine, depth, tiny):
    backbone = tiny(family)
    options = Options(
        size=6, placement=placement, combine=combine, depth=depth, inner_norm=depth > 1, train_norms=False
    )
    plan = plan_of(backbone, options)
    tensors = filled(plan.additions[0], backbone.config.hidden)
    for name in tensors:
        if ".up." in name:
            tensors[name].zero_()
    rows = backbone.tokenize(TEXTS)
    with torch.no_grad():
        bare = forward(backbone.config, Frozen(backbone.tensors), pack(rows))
    assert torch.equal(through_slot(backbone, plan, tensors, rows), bare)
    for name in tensors:
        if name.endswith(".up.bias"):
            tensors[name].add_(0.1)
    assert not torch.equal(through_slot(backbone, plan, tensors, rows), bare)


def tensors_of(row):
    return torch.from_numpy(row.ids)[None], torch.from_numpy(row.types)[None]


def run_manually(model, adapters, ids, types):
    """Run the `transformers` BERT sub-layer by sub-layer: LN(x + y + up(act(down(y)))) after each."""
    x = model.embeddings(input_ids=ids, token_type_ids=types)
    for i, layer in enumerate(model.encoder.layer):
        y = layer.attention.output.dense(layer.attention.self(x)[0])
        x = layer.attention.output.LayerNorm(x + y + adapters[i, "attention"](y))
        y = layer.output.dense(layer.intermediate(x))
        x = layer.output.LayerNorm(x + y + adapters[i, "feedforward"](y))
    return x


def test_houlsby_adapters_equal_the_transformers_bert_run_manually(bert, checkpoint):
    plan = plan_of(bert, Options(size=11, train_norms=False))
    tensors = filled(plan.additions[0], 32)
    adapters = {
        (i, site): reference(plan.additions[0], 32, at_site(tensors, f"layers.{i}.{site}"))
        for i in range(3)
        for site in ("attention", "feedforward")
    }
    rows = bert.tokenize(TEXTS, ["the dog ran", "what is good", "a", "why is the film bad"])
    found = through_slot(bert, plan, tensors, rows).split([len(row) for row in rows])
    for row, ours in zip(rows, found, strict=True):
        with torch.no_grad():
            theirs = run_manually(checkpoint("bert")[1], adapters, *tensors_of(row))
        torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=1e-5)


def with_adapters(model, backbone, adapter, tensors):
    """Hook the reference adapters behind the dense layers that end each sub-layer; a shared layer counts its passes."""
    names = checkpoint_names(backbone.config, False)
    hooks = ExitStack()

    def hook(module, site, layers):
        adapters = itertools.cycle(
            [reference(adapter, backbone.config.hidden, at_site(tensors, f"layers.{i}.{site}")) for i in layers]
        )
        hooks.enter_context(module.register_forward_hook(lambda _, __, y: y + next(adapters)(y)))

    for group in sorted(set(backbone.config.groups)):
        layers = [i for i, ours in enumerate(backbone.config.groups) if ours == group]
        for site, part in (("attention", "attention.output"), ("feedforward", "feedforward.down")):
            theirs = names[f"layers.{group}.{part}.weight"].removesuffix(".weight")
            hook(model.get_submodule(theirs), site, layers)
    return hooks


@pytest.mark.parametrize("activation", ["gelu_tanh", "tanh"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_in_every_family_equal_hooks_on_its_transformers_model(family, activation, tiny, checkpoint):
    backbone, model = tiny(family), checkpoint(family)[1]
    plan = plan_of(backbone, Options(size=9, activation=activation, train_norms=False, inner_norm=activation == "tanh"))
    tensors = filled(plan.additions[0], backbone.config.hidden)
    rows = backbone.tokenize(TEXTS)
    found = through_slot(backbone, plan, tensors, rows).split([len(row) for row in rows])
    with with_adapters(model, backbone, plan.additions[0], tensors), torch.no_grad():
        for row, ours in zip(rows, found, strict=True):
            theirs = model(input_ids=tensors_of(row)[0]).last_hidden_state[0]
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_slots_own_layernorms_replace_the_frozen_ones(bert, checkpoint, new_slot):
    plan = plan_of(bert, Options(method="layernorm"))
    tensors = new_slot(bert, plan)
    model, names = copy.deepcopy(checkpoint("bert")[1]), checkpoint_names(bert.config, True)
    changed = {names[name]: tensor for name, tensor in tensors.items() if name in names}
    assert len(changed) == 14
    missing = model.load_state_dict(changed, strict=False)
    assert not missing.unexpected_keys
    rows = bert.tokenize(TEXTS)
    found = through_slot(bert, plan, tensors, rows).split([len(row) for row in rows])
    for row, ours in zip(rows, found, strict=True):
        with torch.no_grad():
            theirs = model(input_ids=tensors_of(row)[0]).last_hidden_state[0]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def numbers(tensors, ending):
    return np.concatenate([tensor.numpy().ravel() for name, tensor in tensors.items() if name.endswith(ending)])


@pytest.mark.parametrize("sigma", [1e-7, 1e-3, 1e-2, 1.0])
def test_initial_weights_are_gaussian_truncated_at_two_sigma(sigma):
    adapter = Adapter(24, (0, 1), depth=2)
    made = draw(adapter, 96, sigma, 3)
    for module in ("down", "middle.1", "up"):
        drawn = numbers(made, f"{module}.weight") / sigma
        assert np.abs(drawn).max() <= 2 * (1 + 1e-6)
        assert np.abs(drawn).max() > 1.9
        assert drawn.std() == pytest.approx(scipy.stats.truncnorm.std(-2, 2), rel=0.05)  # 0.88
        assert scipy.stats.kstest(drawn, scipy.stats.truncnorm(-2, 2).cdf).pvalue > 1e-3


def test_initial_biases_are_zero_and_the_inner_norm_is_the_identity():
    made = draw(Adapter(4, (0, 2), inner_norm=True, depth=3), 8, 0.01, 0)
    assert not numbers(made, ".bias").any()
    assert (numbers(made, ".norm.weight") == 1).all()


def test_equal_seeds_draw_equal_numbers_and_different_seeds_different_ones():
    adapter = Adapter(4, (0, 1))
    a, b, c = (draw(adapter, 8, 0.01, s) for s in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    weights = [name for name in a if name.endswith("weight")]
    assert not any(torch.equal(a[name], c[name]) for name in weights)
    assert not torch.equal(a["layers.0.attention.adapter.down.weight"], a["layers.1.attention.adapter.down.weight"])


def test_drawing_initial_values_does_not_touch_the_global_generator_of_torch():
    before = torch.get_rng_state()
    draw(Adapter(4, (0, 1)), 8, 0.01, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_sigma_zero_draws_zeros():
    made = draw(Adapter(4, (0,)), 8, 0.0, 0)
    assert not any(tensor.any() for tensor in made.values())


@pytest.mark.parametrize(("size", "hidden"), [(1, 8), (8, 32), (64, 768)])
def test_an_adapter_has_2md_plus_d_plus_m_parameters(size, hidden):
    made = draw(Adapter(size, (4,), ("attention",)), hidden, 0.0, 0)
    assert sum(tensor.numel() for tensor in made.values()) == 2 * size * hidden + hidden + size
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "layers.4.attention.adapter.down.weight": (size, hidden),
        "layers.4.attention.adapter.down.bias": (size,),
        "layers.4.attention.adapter.up.weight": (hidden, size),
        "layers.4.attention.adapter.up.bias": (hidden,),
    }
