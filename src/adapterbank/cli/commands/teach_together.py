"""`adapterbank teach-together`: one package that several tasks teach, for others to stand on."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

import typer

from adapterbank.cli.commands.train import help_of, option_of
from adapterbank.cli.console import format_size, print_json, print_message, print_text
from adapterbank.cli.options import RECOMPUTED
from adapterbank.config import Config
from adapterbank.errors import ConfigError
from adapterbank.tasks.catalog import CATALOG

HELP = """Teach one package by several tasks at once, for other tasks to stand on.

The adapters are shared, and each task has a head of its own. A step takes a batch of one task, drawn in proportion to
the square root of its rows. The epoch with the best mean of the tasks' dev scores is kept, with the first task's head.
The encoder and the tasks of the bank do not change. Ctrl-C leaves the bank intact; a run begins anew.

Example: adapterbank teach-together --bank bank --tasks glue/mnli,glue/qnli,glue/qqp --name shared --data-root data

Then: adapterbank train --bank bank --task glue/rte --data-root data --on shared

Files: adapterbank teach-together --bank bank --tasks reviews=reviews.csv,topics=topics.jsonl --name shared

Python: adapterbank.open_bank("bank").teach_together({"reviews": "reviews.csv", "topics": "topics.jsonl"}, "shared")
"""
_LEFT_OUT = ("task", "train", "dev", "test", "backbone")


def _run(bank: str, tasks: str, name: str, backbone: str | None, recompute: str, json: bool, **given: Any) -> None:
    data = _named(tasks)
    from adapterbank.api.opened import open_bank
    from adapterbank.api.progress import Display

    chosen = {option: value for option, value in given.items() if value is not None}
    places = {option: chosen.pop(option) for option in ("device", "precision", "data_root") if option in chosen}
    opened = open_bank(bank, backbone or _encoder(bank), **places)
    display = Display(quiet=json)
    try:
        with display:
            calls: Any = {"watch": display.watch, "stage": display.stage, "note": display.note}
            result = opened.teach_together(data, name, progress=False, recompute=recompute, **calls, **chosen)
    except KeyboardInterrupt:
        print_message(f"adapterbank: stopped {display.reached}; the bank's tasks are unchanged.")
        raise typer.Exit(130) from None
    record = result.record
    if json:
        print_json(record)
        return
    scores = ", ".join(f"{one['task']} {one['metric']} {one['score']:.4f}" for one in record["together"])
    print_text(f"{record['package']}  on dev: {scores}; epoch {record['best_epoch']}")
    print_text(
        f"  {record['params']['trained']:,} trained parameters ({record['params']['percent']:.2f} % of the encoder), "
        f"{format_size(record['bytes'])}, {record['seconds']:.0f} s"
    )


def _encoder(bank: str) -> str | None:
    """Return the encoder of a bank that does not exist yet; an existing one knows its own."""
    from adapterbank.cli.options import bank_defaults

    return None if bank_defaults(bank) else Config.backbone


def _named(tasks: str) -> dict[str, str | None]:
    """Return the data of each task: `name=file`, or the name of a catalog task."""
    data: dict[str, str | None] = {}
    for part in tasks.split(","):
        name, given, file = part.strip().partition("=")
        problem = "occurs twice" if name in data else None
        if not name or (given and not file) or (not given and name not in CATALOG):
            problem = "is neither name=file nor a task that adapterbank catalog lists"
        if problem:
            raise ConfigError([f"tasks is {tasks!r}, of which {part.strip()!r} {problem}; name each task once."])
        data[name] = file or None
    return data


def _options() -> list[inspect.Parameter]:
    """Return the options of `train` but for its task and its data, and those of this command."""
    hints = typing.get_type_hints(Config)
    listed = "The tasks, separated by commas: names of the catalog, or name=file."
    return [
        option_of("bank", str, "Bank folder; created if it does not exist.", "Bank", ...),
        option_of("tasks", str, listed, "Bank", ...),
        option_of("name", str, "The name of the package in the bank.", "Bank", ...),
        *(
            option_of(f.name, hints[f.name], help_of(f), f.metadata["group"], None, f.metadata["choices"])
            for f in dataclasses.fields(Config)
            if f.name not in _LEFT_OUT
        ),
        option_of("backbone", str | None, "The encoder (default: the bank's own, or minilm).", "Bank", None),
        option_of("recompute", str, f"{RECOMPUTED} (default: auto)", "Bank", "auto"),
        option_of("json", bool, "Print the record as JSON, and nothing else, to standard output.", "Bank", False),
    ]


def command(**options: Any) -> None:
    """See `HELP`."""
    _run(**options)


command.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
command.__annotations__ = {p.name: p.annotation for p in _options()}
