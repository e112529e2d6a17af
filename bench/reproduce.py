"""Run the studies of docs/results.md in parallel on one machine: one process per task and kind of method.

    python bench/reproduce.py --records results --data-root data --at-once 13 --dry-run
    python bench/reproduce.py --records results --data-root data --at-once 13 --minutes 9

A small encoder leaves much of a large GPU idle, so several processes share it (with `nvidia-cuda-mps-control -d` their
kernels run at the same time). Runs that train alone are the longest, so each setting is a process, and then each seed
of the chosen one. Encoders are folders or short names, as elsewhere. Runs that have a record are not repeated, so the
same command continues what was stopped; runs of `full` and `teach-together` begin again. What a study starts from or
stands on is trained first, into `--bank`. AutoML runs on CPUs only, `--searches` at a time, and requires Optuna.
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

from adapterbank.tasks.yaml_files import read_yaml

CONFIGS = Path(__file__).parents[1] / "configs"
STUDIES = {
    "glue-minilm": "held-out/tables/records",
    "glue-start-minilm": "held-out/tables/records",
    "few-further-minilm": "held-out/few/records",
    "few-labels-further-minilm": "held-out/few-labels/records",
    "glue-mpnet": "held-out/tables/records",
    "further-minilm": "held-out/tables/records",
    "mix-minilm": "held-out/tables/records",
    "glue-grid-minilm": "records/minilm",
    "table1-minilm": "records/minilm",
    "figures-gte-small": "records/gte-small",
    "table2-minilm": "records/minilm",
    "table1-mpnet": "records/mpnet",
    "defaults-minilm": "records/minilm",
    "tagging-minilm": "records/minilm",
    "tagging-mpnet": "records/mpnet",
}
"""Study -> folder of its records."""
_TASK = ("train", "--resume", "--backbone", "minilm", "--choose-on", "train", "--average", "--epochs")
PACKAGES: dict[str, tuple[str, ...]] = {
    "glue-mnli": (*_TASK, "6", "--task", "glue/mnli"),
    "full-mnli": (*_TASK, "6", "--task", "full-mnli", "--train", "glue/mnli", "--method", "full", "--lr", "1e-4"),
    "glue-sst2": (*_TASK, "3", "--task", "glue/sst2"),
    **{f"glue-{name}": (*_TASK, "20", "--task", f"glue/{name}") for name in ("cola", "stsb", "mrpc", "rte")},
    "shared": (
        *("teach-together", "--backbone", "minilm", "--choose-on", "train", "--limit", "5000", "--epochs", "5"),
        *("--name", "shared", "--tasks", "glue/mnli,glue/sst2,glue/cola,glue/stsb,glue/mrpc,glue/rte"),
    ),
}
"""Task of the bank -> the command that trains it."""
NEEDS = {
    "glue-start-minilm": ("glue-mnli", "full-mnli"),
    "few-further-minilm": tuple(name for name in PACKAGES if name != "full-mnli"),
    "few-labels-further-minilm": ("shared",),
}
"""Study -> the tasks of the bank that its runs start from, stand on or fuse."""


@dataclass(frozen=True)
class Job:
    """One process: a part of a study, or a command that trains what a study needs."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Jobs that must have ended before, and well if they train a package."""
    search: bool = False

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-c", "from adapterbank.cli.entry import main; main()", *self.words]


def packages(studies: list[str], options: argparse.Namespace) -> list[Job]:
    """Return the jobs that train what some studies need and the bank has not; none in a dry run."""
    wanted = dict.fromkeys(name for study in studies for name in NEEDS.get(study, ()) if not options.dry_run)
    missing = [name for name in wanted if not Path(options.bank, "tasks", name).exists()]
    common = ("--bank", options.bank, "--data-root", options.data_root)
    return [Job(name, (*PACKAGES[name], *common)) for name in missing]


def jobs(studies: list[str], options: argparse.Namespace, folder: Path) -> list[Job]:
    """Return the jobs of some studies: first what they need, then their parts in the order of the studies."""
    first, found = packages(studies, options), []
    trained = {job.name for job in first}
    for study in studies:
        more = ("--data-root", options.data_root, "--jobs", "15", "--json")
        more += ("--dry-run",) if options.dry_run else ()
        more += ("--bank", options.bank) if study in NEEDS else ()
        for part in parts(study, folder):
            words = ("sweep", str(part.path), "--records", str(Path(options.records, STUDIES[study])), *more)
            needs = (*part.needs, *(name for name in NEEDS.get(study, ()) if name in trained))
            search = part.name.endswith("automl")
            if not (search and options.no_searches):
                found.append(Job(part.name, words, needs, search))
    return [*first, *found]


@dataclass(frozen=True)
class Part:
    """A part of a study."""

    path: Path
    needs: tuple[str, ...] = ()
    """Parts whose records it reads."""

    @property
    def name(self) -> str:
        """Its name among all parts."""
        return self.path.stem


def parts(study: str, folder: Path) -> list[Part]:
    """Write a study's parts, a process each: the grid is one; other studies have one per kind of method and task."""
    whole = read_yaml(CONFIGS / f"{study}.yaml")
    if study.startswith("glue-grid"):
        return [_write(study, "all", whole, folder)]
    found = []
    for kind, methods in _KINDS.items():
        for task in _tasks(whole):
            mine = _of_task(whole, task)
            blocks = [part for part in (_of_kind(block, methods) for block in mine["blocks"]) if part["method"]]
            if blocks:
                label, values = f"{task.split('/')[-1]}-{kind}", {**mine, "blocks": blocks}
                found += _divided(study, label, values, folder, _ALONE.get(kind))
    return found


def _divided(study: str, label: str, values: Mapping[str, Any], folder: Path, option: str | None) -> list[Part]:
    """Write a part for each value of the option, and one for each further seed of the chosen values."""
    blocks, select = values["blocks"], values.get("select", {})
    if option is None or any({"select", "seeds"} & block.keys() or option not in block for block in blocks):
        return [_write(study, label, values, folder)]
    grid = {name: value for name, value in values.items() if name != "select"}
    found = []
    for value in dict.fromkeys(one for block in blocks for one in _listed(block[option])):
        own = [{**block, option: value} for block in blocks if value in _listed(block[option])]
        found.append(_write(study, f"{label}-{value}", {**grid, "blocks": own}, folder))
    needs = tuple(part.name for part in found)
    for seed in range(values.get("seeds", 1), select.get("seeds", 0)):
        further = {**values, "select": {**select, "seeds": [seed]}}
        found.append(_write(study, f"{label}-seed-{seed}", further, folder, needs))
    return found


def _of_kind(block: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
    mine = [method for method in _listed(block.get("method", "adapter")) if method in methods]
    return {**{key: value for key, value in block.items() if key != "top" or "top" in mine}, "method": mine}


_KINDS = {
    "full": {"full"},
    "adapters": {"adapter", "fusion"},
    "small": {"layernorm", "lora", "bitfit", "feature"},
    "top": {"top"},
    "automl": {"automl"},
}
"""Kind of process -> the methods that it runs, in the order in which they start."""
_ALONE = {"full": "lr", "top": "top"}
"""Kind of runs that train alone -> the option of which each value is a process."""


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


def _write(study: str, label: str, values: Mapping[str, Any], folder: Path, needs: tuple[str, ...] = ()) -> Part:
    path = folder / f"{study}-{label}.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return Part(path, needs)


def run(jobs: list[Job], options: argparse.Namespace, logs: Path) -> bool:
    """Keep a fixed number of processes running, in the order of the jobs; return whether all ended well in time."""
    began, going = time.monotonic(), dict[Job, subprocess.Popen[bytes]]()
    left, codes = list(jobs), dict[str, int]()
    searches = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def tell(what: str, job: Job) -> None:
        print(f"{time.monotonic() - began:7.1f} {what} {job.name}", flush=True)

    while (left or going) and time.monotonic() - began < 60 * options.minutes:
        for job in list(left):
            limit = options.searches if job.search else options.at_once
            if any(codes.get(name) for name in job.needs if name in PACKAGES):  # a sweep with a failed run has a choice
                left.remove(job)
                codes[job.name] = 1
                tell("left out, as what it needs failed:", job)
            elif all(name in codes for name in job.needs) and sum(o.search == job.search for o in going) < limit:
                with (logs / f"{job.name}.log").open("wb") as log:
                    env = searches if job.search else None
                    going[job] = subprocess.Popen(job.command, stdout=log, stderr=log, env=env)
                left.remove(job)
                tell("start", job)
        for job, process in list(going.items()):
            if process.poll() is not None:
                del going[job]
                codes[job.name] = process.returncode
                tell(f"ended with {process.returncode}", job)
        time.sleep(0.2)
    for job, process in going.items():
        process.kill()  # records are written whole, and a run without one is run again
        tell("stopped", job)
    return not (left or going or any(codes.values()))


def main() -> None:
    """Split the studies, then run their parts."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", default="results")
    options.add_argument("--data-root", default="data")
    options.add_argument("--bank", default="reproduce/bank", help="bank of what some studies start from or stand on")
    options.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES))
    options.add_argument("--at-once", type=int, default=7)
    options.add_argument("--searches", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options.add_argument("--no-searches", action="store_true", help="leave AutoML out, for instance on a GPU's machine")
    options.add_argument("--minutes", type=float, default=1e6, help="stop then; the same command continues")
    options.add_argument("--folder", default="reproduce", help="folder for the parts of the studies and the logs")
    options.add_argument("--dry-run", action="store_true")
    chosen = options.parse_args()
    folder = Path(chosen.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sys.exit(not run(jobs(chosen.only, chosen, folder), chosen, folder))


if __name__ == "__main__":
    main()
