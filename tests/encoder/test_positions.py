"""Claims about `positions`: which tables a scheme reads, where positions begin, which schemes a kernel serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import pack
from adapterbank.encoder.families import FAMILIES
from adapterbank.encoder.forward import Frozen
from adapterbank.encoder.positions import POSITIONS
from families import TEXTS

Tiny = Callable[[str], Backbone]


def test_every_scheme_is_used_by_a_family_and_every_family_names_one() -> None:
    assert {family.positions for family in FAMILIES.values()} == set(POSITIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scheme_reads_exactly_the_tables_of_its_encoder(family: str, tiny: Tiny) -> None:
    backbone = tiny(family)
    tables = POSITIONS[backbone.config.position_scheme].tables(backbone.config)
    assert {f"{name}.weight" for name in tables} == backbone.tensors.keys() & {
        "embeddings.position.weight",
        "relative.weight",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_begin_after_the_padding_token_where_the_scheme_states_it(family: str, tiny: Tiny) -> None:
    config = tiny(family).config
    assert config.first_position == (2 if POSITIONS[config.position_scheme].after_padding else 0)


def test_a_scheme_that_adds_to_the_scores_is_not_fusible() -> None:
    assert {name for name, scheme in POSITIONS.items() if scheme.fusible} == {"learned", "learned_after_padding"}


def test_the_relative_bias_depends_on_the_distance_alone(tiny: Tiny) -> None:
    mpnet = tiny("mpnet")
    scheme = POSITIONS[mpnet.config.position_scheme]
    assert scheme.bias is not None
    bias = scheme.bias(mpnet.config, Frozen(mpnet.tensors), pack(mpnet.tokenize(TEXTS)))[0]
    for distance in range(-3, 4):
        diagonal = bias.diagonal(distance, 1, 2)
        assert torch.equal(diagonal, diagonal[:, :1].expand_as(diagonal))
