"""Claims about `config_json`: which sizes it reads from which field, and that it names what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.blocks import ACTIVATIONS
from adapterbank.encoder.config_json import CHECKPOINT_ACTIVATIONS, read_config
from adapterbank.encoder.families import FAMILIES, EncoderConfig
from adapterbank.errors import BackboneError, UnknownName

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
    """Read BERT's config with some fields changed; None removes a field."""
    fields = {name: value for name, value in (BERT | changes).items() if value is not None}
    return read_config(fields, "some/folder")


# --- what is read


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_read_from_the_familys_own_fields(family: str, tiny: Callable[[str], Backbone]) -> None:
    config = tiny(family).config
    found = (config.family, config.layers, config.hidden, config.heads, config.feedforward, config.vocabulary)
    assert found == (family, 3, 32, 4, 48, 128)
    assert config.max_length == 64
    assert config.shared_layers == (family == "albert")
    assert config.embedding == (16 if family in ("electra", "albert") else 32)
    assert config.types == {"distilbert": 0, "mpnet": 0, "bert": 2, "electra": 2, "albert": 2}.get(family, 1)
    assert config.buckets == (32 if family == "mpnet" else 0)


def test_a_familys_own_field_wins_over_the_common_one() -> None:
    own = {"n_layers": 2, "dim": 8, "n_heads": 2, "hidden_dim": 16, "activation": "relu", "dropout": 0.3}
    config = read(model_type="distilbert", attention_dropout=0.4, hidden_dropout_prob=0.9, **own)
    assert (config.layers, config.hidden, config.heads, config.feedforward) == (2, 8, 2, 16)
    assert (config.activation, config.dropout, config.attention_dropout) == ("relu", 0.3, 0.4)


def test_fields_that_old_files_lack_have_the_defaults_of_transformers() -> None:
    bert = read()
    assert (bert.epsilon, bert.types, bert.dropout, bert.attention_dropout) == (1e-12, 2, 0.1, 0.1)
    assert read(layer_norm_eps=None, type_vocab_size=None) == bert
    assert read(model_type="roberta").first_position == 2
    assert read(model_type="electra").embedding == read(model_type="albert").embedding == 128
    assert read(model_type="albert").groups == (0, 0, 0)


@pytest.mark.parametrize(("layers", "groups", "expected"), [(4, 2, (0, 0, 1, 1)), (3, 2, (0, 0, 1)), (2, 2, (0, 1))])
def test_shared_layers_are_assigned_to_groups_in_order(layers: int, groups: int, expected: tuple[int, ...]) -> None:
    assert read(model_type="albert", num_hidden_layers=layers, num_hidden_groups=groups).groups == expected


def test_every_activation_that_is_read_can_be_computed() -> None:
    assert set(CHECKPOINT_ACTIVATIONS.values()) == set(ACTIVATIONS)
    for activation in ACTIVATIONS.values():
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
    """Return the message that refuses a config."""
    with pytest.raises((BackboneError, UnknownName)) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
    assert "some/folder" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "deberta-v2", "", "robertas"])
def test_an_unknown_family_is_refused_with_a_list_of_those_known(kind: str) -> None:
    message = refusal(model_type=kind)
    assert repr(kind) in message
    assert all(family in message for family in FAMILIES)


def test_a_similar_family_is_suggested() -> None:
    assert "Did you mean 'roberta'?" in refusal(model_type="robertas")


@pytest.mark.parametrize("kind", [None, 3, ["bert"]])
def test_a_config_without_a_family_is_refused(kind: Any) -> None:
    assert "'model_type'" in refusal(model_type=kind)


@pytest.mark.parametrize("field", ["is_decoder", "add_cross_attention"])
def test_a_decoder_is_refused(field: str) -> None:
    assert "is a decoder" in refusal(**{field: True})


@pytest.mark.parametrize("scheme", ["relative_key", "relative_key_query"])
def test_relative_positions_are_refused(scheme: str) -> None:
    assert repr(scheme) in refusal(position_embedding_type=scheme)
    assert read(position_embedding_type="absolute") == read()


@pytest.mark.parametrize("activation", ["quick_gelu", "gleu", ["gelu"]])
def test_an_unknown_activation_is_refused_with_a_list_of_those_known(activation: Any) -> None:
    message = refusal(hidden_act=activation)
    assert str(activation) in message
    assert "gelu_new" in message


def test_layers_within_a_group_and_other_numbers_of_buckets_are_refused() -> None:
    assert "inner_group_num is 2; only 1 is supported" in refusal(model_type="albert", inner_group_num=2)
    message = refusal(model_type="mpnet", relative_attention_num_buckets=64)
    assert "relative_attention_num_buckets is 64; only 32 is supported" in message


@pytest.mark.parametrize("field", [name for name in BERT if name != "model_type"])
def test_a_missing_field_is_named(field: str) -> None:
    assert f"has no {field!r}" in refusal(**{field: None})


def test_a_missing_field_is_named_as_the_family_names_it() -> None:
    assert "has no 'n_layers'" in refusal(model_type="distilbert", num_hidden_layers=None)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "layer_norm_eps"])
@pytest.mark.parametrize("value", ["large", -1, True, [12]])
def test_a_field_that_is_not_a_number_is_named_with_its_value(field: str, value: Any) -> None:
    assert f"{field} is {value!r}" in refusal(**{field: value})


@pytest.mark.parametrize("heads", [0, 5])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(heads: int) -> None:
    assert f"{heads} heads" in refusal(num_attention_heads=heads)
