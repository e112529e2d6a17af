"""The encoder families: tensor names, and which arithmetic each uses. A table; knows no tensors and no files.

A row of `FAMILIES` states how a family's checkpoints name their tensors and config fields, and which entry of each
table of arithmetic it uses: `blocks.BLOCKS`, `blocks.FEEDFORWARDS`, `positions.POSITIONS`. To add a family: one row,
and an entry for what no other family computes. Our own names are the same for all families, so methods, packages and
the pass never ask for the family:

    embeddings.word.weight, embeddings.type.weight, embeddings.norm.{weight,bias}
    embeddings.position.weight                          (learned positions)
    embeddings.project.{weight,bias}                    (ELECTRA, ALBERT: embedding width -> hidden width)
    relative.weight                                     (MPNet: buckets x heads)
    layers.{i}.attention.{query,key,value,output,norm}.{weight,bias}
    layers.{i}.feedforward.{up,down,norm}.{weight,bias}
    layers.{last}.final.norm.{weight,bias}              (a LayerNorm after the last layer, where there is one)
    pooler.{weight,bias}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterbank.encoder.blocks import FEEDFORWARDS
from adapterbank.encoder.positions import POSITIONS

_KNOWN_VALUES: Mapping[str, Any] = {
    "position_embedding_type": "absolute",
    "inner_group_num": 1,
    "relative_attention_num_buckets": 32,
}


@dataclass(frozen=True)
class Family:
    """One model type: a row of the table."""

    prefix: str
    """The prefix of every tensor name in checkpoints that were saved with a head."""
    embeddings: Mapping[str, str]
    """Our module -> the checkpoint's, for everything outside the layers."""
    layer: str
    """The checkpoint's prefix of a layer, with `{i}`."""
    parts: Mapping[str, str]
    """Our module of a layer -> the checkpoint's. Modules that share a name there are equal parts of one tensor."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """BERT's name of a config field -> the family's own, where they differ."""
    block: str = "post_norm"
    """Order of LayerNorm and sub-layer: an entry of `blocks.BLOCKS`."""
    feedforward: str = "plain"
    """Form of the feed-forward: an entry of `blocks.FEEDFORWARDS`."""
    positions: str = "learned"
    """Position scheme: an entry of `positions.POSITIONS`."""
    attention_spans: Callable[[Mapping[str, Any], int], tuple[int, ...]] = lambda fields, layers: (0,) * layers
    """(fields of config.json, number of layers) -> `EncoderConfig.attention_spans`."""
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    """Which modules have a bias: a value of `bias_group` -> yes or no, or the config field that states it.

    Modules of groups that are not listed have one."""
    absent: frozenset[str] = frozenset()
    """Modules that the encoder lacks, by our names; a LayerNorm that is absent leaves its input as it is."""
    token_types: bool = True
    """Whether there is a table of token types."""
    projection: str = "wider"
    """When embeddings are projected to the hidden width: where that is `wider`, or `always`."""
    shared_layers: bool = False
    """Whether all layers of a group use one set of weights (ALBERT)."""
    final_norm: bool = False
    """Whether a LayerNorm follows the last layer."""
    known_values: Mapping[str, Any] = field(default_factory=lambda: _KNOWN_VALUES)
    """Config field -> the only value of it that the arithmetic here computes."""
    word_piece: bool = False
    """Whether vocab.txt and a few flags describe the whole tokenizer."""


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
    positions="learned_after_padding",
)

FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        prefix="bert.",
        embeddings={**_EMBEDDINGS, **_TYPES, **_POOLER},
        layer="encoder.layer.{i}.",
        parts=_BERT_PARTS,
        word_piece=True,
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
        word_piece=True,
    ),
    "electra": Family(
        prefix="electra.",
        embeddings={**_EMBEDDINGS, **_TYPES, "embeddings.project": "embeddings_project"},
        layer="encoder.layer.{i}.",
        parts=_BERT_PARTS,
        word_piece=True,
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
        positions="relative_buckets",
        token_types=False,
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
        projection="always",
        shared_layers=True,
    ),
}


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes and constants of one encoder: all that changes its mathematics, and the dropout it was trained with."""

    family: str
    vocabulary: int
    embedding: int
    hidden: int
    feedforward: int
    """Inner width of the feed-forward, after the activation."""
    heads: int
    groups: tuple[int, ...]
    """For each layer, which set of layer weights it uses: 0, 1, 2, … unless layers are shared."""
    activation: str
    epsilon: float
    """Added to the variance in every LayerNorm."""
    positions: int
    """Rows of the position table, or the number of positions the encoder was trained for."""
    first_position: int
    types: int
    """Rows of the token-type table, 0 without one."""
    buckets: int
    """Rows of the relative-position table, 0 without one."""
    dropout: float
    attention_dropout: float
    projected: bool
    """Whether embeddings are projected to the hidden width."""
    block: str
    """See `Family`, as for the next two."""
    feedforward_form: str
    position_scheme: str
    position_constants: Mapping[str, Any] = field(hash=False)
    """See `positions.PositionScheme.constants`."""
    attention_spans: tuple[int, ...]
    """For each layer, the greatest distance at which a token attends to another; 0 for any distance."""
    unbiased: frozenset[str]
    """The groups of modules that have no bias: values of `bias_group`."""
    final_norm: bool
    """Whether a LayerNorm follows the last layer."""

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.groups)

    @property
    def max_length(self) -> int:
        """The length in tokens of the longest text that has a position for each of them."""
        return self.positions - self.first_position

    @property
    def shared_layers(self) -> bool:
        """Whether some layers use the same weights."""
        return len(set(self.groups)) < len(self.groups)

    def mathematics(self) -> dict[str, Any]:
        """Return the fields that belong to a backbone's identity: same tensors and same fields, same outputs.

        Fields that came later appear only where they differ from BERT's, so that identities stay as they were.
        """
        found: dict[str, Any] = {
            "heads": self.heads,
            "groups": list(self.groups),
            "activation": self.activation,
            "epsilon": self.epsilon,
            "first_position": self.first_position,
            "relative": self.buckets > 0,
        }
        if self.block != Family.block:
            found["block"] = self.block
        if self.feedforward_form != Family.feedforward:
            found["feedforward"] = self.feedforward_form
        if any(self.attention_spans):
            found["attention_spans"] = list(self.attention_spans)
        if POSITIONS[self.position_scheme].constants:
            found["positions"] = {"scheme": self.position_scheme, **self.position_constants}
        return found

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The modules of a layer, by short names, with the shapes of their weights, in the order of the pass."""
        d, f = self.hidden, self.feedforward
        found: dict[str, tuple[int, ...]] = {
            f"attention.{part}": (d, d) for part in ("query", "key", "value", "output")
        }
        return found | {
            "attention.norm": (d,),
            "feedforward.up": (FEEDFORWARDS[self.feedforward_form].factor * f, d),
            "feedforward.down": (d, f),
            "feedforward.norm": (d,),
        }

    def shapes(self, pooler: bool) -> dict[str, tuple[int, ...]]:
        """Return our name and the shape of every tensor of the encoder, in the order of the pass."""
        e, d = self.embedding, self.hidden
        tables = {"embeddings.word": (self.vocabulary, e), **POSITIONS[self.position_scheme].tables(self)}
        if self.types:
            tables["embeddings.type"] = (self.types, e)
        modules: dict[str, tuple[int, ...]] = {"embeddings.norm": (e,)}
        if self.projected:
            modules["embeddings.project"] = (d, e)
        for group in sorted(set(self.groups)):
            modules |= {f"layers.{group}.{name}": shape for name, shape in self.layer_shapes.items()}
        if self.final_norm:
            modules[f"layers.{self.groups[-1]}.final.norm"] = (d,)
        if pooler:
            modules["pooler"] = (d, d)
        found = {f"{table}.weight": shape for table, shape in tables.items()}
        for module, shape in modules.items():
            if module in FAMILIES[self.family].absent:
                continue
            found[f"{module}.weight"] = shape
            if bias_group(module) not in self.unbiased:
                found[f"{module}.bias"] = shape[:1]
        return found


def bias_group(module: str) -> str:
    """Return the group of a module: norm, attention, feedforward, embeddings or pooler."""
    if module.endswith("norm"):
        return "norm"
    return module.split(".")[2] if module.startswith("layers.") else module.split(".")[0]


def checkpoint_names(config: EncoderConfig, pooler: bool) -> dict[str, str]:
    """Map our tensor names to the checkpoint's, without prefix."""
    family = FAMILIES[config.family]
    modules = dict(family.embeddings)
    if config.final_norm:
        modules[f"layers.{config.groups[-1]}.final.norm"] = modules["final.norm"]
    for group in sorted(set(config.groups)):
        for ours, theirs in family.parts.items():
            modules[f"layers.{group}.{ours}"] = family.layer.format(i=group) + theirs
    found = {}
    for name in config.shapes(pooler):
        module, leaf = name.rsplit(".", 1)
        found[name] = f"{modules[module]}.{leaf}"
    return found
