"""Train a task with `start_from="auto"` beside one other task, for several seeds, and keep the records.

    PYTHONPATH=src python bench/start_auto.py --bank reproduce/bank --beside glue-mnli --task glue/rte \
        --data-root data --records results/held-out/auto/records

Each run has a bank of its own, which holds the other task alone, so that no run starts from an earlier seed's. The
options are those of one setting of configs/glue-minilm.yaml for RTE, MRPC, STS-B and CoLA, whose runs are the fresh
starts to compare with.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from adapterbank.api.opened import open_bank

RECIPE = {"choose_on": "train", "size": 64, "lr": 1e-3, "epochs": 20, "average": True}


def copy_bank(source: Path, task: str, target: Path) -> None:
    """Copy a bank with one of its tasks."""
    (target / "tasks").mkdir(parents=True)
    shutil.copy(source / "bank.json", target)
    shutil.copytree(source / "tasks" / task, target / "tasks" / task)


def main() -> None:
    """Train one run for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--beside", required=True, help="the task that the race knows")
    parser.add_argument("--task", required=True)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.records.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            copy_bank(options.bank, options.beside, Path(scratch))
            bank = open_bank(scratch, backbone=options.backbone, data_root=options.data_root)
            result = bank.train(options.task, start_from="auto", seed=seed, **RECIPE)
            shutil.copy(result.record_path, options.records)
        start = result.record.get("start_from", {}).get("package", "none")
        print(f"{options.task} seed {seed}: from {start}, {result.record['metrics']}"[:400], flush=True)


if __name__ == "__main__":
    main()
