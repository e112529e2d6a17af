"""Few labels: ours against logistic regression on the bare embedding and against SetFit, on the same rows.

    python bench/few_labels.py ours --root DATA --out bench/results/few_labels.json
    python bench/few_labels.py setfit --root DATA --python PEERS/bin/python --out bench/results/few_labels.json
    python bench/few_labels.py table --out bench/results/few_labels.json --tasks agnews,emotion --sizes 8

`ours` runs the library with its defaults and, on the same vectors, scikit-learn's logistic regression; `setfit` runs
SetFit from an environment of its own (`pip install setfit`) or from a folder of packages (`--peers-path`), with its
defaults and 20 iterations. Rows are drawn by class. A result that is in the file is not computed again, so that a run
can be interrupted, and several runs may write to one file. With `--processes`, several results are computed at the same
time: then only the scores count, and not the seconds. A result states its device and the number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import numpy as np  # noqa: E402

TASKS = (
    *("agnews", "emotion", "glue/sst2", "subj", "paper/sms_spam", "paper/airline"),
    *("paper/20newsgroups-bydate", "clinc150"),
)
SETFIT_TASKS = TASKS[:6]
"""SetFit takes a quarter of an hour and more for one draw of the others on two cores; name them if you want them."""
SIZES, DRAWS, TEST_ROWS = (4, 8, 16, 32, 64), 10, 2000
SETFIT = """
import json, sys, time
import torch
torch.set_num_threads(int(sys.argv[2]))
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
for line in sys.stdin:
    given = json.loads(line)
    began = time.perf_counter()
    model = SetFitModel.from_pretrained(sys.argv[1])
    arguments = TrainingArguments(batch_size=16, num_iterations=20, seed=given["draw"], output_dir=given["folder"],
                                  report_to="none", save_strategy="no", show_progress_bar=False)
    data = Dataset.from_dict({"text": given["texts"], "label": given["labels"]})
    Trainer(model=model, args=arguments, train_dataset=data).train()
    seconds = time.perf_counter() - began
    likely = model.predict_proba(given["test_texts"], as_numpy=True)
    classes, device = list(map(int, model.model_head.classes_)), model.model_body.device.type
    trained = sum(one.numel() for one in model.model_body.parameters() if one.requires_grad)
    found = {"seconds": seconds, "likely": likely.tolist(), "classes": classes, "trained": trained,
             "device": torch.cuda.get_device_name() if device == "cuda" else device}
    print(json.dumps(found), flush=True)
"""


def read(task: str, root: str) -> tuple[list[str], list[int], list[str], list[int], int]:
    """Return training texts and classes, test texts and classes, and how many classes there are."""
    from adapterbank.draws import RandomStream
    from adapterbank.tasks import catalog
    from adapterbank.tasks.examples import read_examples

    loaded = catalog.load(task, root)
    tables = loaded.labelled()
    train, _ = read_examples(tables["train"], loaded.task)
    test, _ = read_examples(tables["test" if "test" in tables else "dev"], loaded.task)
    chosen = RandomStream("few labels, test", task).permutation(len(test))[:TEST_ROWS]
    test = test.select(sorted(chosen.tolist()))
    return train.texts, train.targets or [], test.texts, test.targets or [], len(loaded.task.labels)


def drawn(task: str, classes: list[int], draw: int, size: int) -> list[int]:
    """Return `size` rows of each class; a larger draw contains a smaller one of the same number."""
    from adapterbank.draws import RandomStream

    targets, rows = np.asarray(classes), []
    for one in sorted(set(classes)):
        mine = np.flatnonzero(targets == one)
        rows += mine[RandomStream("few labels", task, draw, one).permutation(len(mine))[:size]].tolist()
    return rows


def calibration_error(likely: np.ndarray, targets: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error of the most likely label, in bins of equal width."""
    top, right = likely.max(1), likely.argmax(1) == targets
    places = np.minimum((top * bins).astype(int), bins - 1)
    return float(sum(abs((top - right)[places == one].sum()) for one in range(bins)) / len(top))


def scores(likely: np.ndarray, targets: list[int]) -> dict[str, float]:
    """Return what is reported of a method's probabilities on the test rows."""
    right = np.asarray(targets)
    return {
        "accuracy": float((likely.argmax(1) == right).mean()),
        "calibration_error": calibration_error(likely, right),
    }


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that processes write to a file in it one after the other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Results:
    """The results so far, in one file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        """Read the file, to which other processes may have added."""
        self.rows: list[dict[str, Any]] = json.loads(self.path.read_text())["results"] if self.path.exists() else []
        self.done = {self.key(row) for row in self.rows}

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        """Return what identifies a result."""
        return row["system"], row["task"], row["size"], row["draw"]

    def add(self, **row: Any) -> None:
        """Add a result and write the file."""
        with locked(self.path.parent):
            self.read()
            if self.key(row) in self.done:
                return
            self.rows.append(row)
            self.done.add(self.key(row))
            part = self.path.with_suffix(".part")
            lines = ",\n".join(json.dumps(one) for one in self.rows)
            part.write_text(f'{{"results": [\n{lines}\n]}}\n')
            os.replace(part, self.path)
        print(f"{row['task']} {row['size']} {row['draw']} {row['system']}: {100 * row['accuracy']:.1f}", flush=True)

    def missing(self, system: str, tasks: list[str], sizes: list[int], draws: int) -> Iterator[tuple[str, int, int]]:
        """Yield task, size and draw of what is not in the file, draw by draw, so that what is there is comparable."""
        for draw in range(draws):
            for task in tasks:
                for size in sizes:
                    if (system, task, size, draw) not in self.done:
                        yield task, size, draw


class Ours:
    """The library with its defaults, and scikit-learn's regression on the bare embeddings."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from adapterbank.api.opened import load_backbone
        from adapterbank.runtime import find_device, find_dtype, stamp

        self.arguments, self.results = arguments, Results(arguments.out)
        self.backbone = load_backbone(arguments.backbone)
        self.data: dict[str, Any] = {}
        self.embedded: dict[str, np.ndarray] = {}
        device = find_device(arguments.device)
        self.device = stamp(device, find_dtype("auto", device))["device"]

    def run(self, task: str, size: int, draw: int) -> None:
        """Train on one draw, and add the scores."""
        from sklearn.linear_model import LogisticRegression

        from adapterbank.api.opened import open_bank

        if task not in self.data:
            self.data[task] = read(task, self.arguments.root)
        texts, classes, test_texts, test_classes, count = self.data[task]
        rows = drawn(task, classes, draw, size)
        about = {"task": task, "size": size, "draw": draw, "device": self.device, "processes": self.arguments.processes}
        with tempfile.TemporaryDirectory() as folder:
            bank = open_bank(Path(folder) / "bank", self.backbone, device=self.arguments.device)
            if task not in self.embedded:
                self.embedded[task] = np.stack([one.embedding for one in bank.predict(None, test_texts)])
            if ("regression", task, size, draw) not in self.results.done:
                mine = np.stack([one.embedding for one in bank.predict(None, [texts[row] for row in rows])])
                regression = LogisticRegression(C=10, max_iter=1000).fit(mine, [classes[row] for row in rows])
                likely = np.zeros((len(test_texts), count))
                likely[:, regression.classes_] = regression.predict_proba(self.embedded[task])
                self.results.add(system="regression", **about, **scores(likely, test_classes))
            began = time.perf_counter()
            names = {"labels": ",".join(f"c{one}" for one in range(count)), "few": self.arguments.few}
            result = bank.train("task", [(texts[row], f"c{classes[row]}") for row in rows], seed=draw, **names)
            seconds = time.perf_counter() - began
            likely = np.array([list(one.probabilities.values()) for one in bank.predict("task", test_texts)])
        about |= {"seconds": seconds, "percent": result.record["params"]["percent"]}
        self.results.add(system=own_name(self.arguments), **about, **scores(likely, test_classes))


class SetFit:
    """SetFit, in a process of an environment of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from adapterbank.encoder.sources import locate

        self.arguments, self.results = arguments, Results(arguments.out)
        self.data: dict[str, Any] = {}
        command = [arguments.python, "-c", SETFIT, str(locate(arguments.backbone)), str(arguments.threads)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if arguments.peers_path:
            environment["PYTHONPATH"] = str(arguments.peers_path.resolve())
        if arguments.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, task: str, size: int, draw: int) -> None:
        """Train on one draw, and add the scores."""
        if task not in self.data:
            self.data[task] = read(task, self.arguments.root)
        texts, classes, test_texts, test_classes, count = self.data[task]
        rows = drawn(task, classes, draw, size)
        with tempfile.TemporaryDirectory() as folder:
            given = {"draw": draw, "folder": folder, "test_texts": test_texts}
            found = self.ask({**given, "texts": [texts[row] for row in rows], "labels": [classes[row] for row in rows]})
        likely = np.zeros((len(test_texts), count))
        likely[:, found["classes"]] = found["likely"]
        about = {"task": task, "size": size, "draw": draw, "processes": self.arguments.processes}
        about |= {key: found[key] for key in ("device", "seconds", "trained")}
        self.results.add(system="setfit", **about, **scores(likely, test_classes))

    def ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Send one draw and return the answer; other lines are SetFit's messages."""
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        self.worker.stdin.write(json.dumps(given) + "\n")
        self.worker.stdin.flush()
        for line in self.worker.stdout:
            if line.startswith('{"seconds"'):
                return dict(json.loads(line))
        raise RuntimeError(f"SetFit ended with status {self.worker.wait()}.")


SYSTEMS: dict[str, Callable[[argparse.Namespace], Ours | SetFit]] = {"ours": Ours, "setfit": SetFit}
started: list[Ours | SetFit] = []
"""The system of this process."""


def start(arguments: argparse.Namespace) -> None:
    """Start the system of this process."""
    started[:] = [SYSTEMS[arguments.part](arguments)]


def run(task: str, size: int, draw: int) -> None:
    """Compute one result in this process."""
    started[0].run(task, size, draw)


def own_name(arguments: argparse.Namespace) -> str:
    """Return the system's name in the file."""
    if arguments.part == "setfit":
        return "setfit"
    return "ours" if arguments.few == "auto" else "usual recipe"


def run_missing(arguments: argparse.Namespace, results: Results) -> None:
    """Compute what is not in the file, in as many processes as asked for; each has a system of its own."""
    tasks = arguments.tasks or list(SETFIT_TASKS if arguments.part == "setfit" else TASKS)
    missing = list(results.missing(own_name(arguments), tasks, arguments.sizes, arguments.draws))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, spawn, start, (arguments,)) as pool:
        for done in [pool.submit(run, *one) for one in missing]:
            done.result()


def mean_of(rows: list[dict[str, Any]], key: str) -> float:
    """Return the mean of a value over results."""
    return float(np.mean([row[key] for row in rows]))


def cell(rows: list[dict[str, Any]]) -> str:
    """Return the mean over draws of one system's results; seconds are those of results computed one at a time."""
    if not rows:
        return "-"
    text = f"{100 * mean_of(rows, 'accuracy'):.1f} ({mean_of(rows, 'calibration_error'):.3f}, {len(rows)} draws)"
    timed = [row for row in rows if "seconds" in row and row.get("processes", 1) == 1]
    for device in sorted({row.get("device", "") for row in timed}):
        mine = [row for row in timed if row.get("device", "") == device]
        text += f" {mean_of(mine, 'seconds'):.1f} s" + (f" on {device}" if device else "")
    return text


def paired(rows: list[dict[str, Any]], system: str) -> str:
    """Return how much better ours is than a system: mean over tasks by draw, and its mean and standard error."""
    found = {(row["system"], row["task"], row["draw"]): row["accuracy"] for row in rows}
    both = [(task, draw) for one, task, draw in found if one == system and ("ours", task, draw) in found]
    draws: dict[int, list[float]] = {}
    for task, draw in both:
        draws.setdefault(draw, []).append(100 * (found["ours", task, draw] - found[system, task, draw]))
    if len(draws) < 2:
        return "not enough draws of both"
    means = [np.mean(values) for values in draws.values()]
    error = np.std(means, ddof=1) / len(means) ** 0.5
    return f"{np.mean(means):+.2f} ± {error:.2f} ({len({task for task, _ in both})} tasks, {len(means)} draws)"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the mean over draws of each task and size, the mean over tasks, and the differences paired by draw."""
    systems = [one for one in ("regression", "setfit", "usual recipe", "ours") if any(r["system"] == one for r in rows)]
    for size in sorted({row["size"] for row in rows}):
        print(f"\n{size} labels a class: accuracy (calibration error), mean over draws; seconds")
        sized = [row for row in rows if row["size"] == size]
        means: dict[str, list[tuple[float, float]]] = {}
        for task in dict.fromkeys(row["task"] for row in sized):
            cells = []
            for system in systems:
                mine = [row for row in sized if (row["system"], row["task"]) == (system, task)]
                cells.append(f"{system}: {cell(mine)}")
                if mine:
                    values = mean_of(mine, "accuracy"), mean_of(mine, "calibration_error")
                    means.setdefault(system, []).append(values)
            print(f"  {task:28} " + " | ".join(cells))
        for system, found in means.items():
            accuracy, error = np.mean(found, axis=0)
            print(f"  mean over {len(found)} tasks, {system}: {100 * accuracy:.2f}, calibration error {error:.3f}")
        for system in systems:
            if system != "ours":
                print(f"  ours - {system}: {paired(sized, system)}")


def main() -> None:
    """Read the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ours", "setfit", "table"))
    parser.add_argument("--root", default=os.environ.get("ADAPTERBANK_DATA", ""), help="folder with the catalog's data")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "few_labels.json")
    parser.add_argument("--python", default=sys.executable, help="Python of an environment with SetFit")
    parser.add_argument("--peers-path", type=Path, help="folder with SetFit's packages, if its Python has only torch")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="threads of SetFit")
    parser.add_argument("--processes", type=int, default=1, help="results that are computed at the same time")
    parser.add_argument("--few", default="auto", choices=("auto", "never"), help="never: the recipe for many labels")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=list(SIZES))
    parser.add_argument("--tasks", type=lambda text: text.split(","), help="default: all; of SetFit, the first six")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    if arguments.part in SYSTEMS:
        run_missing(arguments, results)
        results.read()
    shown = [row for row in results.rows if row["task"] in (arguments.tasks or TASKS)]
    print_table([row for row in shown if row["size"] in arguments.sizes and row["draw"] < arguments.draws])


if __name__ == "__main__":
    main()
