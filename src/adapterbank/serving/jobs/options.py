"""Checks what a request may set for a run: task, options of an allow-list, format. Knows no files and no runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterbank import config as configs
from adapterbank.config import AUTO, fused_tasks
from adapterbank.errors import ConfigError, InputError, UnknownName
from adapterbank.methods import METHODS
from adapterbank.serving.jobs.run_row import FORMATS
from adapterbank.storage.package import is_package_path, parse_ref

OPTIONS = (
    *("text", "text_pair", "label", "kind", "labels", "label_separator", "drop_unlabelled", "separator", "header"),
    *("metric", "choose_on", "limit", "max_length", "long", "max_windows", "window_pooling", "doc_stride"),
    *("method", "size", "layers", "sites", "activation", "sigma", "train_norms", "placement", "combine", "inner_norm"),
    *("depth", "narrow_after", "rank", "alpha", "targets", "top", "pooling", "head_hidden"),
    *("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout"),
    *("class_weights", "patience", "mix", "average", "calibrate", "few", "seed", "start_from", "on", "fuse"),
    "default",
)
"""The options a request may set. None of them names a file, an encoder or a device of this machine."""


def check(task: str, options: Mapping[str, Any], format: str) -> tuple[str, dict[str, Any]]:
    """Return a task's name in the bank and the options of a run, checked before any data is read."""
    name, version = parse_ref(task)
    if version is not None:
        raise InputError(f"{task!r} names one version, but a run adds a new one; write {name!r}.")
    if format not in FORMATS:
        raise UnknownName(format, "a format of data files", FORMATS)
    unknown = [option for option in options if option.replace("-", "_") not in OPTIONS]
    mistakes = [str(UnknownName(option, "an option of a request", OPTIONS)) for option in unknown]
    try:
        parsed = configs.parse({option: value for option, value in options.items() if option not in unknown})
    except ConfigError as error:
        raise ConfigError([*mistakes, *error.mistakes]) from None
    if not METHODS[parsed.method].slot:
        choices = ", ".join(method for method, row in METHODS.items() if row.slot)
        mistakes.append(f"method is {parsed.method!r}, which produces nothing to serve; use one of {choices}.")
    if parsed.start_from == AUTO:
        mistakes.append("start_from is 'auto', which a request cannot use; name a task, or leave it out.")
    if is_package_path(parsed.start_from):
        mistakes.append(f"start_from is {parsed.start_from!r}, a path; name a task, or one version of it.")
    for option, names in (("on", [parsed.on]), ("fuse", fused_tasks(parsed))):
        paths = [name for name in names if is_package_path(name)]
        mistakes += [f"{option} is {name!r}, a path; name a task, or one version of it." for name in paths]
    if mistakes:
        raise ConfigError(mistakes)
    return name, {key: getattr(parsed, key) for key in (option.replace("-", "_") for option in options)}
