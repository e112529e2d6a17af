"""Whole commands of two versions of adapterbank in turns: imported modules, and seconds from start to end.

    git worktree add ../before COMMIT
    PYTHONPATH=src OMP_NUM_THREADS=1 python bench/commands.py --before ../before --out bench/results/commands_cpu.json

Trains MiniLM's adapter on 400 drawn sentences of two classes. `--uncompiled` hides Python's `.pyc` files, as on
a machine where nothing was ever imported.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch
from contest import write
from machine import machine

HERE = Path(__file__).resolve().parents[1]
COUNT = """
import atexit, sys
atexit.register(lambda: open("modules", "w").write(str(len(sys.modules))))
from adapterbank.cli.entry import main
main()
"""
COMMANDS = {
    "train": "train --train rows.csv --bank bank --backbone minilm --epochs 1 --task s --device cpu --json",
    "evaluate": "evaluate --task s --data few.csv --bank bank --device cpu",
    "predict": "predict --task s --text fine --bank bank --device cpu",
    "tasks": "tasks --bank bank",
    "help": "--help",
}


def rows(count: int) -> str:
    """Return a table of drawn sentences, each with the class of its last word."""
    draw = random.Random(0)
    words = ("a", "film", "story", "with", "much", "charm", "of", "the", "year")
    lines = [[*draw.choices(words, k=draw.randrange(3, 30)), draw.choice(("good", "bad"))] for _ in range(count)]
    return "text,label\n" + "".join(f"{' '.join(line)},{line[-1]}\n" for line in lines)


def take(words: str, folder: Path, source: Path, uncompiled: bool) -> dict[str, float]:
    """Run a command in a folder; return its wall-clock and processor seconds and the number of modules."""
    hidden = {"PYTHONPYCACHEPREFIX": str(folder / "none"), "PYTHONDONTWRITEBYTECODE": "1"} if uncompiled else {}
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), **hidden}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", COUNT, *words.split()], cwd=folder, env=environment, stdout=DEVNULL, stderr=DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{words!r} of {source} failed.")
    seconds = {"wall": time.perf_counter() - began, "processor": used.ru_utime + used.ru_stime}
    return {**seconds, "modules": int((folder / "modules").read_text())}


def main() -> None:
    """Measure all commands, both versions in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uncompiled", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    taken: dict[str, dict[str, list[dict[str, float]]]] = {name: {"before": [], "after": []} for name in COMMANDS}
    with tempfile.TemporaryDirectory() as place:
        for version in ("before", "after"):
            (folder := Path(place, version)).mkdir()
            (folder / "rows.csv").write_text(rows(400))
            (folder / "few.csv").write_text(rows(40))
        for _ in range(given.rounds):
            for name, words in COMMANDS.items():
                for version, source in (("before", given.before.resolve()), ("after", HERE)):
                    taken[name][version].append(take(words, Path(place, version), source, given.uncompiled))
    found: dict[str, Any] = {}
    for name, versions in taken.items():
        found[name] = {
            version: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            for version, runs in versions.items()
        }
        print(name, found[name])
    if given.out:
        write(given.out, {"machine": machine(torch.device("cpu")), "rounds": given.rounds, "commands": found})


if __name__ == "__main__":
    main()
