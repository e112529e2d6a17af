"""Small labelled data in the vocabulary of the tiny encoders, files of every format, and the command line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
from typer.testing import CliRunner

from adapterbank.cli.main import main

NOUNS = ("cat", "dog", "house", "film", "fox", "mat")
FAST: dict[str, Any] = {"epochs": 2, "size": 4, "lr": 0.01, "batch": 8, "max_length": 32}
"""Options of a training that takes a tenth of a second on a tiny encoder, which has 64 positions."""


def reviews(count: int = 24) -> list[tuple[str, str]]:
    """Return texts and their labels, the two classes in turn."""
    places = itertools.cycle(itertools.product(("big", "small", "red", "lazy"), NOUNS))
    made = [f"the {first} {noun} was" for (first, noun), _ in zip(places, range(count), strict=False)]
    return [(f"{text} {('bad', 'good')[i % 2]}", ("negative", "positive")[i % 2]) for i, text in enumerate(made)]


def scores(count: int = 24) -> list[tuple[str, float]]:
    """Return texts with a number each."""
    return [(text, 0.5 + i % 4) for i, (text, _) in enumerate(reviews(count))]


def pairs(count: int = 24) -> list[tuple[str, str, str]]:
    """Return pairs of texts and their labels."""
    return [(text, f"it is a {NOUNS[i % 6]}", ("no", "yes")[i % 2]) for i, (text, _) in enumerate(reviews(count))]


def tags(count: int = 24) -> list[dict[str, Any]]:
    """Return texts with any number of labels each."""
    names = (["red"], ["red", "big"], [], ["big"])
    return [{"text": text, "labels": names[i % 4]} for i, (text, _) in enumerate(reviews(count))]


def answers(count: int = 24) -> list[dict[str, Any]]:
    """Return questions, contexts and the answers in them."""
    rows = [("what was it", text, text.split()[2]) for text, _ in reviews(count)]
    return [dict(zip(("question", "context", "answer"), row, strict=True)) for row in rows]


def write(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str] = ("text", "label")) -> Path:
    """Write rows in the format of the file's suffix."""
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    ending = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        return path
    if ending in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.writer(text, delimiter="," if ending == "csv" else "\t", lineterminator="\n")
        writer.writerows([columns, *rows])
        content = text.getvalue()
    else:
        content = json.dumps(records) if ending == "json" else "".join(json.dumps(r) + "\n" for r in records)
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def flags(options: dict[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON value that it must be."""
        return json.loads(self.out)

    @property
    def answers(self) -> list[Any]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def shell(*words: object, input: str | bytes | None = None, terminal: bool = False, **env: str) -> Outcome:
    """Run `adapterbank` with these words in this process; exceptions that it does not handle are raised here."""
    arguments = [str(word) for word in words]
    runner = CliRunner()
    with (
        runner.isolation(input=input, env=env) as (out, err, _),
        mock.patch.object(sys, "argv", ["adapterbank", *arguments]),
        mock.patch.object(sys.stdin, "isatty", return_value=terminal),
    ):
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
        sys.stderr.flush()
        return Outcome(code or 0, out.getvalue().decode(), err.getvalue().decode())


COMMAND = (sys.executable, "-c", "from adapterbank.cli.main import main; main()")
"""The command line in its own process."""


def process(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `adapterbank` in its own process, with one thread as in the tests."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def ordinary() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test runner in the background may ignore it

    return subprocess.Popen(
        [*COMMAND, *map(str, words)], text=True, env=environment, preexec_fn=ordinary, **{**pipes, **options}
    )


def snapshot(folder: Path, without: Iterable[str] = ()) -> dict[str, str] | None:
    """Return the sha256 of every file and the name of every folder below; None if the folder does not exist."""
    if not folder.exists():
        return None
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not name.startswith(tuple(without) or ("\0",)):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found
