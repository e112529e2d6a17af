"""Claims about `config`: a config says which tensors a checkpoint has, and what is not known is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapterbank.encoder import families as families
from adapterbank.encoder import forward
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.families import EncoderConfig, checkpoint_names, read_config
from adapterbank.errors import BackboneError, UnknownName
from families import FAMILIES

Checkpoint = Callable[[str], tuple[Path, Any]]

BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_act": "gelu",
    "max_position_embeddings": 64,
}


def read(**changes: Any) -> EncoderConfig:
    """Read BERT's config with some fields changed; None takes a field away."""
    config = {name: value for name, value in (BERT | changes).items() if value is not None}
    return read_config(config, "some/folder")


# --- what a config says


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


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_read_from_the_familys_own_words(family: str, tiny: Callable[[str], Backbone]) -> None:
    config = tiny(family).config
    found = (config.family, config.layers, config.hidden, config.heads, config.feedforward, config.vocabulary)
    assert found == (family, 3, 32, 4, 48, 128)
    assert config.max_length == 64
    assert config.shared_layers == (family == "albert")
    assert config.embedding == (16 if family in ("electra", "albert") else 32)
    assert config.types == {"distilbert": 0, "mpnet": 0, "bert": 2, "electra": 2, "albert": 2}.get(family, 1)
    assert config.buckets == (32 if family == "mpnet" else 0)


def test_a_familys_own_word_wins_over_the_common_one() -> None:
    own = {"n_layers": 2, "dim": 8, "n_heads": 2, "hidden_dim": 16, "activation": "relu", "dropout": 0.3}
    config = read(model_type="distilbert", attention_dropout=0.4, hidden_dropout_prob=0.9, **own)
    assert (config.layers, config.hidden, config.heads, config.feedforward) == (2, 8, 2, 16)
    assert (config.activation, config.dropout, config.attention_dropout) == ("relu", 0.3, 0.4)


def test_what_old_files_leave_out_is_what_transformers_takes_for_granted() -> None:
    bert = read()
    assert (bert.epsilon, bert.types, bert.dropout, bert.attention_dropout) == (1e-12, 2, 0.1, 0.1)
    assert read(layer_norm_eps=None, type_vocab_size=None) == bert
    assert read(model_type="roberta").first_position == 2
    assert read(model_type="electra").embedding == read(model_type="albert").embedding == 128
    assert read(model_type="albert").groups == (0, 0, 0)


@pytest.mark.parametrize(("layers", "groups", "expected"), [(4, 2, (0, 0, 1, 1)), (3, 2, (0, 0, 1)), (2, 2, (0, 1))])
def test_shared_layers_are_dealt_to_groups_in_order(layers: int, groups: int, expected: tuple[int, ...]) -> None:
    assert read(model_type="albert", num_hidden_layers=layers, num_hidden_groups=groups).groups == expected


def test_every_activation_that_is_read_can_be_computed() -> None:
    assert set(families.ACTIVATIONS.values()) == set(forward.ACTIVATIONS)
    for activation in forward.ACTIVATIONS.values():
        assert activation(torch.zeros(1)).item() == 0


def test_the_mathematics_leave_dropout_and_sizes_out() -> None:
    assert read(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0).mathematics() == read().mathematics()
    different: list[dict[str, Any]] = [
        {"hidden_act": "relu"},
        {"layer_norm_eps": 1e-5},
        {"num_attention_heads": 8},
        {"model_type": "roberta"},
        {"model_type": "mpnet"},
        {"model_type": "albert"},
    ]
    for changes in different:
        assert read(**changes).mathematics() != read().mathematics(), changes


# --- what is refused


def refusal(**changes: Any) -> str:
    """Give the sentence that refuses a config."""
    with pytest.raises((BackboneError, UnknownName)) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    assert "some/folder" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "deberta-v2", "", "robertas"])
def test_an_unknown_family_is_answered_with_those_there_are(kind: str) -> None:
    sentence = refusal(model_type=kind)
    assert repr(kind) in sentence
    assert all(family in sentence for family in families.FAMILIES)


def test_a_near_family_is_offered() -> None:
    assert "Did you mean 'roberta'?" in refusal(model_type="robertas")


@pytest.mark.parametrize("kind", [None, 3, ["bert"]])
def test_a_config_without_a_family_says_so(kind: Any) -> None:
    assert "'model_type'" in refusal(model_type=kind)


@pytest.mark.parametrize("field", ["is_decoder", "add_cross_attention"])
def test_a_decoder_is_refused(field: str) -> None:
    assert "is a decoder" in refusal(**{field: True})


@pytest.mark.parametrize("scheme", ["relative_key", "relative_key_query"])
def test_relative_positions_are_refused(scheme: str) -> None:
    assert repr(scheme) in refusal(position_embedding_type=scheme)
    assert read(position_embedding_type="absolute") == read()


@pytest.mark.parametrize("activation", ["quick_gelu", "gleu", ["gelu"]])
def test_an_unknown_activation_is_answered_with_those_there_are(activation: Any) -> None:
    sentence = refusal(hidden_act=activation)
    assert str(activation) in sentence
    assert "gelu_new" in sentence


def test_layers_within_a_group_and_other_numbers_of_buckets_are_refused() -> None:
    assert "inner_group_num is 2; only 1 is supported" in refusal(model_type="albert", inner_group_num=2)
    sentence = refusal(model_type="mpnet", relative_attention_num_buckets=64)
    assert "relative_attention_num_buckets is 64; only 32 is supported" in sentence


@pytest.mark.parametrize("field", [name for name in BERT if name != "model_type"])
def test_a_missing_field_is_named(field: str) -> None:
    assert f"has no {field!r}" in refusal(**{field: None})


def test_a_missing_field_is_named_in_the_familys_own_word() -> None:
    assert "has no 'n_layers'" in refusal(model_type="distilbert", num_hidden_layers=None)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "layer_norm_eps"])
@pytest.mark.parametrize("value", ["large", -1, True, [12]])
def test_a_field_that_is_no_number_is_named_with_its_value(field: str, value: Any) -> None:
    assert f"{field} is {value!r}" in refusal(**{field: value})


@pytest.mark.parametrize("heads", [0, 5])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(heads: int) -> None:
    assert f"{heads} heads" in refusal(num_attention_heads=heads)
