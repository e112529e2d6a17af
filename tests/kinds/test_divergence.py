"""Claims about `adapterbank.kinds.divergence` and the `consistency` of each kind, against torch's KL divergence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Bernoulli, Categorical, kl_divergence

from adapterbank.kinds.divergence import between_sigmoids, between_softmaxes
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Head


def drawn(*shape, seed=0, scale=3.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(p, q):
    return (kl_divergence(p, q) + kl_divergence(q, p)) / 2


def consistency(kind, x, y, targets=None, counts=None, head=None):
    return KINDS[kind].consistency(x, y, targets, head or Head(kind, x.shape[-1]), counts)


def test_between_softmaxes_is_half_the_sum_of_both_divergences():
    x, y = drawn(5, 4), drawn(5, 4, seed=1)
    torch.testing.assert_close(between_softmaxes(x, y), symmetric(Categorical(logits=x), Categorical(logits=y)))
    torch.testing.assert_close(between_softmaxes(x, x + 7.0), torch.zeros(5, dtype=torch.float64))


def test_between_sigmoids_is_that_of_each_pair():
    x, y = drawn(5, 4), drawn(5, 4, seed=1)
    torch.testing.assert_close(between_sigmoids(x, y), symmetric(Bernoulli(logits=x), Bernoulli(logits=y)))


def test_both_sides_have_gradients_of_the_formula():
    x, y = drawn(3, 4).requires_grad_(), drawn(3, 4, seed=1).requires_grad_()
    ours = torch.autograd.grad(between_softmaxes(x, y).sum(), (x, y))
    log_p, log_q = (F.log_softmax(t, -1) for t in (x, y))
    both = F.kl_div(log_q, log_p, log_target=True, reduction="sum") + F.kl_div(
        log_p, log_q, log_target=True, reduction="sum"
    )
    for mine, theirs in zip(ours, torch.autograd.grad(both / 2, (x, y)), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.abs().max() > 0.01


def test_classification_compares_labels_and_multilabel_each_of_them():
    x, y = drawn(5, 4), drawn(5, 4, seed=1)
    torch.testing.assert_close(
        consistency("classification", x, y), symmetric(Categorical(logits=x), Categorical(logits=y))
    )
    each = symmetric(Bernoulli(logits=x), Bernoulli(logits=y))
    torch.testing.assert_close(consistency("multilabel", x, y), each.mean(1))


def test_regression_compares_numbers_in_units_of_the_labels_spread():
    x, y = drawn(5, 1), drawn(5, 1, seed=1)
    found = consistency("regression", x, y, head=Head("regression", 1, shift=9.0, scale=4.0))
    torch.testing.assert_close(found, (x - y)[:, 0] ** 2 / 16)


COUNTS = torch.tensor([3, 5, 1])


def test_span_compares_start_and_end_over_the_tokens_of_a_row_and_no_others():
    x, y = (drawn(3, 5, 2, seed=seed).requires_grad_() for seed in (0, 1))
    found = consistency("span", x, y, counts=COUNTS)
    for row, count in enumerate(COUNTS):
        parts = [symmetric(*(Categorical(logits=t[row, :count, side]) for t in (x, y))) for side in (0, 1)]
        torch.testing.assert_close(found[row], sum(parts) / 2)
    beyond = torch.arange(5) >= COUNTS[:, None]
    for gradient in torch.autograd.grad(found.sum(), (x, y)):
        assert gradient.isfinite().all()
        assert not gradient[beyond].any()
        assert gradient[0, :3].abs().min() > 0


@pytest.mark.parametrize("width", [3, 4, 6])
def test_tagging_compares_the_words_of_a_row_and_no_other_tokens(width):
    x, y = drawn(3, 4, 3), drawn(3, 4, 3, seed=1)
    targets = torch.full((3, width), -100)
    targets[0, 1], targets[0, 2], targets[1, 1] = 2, 0, 1
    found = consistency("tagging", x, y, targets=targets, counts=COUNTS)
    each = symmetric(Categorical(logits=x), Categorical(logits=y))
    torch.testing.assert_close(found, torch.stack([(each[0, 1] + each[0, 2]) / 2, each[1, 1], each[2, 0] * 0]))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equal_outputs_differ_by_nothing(kind):
    x = drawn(3, 5, 4).float() if KINDS[kind].per_token else drawn(3, 4).float()
    found = consistency(kind, x, x.clone(), targets=torch.zeros(3, 5, dtype=torch.int64), counts=COUNTS)
    assert found.tolist() == [0.0, 0.0, 0.0]
