"""The command `adapterbank`: joins the commands, one file each. Loads nothing heavy before a command runs."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from adapterbank import __version__
from adapterbank.cli.commands import (
    ablate,
    audit,
    backbones,
    cache,
    catalog,
    data,
    evaluate,
    figures,
    gc,
    glue_score,
    glue_submission,
    keys,
    predict,
    prune,
    remove,
    report,
    rollback,
    serve,
    show,
    squad,
    sweep,
    tasks,
    train,
)
from adapterbank.cli.console import guarded, say

app = typer.Typer(
    name="adapterbank",
    help="Teach one frozen encoder any number of language tasks, and keep them in a bank.",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_BANK = (train, predict, evaluate, tasks, show, remove, rollback, audit, gc, backbones, serve)
_STUDIES = (sweep, ablate, prune, figures, report)
for module in (*_BANK, *_STUDIES, catalog, data, squad, glue_score, glue_submission, cache):
    name = module.__name__.rsplit(".", 1)[1].replace("_", "-")
    app.command(name, help=module.HELP, epilog=None)(guarded(module.command))
app.add_typer(keys.app, name="keys")

_UsageError: Any = typer.BadParameter.__base__
"""What the parser raises; by way of its subclass, as typer had it from click once and now carries its own."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adapterbank {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; a slip in it is told in one sentence, like every other mistake."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale: the files are UTF-8 too
    try:
        status = app(prog_name="adapterbank", standalone_mode=False)
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "adapterbank"
        what = " ".join(error.format_message().split())
        say(f"adapterbank: {what}{'' if what.endswith(('.', '?')) else '.'} See: {where} --help")
        status = error.exit_code
    sys.exit(status)
