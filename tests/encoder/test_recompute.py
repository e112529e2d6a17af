"""`encoder.recompute`: what is kept, and what is computed again."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.recompute import RECOMPUTE, Recompute, Recomputing
from adapterbank.errors import ConfigError

UP = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Calls:
    """A wide product that counts how often it is computed."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.made += 1
        return F.linear(x, UP)


def activate(y: Tensor) -> Tensor:
    return F.gelu(y)


def gate(y: Tensor) -> Tensor:
    a, b = y.chunk(2, -1)
    return F.gelu(a) * b


def inputs() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("after", [activate, gate])
def test_a_wide_output_and_its_views_are_computed_again_with_the_same_gradient(after):
    x, run, recompute = inputs(), Calls(), Recompute()
    (expected,) = torch.autograd.grad(after(F.linear(x, UP)).sum(), x)
    with recompute.dropping():
        out = after(recompute.widened(run, x))
    assert run.made == 1
    (found,) = torch.autograd.grad(out.sum(), x)
    assert run.made > 1
    assert torch.equal(found, expected)


def test_an_input_that_can_be_computed_is_not_kept():
    z, run, recompute = inputs(), Calls(), Recompute()
    (expected,) = torch.autograd.grad(F.gelu(F.linear(torch.tanh(z), UP)).sum(), z)
    with recompute.dropping():
        x = torch.tanh(z)
        recompute.remember(x, recompute.run_again(torch.tanh, z))
        packed = recompute._pack(x)
        out = F.gelu(recompute.widened(run, x))
    assert not isinstance(packed, Tensor)
    assert torch.equal(packed(), x)
    (found,) = torch.autograd.grad(out.sum(), z)
    assert torch.equal(found, expected)


def test_an_output_as_wide_as_its_input_is_kept():
    recompute, x = Recompute(), inputs()
    out = recompute.widened(lambda x: F.linear(x, UP[:4]), x)
    assert recompute._pack(out) is out


def test_nothing_is_remembered_without_gradients():
    recompute = Recompute()
    with torch.no_grad():
        out = recompute.widened(Calls(), inputs())
    assert recompute._pack(out) is out


def test_memory_that_is_used_again_is_not_mistaken_for_what_was_there():
    recompute, x = Recompute(), inputs()
    out = recompute.widened(Calls(), x)
    address = out.data_ptr()
    other = torch.zeros(0).set_(out.untyped_storage(), 0, out.shape)  # as an allocator would give it to the next
    del out
    gc.collect()
    assert other.data_ptr() == address
    assert recompute._pack(other) is other


def test_auto_begins_when_memory_runs_out_and_only_once():
    auto, always, never = map(Recomputing, RECOMPUTE)
    assert [one.on for one in (auto, always, never)] == [False, True, False]
    assert [one.start() for one in (auto, auto, always, never)] == [True, False, False, False]
    assert [one.on for one in (auto, always, never)] == [True, True, False]
    with never.of_a_pass() as kept:
        assert kept is None
    with auto.of_a_pass() as kept:
        assert isinstance(kept, Recompute)


def test_another_word_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"recompute is 'sometimes'.*auto, always, never"):
        Recomputing("sometimes")
