"""Whole processes by the clock, taking turns: training from the command to the package, serving, one prediction.

    PYTHONPATH=src python bench/carry.py --sst2 FOLDER --out clock
    PYTHONPATH=src python bench/clock.py --data clock --peers-path FOLDER --device cuda --out bench/results/clock.json
    PYTHONPATH=src python bench/clock.py --peers .venv-bench/bin/python --tiny --out rehearsal.json

Both sides train on the same rows of the same files, in batches of 32 with a score on the dev rows after each epoch,
on the same encoder: `adapterbank train` into a new bank, and `adapters` in a plain loop (`clock_peer.py`). The clock
runs from the start of the process to its end. `all` is every row for three epochs; `few` is 400 rows for five.

With an `empty cache` a process has new folders for code that torch, Triton and the driver compile; `warm cache` is the
same command again with the folders that it has filled. `serve` ends at the first 200 of /readyz, which is asked for
every 50 ms, and needs the libraries of HTTP; `engine` is the same without HTTP (`clock_engine.py`), and ends at its
first answer.

`fixed` is everything but the epochs: the seconds of the process less its number of epochs times its median epoch. An
epoch is what both sides report: the steps and the score on dev. The first one also waits for libraries and compilers;
what it takes longer than the median is in `fixed`.

Before the first round, Python's bytecode is compiled and each side runs once, so that files are in memory. Processes
may write bytecode even where PYTHONDONTWRITEBYTECODE is set: an installed package has it, too.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import carry
import random_bank
import torch
from contest import HERE, Peers, write
from machine import machine
from shapes import SHAPES, save

from adapterbank.encoder.backbone import load

SOURCE = HERE.parent / "src"
COMMAND = [sys.executable, "-c", "from adapterbank.cli.entry import main; main()"]
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
"""Variables that name the folders of compiled code."""
EMPTY, WARM = "empty cache", "warm cache"
PATIENCE = 300
"""Longest time in seconds for one process."""
TASKS = 4
"""Tasks of the bank that is served."""
HTTP = ("fastapi", "uvicorn")


@dataclass(frozen=True)
class Job:
    """What is trained."""

    train: Path
    dev: Path
    epochs: int
    batch: int


@dataclass(frozen=True)
class Process:
    """One process that is timed."""

    command: list[str]
    environment: dict[str, str]
    epochs: int = 0
    """The epochs that it reports; 0 if it trains nothing."""
    until: str = ""
    """The line of its output at which the clock stops; without it, at the end of the process."""


def surroundings(extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "HF_HUB_OFFLINE": "1", **extra}


def timed(process: Process) -> dict[str, Any]:
    """Run a process; return its seconds, and what it says of its epochs."""
    environment, began, stopped = surroundings(process.environment), time.perf_counter(), 0.0
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(process.command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        limit = threading.Timer(PATIENCE, child.kill)
        limit.start()
        lines = []
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if process.until and line.strip() == process.until:
                stopped = time.perf_counter()
        code = child.wait()
        seconds = (stopped or time.perf_counter()) - began
        limit.cancel()
        if code or (process.until and not stopped):
            errors.seek(0)
            return {"failure": f"exit {code}: " + " | ".join(errors.read().strip().splitlines()[-4:])[-800:]}
    return {"seconds": seconds, **(reported("".join(lines), seconds, process.epochs) if process.epochs else {})}


def reported(output: str, seconds: float, epochs: int) -> dict[str, Any]:
    """Return what a training process says of its epochs, and what of its seconds is not theirs; see `fixed`."""
    record = json.loads(output[("\n" + output).rindex("\n{") :])  # libraries print, too
    history = [epoch["seconds"] for epoch in record["history"]]
    found = {
        "epochs_s": history,
        "fixed_s": seconds - len(history) * median(history),
        "score": max(epoch["score"] for epoch in record["history"]),
    }
    if len(history) != epochs or record.get("restarts"):
        found["warning"] = f"{len(history)} epochs of {epochs}, {len(record.get('restarts', ()))} new beginnings"
    return found


class Clock:
    """The processes of a comparison."""

    def __init__(self, work: Path, options: Any) -> None:
        """Prepare data, encoder and a bank of random tasks."""
        self.work, self.device, self.size = work, options.device, 16 if options.tiny else 64
        self.peers, self.number = Peers(options), 0
        self.jobs, self.encoder = made_up(work) if options.tiny else from_folder(work, options.data)
        backbone = load(self.encoder)
        self.bank = work / "random bank"
        random_bank.make(self.bank, backbone, TASKS, self.size)

    def folder(self, what: str) -> Path:
        """Return a new name for a folder."""
        self.number += 1
        return self.work / f"{what} {self.number}"

    def own(self, cache: Path) -> dict[str, str]:
        """Return the variables of one of adapterbank's processes, whose compiled code is in a folder."""
        for name in CACHES:
            (cache / name).mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, **{name: str(cache / name) for name in CACHES}}

    def train(self, given: Job, cache: Path) -> Process:
        """Return `adapterbank train` into a new bank."""
        about = {"task": "sst2", "train": given.train, "dev": given.dev, "epochs": given.epochs, "batch": given.batch}
        about |= {"bank": self.folder("bank"), "backbone": self.encoder, "size": self.size, "device": self.device}
        words = [str(word) for name, value in about.items() for word in (f"--{name}", value)]
        return Process([*COMMAND, "train", "--json", *words], self.own(cache), given.epochs)

    def peer(self, given: Job) -> Process:
        """Return the plain loop of `adapters`."""
        command, extra = self.peers.command("clock_peer.py")
        about = {"train": given.train, "dev": given.dev, "epochs": given.epochs, "batch": given.batch}
        about |= {"out": self.folder("adapter"), "backbone": self.encoder, "size": self.size, "device": self.device}
        words = [str(word) for name, value in about.items() for word in (f"--{name}", value)]
        return Process([*command, *words], extra, given.epochs)

    def predict(self, cache: Path) -> Process:
        """Return `adapterbank predict` on one text."""
        words = ["--bank", str(self.bank), "--task", random_bank.name(0), "--device", self.device]
        return Process([*COMMAND, "predict", *words, "--text", "a long and slow story"], self.own(cache))

    def engine(self, cache: Path) -> Process:
        """Return a server without HTTP."""
        words = ["--bank", str(self.bank), "--device", self.device]
        return Process([sys.executable, str(HERE / "clock_engine.py"), *words], self.own(cache), until="answered")

    def serve(self, cache: Path) -> dict[str, Any]:
        """Start a server and wait until it is ready."""
        import serving

        with serving.serving(self.bank, self.device, surroundings(self.own(cache))) as (_, _, _, seconds):
            return {"seconds": seconds}


Turns = dict[str, Callable[[], dict[str, Any]]]
"""How each process of a round is timed, by its name, in order."""


def turns(clock: Clock) -> Turns:
    """Return the processes of one round; what has an empty cache comes before the same with a warm one."""
    found: Turns = {}

    def add(name: str, make: Callable[..., Process], *given: Any) -> None:
        found[name] = lambda: timed(make(*given))

    for what, given in clock.jobs.items():
        cache = clock.folder("cache")
        for state in (EMPTY, WARM):
            add(f"adapterbank train {what}, {state}", clock.train, given, cache)
        if clock.peers.there:
            add(f"adapters train {what}", clock.peer, given)
    cache, other = clock.folder("cache"), clock.folder("cache")
    for state in (EMPTY, WARM):
        add(f"adapterbank engine, {state}", clock.engine, cache)
        if all(importlib.util.find_spec(name) for name in HTTP):
            found[f"adapterbank serve, {state}"] = partial(clock.serve, other)
    add("adapterbank predict", clock.predict, cache)
    return found


def from_folder(work: Path, data: Path) -> tuple[dict[str, Job], str]:
    """Return the jobs of a folder that `carry.py` made, and the folder of its encoder in float32."""
    train, dev = (data.resolve() / f"{name}.parquet" for name in ("train", "dev"))
    few = first_rows(train, work / "few.parquet", 400)
    jobs = {"all": Job(train, dev, 3, 32), "few": Job(few, dev, 5, 32)}
    return jobs, carry.unpack(data / "encoder", work / "encoder")


def first_rows(source: Path, target: Path, count: int) -> Path:
    """Write the first rows of a file to another; return that."""
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(source).slice(0, count), target)
    return target


def made_up(work: Path) -> tuple[dict[str, Job], str]:
    """Return jobs of a few rows of made-up words, whose first word tells the label, and a tiny random encoder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sentences = [f"word{1000 + i % 2} word{1100 + i} word{1200 + i}" for i in range(64)]
    table = pa.table({"sentence": sentences, "label": [i % 2 for i in range(64)]})
    paths = {"train": table.slice(0, 48), "dev": table.slice(48), "few": table.slice(0, 16)}
    for name, rows in paths.items():
        pq.write_table(rows, work / f"{name}.parquet")
    train, dev, few = (work / f"{name}.parquet" for name in paths)
    return {"all": Job(train, dev, 2, 8), "few": Job(few, dev, 2, 8)}, save(SHAPES["tiny"], work / "encoder")


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and all figures of one process over the rounds."""
    done = [one for one in found if "failure" not in one]
    keys = [key for key in ("seconds", "fixed_s") if done and key in done[0]]
    return {**{f"median_{key}": median(one[key] for one in done) for key in keys}, "rounds": found}


def ratios(processes: dict[str, Any]) -> dict[str, float]:
    """Return the times of `adapters` as multiples of ours, of the whole process and of everything but its epochs."""
    found = {}
    for name, own in processes.items():
        what = name.removeprefix("adapterbank ").partition(",")[0]
        peer = processes.get(f"adapters {what}", {})
        for key in ("median_seconds", "median_fixed_s"):
            if name.startswith("adapterbank") and key in own and key in peer:
                part = " (fixed)" * ("fixed" in key)
                found[f"adapters {what} / {name}{part}"] = peer[key] / own[key]
    return found


def print_table(processes: dict[str, Any]) -> None:
    """Print the seconds of every process, and its ratios."""
    print(f"\n  {'process':<40} {'median s':>9} {'fixed s':>9}   each round")
    for name, one in processes.items():
        whole, fixed = (one.get(key, float("nan")) for key in ("median_seconds", "median_fixed_s"))
        each = " ".join(f"{done['seconds']:.2f}" for done in one["rounds"] if "seconds" in done)
        print(f"  {name:<40} {whole:9.2f} {fixed:9.2f}   {each}")
    for what, ratio in ratios(processes).items():
        print(f"    {what:<80} {ratio:6.2f}", flush=True)


def get_ready(clock: Clock) -> None:
    """Compile the bytecode of our sources, and run each side once: for one epoch, and together if there are cores."""
    compileall.compile_dir(SOURCE, quiet=1, workers=0)
    cache, one_epoch = clock.folder("cache"), replace(clock.jobs["few"], epochs=1)
    first = [clock.train(one_epoch, cache), clock.predict(cache), clock.engine(cache)]
    first += [clock.peer(one_epoch)] if clock.peers.there else []
    with ThreadPoolExecutor(1 + (os.cpu_count() or 1) // 4) as pool:
        for done in pool.map(timed, first):
            if "failure" in done:
                print(f"  failed before the first round: {done['failure']}", flush=True)


def parse() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--data", type=Path, help="folder that carry.py made")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every process")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="processes whose name matches")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="start no process after this many minutes")
    parser.add_argument("--tiny", action="store_true", help="a small test run, which needs no data")
    options = parser.parse_args()
    if not (options.tiny or options.data):
        parser.error("--data or --tiny is required")
    return options


def main() -> None:
    """Time every process in every round, print the ratios, write JSON after each."""
    options, began = parse(), time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        clock = Clock(Path(work), options)
        about = {**machine(torch.device(options.device)), "cores": os.cpu_count(), "bytecode": "compiled before"}
        get_ready(clock)
        print(f"  (ready after {time.perf_counter() - began:.0f} s)", flush=True)
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for name, run in turns(clock).items():
                wanted = not options.only or any(fnmatchcase(name, one) for one in options.only)
                if not wanted or time.perf_counter() - began > 60 * options.minutes:
                    continue
                found.setdefault(name, []).append(run())
                print(f"  {name:<40} {found[name][-1]}", flush=True)
                processes = {name: summary(rounds) for name, rounds in found.items()}
                write(options.out, {**about, "processes": processes, "ratios": ratios(processes)})
        print_table({name: summary(rounds) for name, rounds in found.items()})


if __name__ == "__main__":
    main()
