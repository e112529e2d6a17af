"""`slots.heads`: pooling against a manual computation, outputs per row or per token, dropout, initial values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from adapterbank.encoder.batch import Tokens, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks

HIDDEN = 6
LENGTHS = (4, 1, 7, 2)


def hidden_states(seed=0):
    """Return random last hidden states of four rows, packed."""
    generator = torch.Generator().manual_seed(seed)
    batch = pack([Tokens(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)) for n in LENGTHS])
    return torch.randn(sum(LENGTHS), HIDDEN, generator=generator), batch


def frozen(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "pooler.weight": torch.randn(HIDDEN, HIDDEN, generator=generator),
        "pooler.bias": torch.randn(HIDDEN, generator=generator),
    }


def slot_of(head, method="feature", seed=2):
    plan = make_plan(Options(method=method), depth=1, head=head)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(t.shape, generator=generator) for n, t in heads.initial(head, HIDDEN, seed).items()}
    return plan, tensors


def outputs_of(head, tensors, plan, *, base=None, dropout=None):
    hidden, batch = hidden_states()
    stacks = Stacks(base or frozen())
    slot = stacks.put(plan, tensors)
    route = Route(stacks, segments([(slot, n) for n in LENGTHS]))
    (outputs,) = heads.outputs(hidden, batch, route, dropout)
    return outputs


def pooled(pooling, pooler):
    """Pool each row with a plain loop."""
    vectors = []
    for row in hidden_states()[0].split(LENGTHS):
        if pooling == "mean":
            vectors.append(sum(row[i] for i in range(len(row))) / len(row))
        elif pooling == "first":
            vectors.append(row[0])
        else:
            vectors.append(torch.tanh(pooler["pooler.weight"] @ row[0] + pooler["pooler.bias"]))
    return torch.stack(vectors)


@pytest.mark.parametrize("pooling", ["first", "mean", "pooler"])
def test_a_head_is_a_linear_layer_on_the_pooled_row(pooling):
    plan, tensors = slot_of(Head("classification", 3, pooling))
    expected = pooled(pooling, frozen()) @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(outputs_of(plan.head, tensors, plan), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["first", "mean", "pooler"])
def test_a_hidden_layer_of_the_head_is_a_tanh_layer(pooling):
    plan, tensors = slot_of(Head("multilabel", 3, pooling, hidden=5))
    inner, outer = nn.Linear(HIDDEN, 5), nn.Linear(5, 3)
    inner.load_state_dict({"weight": tensors["head.hidden.weight"], "bias": tensors["head.hidden.bias"]})
    outer.load_state_dict({"weight": tensors["head.weight"], "bias": tensors["head.bias"]})
    expected = outer(torch.tanh(inner(pooled(pooling, frozen()))))
    torch.testing.assert_close(outputs_of(plan.head, tensors, plan), expected.detach(), atol=1e-6, rtol=1e-6)


def test_a_slot_with_its_own_pooler_uses_it():
    plan, tensors = slot_of(Head("classification", 2, "pooler"), method="full")
    own = frozen(seed=9)
    expected = pooled("pooler", own) @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(outputs_of(plan.head, {**tensors, **own}, plan), expected, atol=1e-6, rtol=1e-6)


def test_a_span_head_returns_start_and_end_scores_for_each_token():
    plan, tensors = slot_of(Head("span", 2))
    expected = hidden_states()[0] @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(outputs_of(plan.head, tensors, plan), expected, atol=1e-6, rtol=1e-6)


def test_regression_outputs_have_the_scale_of_the_labels():
    plan, tensors = slot_of(Head("regression", 1, "mean", shift=70.0, scale=12.5))
    raw = pooled("mean", None) @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(outputs_of(plan.head, tensors, plan), raw * 12.5 + 70.0, atol=1e-4, rtol=1e-6)


def test_only_regression_is_shifted_and_scaled():
    for kind, outputs in (("classification", 2), ("multilabel", 2), ("span", 2)):
        plain, tensors = slot_of(Head(kind, outputs, "mean"))
        moved, _ = slot_of(Head(kind, outputs, "mean", shift=5.0, scale=3.0))
        assert torch.equal(outputs_of(plain.head, tensors, plain), outputs_of(moved.head, tensors, moved))


def test_rows_without_a_task_return_their_mean_hidden_state():
    hidden, batch = hidden_states()
    route = Route(Stacks(frozen()), segments([(None, n) for n in LENGTHS]))
    (outputs,) = heads.outputs(hidden, batch, route)
    torch.testing.assert_close(outputs, pooled("mean", None), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        Head("classification", 3, "first"),
        Head("classification", 3, "mean"),
        Head("classification", 3, "pooler"),
        Head("span", 2),
    ],
)
def test_dropout_before_the_head_depends_on_its_key_and_keeps_the_expectation(head):
    plan, tensors = slot_of(head)
    batch = hidden_states()[1]

    def drawn(step, rate=0.1):
        keys = row_keys(0, step, torch.arange(len(LENGTHS)))
        drop = Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=0.0)
        return outputs_of(head, tensors, plan, dropout=drop)

    plain = outputs_of(head, tensors, plan)
    assert torch.equal(drawn(0, rate=0.0), plain)
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0, rate=0.5), drawn(1, rate=0.5))
    mean = torch.stack([drawn(step) for step in range(400)]).mean(0)
    torch.testing.assert_close(mean, plain, atol=0.2, rtol=0.05)


def test_initial_head_weights_are_gaussian_with_sigma_002_truncated_at_two_sigma_and_biases_are_zero():
    tensors = heads.initial(Head("classification", 40, hidden=50), 60, 0)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "head.hidden.weight": (50, 60),
        "head.hidden.bias": (50,),
        "head.weight": (40, 50),
        "head.bias": (40,),
    }
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            assert not tensor.any()
        else:
            assert tensor.abs().max() <= 0.04 * (1 + 1e-6)
            assert float(tensor.std()) == pytest.approx(0.88 * 0.02, rel=0.05)
    again = heads.initial(Head("classification", 40, hidden=50), 60, 0)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
