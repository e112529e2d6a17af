"""The table of kinds: losses against torch and scikit-learn, decisions by hand, and nothing heavy on import."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from adapterbank.inference.rows import Rows
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.table import KINDS
from adapterbank.slots.plan import Head
from kinds.tasks_of import task_of


def test_every_row_is_found_by_its_own_name_and_the_first_recognizes_anything():
    assert all(name == kind.name for name, kind in KINDS.items())
    assert next(iter(KINDS.values())).recognizes(None, [object()])


def test_importing_the_kinds_loads_neither_torch_nor_numpy():
    code = (
        "import sys, adapterbank.kinds.table, adapterbank.kinds.scoring\n"
        "print(*sorted({'torch', 'numpy', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert result.stdout.strip() == ""


def loss_of(x, targets, head, lengths=None):
    """Return one loss for each row, from targets as examples have them."""
    kind = KINDS[head.kind]
    wanted = kind.targets(targets, head)
    assert len(wanted) == len(targets)
    return kind.loss(x, wanted, head, torch.tensor(lengths or [1.0] * len(targets)))


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


def decided(kind, outputs):
    task = task_of(kind, ("a", "b", "c"))
    return KINDS[kind].decide(HeadOutputs(task, None, Rows([], None), list(np.array(outputs))))


def test_decisions_are_the_most_probable_class_the_probable_labels_and_the_number():
    assert decided("classification", [[0.1, 3.0, -1.0], [5.0, 3.0, -1.0]]) == [1, 0]
    assert decided("multilabel", [[0.1, -3.0, 2.0], [-0.1, -3.0, 0.0]]) == [(0, 2), ()]
    assert decided("regression", [[2.5], [-1.0]]) == [2.5, -1.0]
