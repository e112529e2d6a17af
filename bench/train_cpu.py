"""Training steps against the peers, side by side in one run on the CPU: same weights, same rows, same batch size.

    python bench/train_cpu.py --peers .venv-bench/bin/python --data FOLDER --out bench/results/train_cpu.json

Each contestant is a process of its own; they take turns, a few steps at a time, so that noise hurts all alike.
Peers get the rows in random order, padded to the longest of the batch; adapterbank draws its batches itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROUNDS, STEPS, BATCH, ROWS = 5, 4, 32, 640


def real_rows(backbone: str, file: Path) -> list[list[int]]:
    """Tokenise the first sentences of a data file."""
    import pyarrow.parquet as pq

    from adapterbank.encoder.checkpoint import load

    texts = pq.read_table(file).column("sentence").to_pylist()[:ROWS]
    return [row.ids.tolist() for row in load(backbone).tokenize(texts, None, 128)]


def cases(backbone: str, data: Path | None) -> dict[str, list[list[int]]]:
    """Give the rows of each case: real lengths where there is data, and all rows of 64 tokens."""
    random = np.random.RandomState(0)
    found = {"all rows 64 tokens": random.randint(1000, 20000, (ROWS, 64)).tolist()}
    if data:
        found = {
            "SST-2": real_rows(backbone, data / "sst2" / "train.parquet"),
            "CoLA": real_rows(backbone, data / "cola" / "train.parquet"),
            **found,
        }
    return found


class Contestant:
    """One worker process."""

    def __init__(self, python: str, script: str, setup: dict[str, Any]) -> None:
        """Start it and wait until it is ready."""
        self.process = subprocess.Popen(
            [python, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.trained = self._ask({"setup": setup})["ready"]
        self.seconds: list[float] = []
        self.peak = 0

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"a contestant ended: {self.process.args}")

    def steps(self, count: int, keep: bool = True) -> None:
        """Take steps; the first ones are not kept."""
        answer = self._ask({"steps": count})
        self.seconds += answer["seconds"] if keep else []
        self.peak = answer["peak_kb"]

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def measure(rows: list[list[int]], backbone: str, peers: str) -> dict[str, Any]:
    """Let all contestants train on the same rows, in turns."""
    order = np.random.RandomState(1).permutation(len(rows))
    batches = [
        {"rows": [rows[i] for i in order[k : k + BATCH]], "labels": [int(i % 2) for i in order[k : k + BATCH]]}
        for k in range(0, len(rows), BATCH)
    ]
    setup = {"backbone": backbone, "batches": batches, "device": "cpu"}
    contestants = {
        "adapterbank adapter 64": Contestant(sys.executable, "worker_own.py", {**setup, "options": {"size": 64}}),
        "adapters DoubleSeqBn 64": Contestant(peers, "worker_peers.py", {**setup, "peer": "adapters"}),
        "peft LoRA q,v r=8": Contestant(peers, "worker_peers.py", {**setup, "peer": "peft"}),
        "transformers full": Contestant(peers, "worker_peers.py", {**setup, "peer": "full"}),
    }
    for contestant in contestants.values():
        contestant.steps(2, keep=False)
    for _ in range(ROUNDS):
        for contestant in contestants.values():
            contestant.steps(STEPS)
    for contestant in contestants.values():
        contestant.stop()
    own = statistics.median(contestants["adapterbank adapter 64"].seconds)
    return {
        name: {
            "median_ms": 1000 * statistics.median(c.seconds),
            "quartiles_ms": [1000 * q for q in statistics.quantiles(c.seconds, n=4)[::2]],
            "times_adapterbank": statistics.median(c.seconds) / own,
            "trained": c.trained,
            "peak_mb": c.peak / 1000,
        }
        for name, c in contestants.items()
    }


def main() -> None:
    """Measure every case, print the ratios, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="python of an environment with bench/requirements.txt")
    parser.add_argument("--data", type=Path, help="folder with sst2/train.parquet and cola/train.parquet")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    from adapterbank.encoder.sources import locate
    from adapterbank.runtime import stamp

    backbone = str(locate("minilm"))
    found: dict[str, Any] = {"stamp": stamp(torch.device("cpu"), torch.float32), "machine": platform.machine()}
    found["cases"] = {}
    for name, rows in cases(backbone, options.data).items():
        result = found["cases"][name] = measure(rows, backbone, options.peers)
        print(f"\n{name}: mean {np.mean([len(r) for r in rows]):.1f} tokens a row, batch {BATCH}")
        for who, r in result.items():
            low, high = r["quartiles_ms"]
            times = f"{r['median_ms']:7.0f} ms ({low:.0f}-{high:.0f})"
            print(f"  {who:<26} {times:<22} {r['times_adapterbank']:5.2f}x  {r['peak_mb']:6.0f} MB")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
