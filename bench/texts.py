r"""From text to answer on a CPU: one text a call and 64, against ONNX Runtime and `transformers`, in turns in one run.

    python -m venv .venv-onnx && .venv-onnx/bin/pip install -r bench/requirements-onnx.txt
    git worktree add ../before COMMIT
    PYTHONPATH=src python bench/texts.py --peers .venv-onnx/bin/python --before ../before --data FOLDER \
        --out bench/results/texts_cpu.json

Every contestant is a process with as many threads as its library chooses; ONNX Runtime also takes part with one. FOLDER
has sst2/train.parquet. With `--neighbour`, a process of another user keeps the first core busy in every second round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from contest import HERE, Contestant, Field, Peers, print_table, write
from machine import machine

from adapterbank.encoder.sources import locate

TEXTS = 640
OWN, INT8, BEFORE = "adapterbank fp32", "adapterbank int8", "adapterbank before, fp32"
ONNX = ("onnxruntime fp32", "onnxruntime int8")
GOALS = {
    1: ((ONNX[0], OWN, 1.0), (ONNX[1], INT8, 0.9), (BEFORE, INT8, 3.0)),
    64: ((ONNX[0], OWN, 1.1), (ONNX[1], INT8, 1.0), (BEFORE, INT8, 2.0)),
}
"""By texts a call: time of the first over time of the second, at least."""


def start(name: str, setup: dict[str, Any], python: str, source: Path | None = None) -> Contestant:
    """Start a contestant, with the sources of a tree if it is ours."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))} if source else {}
    return Contestant(name, [python, str(HERE / "worker_texts.py")], setup, path)


def field(options: argparse.Namespace, texts: list[str]) -> list[Contestant]:
    """Start everyone."""
    base = {"backbone": str(locate(options.backbone)), "texts": texts, "size": options.size}
    here = (sys.executable, HERE.parent / "src")
    everyone = [
        start(f"adapterbank {precision}", {**base, "who": "own", "precision": precision}, *here)
        for precision in ("fp32", "int8")
    ]
    if options.before:
        setup = {**base, "who": "own", "precision": "fp32"}
        everyone.append(start(BEFORE, setup, sys.executable, options.before.resolve() / "src"))
    if options.peers:
        setup = {**base, "who": "transformers", "precision": "fp32"}
        everyone.append(start("transformers fp32", setup, options.peers))
        for name, precision in zip(ONNX, ("fp32", "int8"), strict=True):
            for threads in (0, 1):
                setup = {**base, "who": "onnx", "precision": precision, "threads": threads}
                everyone.append(start(name + (", one thread" if threads else ""), setup, options.peers))
    return everyone


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keep a core busy with another process."""
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(core,), daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()


def _spin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while True:
        pass


def measure(everyone: Field, texts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let everyone answer in turns."""
    order = {"texts": texts, "block": max(1, 32 // texts), "blocks": 2}
    everyone.warm_up(order, one_by_one=True)
    for contestant in everyone.racing:
        contestant.seconds = []
    everyone.take_turns({**order, "seconds": options.seconds}, options.rounds)
    return everyone.results(OWN)


def ratios(found: dict[str, Any], texts: int) -> list[dict[str, Any]]:
    """Return the ratios that have a goal; a library counts with its faster number of threads."""
    times: dict[str, float] = {}
    for name, one in found["contestants"].items():
        plain = name.removesuffix(", one thread")
        times[plain] = min(one["median_ms"], times.get(plain, float("inf")))
    return [
        {"ratio": f"{slow} / {fast}", "goal": goal, "value": times[slow] / times[fast]}
        for slow, fast, goal in GOALS[texts]
        if slow in times and fast in times
    ]


def with_neighbour(everyone: Field, options: argparse.Namespace) -> dict[str, float]:
    """Return each contestant's time for one text beside a busy core over its time alone, in turns."""
    alone: dict[str, list[float]] = {c.name: [] for c in everyone.racing}
    beside: dict[str, list[float]] = {c.name: [] for c in everyone.racing}
    for _ in range(options.rounds):
        alone = _add(alone, measure(everyone, 1, argparse.Namespace(**{**vars(options), "rounds": 1})))
        with busy_core(0):
            beside = _add(beside, measure(everyone, 1, argparse.Namespace(**{**vars(options), "rounds": 1})))
    return {name: sorted(beside[name])[len(beside[name]) // 2] / sorted(alone[name])[len(alone[name]) // 2]
            for name in alone if alone[name]}  # fmt: skip


def _add(times: dict[str, list[float]], found: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [*times[name], found["contestants"][name]["median_ms"]] for name in found["contestants"]}


def read(data: Path, tiny: bool) -> list[str]:
    """Return the first sentences of SST-2, or made-up ones."""
    if tiny:
        return [f"a film of {n} parts" + " and more" * (n % 7) for n in range(64)]
    import pyarrow.parquet as pq

    return list(pq.read_table(data / "sst2" / "train.parquet").column("sentence").to_pylist()[:TEXTS])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--before", type=Path, help="a checkout of the older version")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--size", type=int, default=64, help="of our adapters")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="a contestant's turn, at least")
    parser.add_argument("--neighbour", action="store_true", help="also measure beside a busy core")
    parser.add_argument("--tiny", action="store_true", help="a small test run")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Measure one text a call and 64."""
    options = parse()
    if options.tiny:
        options.rounds, options.seconds = 1, 0.01
    found: dict[str, Any] = {**machine(torch.device("cpu")), "texts": {}}
    with Field(field(options, read(options.data, options.tiny))) as everyone:
        for texts in GOALS:
            result = measure(everyone, texts, options)
            found["texts"][str(texts)] = {**result, "ratios": ratios(result, texts)}
            print_table(f"ms a text, {texts} a call", result)
            for one in ratios(result, texts):
                print(f"    {one['ratio']:<48} {one['value']:.2f} (goal {one['goal']})", flush=True)
            write(options.out, found)
        if options.neighbour:
            found["one text beside a busy core / alone"] = with_neighbour(everyone, options)
            print(found["one text beside a busy core / alone"], flush=True)
            write(options.out, found)


if __name__ == "__main__":
    main()
