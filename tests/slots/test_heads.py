"""Heads: pooling by hand, losses against torch and scikit-learn, spans by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from adapterbank.encoder.batch import Tokens, pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.inference.runner import segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.tasks import spec

HIDDEN = 6
LENGTHS = (4, 1, 7, 2)


def loss_of(x, targets, head, lengths=None):
    """Give one loss a row, from targets as examples have them."""
    kind = heads.KINDS[head.kind]
    wanted = kind.targets(targets, head)
    assert len(wanted) == len(targets)
    return kind.loss(x, wanted, head, torch.tensor(lengths or [1.0] * len(targets)))


def made(seed=0):
    """Give random last hidden states of four rows, packed."""
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
    tensors = {n: torch.randn(t.shape, generator=generator) for n, t in heads.initial(head, HIDDEN, generator).items()}
    return plan, tensors


def given_by(head, tensors, plan, *, base=None, dropout=None):
    hidden, batch = made()
    stacks = Stacks(base or frozen())
    slot = stacks.put(plan, tensors)
    route = Route(stacks, segments([(slot, n) for n in LENGTHS]))
    (found,) = heads.outputs(hidden, batch, route, dropout)
    return found


def pooled(pooling, pooler):
    """Pool each row by hand."""
    vectors = []
    for row in made()[0].split(LENGTHS):
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
    torch.testing.assert_close(given_by(plan.head, tensors, plan), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["first", "mean", "pooler"])
def test_a_hidden_layer_of_the_head_is_a_tanh_layer(pooling):
    plan, tensors = slot_of(Head("multilabel", 3, pooling, hidden=5))
    inner, outer = nn.Linear(HIDDEN, 5), nn.Linear(5, 3)
    inner.load_state_dict({"weight": tensors["head.hidden.weight"], "bias": tensors["head.hidden.bias"]})
    outer.load_state_dict({"weight": tensors["head.weight"], "bias": tensors["head.bias"]})
    expected = outer(torch.tanh(inner(pooled(pooling, frozen()))))
    torch.testing.assert_close(given_by(plan.head, tensors, plan), expected.detach(), atol=1e-6, rtol=1e-6)


def test_a_slot_with_its_own_pooler_reads_that_one():
    plan, tensors = slot_of(Head("classification", 2, "pooler"), method="full")
    own = frozen(seed=9)
    expected = pooled("pooler", own) @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(given_by(plan.head, {**tensors, **own}, plan), expected, atol=1e-6, rtol=1e-6)


def test_a_span_head_gives_start_and_end_for_each_token():
    plan, tensors = slot_of(Head("span", 2))
    expected = made()[0] @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(given_by(plan.head, tensors, plan), expected, atol=1e-6, rtol=1e-6)


def test_regression_outputs_are_on_the_scale_of_the_labels():
    plan, tensors = slot_of(Head("regression", 1, "mean", shift=70.0, scale=12.5))
    raw = pooled("mean", None) @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(given_by(plan.head, tensors, plan), raw * 12.5 + 70.0, atol=1e-4, rtol=1e-6)


def test_only_regression_is_shifted_and_scaled():
    for kind, outputs in (("classification", 2), ("multilabel", 2), ("span", 2)):
        plain, tensors = slot_of(Head(kind, outputs, "mean"))
        moved, _ = slot_of(Head(kind, outputs, "mean", shift=5.0, scale=3.0))
        assert torch.equal(given_by(plain.head, tensors, plain), given_by(moved.head, tensors, moved))


def test_rows_of_no_task_give_their_mean_hidden_state():
    hidden, batch = made()
    route = Route(Stacks(frozen()), segments([(None, n) for n in LENGTHS]))
    (found,) = heads.outputs(hidden, batch, route)
    torch.testing.assert_close(found, pooled("mean", None), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        Head("classification", 3, "first"),
        Head("classification", 3, "mean"),
        Head("classification", 3, "pooler"),
        Head("span", 2),
    ],
)
def test_dropout_before_the_head_follows_its_key_and_changes_no_expectation(head):
    plan, tensors = slot_of(head)
    batch = made()[1]

    def drawn(step, rate=0.1):
        keys = row_keys(0, step, torch.arange(len(LENGTHS)))
        drop = Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=0.0)
        return given_by(head, tensors, plan, dropout=drop)

    plain = given_by(head, tensors, plan)
    assert torch.equal(drawn(0, rate=0.0), plain)
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0, rate=0.5), drawn(1, rate=0.5))
    mean = torch.stack([drawn(step) for step in range(400)]).mean(0)
    torch.testing.assert_close(mean, plain, atol=0.2, rtol=0.05)


def test_a_new_head_is_a_gaussian_of_width_002_cut_at_two_sigma_and_its_biases_are_zero():
    made_ = heads.initial(Head("classification", 40, hidden=50), 60, torch.Generator().manual_seed(0))
    assert {name: tuple(t.shape) for name, t in made_.items()} == {
        "head.hidden.weight": (50, 60),
        "head.hidden.bias": (50,),
        "head.weight": (40, 50),
        "head.bias": (40,),
    }
    for name, tensor in made_.items():
        if name.endswith("bias"):
            assert not tensor.any()
        else:
            assert tensor.abs().max() <= 0.04 * (1 + 1e-6)
            assert float(tensor.std()) == pytest.approx(0.88 * 0.02, rel=0.05)
    again = heads.initial(Head("classification", 40, hidden=50), 60, torch.Generator().manual_seed(0))
    assert all(torch.equal(made_[name], again[name]) for name in made_)


def test_every_kind_of_task_has_a_head():
    assert set(heads.KINDS) == set(spec.KINDS)


def scores(rows, outputs, seed=0):
    return 3 * torch.randn(rows, outputs, generator=torch.Generator().manual_seed(seed))


def test_classification_loss_is_the_cross_entropy_of_each_row():
    x, targets = scores(8, 4), [0, 1, 2, 3, 3, 2, 0, 1]
    found = loss_of(x, targets, Head("classification", 4))
    assert found.shape == (8,)
    for i, target in enumerate(targets):
        single = sklearn.metrics.log_loss([target], x[i : i + 1].double().softmax(1).numpy(), labels=[0, 1, 2, 3])
        assert float(found[i]) == pytest.approx(single, rel=1e-5)
    assert float(found.mean()) == pytest.approx(float(nn.CrossEntropyLoss()(x, torch.tensor(targets))), rel=1e-6)


def test_multilabel_loss_is_the_mean_over_labels_of_the_binary_cross_entropies():
    x, targets = scores(5, 4), [(0,), (), (1, 3), (0, 1, 2, 3), (2,)]
    wanted = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]])
    found = loss_of(x, targets, Head("multilabel", 4))
    assert found.shape == (5,)
    for i in range(5):
        p = x[i].double().sigmoid().numpy()
        each = [sklearn.metrics.log_loss([int(wanted[i, k])], [[1 - p[k], p[k]]], labels=[0, 1]) for k in range(4)]
        assert float(found[i]) == pytest.approx(np.mean(each), rel=1e-5)
    assert float(found.mean()) == pytest.approx(float(nn.BCEWithLogitsLoss()(x, wanted.float())), rel=1e-6)


def test_regression_loss_is_the_squared_error_in_units_of_the_spread():
    targets = [3.0, -1.0, 10.0, 4.5]
    plain = loss_of(scores(4, 1), targets, Head("regression", 1))
    expected = sklearn.metrics.mean_squared_error(targets, scores(4, 1)[:, 0].numpy())
    assert float(plain.mean()) == pytest.approx(expected, rel=1e-6)
    scaled = loss_of(scores(4, 1), targets, Head("regression", 1, shift=3.0, scale=2.5))
    torch.testing.assert_close(scaled, plain / 2.5**2)


def test_regression_gradients_do_not_depend_on_the_scale_of_the_labels():
    """A head with shift and scale on labels t learns as one without on (t - shift) / scale."""
    gradients = []
    for shift, scale in ((0.0, 1.0), (50.0, 20.0)):
        raw = scores(4, 1).requires_grad_()
        head = Head("regression", 1, shift=shift, scale=scale)
        targets = [t * scale + shift for t in (0.5, -1.0, 2.0, 0.25)]
        loss_of(raw * scale + shift, targets, head).mean().backward()
        gradients.append(raw.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_span_loss_is_the_mean_cross_entropy_of_start_and_end_within_each_row_alone():
    lengths, targets = [5, 1, 9, 3], [(1, 3), (0, 0), (8, 8), (0, 2)]
    x = scores(sum(lengths), 2).requires_grad_()
    found = loss_of(pad_sequence(x.split(lengths), True, padding_value=99.0), targets, Head("span", 2), lengths)
    again = x.detach().clone().requires_grad_()
    expected = []
    for row, (start, end) in zip(again.split(lengths), targets, strict=True):
        each = [nn.functional.cross_entropy(row[:, k][None], torch.tensor([t])) for k, t in ((0, start), (1, end))]
        expected.append(sum(each) / 2)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-6, rtol=1e-6)
    weights = torch.tensor([0.1, 0.4, 0.2, 0.3])
    (found * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    assert torch.isfinite(x.grad).all()
    torch.testing.assert_close(x.grad, again.grad, atol=1e-6, rtol=1e-6)


def test_decisions_are_the_likeliest_class_the_likely_labels_and_the_number():
    assert heads.DECIDE["classification"](np.array([[0.1, 3.0, -1.0], [5.0, 3.0, -1.0]])) == [1, 0]
    assert heads.DECIDE["multilabel"](np.array([[0.1, -3.0, 2.0], [-0.1, -3.0, 0.0]])) == [(0, 2), ()]
    assert heads.DECIDE["regression"](np.array([[2.5], [-1.0]])) == [2.5, -1.0]
