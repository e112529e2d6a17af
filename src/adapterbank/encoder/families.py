"""What an encoder family looks like: tensor names, embeddings, positions, activation. Knows no tensors and no files.

Every family here is the same post-LayerNorm encoder; a row of `FAMILIES` says how its checkpoint spells the parts.
Our own names are the same for all families, so methods, packages and the pass never ask which family they serve:

    embeddings.word.weight, embeddings.position.weight, embeddings.type.weight, embeddings.norm.{weight,bias}
    embeddings.project.{weight,bias}                    (ELECTRA, ALBERT: embedding width -> hidden width)
    relative.weight                                     (MPNet: buckets x heads)
    layers.{i}.attention.{query,key,value,output,norm}.{weight,bias}
    layers.{i}.feedforward.{up,down,norm}.{weight,bias}
    pooler.{weight,bias}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank.errors import BackboneError, UnknownName

ACTIVATIONS = {
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
"""A checkpoint's word for its activation -> ours."""

_NUMBERS = {int: "whole number", float: "number"}


@dataclass(frozen=True)
class Family:
    """How one model type spells the common encoder."""

    prefix: str
    """What stands before every tensor name when the checkpoint was saved with a head on top."""
    embeddings: Mapping[str, str]
    """Our part -> the checkpoint's, for everything outside the layers."""
    layer: str
    """The checkpoint's prefix of a layer, with `{i}`."""
    parts: Mapping[str, str]
    """Our part of a layer -> the checkpoint's."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Our word for a config field -> the checkpoint's, where they differ from BERT's."""
    positions_follow_padding: bool = False
    """Whether the first position is `pad_token_id + 1` (RoBERTa and MPNet) and not 0."""
    token_types: bool = True
    shared_layers: bool = False
    """Whether all layers of a group use one set of weights (ALBERT)."""
    relative: bool = False
    """Whether attention has a bias that depends on the distance between two tokens (MPNet)."""


_EMBEDDINGS = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_TYPES = {"embeddings.type": "embeddings.token_type_embeddings"}
_POOLER = {"pooler": "pooler.dense"}
_BERT_PARTS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward.norm": "output.LayerNorm",
}
_ROBERTA = Family(
    prefix="roberta.",
    embeddings={**_EMBEDDINGS, **_TYPES, **_POOLER},
    layer="encoder.layer.{i}.",
    parts=_BERT_PARTS,
    positions_follow_padding=True,
)

FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        prefix="bert.",
        embeddings={**_EMBEDDINGS, **_TYPES, **_POOLER},
        layer="encoder.layer.{i}.",
        parts=_BERT_PARTS,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        prefix="distilbert.",
        embeddings=_EMBEDDINGS,
        layer="transformer.layer.{i}.",
        parts={
            "attention.query": "attention.q_lin",
            "attention.key": "attention.k_lin",
            "attention.value": "attention.v_lin",
            "attention.output": "attention.out_lin",
            "attention.norm": "sa_layer_norm",
            "feedforward.up": "ffn.lin1",
            "feedforward.down": "ffn.lin2",
            "feedforward.norm": "output_layer_norm",
        },
        fields={
            "num_hidden_layers": "n_layers",
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        token_types=False,
    ),
    "electra": Family(
        prefix="electra.",
        embeddings={**_EMBEDDINGS, **_TYPES, "embeddings.project": "embeddings_project"},
        layer="encoder.layer.{i}.",
        parts=_BERT_PARTS,
    ),
    "mpnet": Family(
        prefix="mpnet.",
        embeddings={**_EMBEDDINGS, **_POOLER, "relative": "encoder.relative_attention_bias"},
        layer="encoder.layer.{i}.",
        parts={
            **_BERT_PARTS,
            "attention.query": "attention.attn.q",
            "attention.key": "attention.attn.k",
            "attention.value": "attention.attn.v",
            "attention.output": "attention.attn.o",
            "attention.norm": "attention.LayerNorm",
        },
        positions_follow_padding=True,
        token_types=False,
        relative=True,
    ),
    "albert": Family(
        prefix="albert.",
        embeddings={
            **_EMBEDDINGS,
            **_TYPES,
            "pooler": "pooler",
            "embeddings.project": "encoder.embedding_hidden_mapping_in",
        },
        layer="encoder.albert_layer_groups.{i}.albert_layers.0.",
        parts={
            "attention.query": "attention.query",
            "attention.key": "attention.key",
            "attention.value": "attention.value",
            "attention.output": "attention.dense",
            "attention.norm": "attention.LayerNorm",
            "feedforward.up": "ffn",
            "feedforward.down": "ffn_output",
            "feedforward.norm": "full_layer_layer_norm",
        },
        shared_layers=True,
    ),
}


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes and constants of one encoder: all that changes its mathematics, and the dropout it was made with."""

    family: str
    vocabulary: int
    embedding: int
    hidden: int
    feedforward: int
    heads: int
    groups: tuple[int, ...]
    """For each layer, which set of layer weights it uses: 0, 1, 2, … unless layers are shared."""
    activation: str
    epsilon: float
    """Added to the variance in every LayerNorm."""
    positions: int
    """Rows of the position table."""
    first_position: int
    types: int
    """Rows of the token-type table, 0 without one."""
    buckets: int
    """Rows of the relative-position table, 0 without one."""
    dropout: float
    attention_dropout: float

    @property
    def layers(self) -> int:
        """How many layers a text goes through."""
        return len(self.groups)

    @property
    def max_length(self) -> int:
        """The longest text, in tokens, that has a position for each of them."""
        return self.positions - self.first_position

    @property
    def shared_layers(self) -> bool:
        """Whether some layers use the same weights."""
        return len(set(self.groups)) < len(self.groups)

    def mathematics(self) -> dict[str, Any]:
        """Give the fields that belong to a backbone's identity: same tensors and same fields, same outputs."""
        return {
            "heads": self.heads,
            "groups": list(self.groups),
            "activation": self.activation,
            "epsilon": self.epsilon,
            "first_position": self.first_position,
            "relative": self.buckets > 0,
        }

    @property
    def projected(self) -> bool:
        """Whether embeddings are projected to the hidden width."""
        return self.embedding != self.hidden or FAMILIES[self.family].shared_layers

    def shapes(self, pooler: bool) -> dict[str, tuple[int, ...]]:
        """Give our name and shape of every tensor of the encoder, in the order of the pass."""
        e, d, f = self.embedding, self.hidden, self.feedforward
        modules: dict[str, tuple[int, ...]] = {
            "embeddings.word": (self.vocabulary, e),
            "embeddings.position": (self.positions, e),
        }
        if self.types:
            modules["embeddings.type"] = (self.types, e)
        if self.buckets:
            modules["relative"] = (self.buckets, self.heads)
        names = {f"{module}.weight": shape for module, shape in modules.items()}
        names |= _with_bias("embeddings.norm", (e,))
        if self.projected:
            names |= _with_bias("embeddings.project", (d, e))
        for group in sorted(set(self.groups)):
            for part in ("query", "key", "value", "output"):
                names |= _with_bias(f"layers.{group}.attention.{part}", (d, d))
            names |= _with_bias(f"layers.{group}.attention.norm", (d,))
            names |= _with_bias(f"layers.{group}.feedforward.up", (f, d))
            names |= _with_bias(f"layers.{group}.feedforward.down", (d, f))
            names |= _with_bias(f"layers.{group}.feedforward.norm", (d,))
        if pooler:
            names |= _with_bias("pooler", (d, d))
        return names


def _with_bias(module: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{module}.weight": shape, f"{module}.bias": shape[:1]}


def read_config(fields: Mapping[str, Any], source: str) -> EncoderConfig:
    """Read the sizes of an encoder from its `fields.json`.

    `source` names the checkpoint in messages.
    """
    family = _family(fields, source)
    get = _getter(fields, family, source)
    _refuse_unknown_mathematics(fields, get, source)
    layers, hidden, heads = (
        get(name, kind=int) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not heads or hidden % heads:
        raise BackboneError(f"{source}: config.json has {heads} heads, which do not divide the hidden size {hidden}.")
    groups = (get("num_hidden_groups", 1, kind=int) or 1) if family.shared_layers else layers
    return EncoderConfig(
        family=fields["model_type"],
        vocabulary=get("vocab_size", kind=int),
        embedding=get("embedding_size", 128, kind=int) if "embeddings.project" in family.embeddings else hidden,
        hidden=hidden,
        feedforward=get("intermediate_size", kind=int),
        heads=heads,
        groups=tuple(int(i / (layers / groups)) for i in range(layers)),
        activation=ACTIVATIONS[get("hidden_act")],
        epsilon=get("layer_norm_eps", 1e-12, kind=float),
        positions=get("max_position_embeddings", kind=int),
        first_position=get("pad_token_id", 1, kind=int) + 1 if family.positions_follow_padding else 0,
        types=get("type_vocab_size", 2, kind=int) if family.token_types else 0,
        buckets=32 if family.relative else 0,
        dropout=min(0.95, get("hidden_dropout_prob", 0.1, kind=float)),
        attention_dropout=min(0.95, get("attention_probs_dropout_prob", 0.1, kind=float)),
    )


def checkpoint_names(config: EncoderConfig, pooler: bool) -> dict[str, str]:
    """Map our tensor names to the checkpoint's, without prefix."""
    family = FAMILIES[config.family]
    modules = dict(family.embeddings)
    for group in sorted(set(config.groups)):
        for ours, theirs in family.parts.items():
            modules[f"layers.{group}.{ours}"] = family.layer.format(i=group) + theirs
    found = {}
    for name in config.shapes(pooler):
        module, leaf = name.rsplit(".", 1)
        found[name] = f"{modules[module]}.{leaf}"
    return found


def _family(fields: Mapping[str, Any], source: str) -> Family:
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise BackboneError(
            f"{source}: config.json has no 'model_type', so its family is unknown. "
            f"It must be one of: {', '.join(FAMILIES)}."
        )
    if kind not in FAMILIES:
        raise UnknownName(kind, f"an encoder family that is known here ({source})", FAMILIES)
    return FAMILIES[kind]


def _getter(fields: Mapping[str, Any], family: Family, source: str) -> Any:
    def get(name: str, default: Any = None, kind: type[int] | type[float] | None = None) -> Any:
        # Newer files of a family with names of its own may carry the common name as well: the family's own wins.
        own = family.fields.get(name, name)
        found = [value for value in (fields.get(own), fields.get(name), default) if value is not None]
        if not found:
            raise BackboneError(f"{source}: config.json has no {own!r}. Is it a whole checkpoint of an encoder?")
        value = found[0]
        if kind and (not isinstance(value, int | kind) or isinstance(value, bool) or value < 0):
            raise BackboneError(
                f"{source}: {own} is {value!r} in config.json; it must be a {_NUMBERS[kind]} from 0 on."
            )
        return kind(value) if kind else value

    return get


def _refuse_unknown_mathematics(fields: Mapping[str, Any], get: Any, source: str) -> None:
    activation = get("hidden_act")
    if str(activation) not in ACTIVATIONS:
        raise UnknownName(str(activation), f"an activation that is known here ({source})", ACTIVATIONS)
    scheme = fields.get("position_embedding_type", "absolute") or "absolute"
    if scheme != "absolute":
        raise BackboneError(f"{source}: position_embedding_type is {scheme!r}; only 'absolute' is known here.")
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise BackboneError(f"{source} is a decoder; adapterbank works with encoders.")
    # The public code of MPNet uses 32 buckets whatever its config says.
    for name, known in (("inner_group_num", 1), ("relative_attention_num_buckets", 32)):
        if (found := fields.get(name, known)) != known:
            raise BackboneError(f"{source}: {name} is {found!r}; only {known} is known here.")
