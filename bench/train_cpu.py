"""Training steps compared with the peers in one run on the CPU: same weights, same rows, same batch size.

    python bench/train_cpu.py --peers .venv-bench/bin/python --data FOLDER --out bench/results/train_cpu.json
    python bench/train_cpu.py --peers .venv-bench/bin/python --data FOLDER --only WNUT-17 --out tagging.json

Each contestant is a separate process. They take turns, a few steps at a time, so that noise affects all equally.
Peers get the rows in random order, padded to the longest of the batch; adapterbank draws its batches itself. WNUT-17 is
tagged: every contestant has a head on each token and the same tag for the first token of each word.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest import Field, Peers, print_table, start_own, write
from machine import machine

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.sources import locate

OWN = "adapterbank adapter 64"
PEERS = {"adapters DoubleSeqBn 64": "adapters", "peft LoRA q,v r=8": "peft", "transformers full": "full"}
ROUNDS, STEPS, BATCH, ROWS, LONGEST = 5, 4, 32, 640, 128


@dataclass(frozen=True)
class Case:
    """The rows of a comparison with their labels: one for each row, or for tagging one for each token."""

    rows: list[list[int]]
    labels: list[Any]
    kind: str = "classification"
    outputs: int = 2


def sentences(folder: str) -> Callable[[Backbone, Path], Case]:
    """Return a function that tokenises the first sentences of a GLUE task; their labels are made up."""

    def read(backbone: Backbone, data: Path) -> Case:
        import pyarrow.parquet as pq

        texts = pq.read_table(data / folder / "train.parquet").column("sentence").to_pylist()[:ROWS]
        rows = [row.ids.tolist() for row in backbone.tokenize(texts, None, LONGEST)]
        return Case(rows, [i % 2 for i in range(len(rows))])

    return read


def tagged(name: str) -> Callable[[Backbone, Path], Case]:
    """Return a function that tokenises the first sentences of a tagging task, with their own tags."""

    def read(backbone: Backbone, data: Path) -> Case:
        from adapterbank.inference.rows import make_rows
        from adapterbank.tasks.catalog import load
        from adapterbank.tasks.examples import read_examples

        loaded = load(name, data)
        examples, _ = read_examples(loaded.tables["train"], loaded.task)
        rows = make_rows(backbone, examples.select(range(ROWS)), kind="tagging", max_length=LONGEST)
        targets = [row.tolist() for row in rows.targets or []]
        return Case([row.ids.tolist() for row in rows.tokens], targets, "tagging", len(loaded.task.labels))

    return read


def same_length(backbone: Backbone, data: Path | None) -> Case:
    """Draw rows of 64 tokens."""
    rows = np.random.RandomState(0).randint(1000, 20000, (ROWS, 64)).tolist()
    return Case(rows, [i % 2 for i in range(len(rows))])


REAL: dict[str, Callable[[Backbone, Path], Case]] = {
    "SST-2": sentences("sst2"),
    "CoLA": sentences("cola"),
    "WNUT-17": tagged("tag/wnut17"),
}
"""Cases of real lengths, which need a folder of data."""
MADE_UP = "all rows 64 tokens"


def measure(case: Case, backbone: str, peers: Peers) -> dict[str, Any]:
    """Train all contestants on the same rows, taking turns."""
    order = np.random.RandomState(1).permutation(len(case.rows))
    batches = [
        {
            name: [values[i] for i in order[k : k + BATCH]]
            for name, values in (("rows", case.rows), ("labels", case.labels))
        }
        for k in range(0, len(order), BATCH)
    ]
    head = {"kind": case.kind, "outputs": case.outputs}
    setup = {"backbone": backbone, "cases": {"rows": batches}, "device": "cpu", **head}
    everyone = [start_own(OWN, {**setup, "options": {"size": 64}})]
    if peers.there:
        everyone += [
            peers.start(name, {**setup, "peer": peer, "size": 64, "precision": "fp32"}) for name, peer in PEERS.items()
        ]
    with Field(everyone) as field:
        field.warm_up({"do": "train", "case": "rows", "blocks": 2}, one_by_one=True)
        field.take_turns({"do": "train", "case": "rows", "blocks": STEPS}, ROUNDS)
        return field.results(OWN)


def main() -> None:
    """Measure every case, print the ratios, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--data", type=Path, help="folder with sst2/train.parquet, cola/train.parquet and wnut17/")
    parser.add_argument("--only", nargs="*", choices=[*REAL, MADE_UP], default=[*REAL, MADE_UP], help="these cases")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    backbone, peers = load("minilm"), Peers(options)
    found: dict[str, Any] = {**machine(torch.device("cpu")), "machine": platform.machine(), "cases": {}}
    readers = {**(REAL if options.data else {}), MADE_UP: same_length}
    for name, read in readers.items():
        if name not in options.only:
            continue
        case = read(backbone, options.data)
        found["cases"][name] = measure(case, str(locate("minilm")), peers)
        mean = np.mean([len(row) for row in case.rows])
        print_table(f"{name}: mean {mean:.1f} tokens a row, batch {BATCH}", found["cases"][name])
        write(options.out, found)


if __name__ == "__main__":
    main()
