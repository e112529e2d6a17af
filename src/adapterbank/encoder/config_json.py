"""The fields of a checkpoint's config.json, read into an `EncoderConfig`. Knows no tensors and no other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterbank.encoder.families import FAMILIES, EncoderConfig, Family
from adapterbank.encoder.positions import POSITIONS
from adapterbank.errors import BackboneError, UnknownName

CHECKPOINT_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""A checkpoint's name for its activation -> ours."""

_NUMBERS = {int: "whole number", float: "number"}


def read_config(fields: Mapping[str, Any], source: str) -> EncoderConfig:
    """Read the sizes of an encoder from the fields of its config.json.

    `source` names the checkpoint in messages.
    """
    family = _family(fields, source)
    get = _getter(fields, family, source)
    _refuse_unknown_mathematics(fields, family, get, source)
    layers, hidden, heads = (
        get(name, kind=int) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not heads or hidden % heads:
        raise BackboneError(f"{source}: config.json has {heads} heads, which do not divide the hidden size {hidden}.")
    groups = (get("num_hidden_groups", 1, kind=int) or 1) if family.shared_layers else layers
    embedding = get("embedding_size", 128, kind=int) if "embeddings.project" in family.embeddings else hidden
    scheme = POSITIONS[family.positions]
    has_bias = {group: has if isinstance(has, bool) else fields.get(has) for group, has in family.biases.items()}
    return EncoderConfig(
        family=fields["model_type"],
        vocabulary=get("vocab_size", kind=int),
        embedding=embedding,
        hidden=hidden,
        feedforward=get("intermediate_size", kind=int),
        heads=heads,
        groups=tuple(int(i / (layers / groups)) for i in range(layers)),
        activation=CHECKPOINT_ACTIVATIONS[get("hidden_act")],
        epsilon=get("layer_norm_eps", 1e-12, kind=float),
        positions=get("max_position_embeddings", kind=int),
        first_position=get("pad_token_id", 1, kind=int) + 1 if scheme.after_padding else 0,
        types=get("type_vocab_size", 2, kind=int) if family.token_types else 0,
        buckets=scheme.buckets,
        dropout=min(0.95, get("hidden_dropout_prob", 0.1, kind=float)),
        attention_dropout=min(0.95, get("attention_probs_dropout_prob", 0.1, kind=float)),
        projected=embedding != hidden or family.projection == "always",
        block=family.block,
        feedforward_form=family.feedforward,
        position_scheme=family.positions,
        position_constants=scheme.constants(fields) if scheme.constants else {},
        attention_spans=family.attention_spans(fields, layers),
        unbiased=frozenset(group for group, has in has_bias.items() if not has),
        final_norm=family.final_norm,
    )


def _family(fields: Mapping[str, Any], source: str) -> Family:
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise BackboneError(
            f"{source}: config.json has no 'model_type', so its family is unknown. "
            f"It must be one of: {', '.join(FAMILIES)}."
        )
    if kind not in FAMILIES:
        raise UnknownName(kind, f"a supported encoder family ({source})", FAMILIES)
    return FAMILIES[kind]


def _getter(fields: Mapping[str, Any], family: Family, source: str) -> Any:
    def get(name: str, default: Any = None, kind: type[int] | type[float] | None = None) -> Any:
        # Newer files of a family with names of its own may have the common name as well: the family's own wins.
        own = family.fields.get(name, name)
        found = [value for value in (fields.get(own), fields.get(name), default) if value is not None]
        if not found:
            raise BackboneError(f"{source}: config.json has no {own!r}. Is it the whole checkpoint of an encoder?")
        value = found[0]
        if kind and (not isinstance(value, int | kind) or isinstance(value, bool) or value < 0):
            raise BackboneError(
                f"{source}: {own} is {value!r} in config.json; it must be a {_NUMBERS[kind]}, 0 or greater."
            )
        return kind(value) if kind else value

    return get


def _refuse_unknown_mathematics(fields: Mapping[str, Any], family: Family, get: Any, source: str) -> None:
    activation = get("hidden_act")
    if str(activation) not in CHECKPOINT_ACTIVATIONS:
        raise UnknownName(str(activation), f"a supported activation ({source})", CHECKPOINT_ACTIVATIONS)
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise BackboneError(f"{source} is a decoder; adapterbank works with encoders.")
    for name, known in family.known_values.items():
        if (found := fields.get(name)) not in (None, "", known):
            raise BackboneError(f"{source}: {name} is {found!r}; only {known!r} is supported.")
