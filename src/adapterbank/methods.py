"""The methods: a table of what each adds to the encoder and which tensors train. Knows no torch.

A tensor's *roles* follow from its name. A method names roles: every tensor with one of them trains, and what trains is
saved. No other module depends on the method that a slot was trained with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""The linear layers that can have a low-rank update, and their names within a layer."""
MAX_SIZE = 4096
"""The widest adapter: above the hidden size it is not a bottleneck, and a typing error would fill the memory."""
_WIDTHS = re.compile(r"\d+(/\d+)*(,\d+(/\d+)*)*")
_EXPECTED = "a whole number, widths by layer such as 8,8,16 (8/16,0/4,32 by layer and site), or 64to32"

MAX_LAYERS = 1024
"""More layers than any encoder has."""


@dataclass(frozen=True)
class Default:
    """A default value and the reason for it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Options:
    """The options of a slot; an option that the method does not use is refused (`config.check`)."""

    method: str = "adapter"
    size: int | str = 64
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
    """Returns the roles that train, from the options, the chosen layers and the number of layers."""
    uses: tuple[str, ...]
    """The options that this method uses, besides those of the head."""
    defaults: Mapping[str, Default]
    additions: tuple[str, ...] = ()
    """The additions of its slots: names of files in `slots/additions`."""
    shown: tuple[str, ...] = ()
    """The options that tell two of its runs apart; the first one decides how many parameters train."""
    slot: bool = True
    """Whether it trains a slot and so writes a package; otherwise it writes only a record."""
    rate_scale: Callable[[int, int], float] = lambda size, width: 1.0
    """(widest of the option `size`, hidden width of the encoder) -> factor of the default learning rate."""


def _norms(layers: Iterable[int]) -> frozenset[str]:
    """Return the roles of the LayerNorms of some layers; that of the embeddings belongs to layer 0."""
    return frozenset(f"layer_norm:{i}" for i in layers)


def _biases(layers: Iterable[int]) -> frozenset[str]:
    """Return the roles of the biases of some layers; those of the embeddings belong to layer 0."""
    return frozenset(f"bias:{i}" for i in layers)


_HEAD = frozenset({"head"})
_ADAM = {
    "epsilon": Default(1e-6, "the public code of the paper"),
    "weight_decay": Default(0.01, "the public code of the paper; not on LayerNorms and biases"),
    "bias_correction": Default(
        True,
        "without it (the public code) the first steps are three times as large: at 1e-3, CoLA and sometimes MRPC then "
        "ended with one answer to everything, a known failure on small data sets (Zhang et al. 2021)",
    ),
    "pooling": Default("mean", "right for sentence encoders, and as good as the first token for others"),
}
_FEW = {
    **_ADAM,
    "lr": Default(1e-3, "few new parameters near zero: scores are flat from 3e-4 to 1e-3 and collapse at 2e-3"),
    "epochs": Default(10, "small data sets need some hundred steps; the best epoch is kept"),
}
_FEWER = {
    **_FEW,
    "lr": Default(3e-3, "very few parameters need larger steps: better than 1e-3 on every task of docs/results.md"),
}
_PRETRAINED = {
    **_ADAM,
    "lr": Default(5e-5, "pretrained weights need small steps: 3e-5 to 1e-4"),
    "epochs": Default(5, "pretrained weights converge sooner; the best epoch is kept"),
}

METHODS: Mapping[str, Method] = {
    "adapter": Method(
        "bottleneck adapters at every site, the LayerNorms, a head (Houlsby et al. 2019)",
        lambda o, layers, depth: _HEAD | {"adapter"} | (_norms(layers) if o.train_norms else frozenset()),
        (
            "size",
            "narrow_after",
            "layers",
            "sites",
            "activation",
            "placement",
            "combine",
            "inner_norm",
            "depth",
            "train_norms",
            "sigma",
            "mix",
        ),
        _FEW,
        additions=("adapter",),
        shown=("size", "activation"),
        # Larger adapters and wider encoders sum up more steps: at 1e-3, sizes above 64 collapsed on CoLA and MNLI.
        rate_scale=lambda size, width: math.sqrt(min(1.0, 64 / size)) * min(1.0, 384 / width),
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
        shown=("top",),
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
        ("layers", "rank", "alpha", "targets", "mix"),
        _FEW,
        additions=("lora",),
        shown=("rank", "alpha", "targets"),
    ),
    "ia3": Method(
        "scales of keys, values and feed-forward activations, and a head (Liu et al. 2022)",
        lambda o, layers, depth: _HEAD | {"ia3"},
        ("layers", "mix"),
        _FEWER,
        additions=("ia3",),
    ),
    "fusion": Method(
        "attention over the frozen adapters of other tasks, the LayerNorms, a head (Pfeiffer et al. 2021)",
        lambda o, layers, depth: _HEAD | {"fusion"} | (_norms(layers) if o.train_norms else frozenset()),
        ("fuse", "rank", "layers", "sites", "train_norms"),
        {
            **_FEW,
            "lr": Default(3e-3, "at 1e-3 the attention hardly leaves the mean of its members in some hundred steps"),
        },
        additions=("fusion",),
        shown=("rank",),
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
            "lr": Default(1e-2, "only the head trains: better than 1e-3 on CoLA, RTE and STS-B, equal elsewhere"),
            "epochs": Default(20, "only the head trains, which takes more epochs"),
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

ADDITIONS: tuple[str, ...] = tuple(dict.fromkeys(name for row in METHODS.values() for name in row.additions))
"""The names of all additions."""

LAYER = re.compile(r"layers\.(\d+)\.")
"""The start of the name of a layer's tensor."""


def size_option(name: str) -> str | None:
    """Return the option that decides how many parameters a method trains; None for methods that have none."""
    row = METHODS.get(name)
    return row.shown[0] if row and row.shown else None


def find_method(name: str) -> Method:
    """Return a method by its name."""
    if name not in METHODS:
        raise UnknownName(name, "a method", METHODS)
    return METHODS[name]


def addition_name(key: str) -> str:
    """Return the name of the addition that a key stands for: `adapter` for `adapter` and for `adapter-2`."""
    return key.partition("-")[0]


def stored_fields(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the additions in a manifest's `method`, such as `size`, `rank` and `layers`."""
    stored = [value for key, value in method.items() if addition_name(key) in ADDITIONS and value]
    return {name: value for fields in stored for name, value in fields.items()}


def shown_fields(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest's `method` that lists show beside its name, the most important first."""
    fields, row = stored_fields(method), METHODS.get(method["name"])
    if widths := fields.get("widths"):
        fields["size"] = f"{min(widths)}-{max(widths)}"
    return {name: fields[name] for name in (row.shown if row else ()) if name in fields}


def addition_in(name: str) -> str | None:
    """Return the key of the addition in a tensor's name, such as `adapter` or `adapter-2`; None without one."""
    return next((part for part in name.split(".") if addition_name(part) in ADDITIONS), None)


def roles(name: str) -> frozenset[str]:
    """Return the roles of a tensor from its name."""
    own = {"bias"} if name.endswith(".bias") else set()
    first = name.split(".", 1)[0]
    if first in ("head", "pooler"):
        return frozenset(own | {first})
    if key := addition_in(name):
        return frozenset(own | {addition_name(key)})
    layer = LAYER.match(name)
    if ".norm." in name:
        own.add("layer_norm")
    own |= {f"{role}:{layer[1] if layer else 0}" for role in own}
    return frozenset(own | {f"layer:{layer[1]}" if layer else "embedding"})


def parse_layers(text: str, depth: int) -> tuple[int, ...]:
    """Parse a choice of layers: `all`, `6-11`, `0,1,5`, `upper` (the upper half)."""
    if text == "all":
        return tuple(range(depth))
    if text == "upper":
        return tuple(range(depth // 2, depth))
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise ConfigError(
                [f"layers is {text!r}; it must be 'all', 'upper', or numbers and ranges such as '0,2,6-11'."]
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= depth:
            raise ConfigError([f"layers is {text!r}, but this backbone has layers 0 to {depth - 1}."])
        layers |= set(range(first, last + 1))
    return tuple(sorted(layers))


@dataclass(frozen=True)
class Sizes:
    """What a `size` asks for."""

    layers: tuple[tuple[int, ...], ...]
    """The widths of each layer: one for all of its sites, or one for each; one layer alone stands for all."""
    mean: int = 0
    """The mean width after the adapters are narrowed in training; 0 if they are not."""

    @property
    def widest(self) -> int:
        """The widest of all."""
        return max(width for layer in self.layers for width in layer)

    def widths(self, layers: int, sites: int) -> tuple[int, ...]:
        """Return the width of every site, layer by layer; raise `ValueError` if there are not as many."""
        each = self.layers * layers if len(self.layers) == 1 else self.layers
        if len(each) != layers:
            raise ValueError(f"{len(each)} layers, but {layers} have adapters; give one width, or {layers}")
        if wrong := next((layer for layer in each if len(layer) not in (1, sites)), None):
            raise ValueError(
                f"{len(wrong)} sites in {'/'.join(map(str, wrong))}, but {sites} have adapters; "
                f"give each layer one width, or {sites}"
            )
        return tuple(width for layer in each for width in (layer * sites if len(layer) == 1 else layer))


def parse_size(size: int | str) -> Sizes:
    """Return what a `size` asks for; raise `ValueError` with what it must be."""
    text, narrows, mean = "".join(str(size).split()).partition("to")
    if not _WIDTHS.fullmatch(text) or (narrows and not (text.isdecimal() and mean.isdecimal())):
        raise ValueError(_EXPECTED)
    found = Sizes(tuple(tuple(_number(part) for part in layer.split("/")) for layer in text.split(",")))
    if found.widest < 1:
        raise ValueError("above 0 in some layer")
    if narrows and not 0 < _number(mean) < found.widest:
        raise ValueError("narrowed to a mean width of 1 or more, below the first width")
    return replace(found, mean=_number(mean)) if narrows else found


def size_text(widths: Sequence[int], sites: int) -> str:
    """Return the widths of every site as a `size`."""
    layers = [widths[at : at + sites] for at in range(0, len(widths), sites)]
    return ",".join("/".join(map(str, layer if len({*layer}) > 1 else layer[:1])) for layer in layers)


def _number(text: str) -> int:
    if len(text) > len(str(MAX_SIZE)) or int(text) > MAX_SIZE:
        raise ValueError(f"from 0 to {MAX_SIZE} in each layer")
    return int(text)
