"""Claims about `families`: a row states exactly the tensors of a checkpoint, and names entries that exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapterbank.encoder import families
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.blocks import BLOCKS, FEEDFORWARDS
from adapterbank.encoder.config_json import read_config
from adapterbank.encoder.families import bias_group, checkpoint_names
from adapterbank.encoder.positions import POSITIONS
from families import FAMILIES

Checkpoint = Callable[[str], tuple[Path, Any]]


def test_the_tests_know_every_family() -> None:
    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_exactly_those_of_the_checkpoint(family: str, checkpoint: Checkpoint) -> None:
    folder, model = checkpoint(family)
    config = read_config(json.loads((folder / "config.json").read_text()), str(folder))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    pooler = any(name.startswith("pooler") for name in theirs)
    names, shapes = checkpoint_names(config, pooler), config.shapes(pooler)
    assert names.keys() == shapes.keys()
    assert {names[ours]: shapes[ours] for ours in shapes} == theirs


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_row_names_entries_that_exist(family: str) -> None:
    row = families.FAMILIES[family]
    assert (row.block in BLOCKS, row.feedforward in FEEDFORWARDS, row.positions in POSITIONS) == (True, True, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_shapes_are_those_of_the_weights_of_a_layer(family: str, tiny: Callable[[str], Backbone]) -> None:
    backbone = tiny(family)
    shapes = {f"layers.0.{module}.weight": shape for module, shape in backbone.config.layer_shapes.items()}
    assert shapes == {
        name: tuple(tensor.shape)
        for name, tensor in backbone.tensors.items()
        if name.startswith("layers.0.") and name.endswith(".weight")
    }


def test_every_module_belongs_to_one_group_of_biases() -> None:
    groups = {
        "embeddings.norm": "norm",
        "embeddings.project": "embeddings",
        "layers.11.attention.query": "attention",
        "layers.0.attention.norm": "norm",
        "layers.2.feedforward.down": "feedforward",
        "layers.2.final.norm": "norm",
        "pooler": "pooler",
    }
    assert {module: bias_group(module) for module in groups} == groups
