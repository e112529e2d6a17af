"""(IA)³ against `transformers`' BERT with hooks that scale keys, values and inner activations; mixed and trained."""

from __future__ import annotations

import contextlib

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import Frozen, forward, join_projections
from adapterbank.inference.runner import outputs, segments
from adapterbank.methods import Options
from adapterbank.slots.additions.ia3 import Ia3
from adapterbank.slots.plan import Head, decays, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.slots.tensors import added_shapes, initial
from families import FAMILIES, TEXTS
from small_data import reviews


def plan_of(backbone, method="ia3", **options):
    config = backbone.config
    choice = Options(method=method, **options)
    head = Head("classification", 2)
    return make_plan(choice, depth=config.layers, head=head, shared_layers=config.shared_layers)


@contextlib.contextmanager
def scaled(model, own):
    """Scale the outputs of key and value, and the input of the feed-forward's second layer, in every layer."""
    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(model.encoder.layer):
            for name in ("key", "value"):
                scale, module = own[f"layers.{i}.attention.{name}.ia3.scale"], getattr(layer.attention.self, name)
                stack.callback(module.register_forward_hook(lambda _m, _i, out, s=scale: out * s).remove)
            inner = own[f"layers.{i}.feedforward.inner.ia3.scale"]
            hook = layer.output.dense.register_forward_pre_hook(lambda _m, inputs, s=inner: (inputs[0] * s,))
            stack.callback(hook.remove)
        yield


@pytest.mark.parametrize("joined", [True, False])
def test_scales_equal_hooks_on_the_transformers_bert(bert, checkpoint, new_slot, joined):
    plan, model = plan_of(bert), checkpoint("bert")[1]
    own = new_slot(bert, plan)
    rows = bert.tokenize(TEXTS)
    stacks = Stacks(join_projections(bert.tensors) if joined else bert.tensors)
    slot = stacks.put(plan, own)
    with torch.no_grad(), scaled(model, own):
        found = forward(bert.config, Route(stacks, segments([(slot, len(row)) for row in rows])), pack(rows))
        for row, ours in zip(rows, found.split([len(row) for row in rows]), strict=True):
            ids, types = (torch.from_numpy(values)[None] for values in (row.ids, row.types))
            theirs = model(input_ids=ids, token_type_ids=types).last_hidden_state[0]
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_slot_computes_exactly_what_the_frozen_encoder_computes(family, tiny):
    backbone = tiny(family)
    plan = plan_of(backbone)
    stacks = Stacks(join_projections(backbone.tensors))
    slot = stacks.put(plan, initial(plan, backbone.config, 0.0, 0))
    batch = pack(backbone.tokenize(TEXTS))
    with torch.no_grad():
        found = forward(backbone.config, Route(stacks, segments([(slot, len(batch.ids))])), batch)
        assert torch.equal(found, forward(backbone.config, Frozen(stacks.frozen), batch))


def test_ia3_has_three_vectors_per_layer_without_weight_decay(bert):
    plan, config = plan_of(bert, layers="1-2"), bert.config
    assert plan.additions == (Ia3((1, 2)),)
    assert added_shapes(plan, config) == {
        f"layers.{i}.{site}.ia3.scale": (width,)
        for i in (1, 2)
        for site, width in (
            ("attention.key", config.hidden),
            ("attention.value", config.hidden),
            ("feedforward.inner", config.feedforward),
        )
    }
    assert not any(decays(name) for name in added_shapes(plan, config))


def test_ia3_rows_share_a_batch_with_adapters_lora_and_the_bare_encoder(bert, new_slot):
    plans = [plan_of(bert), plan_of(bert, "adapter", size=5), plan_of(bert, "lora"), plan_of(bert, layers="0")]
    stacks = Stacks(join_projections(bert.tensors))
    slots = [*(stacks.put(plan, new_slot(bert, plan, seed=k)) for k, plan in enumerate([*plans, plans[0]])), None]
    tokens = bert.tokenize(TEXTS)
    rows = [(row, slot) for row in tokens for slot in slots]
    together = outputs(bert.config, stacks, [row for row, _ in rows], [slot for _, slot in rows])
    for (row, slot), ours in zip(rows, together, strict=True):
        (alone,) = outputs(bert.config, stacks, [row], [slot])
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(alone), atol=1e-5, rtol=1e-5)


def test_ia3_trains_saves_predicts_beside_other_methods_and_audits(tmp_path, bert):
    rows, fast = reviews(), {"epochs": 6, "lr": 0.03, "batch": 8, "max_length": 32}
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    result = bank.train("scales", rows, rows, method="ia3", **fast)
    bank.train("plain", rows, rows, size=4, **{**fast, "epochs": 1})
    losses = [epoch["loss"] for epoch in result.record["history"]]
    assert losses[-1] < losses[0]
    assert result.package.manifest.method["ia3"] == {"layers": [0, 1, 2]}
    again = open_bank(bank.path, bert, device="cpu")
    assert again.evaluate("scales", rows)["accuracy"] == result.record["metrics"]["dev"]["accuracy"]
    text = rows[0][0]
    mixed = again.predict(["scales", "plain", None], [text] * 3)
    assert mixed[0].label == again.predict("scales", [text])[0].label
    assert all(finding.ok for finding in again.audit())
