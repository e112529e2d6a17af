"""Hostile data files and studies, read as a server and the command line read what a stranger sends."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from adapterbank.errors import AdapterbankError, ConfigError
from adapterbank.studies import grid
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.limits import TableLimits
from adapterbank.tasks.tables import read_table
from trials.children import MIB, in_child
from trials.frame import Stage, Trial
from trials.hostile_files import DATA, STUDIES

LIMITS = TableLimits(rows=100_000, columns=1_000, text=100_000, memory=64 * MIB)
"""Smaller than a server's, so that a case is made and read in a moment."""
SECONDS = 10
"""CPU time that reading may take; a case that has not ended after ten times as long hangs."""
ADDRESSES = 4096
"""MiB of addresses that reading may reserve; Arrow reserves far more than it uses, so resident memory is judged."""
SENTENCE = 1_000
"""Characters of a clear error."""


def read_data(path: Path) -> str:
    """Read a file as the worker of a training does, up to its examples; return what it was refused for."""
    try:
        table = read_table(path, LIMITS)
        task = infer_task(table, find_columns(table), name="upload")
        read_examples(table, task)
    except AdapterbankError as error:
        return str(error)
    return ""


def read_study(path: Path) -> str:
    """Read a study as `sweep` does; return what it was refused for."""
    try:
        grid.read(path, {"backbone": "minilm"}, {"device": "cpu"})
    except ConfigError as error:
        return error.mistakes[0]
    except AdapterbankError as error:
        return str(error)
    return ""


def warm(folder: Path) -> None:
    """Read something harmless, so that the children find everything imported."""
    (folder / "good.csv").write_text("text,label\na,1\nb,0\n")
    (folder / "good.yaml").write_text("task: x\ntrain: x.csv\nsize: [8, 64]\n")
    if told := read_data(folder / "good.csv") or read_study(folder / "good.yaml"):
        raise AssertionError(f"A harmless file was refused: {told}")


def run(stage: Stage) -> None:
    """Write hostile files and read them."""
    warm(stage.folder)
    folder, highest, longest = stage.folder / "case", 0.0, 0.0
    for case in stage.cases():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        data = case.random.random() < 0.6
        name = case.random.choice([*(DATA if data else STUDIES)])
        path = folder / "study.yaml"
        if data:
            made = in_child(partial(DATA[name], folder, case.random), seconds=120, megabytes=8192)
            if made.ended != "returned":
                raise AssertionError(f"{name} could not be made: {made.summary}\n{made.trace}")
            path = made.value
        else:
            path.write_text(STUDIES[name](case.random), encoding="utf-8")
        limit = 2 * LIMITS.memory // MIB
        outcome = in_child(partial(read_data if data else read_study, path), seconds=10 * SECONDS, megabytes=ADDRESSES)
        highest, longest = max(highest, outcome.megabytes), max(longest, outcome.cpu)
        wrong = ""
        if outcome.ended != "returned":
            wrong = f"{outcome.summary} {outcome.trace.strip().splitlines()[-1] if outcome.trace else ''}"
        elif outcome.cpu > SECONDS:
            wrong = f"took {outcome.cpu:.1f} s of CPU time; the bound is {SECONDS}"
        elif outcome.megabytes > limit:
            wrong = f"took {outcome.megabytes:.0f} MiB; twice the bound is {limit}"
        elif len(outcome.value) > SENTENCE or "\n" in outcome.value:
            wrong = f"was refused with {len(outcome.value):,} characters: {outcome.value[:200]!r}"
        if wrong:
            size = path.stat().st_size
            content = path.read_bytes() if path.is_file() and size < 20_000 else b""
            stage.fail(case, f"{name} ({size:,} bytes) {wrong}", content=content, trace=outcome.trace)
    stage.note("highest memory of a case above the start, MiB", round(highest))
    stage.note("CPU time of the longest case, s", round(longest, 1))


TRIAL = Trial(
    "uploads",
    "A hostile data file or study is read or refused with one clear error, within twice its bound of memory, in time.",
    full=500,
    run=run,
    weight=2,
)
