"""Claims about `blocks`: what the entries of its two tables compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.blocks import BLOCKS, FEEDFORWARDS, SubLayer
from adapterbank.encoder.forward import Frozen, Within

WIDTH = 8


class Doubling(Frozen):
    """A layer whose slot doubles the output of a sub-layer and adds its input."""

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        assert site == "layers.0.attention"
        return 2 * y + x


def normal(x: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), gain, None, 1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_slot_adds_to_the_sub_layers_output_and_reads_its_input(block: str) -> None:
    gain, x = torch.rand(WIDTH), torch.randn(3, WIDTH)
    layer = Within(Doubling({"layers.0.attention.norm.weight": gain}), "layers.0", "layers.0")
    found = BLOCKS[block](layer, x, SubLayer("attention", torch.sin, None), 1e-5)
    expected = {
        "post_norm": normal(x + 2 * x.sin() + x, gain),
        "pre_norm": x + 2 * normal(x, gain).sin() + normal(x, gain),
    }
    torch.testing.assert_close(found, expected[block])


@pytest.mark.parametrize("form", FEEDFORWARDS)
def test_a_feed_forward_returns_its_inner_width(form: str) -> None:
    weight, x = torch.randn(FEEDFORWARDS[form].factor * WIDTH, WIDTH), torch.randn(3, WIDTH)
    y = x @ weight.T
    layer = Within(Frozen({"layers.0.feedforward.up.weight": weight}), "layers.0", "layers.0")
    found = FEEDFORWARDS[form].inner(layer, x, "tanh")
    assert found.shape == (3, WIDTH)
    assert torch.equal(found, y.tanh() if form == "plain" else y[:, :WIDTH].tanh() * y[:, WIDTH:])


def test_a_layernorm_that_is_absent_leaves_its_input() -> None:
    x = torch.randn(3, WIDTH)
    assert torch.equal(
        BLOCKS["pre_norm"](Within(Frozen({}), "a", "a"), x, SubLayer("attention", torch.sin, None), 1e-5), x + x.sin()
    )
