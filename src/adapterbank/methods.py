"""The methods: which tensors each adds to the encoder and which of them train. A table; knows no torch.

A tensor's *roles* follow from its name. A method names roles; what carries one of them trains, and what trains is what
is saved. No other place in the library asks which method a slot was trained with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adapterbank.errors import ConfigError, UnknownName

ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "silu", "tanh")
SITES = ("attention", "feedforward")
PLACEMENTS = ("sequential", "parallel")
COMBINATIONS = ("add", "multiply")
POOLINGS = ("pooler", "first", "mean")
PROJECTIONS: Mapping[str, str] = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "output": "attention.output",
    "up": "feedforward.up",
    "down": "feedforward.down",
}
"""The linear layers that may get a low-rank part, and where they stand in a layer."""
MAX_SIZE = 4096
"""No adapter is wider: past the hidden size it is no bottleneck, and a slip of the keyboard would fill the memory."""


@dataclass(frozen=True)
class Adapter:
    """The shape of a slot's adapters: `y + up(act(down(y)))` at each chosen site, 2md + d + m numbers each."""

    size: int = 64
    """m, the width of the bottleneck."""
    layers: tuple[int, ...] = ()
    """The layers that get adapters, from 0."""
    sites: tuple[str, ...] = SITES
    activation: str = "gelu_tanh"
    placement: str = "sequential"
    """Whether the adapter reads the sub-layer's output (sequential) or its input (parallel)."""
    combine: str = "add"
    """Whether the sub-layer's output is added to, or multiplied by one plus, what the adapter gives."""
    inner_norm: bool = False
    """A LayerNorm of the adapter's own before the down-projection."""
    depth: int = 1
    """Hidden layers of the bottleneck."""


@dataclass(frozen=True)
class Lora:
    """The shape of a slot's low-rank parts: `x W' + b + (x A') B' alpha / r` at each chosen linear layer."""

    rank: int = 8
    """r, the rows of A and columns of B."""
    alpha: float = 16.0
    layers: tuple[int, ...] = ()
    """The layers that get them, from 0."""
    targets: tuple[str, ...] = ("query", "value")
    """Which linear layers of those, by their names in `PROJECTIONS`."""

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank

    def widened(self, rank: int) -> Lora:
        """Give the same arithmetic at another rank: A and B filled up with zeros, the scale as it was."""
        return replace(self, rank=rank, alpha=self.scale * rank)


@dataclass(frozen=True)
class Head:
    """The shape of a slot's head: pooling, dropout, perhaps a hidden layer, then one linear layer."""

    kind: str
    outputs: int
    """Classes; 1 for regression; 2 (start, end) for spans."""
    pooling: str = "mean"
    hidden: int = 0
    """Width of a hidden tanh layer, 0 for none."""
    shift: float = 0.0
    scale: float = 1.0
    """Regression: the head's raw output times `scale` plus `shift`, the training labels' mean and spread."""


@dataclass(frozen=True)
class Plan:
    """All that a slot adds and changes, apart from the numbers: what a manifest says of its method."""

    method: str
    head: Head
    adapter: Adapter | None
    trains: frozenset[str]
    """The roles that train and are saved."""
    lora: Lora | None = None

    @property
    def alone(self) -> bool:
        """Whether it changes whole layers: then its rows share a batch with nobody else's."""
        return any(role == "embedding" or role.startswith("layer:") for role in self.trains)

    def to_json(self) -> dict[str, Any]:
        """Give the plan as JSON values."""
        return {
            "name": self.method,
            "head": asdict(self.head),
            "adapter": asdict(self.adapter) if self.adapter else None,
            "lora": asdict(self.lora) if self.lora else None,
            "trains": sorted(self.trains),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Read what `to_json` gave."""
        adapter, lora = value["adapter"], value.get("lora")  # packages of the first release know of no `lora`
        if adapter is not None:
            lists = {key: tuple(adapter[key]) for key in ("layers", "sites")}
            adapter = Adapter(**{**adapter, **lists})
        if lora is not None:
            lists = {key: tuple(lora[key]) for key in ("layers", "targets")}
            lora = Lora(**{**lora, **lists})
        return cls(value["name"], Head(**value["head"]), adapter, frozenset(value["trains"]), lora)


@dataclass(frozen=True)
class Default:
    """A default and why it is that."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Options:
    """What a user may choose of a slot; an option that a method has no use for is refused (`config.check`)."""

    method: str = "adapter"
    size: int = 64
    layers: str = "all"
    sites: str = "attention,feedforward"
    activation: str = "gelu_tanh"
    placement: str = "sequential"
    combine: str = "add"
    inner_norm: bool = False
    depth: int = 1
    train_norms: bool = True
    rank: int = 8
    alpha: float = 16.0
    targets: str = "query,value"
    top: int = 1
    pooling: str = "mean"
    head_hidden: int = 0


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    summary: str
    trains: Callable[[Options, Sequence[int], int], frozenset[str]]
    """(options, chosen layers, number of layers) -> roles."""
    uses: tuple[str, ...]
    """The options that mean something to this method, beside the head's."""
    defaults: Mapping[str, Default]
    adapters: bool = False
    lora: bool = False
    slot: bool = True
    """Whether it leaves a slot on the encoder, and so a package; else a record alone."""


def _norms(layers: Iterable[int]) -> frozenset[str]:
    """Name the LayerNorms of chosen layers; the embeddings' own goes with layer 0."""
    return frozenset(f"layer_norm:{i}" for i in layers)


def _biases(layers: Iterable[int]) -> frozenset[str]:
    """Name the biases of chosen layers; the embeddings' go with layer 0."""
    return frozenset(f"bias:{i}" for i in layers)


_HEAD = frozenset({"head"})
_ADAM = {
    "epsilon": Default(1e-6, "the public code of the paper"),
    "weight_decay": Default(0.01, "the public code of the paper; not on LayerNorms and biases"),
    "bias_correction": Default(
        True,
        "without it (the public code) the first steps are three times as long: at 1e-3 CoLA, and at times MRPC, then "
        "ended in one answer to everything, a known fault on small sets (Zhang et al. 2021)",
    ),
    "pooling": Default("mean", "right for sentence encoders, and as good as the first token on plain ones"),
}
_FEW = {
    **_ADAM,
    "lr": Default(1e-3, "few new numbers near zero: 3e-4 to 1e-3 is the flat part of the curve, 2e-3 collapses"),
    "epochs": Default(10, "small sets need some hundred steps; the best epoch is kept"),
}
_FEWER = {
    **_FEW,
    "lr": Default(3e-3, "so few numbers need longer steps: better than 1e-3 on every task of docs/results.md"),
}
_PRETRAINED = {
    **_ADAM,
    "lr": Default(5e-5, "pretrained weights are moved gently: 3e-5 to 1e-4"),
    "epochs": Default(5, "pretrained weights fit sooner; the best epoch is kept"),
}

METHODS: Mapping[str, Method] = {
    "adapter": Method(
        "bottleneck adapters at every site, the LayerNorms, a head (Houlsby et al. 2019)",
        lambda o, layers, depth: _HEAD | {"adapter"} | (_norms(layers) if o.train_norms else frozenset()),
        ("size", "layers", "sites", "activation", "placement", "combine", "inner_norm", "depth", "train_norms"),
        _FEW,
        adapters=True,
    ),
    "full": Method(
        "every weight of the encoder and a head: one whole copy per task",
        lambda o, layers, depth: _HEAD | {"embedding", "pooler"} | {f"layer:{i}" for i in range(depth)},
        (),
        _PRETRAINED,
    ),
    "top": Method(
        "the top n layers and a head (variable fine-tuning)",
        lambda o, layers, depth: _HEAD | {"pooler"} | {f"layer:{i}" for i in range(depth - o.top, depth)},
        ("top",),
        _PRETRAINED,
    ),
    "layernorm": Method(
        "the LayerNorms and a head",
        lambda o, layers, depth: _HEAD | _norms(layers),
        ("layers",),
        _FEWER,
    ),
    "lora": Method(
        "low-rank parts of chosen linear layers and a head (Hu et al. 2021)",
        lambda o, layers, depth: _HEAD | {"lora"},
        ("layers", "rank", "alpha", "targets"),
        _FEW,
        lora=True,
    ),
    "bitfit": Method(
        "the biases of the linear layers and LayerNorms, and a head (Ben Zaken et al. 2021)",
        lambda o, layers, depth: _HEAD | _biases(layers),
        ("layers",),
        _FEWER,
    ),
    "feature": Method(
        "a head on the frozen encoder's features",
        lambda o, layers, depth: _HEAD,
        (),
        {
            **_FEW,
            "lr": Default(1e-2, "only the head trains: above 1e-3 on CoLA, RTE and STS-B, level elsewhere"),
            "epochs": Default(20, "only the head trains, which takes more passes"),
        },
    ),
    "automl": Method(
        "no encoder at all: a search over TF-IDF and n-gram models (the paper's non-BERT baseline)",
        lambda o, layers, depth: frozenset(),
        ("trials", "minutes"),
        {},
        slot=False,
    ),
}

_LAYER = re.compile(r"layers\.(\d+)\.")


def find_method(name: str) -> Method:
    """Look a method up."""
    if name not in METHODS:
        raise UnknownName(name, "a method", METHODS)
    return METHODS[name]


def roles(name: str) -> frozenset[str]:
    """Say which roles a tensor has, from its name alone."""
    found = {"bias"} if name.endswith(".bias") else set()
    first = name.split(".", 1)[0]
    if first in ("head", "pooler"):
        return frozenset(found | {first})
    layer = _LAYER.match(name)
    for added in ("adapter", "lora"):
        if f".{added}." in name:
            return frozenset(found | {added})
    if ".norm." in name:
        found.add("layer_norm")
    found |= {f"{role}:{layer[1] if layer else 0}" for role in found}
    return frozenset(found | {f"layer:{layer[1]}" if layer else "embedding"})


def trained(names: Iterable[str], plan: Plan) -> list[str]:
    """Choose the names that train under a plan; the pooler only where the head reads it."""
    return [
        name
        for name in names
        if roles(name) & plan.trains and (plan.head.pooling == "pooler" or "pooler" not in roles(name))
    ]


def decays(name: str) -> bool:
    """Say whether weight decay applies: not to LayerNorms and biases."""
    return not roles(name) & {"bias", "layer_norm"} and ".norm." not in name


def parse_layers(text: str, depth: int) -> tuple[int, ...]:
    """Read a choice of layers: `all`, `6-11`, `0,1,5`, `upper` (the upper half)."""
    if text == "all":
        return tuple(range(depth))
    if text == "upper":
        return tuple(range(depth // 2, depth))
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not ends:
            raise ConfigError(
                [f"layers is {text!r}; it must be 'all', 'upper', or numbers and spans such as '0,2,6-11'."]
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if first > last or last >= depth:
            raise ConfigError([f"layers is {text!r}, but this backbone has layers 0 to {depth - 1}."])
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def make_plan(options: Options, *, depth: int, head: Head, shared_layers: bool = False) -> Plan:
    """Turn a user's choices into a plan for an encoder of `depth` layers."""
    method = find_method(options.method)
    if options.method == "top" and not 1 <= options.top <= depth:
        raise ConfigError([f"top is {options.top}, but this backbone has {depth} layers: give 1 to {depth}."])
    layers = parse_layers(options.layers, depth) if "layers" in method.uses else tuple(range(depth))
    trains = method.trains(options, layers, depth)
    partial = len(layers) < depth and any(role.startswith(("layer_norm:", "bias:")) for role in trains)
    if shared_layers and (options.method == "top" or partial):
        raise ConfigError(
            [
                "This backbone's layers share one set of weights, so a part of them cannot be trained alone: "
                "use method full, lora, or adapter without train_norms."
            ]
        )
    adapter = None
    if method.adapters:
        adapter = Adapter(
            size=options.size,
            layers=layers,
            sites=tuple(site for site in SITES if site in options.sites.split(",")),
            activation=options.activation,
            placement=options.placement,
            combine=options.combine,
            inner_norm=options.inner_norm,
            depth=options.depth,
        )
    lora = None
    if method.lora:
        chosen = tuple(name for name in PROJECTIONS if name in options.targets.split(","))
        lora = Lora(options.rank, options.alpha, layers, chosen)
    return Plan(options.method, head, adapter, trains, lora)


def first_trained_layer(names: Iterable[str], depth: int) -> int:
    """Give the lowest layer that something trains in: 0 with the embeddings, `depth` when only the head does."""
    found = [depth]
    for name in names:
        layer = _LAYER.match(name)
        found += [int(layer[1])] if layer else ([] if roles(name) & {"head", "pooler"} else [0])
    return min(found)
