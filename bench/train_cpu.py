"""Training steps compared with the peers in one run on the CPU: same weights, same rows, same batch size.

    python bench/train_cpu.py --peers .venv-bench/bin/python --data FOLDER --out bench/results/train_cpu.json

Each contestant is a separate process. They take turns, a few steps at a time, so that noise affects all equally.
Peers get the rows in random order, padded to the longest of the batch; adapterbank draws its batches itself.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest import Field, Peers, print_table, start_own, write
from machine import machine

OWN = "adapterbank adapter 64"
PEERS = {"adapters DoubleSeqBn 64": "adapters", "peft LoRA q,v r=8": "peft", "transformers full": "full"}
ROUNDS, STEPS, BATCH, ROWS = 5, 4, 32, 640


def real_rows(backbone: str, file: Path) -> list[list[int]]:
    """Tokenise the first sentences of a data file."""
    import pyarrow.parquet as pq

    from adapterbank.encoder.backbone import load

    texts = pq.read_table(file).column("sentence").to_pylist()[:ROWS]
    return [row.ids.tolist() for row in load(backbone).tokenize(texts, None, 128)]


def cases(backbone: str, data: Path | None) -> dict[str, list[list[int]]]:
    """Return the rows of each case: real lengths if there is data, and all rows of 64 tokens."""
    random = np.random.RandomState(0)
    found = {"all rows 64 tokens": random.randint(1000, 20000, (ROWS, 64)).tolist()}
    if data:
        found = {
            "SST-2": real_rows(backbone, data / "sst2" / "train.parquet"),
            "CoLA": real_rows(backbone, data / "cola" / "train.parquet"),
            **found,
        }
    return found


def measure(rows: list[list[int]], backbone: str, peers: Peers) -> dict[str, Any]:
    """Train all contestants on the same rows, taking turns."""
    order = np.random.RandomState(1).permutation(len(rows))
    batches = [
        {"rows": [rows[i] for i in order[k : k + BATCH]], "labels": [int(i % 2) for i in order[k : k + BATCH]]}
        for k in range(0, len(rows), BATCH)
    ]
    setup = {"backbone": backbone, "cases": {"rows": batches}, "device": "cpu"}
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
    parser.add_argument("--data", type=Path, help="folder with sst2/train.parquet and cola/train.parquet")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from adapterbank.encoder.sources import locate

    backbone, peers = str(locate("minilm")), Peers(options)
    found: dict[str, Any] = {**machine(torch.device("cpu")), "machine": platform.machine(), "cases": {}}
    for name, rows in cases(backbone, options.data).items():
        found["cases"][name] = measure(rows, backbone, peers)
        mean = np.mean([len(row) for row in rows])
        print_table(f"{name}: mean {mean:.1f} tokens a row, batch {BATCH}", found["cases"][name])
        write(options.out, found)


if __name__ == "__main__":
    main()
