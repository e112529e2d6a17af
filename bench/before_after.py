"""Training steps and inference of two versions of adapterbank, in turns in one run: is the newer one no slower?

    git worktree add ../before COMMIT
    PYTHONPATH=src python bench/before_after.py --before ../before --out bench/results/before_after.json

Each version runs its own `bench/worker_own.py` on its own sources. Rows, weights and orders are the same for both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from contest import Contestant, Field, print_table, start_own, write
from machine import machine
from shapes import SHAPES, batches, save

BEFORE, AFTER = "before", "after"


def start_before(tree: Path, setup: dict[str, Any]) -> Contestant:
    """Start the worker of the other tree, on that tree's sources."""
    path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Contestant(BEFORE, [sys.executable, str(tree / "bench" / "worker_own.py")], setup, {"PYTHONPATH": path})


def measure(tree: Path, setup: dict[str, Any], order: dict[str, Any], options: Any) -> dict[str, Any]:
    """Let both versions take the same order in turns; the ratio is the newer version's time over the older one's."""
    with Field([start_before(tree, setup), start_own(AFTER, setup)]) as field:
        field.warm_up({**order, "blocks": 3})
        field.take_turns({**order, "blocks": 3, "seconds": options.seconds}, options.rounds)
        found = field.results(BEFORE)
    everyone = found["contestants"]
    if len(everyone) == 2:
        found["ratio"] = everyone[AFTER]["median_ms"] / everyone[BEFORE]["median_ms"]
    return found


def parse() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: base and minilm")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="a version's turn, at least")
    return parser.parse_args()


def main() -> None:
    """Measure a training step, a mixed batch and a batch of one task, for each shape."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {**machine(device), "rows": options.rows, "length": options.length}
    block = 10 if device.type == "cuda" else 2
    with tempfile.TemporaryDirectory() as work:
        for name in options.shape or ["base", "minilm"]:
            shape = SHAPES[name]
            cases = {"full rows": batches(options.rows, options.length, shape.vocabulary)}
            setup = {"backbone": save(shape, Path(work) / name), "device": device.type, "cases": cases}
            setup["options"] = {"size": 64}
            infer = {"do": "infer", "case": "full rows", "slots": options.rows}
            orders = {
                "training step": {"do": "train", "case": "full rows", "block": block},
                "mixed batch": {**infer, "tasks": "mixed"},
                "batch of one task": {**infer, "tasks": "one"},
            }
            for what, order in orders.items():
                found.setdefault(name, {})[what] = result = measure(options.before.resolve(), setup, order, options)
                print_table(f"{what}, {name} shape", result)
                print(f"    after / before {result.get('ratio', float('nan')):.3f}", flush=True)
                write(options.out, found)


if __name__ == "__main__":
    main()
