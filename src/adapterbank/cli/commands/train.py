"""`adapterbank train`: teach the bank a task. Its options are the fields of `config.Config`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import shlex
import sys
import types
import typing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank import config as configs
from adapterbank.cli.console import print_json, say, size
from adapterbank.config import Config
from adapterbank.errors import ConfigError
from adapterbank.methods import METHODS
from adapterbank.storage.bank import Bank
from adapterbank.tasks.catalog import CATALOG
from adapterbank.training.dataset import DatasetReader, defaults

_TOLERANCE = 0.5
_TOLERANCE_HELP = f"Points of the metric that --size auto and --prune may cost, each (default: {_TOLERANCE})."

HELP = """Teach the bank a task.

Trains what the method says on top of the frozen encoder, keeps the best epoch on dev, and puts it into the bank as a
new version of the task. Other tasks are not touched.

Example: adapterbank train --bank bank --task sentiment --train reviews.csv --epochs 5

A task of the catalog brings its own data: adapterbank train --bank bank --task glue/mrpc --data-root data

The smallest adapter that is as good as any: adapterbank train --bank bank --task glue/rte --size auto --prune

Python: adapterbank.open_bank("bank", backbone="minilm").train("sentiment", "reviews.csv", epochs=5)
"""


def _run(
    bank: str, config: str | None, resume: bool, json: bool, prune: bool, tolerance: str | None, **given: Any
) -> None:
    chosen = {name: value for name, value in given.items() if value is not None}
    points = _points(tolerance)
    if auto := _asked_size(config, chosen) == "auto":
        chosen["size"] = Config.size  # any will do: `run_auto` finds its own
    elif tolerance is not None and not prune:
        raise ConfigError([f"tolerance is {tolerance}, but neither --size auto nor --prune is given; leave it out."])
    base = {"backbone": Bank.open(bank).backbone["name"]} if Path(bank, "bank.json").exists() else {}
    parsed = _parsed(config, chosen, base)
    missing = ["task is missing; give --task."] if not parsed.task else []
    if not parsed.train and parsed.task not in CATALOG:
        near = difflib.get_close_matches(parsed.task, CATALOG, n=1)
        hint = f" Did you mean --task {near[0]}?" if near else ""
        missing.append(f"train is missing; give --train, or name a task of: adapterbank catalog.{hint}")
    if missing:
        raise ConfigError(missing)
    from adapterbank.cli.progress import Display
    from adapterbank.encoder.backbone import load
    from adapterbank.inference.engine import Engine
    from adapterbank.studies.pruning import prune_result
    from adapterbank.studies.size_search import run_auto
    from adapterbank.training.run import run

    reader = DatasetReader()
    data = reader.read(parsed)  # the commonest mistakes lie in the data: find them before the encoder is loaded
    display = Display(quiet=json)
    try:
        with display:
            encoder = load(parsed.backbone)
            result = (partial(run_auto, tolerance=points) if auto else run)(
                parsed,
                encoder,
                bank,
                reader=reader,
                watch=display.watch,
                stage=display.stage,
                note=display.note,
                resuming=resume,
            )
            if prune:
                engine = Engine(encoder, device=parsed.device, precision=parsed.precision, programs=False)
                result = prune_result(engine, result, data, tolerance=points, note=display.note)
    except KeyboardInterrupt:
        again = "" if auto else f" To go on:\n  {_again()}"
        say(f"adapterbank: stopped {display.where}; the bank's tasks are as they were.{again}")
        raise typer.Exit(130) from None
    if json:
        print_json(result.record)
    else:
        _summary(result.record)


def _asked_size(config: str | None, chosen: dict[str, Any]) -> Any:
    """Give the size that the shell asks for, or the file of options."""
    if "size" in chosen or config is None or not Path(config).exists():
        return chosen.get("size")
    values = configs.read_yaml(config)
    return values.get("size") if isinstance(values, dict) else None


def _points(tolerance: str | None) -> float:
    """Read the tolerance, in points of the metric."""
    try:
        found = float(tolerance) if tolerance is not None else _TOLERANCE
        if 0 <= found < float("inf"):
            return found
    except ValueError:
        pass
    raise ConfigError([f"tolerance is {tolerance!r}; it must be a number of at least 0, in points of the metric."])


def _parsed(config: str | None, chosen: dict[str, Any], base: dict[str, Any]) -> Config:
    """Parse the options; a task of the catalog may want others than usual, below what anyone states."""

    def parse(under: dict[str, Any]) -> Config:
        return configs.read(config, chosen, under) if config else configs.parse({**under, **chosen})

    first = parse(base)
    wanted = defaults(first.task, first.train)
    return parse({**base, **wanted}) if wanted else first


def _summary(record: dict[str, Any]) -> None:
    metric, dev, params = record["task"]["metric"], record["metrics"]["dev"], record["params"]
    majority = f" (always the commonest answer: {dev['majority']:.4f})" if metric == "accuracy" else ""
    name, turn = record["package"] or record["task"]["name"], "epoch" if record["package"] else "model"
    typer.echo(f"{name}  {metric} {dev[metric]:.4f} on dev{majority}, {turn} {record['best_epoch']}")
    for split, scores in record["metrics"].items():
        if split != "dev":
            typer.echo(f"  {metric} {scores[metric]:.4f} on {split}")
    if not record["package"]:
        best = ", ".join(f"{key} {value}" for key, value in record["choice"].items())
        typer.echo(f"  {len(record['history'])} models, {record['seconds']:.0f} s; a record, no package: {best}")
        return
    typer.echo(
        f"  {params['trained']:,} trained parameters ({params['percent']:.2f} % of the encoder), "
        f"{size(record['bytes'])}, {record['seconds']:.0f} s, {record['examples_per_second']:.0f} rows/s"
    )


def _again() -> str:
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["adapterbank", *words, "--resume"])


def _options() -> list[inspect.Parameter]:
    """Make a shell option of every field of `Config`, and of the few that are not part of a run's identity."""
    hints = typing.get_type_hints(Config)
    found = [
        _option("bank", str, "The bank's folder; made if it is not there.", "Bank", ...),
        *(_option(f.name, hints[f.name], _help(f), f.metadata["group"], None) for f in dataclasses.fields(Config)),
        _option("config", str | None, "A YAML file of these options; the shell's win.", "Bank", None),
        _option("resume", bool, "Go on with an unfinished run of the same options and data.", "Bank", False),
        _option("prune", bool, "Remove the adapters that turn out idle, as a version of its own.", "Bank", False),
        _option(
            "tolerance",
            float | None,
            _TOLERANCE_HELP,
            "Bank",
            None,
        ),
        _option("json", bool, "Print the record as JSON and nothing else on standard output.", "Bank", False),
    ]
    return found


def _option(name: str, hint: Any, help: str, panel: str, default: Any) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    kind: Any = next(part for part in (*typing.get_args(hint), hint) if part is not types.NoneType)
    metavar = None
    if kind is bool and default is None:
        flag = f"{flag}/--no-{name.replace('_', '-')}"
    elif kind in (int, float):  # `config.parse` reads the number, so that all mistakes are told together
        kind, metavar = str, "<int>" if kind is int else "<float>"
    made = typer.Option(flag, help=help, rich_help_panel=panel, show_default=False, metavar=metavar)
    extra = {} if default is ... else {"default": default}
    kind = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, made], **extra)


def _help(f: dataclasses.Field[Any]) -> str:
    choices = f" One of: {', '.join(f.metadata['choices'])}." if f.metadata["choices"] else ""
    if f.default is None and f.name in METHODS["adapter"].defaults:
        values = {name: row.defaults[f.name].value for name, row in METHODS.items() if f.name in row.defaults}
        same = len(set(values.values())) == 1
        shown = str(values["adapter"]) if same else ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{f.metadata['help']}{choices} (default: {shown})"
    told = f.default in (None, "") or "(default:" in f.metadata["help"]
    return f"{f.metadata['help']}{choices}{'' if told else f' (default: {f.default})'}"


def command(**options: Any) -> None:
    """See `HELP`."""
    _run(**options)


command.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
command.__annotations__ = {p.name: p.annotation for p in _options()}
