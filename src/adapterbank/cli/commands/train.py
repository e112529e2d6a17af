"""`adapterbank train`: train a task and put it into the bank. Its options are the fields of `config.Config`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank import config as configs
from adapterbank.cli.console import format_size, print_json, print_message, print_text, rerun_command
from adapterbank.cli.options import RECOMPUTED, bank_defaults
from adapterbank.config import AUTO, TOLERANCE, Config
from adapterbank.errors import ConfigError
from adapterbank.methods import METHODS
from adapterbank.tasks.catalog import CATALOG
from adapterbank.tasks.yaml_files import read_yaml
from adapterbank.training.dataset import DatasetReader, canonical, defaults

HELP = """Train a task and put it into the bank.

Trains the parameters that --method selects on top of the frozen encoder, keeps the epoch with the best dev score, and
stores it in the bank as a new version of the task. Other tasks do not change.

Example: adapterbank train --bank bank --task sentiment --train reviews.csv --epochs 5

Several columns: adapterbank train --bank bank --task tickets --train t.csv --text title,body --label bug,spam

A catalog task has its own data: adapterbank train --bank bank --task glue/mrpc --data-root data

Train four copies of each adapter, and keep their mean: adapterbank train --bank bank --task glue/rte --mix 4

Weigh the adapters of other tasks: adapterbank train --bank bank --task glue/rte --data-root data --fuse mnli,qnli

Find the smallest adapter that is good enough: adapterbank train --bank bank --task glue/rte --size auto --prune

A width for each layer, 32 on average: adapterbank train --bank bank --task glue/rte --data-root data --size 64to32

Python: adapterbank.open_bank("bank", backbone="minilm").train("sentiment", "reviews.csv", epochs=5)
"""


def _run(
    bank: str,
    config: str | None,
    resume: bool,
    json: bool,
    prune: bool,
    tolerance: str | None,
    recompute: str,
    **given: Any,
) -> None:
    chosen = {name: value for name, value in given.items() if value is not None}
    points = _points(tolerance)
    if auto := _requested_size(config, chosen) == "auto":
        chosen["size"] = Config.size  # a placeholder: `run_auto` finds the size
    elif tolerance is not None and not prune:
        raise ConfigError([f"tolerance is {tolerance}, but it applies only to --size auto and --prune; leave it out."])
    parsed = _parse(config, chosen, bank_defaults(bank))
    _require_task_and_data(parsed)
    from adapterbank.api.progress import Display
    from adapterbank.encoder.backbone import load
    from adapterbank.encoder.recompute import check_recompute
    from adapterbank.inference.engine import Engine
    from adapterbank.studies.pruning import prune_result
    from adapterbank.studies.start_search import choose_training
    from adapterbank.training.callbacks import Callbacks

    check_recompute(recompute)
    reader = DatasetReader()
    data = reader.read(canonical(parsed))  # most mistakes are in the data: report them before the encoder is loaded
    display = Display(quiet=json)
    try:
        with display:
            encoder = load(parsed.backbone) if auto or METHODS[parsed.method].slot else None
            result = choose_training(parsed, any_size=auto, tolerance=points)(
                parsed,
                encoder,
                bank,
                reader=reader,
                callbacks=Callbacks(display.watch, display.stage, display.note),
                resuming=resume,
                recompute=recompute,
            )
            if prune and encoder:
                engine = Engine(encoder, device=parsed.device, precision=parsed.precision, programs=False)
                result = prune_result(engine, result, data, tolerance=points, note=display.note)
    except KeyboardInterrupt:
        how = "" if auto or parsed.start_from == AUTO else " To resume:"
        print_message(f"adapterbank: stopped {display.reached}; the bank's tasks are unchanged.{how}")
        if how:
            print_message(f"  {rerun_command(drop='--resume', add='--resume')}")
        raise typer.Exit(130) from None
    if json:
        print_json(result.record)
    else:
        _print_summary(result.record)


def _require_task_and_data(config: Config) -> None:
    missing = ["task is missing; give --task."] if not config.task else []
    if not config.train and config.task not in CATALOG:
        near = difflib.get_close_matches(config.task, CATALOG, n=1)
        hint = f" Did you mean --task {near[0]}?" if near else ""
        missing.append(f"train is missing; give --train, or a task that adapterbank catalog lists.{hint}")
    if missing:
        raise ConfigError(missing)


def _requested_size(config: str | None, chosen: dict[str, Any]) -> Any:
    """Return the size given on the command line, or else in the config file."""
    if "size" in chosen or config is None or not Path(config).exists():
        return chosen.get("size")
    values = read_yaml(config)
    return values.get("size") if isinstance(values, dict) else None


def _points(tolerance: str | None) -> float:
    """Parse the tolerance, in points of the metric."""
    try:
        found = float(tolerance) if tolerance is not None else TOLERANCE
        if 0 <= found < float("inf"):
            return found
    except ValueError:
        pass
    raise ConfigError([f"tolerance is {tolerance!r}; it must be a number of at least 0, in points of the metric."])


def _parse(config: str | None, chosen: dict[str, Any], base: dict[str, Any]) -> Config:
    """Parse the options; the defaults of a catalog task rank below every option that is given."""

    def parse(under: dict[str, Any]) -> Config:
        return configs.read(config, chosen, under) if config else configs.parse({**under, **chosen})

    first = parse(base)
    wanted = defaults(first.task, first.train)
    return parse({**base, **wanted}) if wanted else first


def _print_summary(record: dict[str, Any]) -> None:
    metric, dev, params = record["task"]["metric"], record["metrics"]["dev"], record["params"]
    majority = f" (majority baseline: {dev['majority']:.4f})" if metric == "accuracy" else ""
    name, best = record["package"] or record["task"]["name"], "epoch" if record["package"] else "model"
    where = "on dev" if "dev" in record["config"]["data"] else "cross-validated before training"
    chosen = "" if "fitted" in record else f", {best} {record['best_epoch']}"
    chosen = ", average of the epochs" if record.get("average", {}).get("kept") else chosen
    print_text(f"{name}  {metric} {dev[metric]:.4f} {where}{majority}{chosen}")
    for split, scores in record["metrics"].items():
        if split != "dev":
            print_text(f"  {metric} {scores[metric]:.4f} on {split}")
    if not record["package"]:
        choice = ", ".join(f"{key} {value}" for key, value in record["choice"].items())
        print_text(f"  {len(record['history'])} models, {record['seconds']:.0f} s; record only, no package: {choice}")
        return
    print_text(
        f"  {params['trained']:,} trained parameters ({params['percent']:.2f} % of the encoder), "
        f"{format_size(record['bytes'])}, {record['seconds']:.0f} s, {record['examples_per_second']:.0f} rows/s"
    )


def _options() -> list[inspect.Parameter]:
    """Return an option for every field of `Config`, and the few that are not part of a run's identity."""
    hints = typing.get_type_hints(Config)
    tolerance = f"Points of the metric that --size auto and --prune may each cost (default: {TOLERANCE})."
    return [
        option_of("bank", str, "Bank folder; created if it does not exist.", "Bank", ...),
        *(
            option_of(f.name, hints[f.name], help_of(f), f.metadata["group"], None, f.metadata["choices"])
            for f in dataclasses.fields(Config)
        ),
        option_of("config", str | None, "YAML file of these options; the command line overrides it.", "Bank", None),
        option_of("resume", bool, "Resume an unfinished run with the same options and data.", "Bank", False),
        option_of("prune", bool, "Then remove the adapters that are not needed, as a new version.", "Bank", False),
        option_of("tolerance", float | None, tolerance, "Bank", None),
        option_of("recompute", str, f"{RECOMPUTED} (default: auto)", "Bank", "auto"),
        option_of("json", bool, "Print the record as JSON, and nothing else, to standard output.", "Bank", False),
    ]


def option_of(
    name: str, hint: Any, help: str, panel: str, default: Any, choices: Collection[str] = ()
) -> inspect.Parameter:
    """Return a command's option; one without a default of its own is left to `config.parse`."""
    flag = f"--{name.replace('_', '-')}"
    kind: Any = next(part for part in (*typing.get_args(hint), hint) if part is not types.NoneType)
    metavar = None
    if kind is bool and default is None:
        flag = f"{flag}/--no-{name.replace('_', '-')}"
    elif kind in (int, float):  # `config.parse` converts the number, so that all mistakes are reported together
        kind, metavar = str, "<int>" if kind is int else "<float>"
    complete = (lambda incomplete: [one for one in choices if one.startswith(incomplete)]) if choices else None
    made = typer.Option(
        flag, help=help, rich_help_panel=panel, show_default=False, metavar=metavar, autocompletion=complete
    )
    extra = {} if default is ... else {"default": default}
    kind = kind | None if default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, made], **extra)


def help_of(f: dataclasses.Field[Any]) -> str:
    """Return a field's help with its choices and its default, or its default for each method if they differ."""
    choices = f" One of: {', '.join(f.metadata['choices'])}." if f.metadata["choices"] else ""
    if f.default is None and f.name in METHODS[Config().method].defaults:
        values = {name: row.defaults[f.name].value for name, row in METHODS.items() if f.name in row.defaults}
        same = len(set(values.values())) == 1
        shown = str(values[Config().method]) if same else ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{f.metadata['help']}{choices} (default: {shown})"
    stated = f.default in (None, "") or "(default:" in f.metadata["help"]
    return f"{f.metadata['help']}{choices}{'' if stated else f' (default: {f.default})'}"


def command(**options: Any) -> None:
    """See `HELP`."""
    _run(**options)


command.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
command.__annotations__ = {p.name: p.annotation for p in _options()}
