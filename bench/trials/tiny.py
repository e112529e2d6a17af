"""The tiny encoder, data and banks that the trials use, and the command line inside a process."""

from __future__ import annotations

import contextlib
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from families import save_random
from small_data import FAST, reviews


class Printed(NamedTuple):
    """What a command line printed, and its exit status."""

    status: int
    out: str
    err: str


def encoder(folder: Path) -> Path:
    """Create a random BERT of 3 layers and hidden size 32 in a folder and return the folder."""
    target = folder / "encoder"
    if not target.exists():
        save_random("bert", target)
    return target


def train(bank: Path, encoder: Path, task: str, **options: Any) -> Any:
    """Train a task of two labels on 24 texts, which takes a fraction of a second."""
    from adapterbank.api.opened import open_bank

    return open_bank(bank, str(encoder), device="cpu").train(task, reviews(), **{**FAST, **options})


def command(*words: Any) -> Printed:
    """Run `adapterbank` with these words in this process; an exception of a command is the caller's."""
    main = _main()
    out, err, before = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.StringIO(), sys.argv
    sys.argv = ["adapterbank", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status: Any = 0
    except SystemExit as exit:
        status = exit.code
    finally:
        sys.argv = before
    out.flush()
    printed = out.buffer.getvalue().decode()  # type: ignore[attr-defined]  # a BytesIO
    return Printed(status if isinstance(status, int) else int(bool(status)), printed, err.getvalue())


@cache
def _main() -> Any:
    """Return the command line, whose parser is built once and not in every child."""
    import typer.main

    from adapterbank.cli.main import main

    typer.main.get_command = cache(typer.main.get_command)
    return main


@cache
def backbone(folder: Path) -> Any:
    """Return the encoder in memory, loaded once: a child finds it there."""
    from adapterbank.encoder.backbone import load

    return load(str(folder))
