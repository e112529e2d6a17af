"""`encoder.products`: a matrix that is laid out once multiplies as the plain one, forwards and backwards."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import Frozen, forward, join_projections
from adapterbank.encoder.products import LAYOUTS, FrozenTensors, Product, filled_rows, int8_engine, multiply
from adapterbank.errors import ConfigError
from adapterbank.runtime import find_dtype
from families import FAMILIES

CPU = torch.device("cpu")
TEXTS = ["the cat sat on the mat", "why", "a big red fox jumps over the lazy dog", "was it a good film?"]
ERRORS = {"fp32": 1e-5, "bf16": 2e-2, "int8": 2e-2}
"""The largest error of a product, as a share of its norm."""

needs_int8 = pytest.mark.skipif(int8_engine() is None, reason="this build of torch has no int8 products")


def layouts():
    """Return the layouts that this machine computes, each with its largest error."""
    supported = []
    for name in ERRORS:
        try:
            find_dtype(name, CPU)
        except ConfigError:
            continue
        supported.append(name)
    return supported


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request):
    if request.param not in layouts():
        pytest.skip(f"this machine has no {request.param} products")
    return request.param


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 13, 200])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_that_of_the_plain_matrix_to_within_its_precision(layout, rows, biased):
    weight, x, bias = numbers(48, 96), numbers(rows, 96, seed=1), numbers(48, seed=2) if biased else None
    found = Product(weight, LAYOUTS[layout])(x, bias)
    assert found.dtype == torch.float32
    assert error(found, F.linear(x, weight, bias)) < ERRORS[layout]


def test_the_gradients_of_input_and_bias_are_those_of_the_plain_matrix(layout):
    weight, dy = numbers(48, 96), numbers(7, 48, seed=3)
    plain, packed = ([numbers(7, 96, seed=1).requires_grad_(), numbers(48, seed=2).requires_grad_()] for _ in range(2))
    wanted = torch.autograd.grad(F.linear(plain[0], weight, plain[1]), plain, dy)
    found = torch.autograd.grad(Product(weight, LAYOUTS[layout])(*packed), packed, dy)
    assert error(found[0], wanted[0]) < ERRORS[layout]
    assert torch.equal(found[1], dy.sum(0))


@needs_int8
def test_an_int8_product_of_a_row_does_not_depend_on_the_other_rows():
    product, x = Product(numbers(48, 96), LAYOUTS["int8"]), numbers(9, 96, seed=1)
    loud = torch.cat([x, 1000 * numbers(3, 96, seed=4)])
    assert torch.equal(product(loud, None)[:9], product(x, None))


@needs_int8
def test_rows_of_equal_numbers_and_extreme_ones_are_multiplied_in_int8():
    weight = numbers(48, 96)
    x = torch.stack([torch.zeros(96), torch.full((96,), 3.0), 1e-20 * numbers(96, seed=1), 1e10 * numbers(96, seed=1)])
    found, wanted = Product(weight, LAYOUTS["int8"])(x, None), x @ weight.t()
    assert torch.equal(found[0], torch.zeros(48))
    assert error(found[1], wanted[1]) < 2e-2
    assert error(found[3], wanted[3]) < 2e-2
    assert found.isfinite().all()


@needs_int8
def test_a_matrix_with_an_empty_output_channel_stays_finite_in_int8():
    weight = numbers(48, 96)
    weight[5] = 0.0
    found = Product(weight, LAYOUTS["int8"])(numbers(3, 96, seed=1), torch.ones(48))
    assert torch.equal(found[:, 5], torch.ones(3))


def test_the_largest_sums_of_the_int8_kernel_do_not_overflow():
    """Without VNNI two products are added in 16 bits, so fewer steps are used there; either way the result is right."""
    if int8_engine() is None:
        pytest.skip("this build of torch has no int8 products")
    weight, x = torch.full((16, 256), 0.5), torch.cat([torch.full((2, 255), 7.0), torch.zeros(2, 1)], 1)
    assert error(Product(weight, LAYOUTS["int8"])(x, None), x @ weight.t()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pass_on_laid_out_matrices_is_the_pass_on_plain_ones(family, tiny, layout):
    backbone = tiny(family)
    batch = pack(backbone.tokenize(TEXTS))
    with torch.inference_mode():
        wanted = forward(backbone.config, Frozen(join_projections(backbone.tensors)), batch)
        found = forward(backbone.config, Frozen(backbone.laid_out(layout)), batch)
    assert error(found, wanted) < 10 * ERRORS[layout]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_layer_is_laid_out_and_no_table_is(family, tiny):
    backbone = tiny(family)
    tensors = backbone.laid_out()
    parts = ("query.weight", "key.weight", "value.weight")
    matrices = {
        name
        for name, tensor in tensors.items()
        if tensor.dim() == 2
        and name.endswith(".weight")
        and not name.endswith(parts)
        and not name.startswith("embeddings.")
        and name != "relative.weight"
    }
    assert set(tensors.products) - {"embeddings.project.weight"} == matrices
    assert {f"layers.0.attention.{part}.weight" for part in ("joined", "output")} <= set(tensors.products)


def test_matrices_are_laid_out_once_for_all_who_place_the_encoder(bert):
    assert bert.laid_out() is bert.laid_out("fp32")
    joined = bert.laid_out()["layers.0.attention.joined.weight"]
    assert joined.data_ptr() == bert.tensors["layers.0.attention.query.weight"].data_ptr()  # and not copied


def test_a_name_without_a_layout_is_multiplied_plainly():
    weight, x = numbers(4, 6), numbers(2, 6, seed=1)
    for tensors in ({"w": weight}, FrozenTensors({"w": weight}, "fp32")):
        assert torch.equal(multiply(tensors, x, "w", None), F.linear(x, weight))


def test_products_meet_few_numbers_of_rows_since_code_for_each_stays_in_memory():
    met = {filled_rows(count) for count in range(1, 4097)}
    assert len(met) == 16 + 8 * 8
    assert all(filled_rows(count) == count for count in met)
    assert all(count <= filled_rows(count) <= 1.125 * count for count in range(1, 4097))


@pytest.mark.parametrize("count", [1, 16, 17, 33, 100])
def test_rows_that_fill_a_product_up_do_not_show(layout, count):
    product, x, bias = Product(numbers(24, 48), LAYOUTS[layout]), numbers(count, 48, seed=1), numbers(24, seed=2)
    with torch.inference_mode():
        found = product(x, bias)
        each = torch.cat([product(row, bias) for row in x.split(1)])
    assert found.shape == (count, 24)
    torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-4)


def test_a_backbone_that_has_been_used_can_be_pickled(bert):
    expected = bert.encode(TEXTS)
    assert bert._laid_out
    again = pickle.loads(pickle.dumps(bert))
    for found, wanted in zip(again.encode(TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
