"""Few labels: ours against logistic regression on the bare embedding and against SetFit, on the same rows.

    python bench/few_labels.py ours --root DATA --out bench/results/few_labels.json
    python bench/few_labels.py setfit --root DATA --python PEERS/bin/python --out bench/results/few_labels.json
    python bench/few_labels.py table --out bench/results/few_labels.json

`ours` runs the library with its defaults and, on the same vectors, scikit-learn's logistic regression; `setfit` runs
SetFit from an environment of its own (`pip install setfit`) with its defaults and 20 iterations. Rows are drawn by
class; a result that is in the file is not computed again, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
"""SetFit takes a quarter of an hour and more for one draw of the others on two cores."""
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
    classes = list(map(int, model.model_head.classes_))
    trained = sum(one.numel() for one in model.model_body.parameters() if one.requires_grad)
    found = {"seconds": seconds, "likely": likely.tolist(), "classes": classes, "trained": trained}
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


class Results:
    """The results so far, in one file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
        self.done = {self.key(row) for row in self.rows}

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        """Return what identifies a result."""
        return row["system"], row["task"], row["size"], row["draw"]

    def add(self, **row: Any) -> None:
        """Add a result and write the file."""
        self.rows.append(row)
        self.done.add(self.key(row))
        part = self.path.with_suffix(".part")
        lines = ",\n".join(json.dumps(one) for one in self.rows)
        part.write_text(f'{{"results": [\n{lines}\n]}}\n')
        os.replace(part, self.path)
        print(f"{row['task']} {row['size']} {row['draw']} {row['system']}: {100 * row['accuracy']:.1f}", flush=True)

    def missing(self, systems: tuple[str, ...], tasks: list[str], sizes: list[int], draws: int) -> Iterator[Any]:
        """Yield task, size and draw of what is not in the file."""
        for task in tasks:
            for draw in range(draws):
                for size in sizes:
                    if any((system, task, size, draw) not in self.done for system in systems):
                        yield task, size, draw


def run_ours(arguments: argparse.Namespace, results: Results) -> None:
    """Train with the library's defaults, and fit scikit-learn's regression to the bare embeddings."""
    from sklearn.linear_model import LogisticRegression

    from adapterbank.api.opened import load_backbone, open_bank

    backbone, data, embedded = load_backbone(arguments.backbone), {}, {}
    system = "ours" if arguments.few == "auto" else "usual recipe"
    for task, size, draw in results.missing((system,), arguments.tasks, arguments.sizes, arguments.draws):
        if task not in data:
            data[task] = read(task, arguments.root)
        texts, classes, test_texts, test_classes, count = data[task]
        rows = drawn(task, classes, draw, size)
        with tempfile.TemporaryDirectory() as folder:
            bank = open_bank(Path(folder) / "bank", backbone, device=arguments.device)
            if task not in embedded:
                embedded[task] = np.stack([one.embedding for one in bank.predict(None, test_texts)])
            about = {"task": task, "size": size, "draw": draw}
            if ("regression", *about.values()) not in results.done:
                mine = np.stack([one.embedding for one in bank.predict(None, [texts[row] for row in rows])])
                regression = LogisticRegression(C=10, max_iter=1000).fit(mine, [classes[row] for row in rows])
                likely = np.zeros((len(test_texts), count))
                likely[:, regression.classes_] = regression.predict_proba(embedded[task])
                results.add(system="regression", **about, **scores(likely, test_classes))
            began = time.perf_counter()
            names = {"labels": ",".join(f"c{one}" for one in range(count)), "few": arguments.few}
            result = bank.train("task", [(texts[row], f"c{classes[row]}") for row in rows], seed=draw, **names)
            seconds = time.perf_counter() - began
            likely = np.array([list(one.probabilities.values()) for one in bank.predict("task", test_texts)])
            params = result.record["params"]["percent"]
            results.add(system=system, **about, **scores(likely, test_classes), seconds=seconds, percent=params)


def run_setfit(arguments: argparse.Namespace, results: Results) -> None:
    """Train SetFit models in an environment of their own."""
    from adapterbank.encoder.sources import locate

    command = [arguments.python, "-c", SETFIT, str(locate(arguments.backbone)), str(arguments.threads)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdin is not None
    assert worker.stdout is not None
    data: dict[str, Any] = {}
    tasks = [task for task in arguments.tasks if task in SETFIT_TASKS]
    for task, size, draw in results.missing(("setfit",), tasks, arguments.sizes, arguments.draws):
        if task not in data:
            data[task] = read(task, arguments.root)
        texts, classes, test_texts, test_classes, count = data[task]
        rows = drawn(task, classes, draw, size)
        with tempfile.TemporaryDirectory() as folder:
            given = {"draw": draw, "folder": folder, "test_texts": test_texts}
            given |= {"texts": [texts[row] for row in rows], "labels": [classes[row] for row in rows]}
            worker.stdin.write(json.dumps(given) + "\n")
            worker.stdin.flush()
            while not (line := worker.stdout.readline()).startswith('{"seconds"'):
                if not line:
                    raise SystemExit(f"SetFit ended with status {worker.wait()}.")
        found = json.loads(line)
        likely = np.zeros((len(test_texts), count))
        likely[:, found["classes"]] = found["likely"]
        about = {"task": task, "size": size, "draw": draw, "seconds": found["seconds"], "trained": found["trained"]}
        results.add(system="setfit", **about, **scores(likely, test_classes))
    worker.stdin.close()
    worker.wait()


def print_table(results: Results) -> None:
    """Print the mean over draws of each task and size, and the mean over tasks."""
    systems = [
        one
        for one in ("regression", "setfit", "usual recipe", "ours")
        if any(row["system"] == one for row in results.rows)
    ]
    for size in sorted({row["size"] for row in results.rows}):
        print(f"\n{size} labels a class: accuracy (calibration error), mean over draws; seconds")
        means: dict[str, list[tuple[float, float]]] = {}
        for task in dict.fromkeys(row["task"] for row in results.rows):
            cells = []
            for system in systems:
                mine = [
                    row for row in results.rows if (row["system"], row["task"], row["size"]) == (system, task, size)
                ]
                if not mine:
                    cells.append("-")
                    continue
                accuracy, error = (float(np.mean([r[key] for r in mine])) for key in ("accuracy", "calibration_error"))
                means.setdefault(system, []).append((accuracy, error))
                took = f" {np.mean([row['seconds'] for row in mine]):.1f} s" if "seconds" in mine[0] else ""
                cells.append(f"{100 * accuracy:.1f} ({error:.3f}, {len(mine)} draws){took}")
            print(f"  {task:28} " + " | ".join(f"{s}: {cell}" for s, cell in zip(systems, cells, strict=True)))
        for system, values in means.items():
            accuracy, error = np.mean(values, axis=0)
            print(f"  mean over {len(values)} tasks, {system}: {100 * accuracy:.2f}, calibration error {error:.3f}")


def main() -> None:
    """Read the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ours", "setfit", "table"))
    parser.add_argument("--root", default=os.environ.get("ADAPTERBANK_DATA", ""), help="folder with the catalog's data")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "few_labels.json")
    parser.add_argument("--python", default=sys.executable, help="Python of an environment with SetFit")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="threads of SetFit")
    parser.add_argument("--few", default="auto", choices=("auto", "never"), help="never: the recipe for many labels")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=list(SIZES))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    arguments = parser.parse_args()
    results = Results(arguments.out)
    if arguments.part == "ours":
        run_ours(arguments, results)
    elif arguments.part == "setfit":
        run_setfit(arguments, results)
    print_table(results)


if __name__ == "__main__":
    main()
