"""adapterbank's side: the product's own `train`, held up after each step until the driver says to go on."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch

from adapterbank.batches import Rows
from adapterbank.encoder.checkpoint import load
from adapterbank.encoder.packed import Tokens
from adapterbank.methods import Head, Options, make_plan
from adapterbank.run import initial_tensors
from adapterbank.train import Lesson, Progress, train


class Pace:
    """Lets training take as many steps as the driver asked for, and reports how long each took."""

    def __init__(self) -> None:
        """Wait for the first order."""
        self.times: list[float] = []
        self.left = 0
        self.wait()

    def wait(self) -> None:
        """Report, then block until there are steps to take."""
        while self.left == 0:
            if self.times:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                print(json.dumps({"seconds": self.times, "peak_kb": peak}), flush=True)
                self.times = []
            line = sys.stdin.readline()
            if not line:
                sys.exit(0)
            self.left = json.loads(line)["steps"]
        self.began = time.perf_counter()

    def watch(self, progress: Progress) -> None:
        """Note a step's time."""
        self.times.append(time.perf_counter() - self.began)
        self.left -= 1
        self.wait()


def lesson(setup: dict[str, Any], backbone: Any) -> Lesson:
    """Make the run the driver describes: its rows, the method's defaults."""
    rows = [row for batch in setup["batches"] for row in batch["rows"]]
    labels = [label for batch in setup["batches"] for label in batch["labels"]]
    tokens = [Tokens(np.array(row), np.zeros(len(row), dtype=np.int64)) for row in rows]
    head = Head("classification", 2, "first")
    plan = make_plan(Options(**setup["options"]), depth=backbone.anatomy.layers, head=head)
    data = Rows(tokens, labels)
    first = initial_tensors(plan, backbone, sigma=1e-2, seed=0)
    return Lesson(plan, first, data, Rows(tokens[:1], None), lambda given: 0.0, 1e-4, 1000)


def main() -> None:
    """Serve one driver."""
    setup = json.loads(sys.stdin.readline())["setup"]
    backbone = load(setup["backbone"])
    run = lesson(setup, backbone)
    device = torch.device(setup["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(json.dumps({"ready": sum(t.numel() for t in run.initial.values())}), flush=True)
    pace = Pace()
    train(backbone, [run], device=device, dtype=dtype, watch=lambda p: p.score is None and pace.watch(p))


if __name__ == "__main__":
    main()
