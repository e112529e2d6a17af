"""Run the studies of docs/results.md in parallel on one machine: one process per task and kind of method.

    python bench/reproduce.py --records results/records --data-root data --at-once 7 --dry-run
    python bench/reproduce.py --records results/records --data-root data --at-once 7

A small encoder leaves much of a large GPU idle, so several processes share it (with `nvidia-cuda-mps-control -d` their
kernels run at the same time). Encoders are folders or short names, as elsewhere. Runs that have a record are not
repeated, so a stopped run continues. The grid whose time is reported (`glue-grid-minilm`) is the first process; AutoML
runs on CPUs only, `--searches` at a time, and requires Optuna.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[1] / "configs"
STUDIES = {
    "glue-grid-minilm": "minilm",
    "table1-minilm": "minilm",
    "figures-gte-small": "gte-small",
    "table2-minilm": "minilm",
    "table1-mpnet": "mpnet",
    "defaults-minilm": "minilm",
    "glue-minilm": "minilm-held-out",
    "further-minilm": "minilm-held-out",
    "glue-mpnet": "mpnet-held-out",
    "tagging-minilm": "minilm",
    "tagging-mpnet": "mpnet",
}
"""Study -> folder of its records."""


@dataclass(frozen=True)
class Job:
    """One process: a part of a study."""

    name: str
    path: Path
    records: str
    search: bool

    def command(self, options: argparse.Namespace) -> list[str]:
        """Return the command line."""
        start = [sys.executable, "-c", "from adapterbank.cli.entry import main; main()", "sweep", str(self.path)]
        words = [
            "--records",
            str(Path(options.records, self.records)),
            "--data-root",
            options.data_root,
            "--jobs",
            "15",
        ]
        return [*start, *words, "--json", *(["--dry-run"] if options.dry_run else [])]


def parts(study: str, folder: Path) -> list[Job]:
    """Split a study into processes: the grid is one; other studies have one per task and kind of method."""
    whole = yaml.safe_load((CONFIGS / f"{study}.yaml").read_text(encoding="utf-8"))
    if study.startswith("glue-grid"):
        return [_job(study, "all", whole, folder)]
    found = []
    for task in _tasks(whole):
        mine = _of_task(whole, task)
        for kind, methods in _KINDS.items():
            blocks = [part for part in (_of_kind(block, methods) for block in mine["blocks"]) if part["method"]]
            if blocks:
                found.append(_job(study, f"{task.split('/')[1]}-{kind}", {**mine, "blocks": blocks}, folder))
    return found


def _of_kind(block: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
    mine = [method for method in _listed(block.get("method", "adapter")) if method in methods]
    return {**{key: value for key, value in block.items() if key != "top" or "top" in mine}, "method": mine}


_KINDS = {
    "full": {"full"},
    "adapters": {"adapter"},
    "top": {"top"},
    "small": {"layernorm", "lora", "bitfit", "feature"},
    "automl": {"automl"},
}
"""Kind of process -> the methods that it runs; the longest starts first."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(task: Any) -> str:
    return str(task["task"] if isinstance(task, Mapping) else task)


def _tasks(study: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(_name(t) for part in [study, *study["blocks"]] for t in _listed(part.get("task", []))))


def _of_task(study: Mapping[str, Any], task: str) -> dict[str, Any]:
    def kept(part: Mapping[str, Any]) -> dict[str, Any]:
        chosen = [t for t in _listed(part["task"]) if _name(t) == task] if "task" in part else None
        return {**part, **({} if chosen is None else {"task": chosen})}

    blocks = [kept(block) for block in study["blocks"]]
    return {**kept(study), "blocks": [block for block in blocks if block.get("task") != []]}


def _job(study: str, label: str, values: Mapping[str, Any], folder: Path) -> Job:
    path = folder / f"{study}-{label}.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return Job(path.stem, path, STUDIES[study], label.endswith("automl"))


def run(jobs: list[Job], options: argparse.Namespace, logs: Path) -> None:
    """Keep a fixed number of processes running, in the order of the jobs."""
    began, going = time.monotonic(), dict[Job, subprocess.Popen[bytes]]()
    left = list(jobs)
    searches = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def tell(what: str, job: Job) -> None:
        print(f"{time.monotonic() - began:7.1f} {what} {job.name}", flush=True)

    while left or going:
        for job in list(left):
            limit = options.searches if job.search else options.at_once
            if sum(other.search == job.search for other in going) < limit:
                with (logs / f"{job.name}.log").open("wb") as log:
                    env = searches if job.search else None
                    going[job] = subprocess.Popen(job.command(options), stdout=log, stderr=log, env=env)
                left.remove(job)
                tell("start", job)
        for job, process in list(going.items()):
            if process.poll() is not None:
                del going[job]
                tell(f"ended with {process.returncode}", job)
        time.sleep(0.2)


def main() -> None:
    """Split the studies, then run their parts."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", default="results/records")
    options.add_argument("--data-root", default="data")
    options.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES))
    options.add_argument("--at-once", type=int, default=7)
    options.add_argument("--searches", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options.add_argument("--folder", default="reproduce", help="folder for the parts of the studies and the logs")
    options.add_argument("--dry-run", action="store_true")
    chosen = options.parse_args()
    folder = Path(chosen.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run([job for study in chosen.only for job in parts(study, folder)], chosen, folder)


if __name__ == "__main__":
    main()
