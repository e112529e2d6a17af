"""Output and errors shared by all commands: one-line errors, tables, JSON and formatted values."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from adapterbank.api.plain_text import LONGEST as LONGEST
from adapterbank.api.plain_text import escaped
from adapterbank.api.plain_text import format_count as format_count
from adapterbank.api.plain_text import format_duration as format_duration
from adapterbank.api.plain_text import format_size as format_size
from adapterbank.errors import AdapterbankError, ConfigError
from adapterbank.tasks.writers import json_text

Returned = TypeVar("Returned")
_LOG = logging.getLogger("adapterbank.load")
_NUMBER = re.compile(r"-?[\d.,]*( ?(%|B|kB|MB|GB))?")


def be_verbose() -> None:
    """Print what is loaded and done, each line with the time since the start, and the traceback of each error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaped("{relativeCreated:8.0f} ms  {message}", style="{"))
    for logger in (_LOG, logging.getLogger("adapterbank.train")):
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)


class _Escaped(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), keep="\n")


def guarded(command: Callable[..., Returned]) -> Callable[..., Returned]:
    """Wrap a command: print this library's errors as one line each, exit with their status, and with 130 on Ctrl-C."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Returned:
        before = signal.signal(signal.SIGTERM, _interrupt)  # SIGTERM cleans up just as Ctrl-C does
        try:
            return command(*args, **options)
        except AdapterbankError as error:
            _LOG.debug("refused", exc_info=error)
            for line in error.mistakes if isinstance(error, ConfigError) else [str(error)]:
                print_message(f"adapterbank: {' '.join(line.splitlines())}")
            raise typer.Exit(error.exit_code) from None
        except (KeyboardInterrupt, typer.Abort):
            print_message("adapterbank: stopped; the bank is unchanged.")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader, such as `head`, closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:  # such as a name that is too long, or a folder where a file should be
            _LOG.debug("refused", exc_info=error)
            what = error.filename or "The output"
            print_message(f"adapterbank: {what} cannot be used: {error.strerror or error}; choose another path.")
            raise typer.Exit(2) from None
        finally:
            _LOG.debug("end")
            signal.signal(signal.SIGTERM, before)

    return wrapped


def print_message(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(escaped(text), err=True)


def print_text(text: str) -> None:
    """Print one or more lines to standard output."""
    typer.echo(escaped(text, keep="\n\t"))


def print_json(value: Any) -> None:
    """Print one JSON value to standard output."""
    typer.echo(json_text(value, indent=2))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as plain-text columns that can be piped and copied; numbers are right-aligned, words left-aligned."""
    titles, rows = [escaped(title) for title in titles], [[escaped(cell) for cell in row] for row in rows]
    widths = [max(len(title), *(len(row[i]) for row in rows), 0) for i, title in enumerate(titles)]
    numeric = [all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(titles))]
    for row in (titles, *rows):
        cells = (f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in zip(row, widths, numeric, strict=True))
        typer.echo("  ".join(cells).rstrip())


def rerun_command(*, drop: str, add: str = "") -> str:
    """Return the command line of this process as text to paste, without the flag `drop` and with the flag `add`."""
    words = [word for word in sys.argv[1:] if word != drop]
    return shlex.join(["adapterbank", *words, *([add] if add else [])])


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
