"""The command `adapterbank`: joins the commands, one file each. Imports nothing heavy before a command runs."""

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
    soup,
    squad,
    sweep,
    tasks,
    teach_together,
    train,
    warm,
)
from adapterbank.cli.console import be_verbose, guarded, print_message

_SERVING = "Serving"
COMMANDS = {
    "Tasks": (train, predict, evaluate),
    "Bank": (tasks, show, remove, rollback, audit, gc),
    _SERVING: (serve,),
    "Studies and analysis": (sweep, teach_together, ablate, prune, soup, figures, report),
    "Encoders and data": (backbones, catalog, data, cache, warm),
    "Benchmarks": (squad, glue_score, glue_submission),
}
"""The commands by their section of `--help`; `keys` has commands of its own and is added to the section Serving."""

app = typer.Typer(
    name="adapterbank",
    help="Train one frozen encoder on any number of language tasks, and keep the tasks in a bank.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _joined(text: str) -> str:
    """Return a help text with each paragraph on one line, so that the terminal's width breaks the lines.

    A bracket, as in `adapterbank[plot]`, is escaped, because rich would take it for markup.
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).replace("[", "\\[")


for _section, _modules in COMMANDS.items():
    for _module in _modules:
        _name = _module.__name__.rsplit(".", 1)[1].replace("_", "-")
        app.command(_name, help=_joined(_module.HELP), rich_help_panel=_section)(guarded(_module.command))
app.add_typer(keys.app, name="keys", help=_joined(keys.HELP), rich_help_panel=_SERVING)

_UsageError: Any = typer.BadParameter.__base__
"""The parser's error class, found through a subclass: older versions of typer take it from click, newer define it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adapterbank {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Say what is loaded and done, and when; show tracebacks."),
    ] = False,
) -> None:
    if verbose:
        be_verbose()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; a usage error is printed as one line, like every other error."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict")  # in every locale: the files are UTF-8 too
    try:
        status = app(prog_name="adapterbank", standalone_mode=False)
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "adapterbank"
        what = " ".join(error.format_message().split())
        print_message(f"adapterbank: {what}{'' if what.endswith(('.', '?')) else '.'} See: {where} --help")
        status = error.exit_code
    sys.exit(status)
