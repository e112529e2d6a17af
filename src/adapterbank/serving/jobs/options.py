"""What a request may ask of a run: a task, options of an allow-list, a format. Knows no files and no runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterbank import config as configs
from adapterbank.errors import ConfigError, InputError, UnknownName
from adapterbank.methods import METHODS
from adapterbank.serving.jobs.uploads import FORMATS
from adapterbank.storage.package import parse_ref

OPTIONS = (
    *("text", "text_pair", "label", "kind", "labels", "metric", "limit", "max_length", "doc_stride"),
    *("method", "size", "layers", "sites", "activation", "sigma", "train_norms", "placement", "combine", "inner_norm"),
    *("depth", "rank", "alpha", "targets", "top", "pooling", "head_hidden"),
    *("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout"),
    *("class_weights", "patience", "seed"),
)
"""What a request may set. Not among them: whatever names a file, an encoder or a device of this machine."""


def check(task: str, options: Mapping[str, Any], format: str) -> tuple[str, dict[str, Any]]:
    """Give a task's name in the bank and the options of a run, checked before a byte of data is read."""
    name, version = parse_ref(task)
    if version is not None:
        raise InputError(f"{task!r} is one version, and a run makes a new one; write {name!r}.")
    if format not in FORMATS:
        raise UnknownName(format, "a format of data files", FORMATS)
    odd = [option for option in options if option.replace("-", "_") not in OPTIONS]
    mistakes = [str(UnknownName(option, "an option of a request", OPTIONS)) for option in odd]
    try:
        parsed = configs.parse({option: value for option, value in options.items() if option not in odd})
    except ConfigError as error:
        raise ConfigError([*mistakes, *error.mistakes]) from None
    if not METHODS[parsed.method].slot:
        choices = ", ".join(method for method, row in METHODS.items() if row.slot)
        mistakes.append(f"method is {parsed.method!r}, which leaves nothing to serve; use one of {choices}.")
    if mistakes:
        raise ConfigError(mistakes)
    return name, {key: getattr(parsed, key) for key in (option.replace("-", "_") for option in options)}
