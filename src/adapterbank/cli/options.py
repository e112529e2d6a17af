"""Options that several commands share, each defined once. The options of `train` are the fields of `config.Config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank.errors import ConfigError
from adapterbank.storage.bank import Bank

BankPath = Annotated[str, typer.Option("--bank", help="Bank folder.", show_default=False)]
OptionalBankPath = Annotated[str | None, typer.Option("--bank", help="Bank folder.", show_default=False)]
TaskName = Annotated[str, typer.Option("--task", help="Task name, or name@version.", show_default=False)]
OptionalTaskName = Annotated[str | None, typer.Option("--task", help="Task name, or name@version.", show_default=False)]
BackboneName = Annotated[
    str | None,
    typer.Option("--backbone", help="Encoder: a folder, hub name or short name (default: the one the bank records)."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[str, typer.Option("--precision", help="auto, fp32, bf16 or int8.")]
RECOMPUTED = "For less memory, compute outputs again instead of keeping them: auto (if it runs out), always or never."
Recomputed = Annotated[str, typer.Option("--recompute", help=RECOMPUTED)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]

LabelledData = Annotated[
    str | None,
    typer.Option(
        "--data", help="Labelled data: CSV, TSV, JSONL, Parquet, or a catalog task (default: the task's catalog data)."
    ),
]
Split = Annotated[str, typer.Option("--split", help="Split of the catalog task to use.")]
DataRoot = Annotated[
    str | None,
    typer.Option("--data-root", help="Folder of data sets (default: $ADAPTERBANK_DATA).", show_default=False),
]
TextPairColumn = Annotated[str | None, typer.Option("--text-pair", help="Column with the second text of a pair.")]

Separator = Annotated[str | None, typer.Option("--separator", help="Between the fields of a file (default: found).")]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether the first line of a file names the columns.")
]
DropUnlabelled = Annotated[bool, typer.Option("--drop-unlabelled", help="Leave out rows without a label.")]

RecordFolders = Annotated[
    list[str], typer.Option("--records", help="Folder of records; can be repeated.", show_default=False)
]

ENGINES = ("local", "ray")
EngineName = Annotated[str, typer.Option("--engine", help="Where to run: local (this process) or ray (a cluster).")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Address of the Ray cluster (default: $RAY_ADDRESS, or a new local cluster)."),
]


def bank_defaults(bank: str | None) -> dict[str, Any]:
    """Return the options of a run that an existing bank determines: its encoder."""
    if bank is None or not Path(bank, "bank.json").exists():
        return {}
    return {"backbone": Bank.open(bank).backbone["name"]}


def check_engine(name: str) -> None:
    """Raise a `ConfigError` unless `name` is an engine."""
    if name not in ENGINES:
        raise ConfigError([f"engine is {name!r}; it must be one of {', '.join(ENGINES)}."])
