"""The config of a run: a frozen dataclass of plain values, from the shell, YAML or Python. Knows no torch.

Each field has its own help, which `--help` prints. `parse` and `check` report all mistakes together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adapterbank import methods, schema
from adapterbank.errors import ConfigError, InputError
from adapterbank.kinds.values import short
from adapterbank.methods import MAX_SIZE, METHODS, Options, parse_size
from adapterbank.tasks.data_options import DataOptions, option
from adapterbank.tasks.dialects import separator_of
from adapterbank.tasks.option_values import convert
from adapterbank.tasks.yaml_files import read_yaml

PRECISIONS = ("auto", "fp32", "bf16", "int8")
CLASS_WEIGHTS = ("none", "balanced")
FEW = ("auto", "always", "never")
DEFAULTS = ("new", "better")
_OF_SLOTS = (
    *("pooling", "head_hidden", "lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction"),
    *("clip", "dropout", "class_weights", "patience", "calibrate", "long", "max_windows", "window_pooling"),
    *("start_from", "on", "average"),
)
"""Fields that a method without a slot does not use."""
FRESH, AUTO = "none", "auto"
"""Values of `start_from` that name no task; `on` and `fuse` have the first one too."""
LONGEST_SEPARATOR = 8
"""Characters between two labels of a cell."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Config(DataOptions):
    """The options of one run."""

    backbone: str = option(
        "minilm",
        "The encoder: a folder, a hub name or a short name (default: the bank's own; minilm for a new bank).",
        group="Method",
    )
    method: str = option("adapter", "How to transfer.", group="Method", choices=tuple(METHODS))
    size: int | str = option(
        64,
        "Adapter: width of the bottleneck; widths by layer such as 8,8,16; 64to32 starts with 64 and keeps the 32 best "
        "on average, by layer and site; auto finds the smallest that scores as well as any.",
        group="Method",
        low=1,
        high=MAX_SIZE,
    )
    layers: str = option(
        "all",
        "Adapter, fusion, layernorm, lora, ia3, bitfit: which layers: all, upper, or numbers such as 0,2,6-11.",
        group="Method",
    )
    sites: str = option("attention,feedforward", "Adapter, fusion: after which sub-layers.", group="Method")
    activation: str = option("gelu_tanh", "Adapter: activation function.", group="Method", choices=methods.ACTIVATIONS)
    narrow_after: int = option(
        1, "Adapter: epochs before a size such as 64to32 is narrowed.", group="Method", low=1, high=100000, later=True
    )
    sigma: float = option(
        1e-2, "Adapter: standard deviation of the initial weights, cut at two sigma.", group="Method", low=0, high=10
    )
    train_norms: bool = option(True, "Adapter, fusion: train the LayerNorms too.", group="Method")
    placement: str = option(
        "sequential", "Adapter: read the sub-layer's output, or its input.", group="Method", choices=methods.PLACEMENTS
    )
    combine: str = option(
        "add", "Adapter: add to the sub-layer's output, or multiply it.", group="Method", choices=methods.COMBINATIONS
    )
    inner_norm: bool = option(False, "Adapter: use a LayerNorm inside the adapter.", group="Method")
    depth: int = option(1, "Adapter: hidden layers of the bottleneck.", group="Method", low=1, high=8)
    rank: int = option(
        8, "Lora: rank of the updates; fusion: width of queries and keys.", group="Method", low=1, high=MAX_SIZE
    )
    alpha: float = option(16.0, "Lora: the updates are scaled by alpha / rank.", group="Method", low=0.001, high=1e6)
    targets: str = option(
        "query,value", f"Lora: which linear layers: {', '.join(methods.PROJECTIONS)}.", group="Method"
    )
    top: int = option(1, "Top: number of upper layers that train.", group="Method", low=1, high=1000)
    trials: int = option(50, "Automl: number of models to try.", group="Method", low=1, high=100000)
    minutes: float = option(
        0.0, "Automl: start no further model after this many minutes; 0 for no limit.", group="Method", low=0, high=1e6
    )
    pooling: str | None = option(None, "How a text becomes one vector.", group="Method", choices=methods.POOLINGS)
    head_hidden: int = option(
        0, "Width of a hidden layer in the head; 0 for a linear head.", group="Method", low=0, high=65536
    )
    start_from: str = option(
        FRESH,
        "Task whose adapters and LayerNorms the run starts from: name, name@version, a package's folder, auto or none.",
        group="Method",
        later=True,
    )
    on: str = option(
        FRESH,
        "Task to stand on: its adapters act before the run's own, frozen: name, name@version or none.",
        group="Method",
        later=True,
    )
    fuse: str = option(
        FRESH,
        "Tasks whose adapters are fused, frozen, by attention that trains: two or more such as mnli,qnli@2, or none.",
        group="Method",
        later=True,
    )
    lr: float | None = option(None, "Peak learning rate.", group="Recipe", low=0, high=10)
    epochs: int | None = option(
        None,
        "Passes over the training data; the epoch with the best dev score is kept (with ten dev rows or more).",
        group="Recipe",
        low=1,
        high=100000,
    )
    batch: int = option(32, "Rows per step.", group="Recipe", low=1, high=65536)
    warmup: float = option(0.1, "Share of the steps over which the learning rate rises.", group="Recipe", low=0, high=1)
    weight_decay: float | None = option(
        None, "Decoupled weight decay; not applied to LayerNorms and biases.", group="Recipe", low=0, high=10
    )
    epsilon: float | None = option(None, "Adam's epsilon.", group="Recipe", low=0, high=1)
    bias_correction: bool | None = option(None, "Adam's bias correction.", group="Recipe")
    clip: float = option(1.0, "Largest gradient norm of a step; 0 for no limit.", group="Recipe", low=0, high=1e6)
    dropout: float | None = option(None, "Dropout (default: the backbone's own).", group="Recipe", low=0, high=0.95)
    class_weights: str = option(
        "none", "balanced: all classes have the same total weight in the loss.", group="Recipe", choices=CLASS_WEIGHTS
    )
    patience: int = option(
        0, "Stop after this many epochs without a better dev score; 0 for never.", group="Recipe", low=0, high=100000
    )
    few: str = option(
        "auto",
        "Train on pairs of rows, then fit the head (auto: up to 64 rows a class, without --epochs, --patience, "
        "--average and --mix).",
        group="Recipe",
        choices=FEW,
        later=True,
    )
    mix: int = option(
        1,
        "Adapter, lora, ia3: copies of each in training, of which random ones take each step; their mean is kept.",
        group="Recipe",
        low=1,
        high=16,
        later=True,
    )
    average: bool = option(
        False, "Also score the average of the epochs' weights, and keep it if it is better.", group="Recipe", later=True
    )
    calibrate: bool = option(
        True, "After training, fit the temperature and the thresholds on dev.", group="Recipe", later=True
    )
    seed: int = option(
        0, "Seed of the initial weights, the order of the data and dropout.", group="Recipe", low=0, high=2**31 - 1
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.", group="Recipe")
    precision: str = option(
        "auto",
        "Precision of the forward pass (auto: fp32 on a CPU, bf16 on a GPU).",
        group="Recipe",
        choices=PRECISIONS,
    )
    default: str = option(
        "new",
        "Which version is served afterwards: the new one, or the better one of the new and the present default.",
        group="Bank",
        choices=DEFAULTS,
        later=True,
    )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that came later and have their default."""
        values = dataclasses.asdict(self)
        return {f.name: values[f.name] for f in fields(self) if not f.metadata["later"] or values[f.name] != f.default}

    def method_options(self) -> Options:
        """Return the options that decide what a slot adds and trains; the config must be resolved."""
        return Options(**{f.name: getattr(self, f.name) for f in fields(Options)})


def limited(name: str, default: Any) -> Any:
    """Declare a dataclass field with the range of the option `name`, so that a file may hold what a run may choose."""
    meta = Config.__dataclass_fields__[name].metadata
    return schema.limited(default, low=meta["low"], high=meta["high"], choices=meta["choices"])


def parse(values: Mapping[str, Any]) -> Config:
    """Create a config from values by field name, such as strings from a shell; report all mistakes together."""
    hints, mistakes, converted = _hints(), [], {}
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" The options are: {', '.join(hints)}."
            mistakes.append(f"{name!r} is not an option of a run.{hint}")
            continue
        try:
            converted[key] = convert(value, hints[key])
        except ValueError as error:
            mistakes.append(f"{key} is {short(repr(value))}; it must be {error}.")
    if (fuse := converted.get("fuse", FRESH)) != FRESH:
        converted["fuse"] = ",".join(map(str.strip, fuse.split(",")))  # however it is written, it is the same run
        converted.setdefault("method", "fusion")
    config = Config(**converted)
    mistakes += check(config)
    if mistakes:
        raise ConfigError(mistakes)
    return config


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def read(path: str | Path, overrides: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file of options, which override `base`; `overrides` override both."""
    if not Path(path).exists():
        raise InputError(f"There is no config file {path}.")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} does not contain options as 'name: value' lines.")
    named = {str(name).replace("-", "_"): value for name, value in values.items()}
    return parse({**(base or {}), **named, **overrides})


def check(config: Config) -> list[str]:
    """Return all mistakes of a config that can be found without opening a file."""
    mistakes = _size_mistakes(config.size)
    mistakes += _narrowing_mistakes(config) if isinstance(config.size, str) and not mistakes else []
    for f in fields(config):
        value, meta = getattr(config, f.name), f.metadata
        if value is None:
            continue
        if meta["choices"] and value not in meta["choices"]:
            near = difflib.get_close_matches(str(value), meta["choices"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            mistakes.append(f"{f.name} is {short(repr(value))}; it must be one of {', '.join(meta['choices'])}.{hint}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            mistakes += _range_mistakes(f.name, value, meta["low"], meta["high"])
    sites = config.sites.split(",")
    if not config.sites or set(sites) - set(methods.SITES):
        choices = " or ".join(methods.SITES)
        mistakes.append(f"sites is {short(repr(config.sites))}; it must be {choices}, or both separated by a comma.")
    if not config.targets or set(config.targets.split(",")) - set(methods.PROJECTIONS):
        choices = ", ".join(methods.PROJECTIONS)
        given = short(repr(config.targets))
        mistakes.append(f"targets is {given}; it must be one or more of {choices}, separated by commas.")
    if not _DEVICE.fullmatch(config.device):
        mistakes.append(f"device is {short(repr(config.device))}; it must be auto, cpu, cuda or cuda:N.")
    mistakes += _separator_mistakes(config)
    if config.lr == 0:
        mistakes.append("lr is 0, so nothing would train; use a positive number.")
    if config.long == "cut" and config.window_pooling != "auto":
        mistakes.append(f"window_pooling is {config.window_pooling!r}, but long is 'cut'; leave one of them out.")
    if config.mix > 1 and config.few == "always":
        mistakes.append(f"mix is {config.mix}, but few is 'always', whose recipe has no copies; leave one of them out.")
    if config.mix > 1 and config.on != FRESH:
        mistakes.append(f"mix is {config.mix}, but on is {config.on!r}, with which copies do not train; leave one out.")
    return mistakes + _fuse_mistakes(config) + _unused_option_mistakes(config)


def fused_tasks(config: Config) -> list[str]:
    """Return the names of the tasks that a run fuses."""
    return [] if config.fuse == FRESH else config.fuse.split(",")


def _fuse_mistakes(config: Config) -> list[str]:
    """Return the mistakes of the tasks that a run fuses."""
    if config.method not in METHODS or "fuse" not in METHODS[config.method].uses:
        return []
    names, given = fused_tasks(config), f"fuse is {short(repr(config.fuse))}"
    mistakes = []
    if len({*names}) < max(2, len(names)) or "" in names:
        mistakes.append(f"{given}; it must name two tasks or more, each once, separated by commas.")
    if config.on != FRESH:
        mistakes.append(f"{given}, but on is {config.on!r}, and fused tasks stand on the encoder; leave one out.")
    return mistakes


def _separator_mistakes(config: Config) -> list[str]:
    """Return the mistakes of options that say how cells are separated."""
    mistakes = []
    if config.separator is not None:
        try:
            separator_of(config.separator)
        except ValueError as error:
            mistakes.append(f"separator is {short(repr(config.separator))}; it must be {error}.")
    if config.label_separator is not None and not 0 < len(config.label_separator) <= LONGEST_SEPARATOR:
        given = short(repr(config.label_separator))
        mistakes.append(f"label_separator is {given}; it must be some characters, such as , or ; or none.")
    return mistakes


def _size_mistakes(size: int | str) -> list[str]:
    """Return the mistake of a size that is a text; numbers have a range."""
    try:
        if isinstance(size, str):
            parse_size(size)
    except ValueError as error:
        return [f"size is {short(repr(size))}; it must be {error}."]
    return []


TOLERANCE = 0.5
"""Points of the metric that choosing a size, and pruning, may cost by default."""


def check_tolerance(points: float) -> None:
    """Refuse an invalid tolerance; it is in points, hundredths of a metric."""
    if not points >= 0:
        raise ConfigError([f"tolerance is {points!r}; it must be at least 0, in points of the metric."])


def resolve(config: Config, width: int = 0) -> Config:
    """Fill in the defaults that depend on the method, its size, and the hidden width of the encoder if it is known."""
    method = METHODS[config.method]
    missing = {name: row.value for name, row in method.defaults.items() if getattr(config, name) is None}
    if "lr" in missing:
        missing["lr"] = float(f"{missing['lr'] * method.rate_scale(parse_size(config.size).widest, width or 1):.2g}")
    found = dataclasses.replace(config, **missing)
    if mistakes := _narrowing_mistakes(found):
        raise ConfigError(mistakes)
    return found


def _narrowing_mistakes(config: Config) -> list[str]:
    """Return the mistakes of a config about adapters that are narrowed in training; epochs count once known."""
    size, after = config.size, config.narrow_after
    if config.method not in METHODS or "size" not in METHODS[config.method].uses:
        return []
    if not parse_size(size).mean:
        remedy = "use a size such as 64to32, or leave it out"
        given = after != Config.narrow_after
        return [f"narrow_after is {after}, but size is {size!r}, which stays as it is; {remedy}."] if given else []
    found = []
    if config.depth > 1:
        found.append(f"size is {size!r}, but depth is {config.depth}, and only one hidden layer is narrowed; use 1.")
    if config.mix > 1 or config.on != FRESH:
        other = f"mix is {config.mix}" if config.mix > 1 else f"on is {config.on!r}"
        found.append(f"size is {size!r}, but {other}, with which adapters are not narrowed; leave one of them out.")
    if config.epochs is not None and after >= config.epochs:
        has = f"{config.epochs} epoch{'' if config.epochs == 1 else 's'}"
        found.append(f"narrow_after is {after}, but the run has {has}; use fewer, or more --epochs.")
    return found


def unused_options(method: str) -> set[str]:
    """Return the options that other methods use and this one does not."""
    special = {name for row in METHODS.values() for name in row.uses}
    row = METHODS[method]
    special |= set() if row.slot else {*_OF_SLOTS}
    return special - {*row.uses}


def _unused_option_mistakes(config: Config) -> list[str]:
    """Return a mistake for each option that the chosen method would ignore."""
    if config.method not in METHODS:
        return []
    defaults = {f.name: f.default for f in fields(config)}
    return [
        f"{name} is {getattr(config, name)!r}, but method {config.method!r} does not use it; leave it out."
        for name in sorted(unused_options(config.method))
        if getattr(config, name) != defaults[name]
    ]


def _range_mistakes(name: str, value: float, low: float, high: float) -> list[str]:
    return [] if low <= value <= high else [f"{name} is {value!r}; it must be from {low} to {high}."]
