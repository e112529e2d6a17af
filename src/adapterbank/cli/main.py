"""The command `adapterbank`: joins the commands, one file each. Loads nothing heavy before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from adapterbank import __version__
from adapterbank.cli import audit, backbones, evaluate, gc, predict, remove, rollback, show, tasks, train
from adapterbank.cli.console import guarded

app = typer.Typer(
    name="adapterbank",
    help="Teach one frozen encoder any number of language tasks, and keep them in a bank.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (train, predict, evaluate, tasks, show, remove, rollback, audit, gc, backbones):
    name = module.__name__.rsplit(".", 1)[1]
    app.command(name, help=module.HELP, epilog=None)(guarded(module.command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adapterbank {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
