"""What all commands share: errors as one sentence, tables, JSON, the everyday options. Knows no command."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from adapterbank.errors import AdapterbankError, ConfigError

Returned = TypeVar("Returned")
_NUMBER = re.compile(r"-?[\d.,]*( ?(%|B|kB|MB|GB))?")

BankPath = Annotated[str, typer.Option("--bank", help="The bank's folder.", show_default=False)]
TaskName = Annotated[str, typer.Option("--task", help="Name of the task, or name@version.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
BackboneName = Annotated[
    str | None, typer.Option("--backbone", help="Where the bank's encoder is (default: as the bank says).")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[str, typer.Option("--precision", help="auto, fp32 or bf16.")]


def guarded(command: Callable[..., Returned]) -> Callable[..., Returned]:
    """Turn this library's errors into one sentence and an exit status, and Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Returned:
        before = signal.signal(signal.SIGTERM, _interrupt)  # a polite kill leaves things as whole as Ctrl-C
        try:
            return command(*args, **options)
        except AdapterbankError as error:
            for line in error.mistakes if isinstance(error, ConfigError) else [str(error)]:
                say(f"adapterbank: {' '.join(line.splitlines())}")
            raise typer.Exit(error.exit_code) from None
        except (KeyboardInterrupt, typer.Abort):
            say("adapterbank: stopped; the bank is as it was.")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:  # what a system may still refuse: a name too long, a folder where a file should be
            what = error.filename or "The output"
            say(f"adapterbank: {what} cannot be used: {error.strerror or error}; choose another.")
            raise typer.Exit(2) from None
        finally:
            signal.signal(signal.SIGTERM, before)

    return wrapped


def say(text: str) -> None:
    """Print a line for the person at the terminal, on standard error."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """Print one JSON value on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns: numbers right, words left; plain text, so that it can be piped and copied."""
    widths = [max(len(title), *(len(row[i]) for row in rows), 0) for i, title in enumerate(titles)]
    numeric = [all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(titles))]
    for row in (titles, *rows):
        cells = (f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in zip(row, widths, numeric, strict=True))
        typer.echo("  ".join(cells).rstrip())


def counted(count: int, noun: str) -> str:
    """Write a number of things: `1 task`, `2 tasks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: float) -> str:
    """Write bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
