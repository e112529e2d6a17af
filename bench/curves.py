"""Cost over number of tasks, concurrent runs, sequence length and batch size, on one device; JSON for `plots.py`.

    PYTHONPATH=src python bench/curves.py --device cpu --out bench/results/curves_cpu.json

A GPU gets the BERT-base shape, a CPU the MiniLM-L6 shape and fewer tokens. `adapters` is measured too if it is given.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import Contestant, Field, Peers, spread, start_own, write
from machine import free_memory, machine
from shapes import SHAPES, batches, save


@dataclass(frozen=True)
class Range:
    """What is measured on a device."""

    shape: str
    slots: tuple[int, ...]
    """Numbers of resident tasks."""
    sizes: tuple[int, ...]
    """Adapter sizes of the curve over tasks; the other curves use the first."""
    runs: tuple[int, ...]
    """Numbers of concurrent runs."""
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    rows: int
    """Rows, where they do not vary."""
    length_rows: int
    """Rows of the curve over lengths."""
    length: int
    """Tokens per row, where they do not vary."""
    task_lengths: tuple[int, ...]
    """Tokens per row of the curve over tasks."""
    seconds: float
    """Least seconds to measure a point."""
    warm: int
    """Warm-up blocks of a point."""
    block: int
    """Training steps per block."""


RANGES = {
    "cuda": Range(
        shape="base",
        slots=(1, 8, 64, 512, 4096),
        sizes=(64,),
        runs=(1, 2, 4, 8),
        lengths=(16, 32, 64, 128, 256, 512),
        batches=(1, 4, 16, 64, 256),
        rows=32,
        length_rows=32,
        length=128,
        task_lengths=(128,),
        seconds=0.3,
        warm=2,
        block=5,
    ),
    "cpu": Range(
        shape="minilm",
        slots=(1, 8, 64, 512, 4096),
        sizes=(64, 16),
        runs=(1, 2, 4, 8),
        lengths=(16, 32, 64, 128, 256, 512),
        batches=(1, 4, 16, 64, 256),
        rows=32,
        length_rows=8,
        length=32,
        task_lengths=(16, 128),
        seconds=1.0,
        warm=2,
        block=1,
    ),
    "tiny": Range(
        shape="tiny",
        slots=(1, 8, 64),
        sizes=(16, 8),
        runs=(1, 2),
        lengths=(16, 32, 64),
        batches=(1, 4, 16),
        rows=8,
        length_rows=8,
        length=16,
        task_lengths=(16,),
        seconds=0.02,
        warm=1,
        block=1,
    ),
}


LABELS = {"mixed": "rows of different tasks", "one": "rows of one task"}


class Curves:
    """One device's curves, point by point."""

    def __init__(self, backbone: str, device: torch.device, span: Range, peers: Peers) -> None:
        """Draw the rows of every case."""
        self.backbone, self.device, self.span, self.peers = backbone, device, span, peers
        self.points: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        shapes = {(span.rows, span.length)}
        shapes |= {(span.length_rows, length) for length in span.lengths}
        shapes |= {(rows, span.length) for rows in span.batches}
        shapes |= {(span.rows, length) for length in span.task_lengths}
        vocabulary = SHAPES[span.shape].vocabulary
        self.cases = {f"{rows} x {length}": batches(rows, length, vocabulary) for rows, length in sorted(shapes)}

    def own(self, size: int) -> Contestant:
        """Start adapterbank's worker."""
        setup = {"backbone": self.backbone, "device": self.device.type, "cases": self.cases, "options": {"size": size}}
        return start_own(f"adapterbank {size}", setup)

    def peer(self) -> Contestant:
        """Start `adapters`; on a GPU with the whole model in bf16, which is its faster setting."""
        precision = "bf16" if self.device.type == "cuda" else "fp32"
        setup = {"backbone": self.backbone, "device": self.device.type, "cases": self.cases, "peer": "adapters"}
        return self.peers.start("adapters", {**setup, "size": self.span.sizes[0], "precision": precision, "tasks": 1})

    @contextmanager
    def field(self, *contestants: Contestant) -> Iterator[Field]:
        """Run a comparison, and record which contestants dropped out."""
        with Field(contestants) as field:
            yield field
            self.skipped += [
                f"{contestant.name}: {contestant.failure}" for contestant in field.all if contestant.failure
            ]

    def point(self, field: Field, curve: str, series: str, x: int, order: dict[str, Any]) -> None:
        """Measure one point for every contestant; the first order of a kind may compile."""
        field.warm_up({**order, "blocks": self.span.warm}, one_by_one=True)
        for contestant in field.racing:
            contestant.seconds = []
        field.take_turns({**order, "blocks": 2, "seconds": self.span.seconds / 2}, rounds=2)
        for contestant in field.racing:
            self.keep(contestant, curve, f"{contestant.name}, {series}", x, order)

    def keep(self, contestant: Contestant, curve: str, series: str, x: int, order: dict[str, Any]) -> None:
        """Record a contestant's time; per run if there are several."""
        seconds = [s / order.get("runs", 1) for s in contestant.seconds]
        extra = {key: contestant.last[key] for key in ("put_ms", "resident", "peak_mb") if key in contestant.last}
        point = {"curve": curve, "series": series, "x": x, "case": order["case"], **spread(seconds), **extra}
        self.points.append(point)
        print(f"  {curve:<7} {series:<40} {x:>5} {point['median_ms']:10.2f} ms", flush=True)

    def over_tasks(self) -> None:
        """Measure inference with more and more tasks resident."""
        for size in self.span.sizes:
            with self.field(self.own(size)) as field:
                for slots in self.span.slots:
                    shape = SHAPES[self.span.shape]
                    numbers = slots * shape.layers * (4 * size * shape.hidden + 8 * shape.hidden)
                    if numbers * (2 if self.device.type == "cuda" else 4) > 0.8 * free_memory(self.device):
                        self.skipped.append(f"{slots} tasks of size {size}: more than 0.8 of the free memory")
                        continue
                    for length in self.span.task_lengths:
                        self.tasks_point(field, size, slots, length)

    def tasks_point(self, field: Field, size: int, slots: int, length: int) -> None:
        """Measure one number of tasks: rows of different tasks, and of one, in turns."""
        order = {"do": "infer", "case": f"{self.span.rows} x {length}", "slots": slots, "blocks": 3}
        found: dict[str, list[float]] = {"mixed": [], "one": []}
        for tasks in found:
            field.warm_up({**order, "tasks": tasks})
        for tasks in list(found) * 3:
            for contestant in field.racing:
                contestant.seconds = []
            field.take_turns({**order, "tasks": tasks, "seconds": self.span.seconds / 3}, rounds=1)
            found[tasks] += [s for contestant in field.racing for s in contestant.seconds]
        for contestant in field.racing:
            if contestant.last["resident"] < slots:
                self.skipped.append(f"{slots} tasks of size {size}: the engine held {contestant.last['resident']}")
            for tasks, contestant.seconds in found.items():
                self.keep(contestant, "tasks", f"{length} tokens, size {size}, {LABELS[tasks]}", slots, order)

    def over_runs(self) -> None:
        """Measure a training step of several concurrent runs, per run."""
        with self.field(self.own(self.span.sizes[0])) as field:
            for runs in self.span.runs:
                case = f"{self.span.rows} x {self.span.length}"
                order = {"do": "train", "case": case, "runs": runs, "block": self.span.block}
                self.point(field, "runs", "training, per run", runs, order)

    def over_shapes(self) -> None:
        """Measure training and inference over length, then over batch size."""
        everyone = [self.own(self.span.sizes[0])] + ([self.peer()] if self.peers.there else [])
        points = [("length", length, f"{self.span.length_rows} x {length}") for length in self.span.lengths]
        points += [("batch", rows, f"{rows} x {self.span.length}") for rows in self.span.batches]
        with self.field(*everyone) as field:
            for curve, x, case in points:
                order = {"do": "infer", "case": case, "slots": 1, "tasks": "one"}
                self.point(field, curve, "inference", x, order)
            for curve, x, case in points:
                self.point(field, curve, "training", x, {"do": "train", "case": case, "block": self.span.block})


PARTS = ("shapes", "runs", "tasks")


def measure(
    work: Path, device: torch.device, peers: Peers, out: Path, *, tiny: bool = False, only: tuple[str, ...] = PARTS
) -> None:
    """Measure all curves, writing JSON after each."""
    span = RANGES["tiny" if tiny else device.type]
    curves = Curves(save(SHAPES[span.shape], work / span.shape), device, span, peers)
    for part in only:
        {"shapes": curves.over_shapes, "runs": curves.over_runs, "tasks": curves.over_tasks}[part]()
        write(out, {**machine(device), "settings": vars(span), "skipped": curves.skipped, "points": curves.points})


def main() -> None:
    """Measure on the device given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a small test run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; can be repeated")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as work:
        only = tuple(options.only or PARTS)
        measure(Path(work), device, Peers(options), options.out, tiny=options.tiny, only=only)


if __name__ == "__main__":
    main()
