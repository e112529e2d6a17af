"""The keywords of `OpenBank.train`: every option of a run with its type, for type checkers, editors and `help`.

A test compares them with the fields of `config.Config`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from adapterbank.config import Config
from adapterbank.training.job import Progress

Function = TypeVar("Function", bound=Callable[..., Any])


class ModelOptions(TypedDict, total=False):
    """The options of a run that describe what is trained, and how."""

    metric: str | None
    limit: int
    max_length: int
    long: str
    max_windows: int
    window_pooling: str
    method: str
    size: int | str
    narrow_after: int
    layers: str | Sequence[int]
    sites: str | Sequence[str]
    activation: str
    sigma: float
    train_norms: bool
    placement: str
    combine: str
    inner_norm: bool
    depth: int
    rank: int
    alpha: float
    targets: str | Sequence[str]
    top: int
    pooling: str | None
    head_hidden: int
    lr: float | None
    epochs: int | None
    batch: int
    warmup: float
    weight_decay: float | None
    epsilon: float | None
    bias_correction: bool | None
    clip: float
    dropout: float | None
    class_weights: str
    patience: int
    mix: int
    average: bool
    calibrate: bool
    few: str
    start_from: str
    seed: int
    device: str
    precision: str


class RunOptions(ModelOptions, total=False):
    """The options of a run, but for its task and its data files."""

    data_root: str | None
    text: str | None
    text_pair: str | None
    label: str | None
    kind: str | None
    labels: str | Sequence[str] | None
    separator: str | None
    header: bool | None
    label_separator: str | None
    drop_unlabelled: bool
    choose_on: str
    doc_stride: int
    backbone: str
    trials: int
    minutes: float
    on: str
    fuse: str | Sequence[str]
    default: str


class TrainOptions(RunOptions, total=False):
    """The options of a run, and what it calls with its progress."""

    watch: Callable[[Progress], None]
    stage: Callable[[str, int, int], None]
    note: Callable[[str], None]


CALLBACKS = ("watch", "stage", "note")
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Config)}
HELP: dict[str, str] = {one.name: one.metadata["help"] for one in fields(Config)}


def listing(options: type, without: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that lists a function's `**options` by name, with defaults, in its signature and docstring.

    Notebooks and `help` read these; type checkers read `Unpack[...]` in the source.
    """

    def listed(function: Function) -> Function:
        found = inspect.signature(function)
        hints = {name: hint for name, hint in _annotations(options).items() if name not in without}
        kept = [one for one in found.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        further = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
            for name, hint in hints.items()
            if name not in found.parameters
        ]
        function.__signature__ = found.replace(parameters=[*kept, *further])  # type: ignore[attr-defined]
        lines = [f"    {name}: {HELP[name]}" for name in hints if name in HELP]
        wrapped = [textwrap.fill(line, 120, subsequent_indent=" " * 8) for line in lines]
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options of a run:", *wrapped])
        return function

    return listed


def _annotations(options: type) -> dict[str, Any]:
    """Return the fields of a TypedDict and of those it extends, with the annotations as they are written."""
    own: dict[str, Any] = dict(options.__annotations__)
    return {name: getattr(hint, "__forward_arg__", hint) for name, hint in own.items()}
