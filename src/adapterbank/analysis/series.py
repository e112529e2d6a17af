"""The numbers of each figure: the rows of a study as plain columns, which are drawn and written as CSV. Draws nothing.

Scores are in points (hundredths). If several settings share a place in a figure, the best on dev is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from adapterbank.analysis.run_table import RunRow, RunTable, by_task
from adapterbank.config import Config
from adapterbank.kinds.table import find_kind
from adapterbank.methods import METHODS, size_option
from adapterbank.studies.selection import mean

Column = str | int | float | None
Data = list[dict[str, Column]]
"""Lines of a CSV."""

SHARED_TASKS = 20
"""The largest number of tasks in the figure of total parameters."""
_ENOUGH_TASKS, _ENOUGH_SEEDS = 5, 3
"""From so many tasks or seeds on, a figure does not say how few they are."""
_FRACTIONS = (20, 50, 80)
SUITES = ("all", "further", "GLUE")
"""All tasks, and the two panels of Fig. 3: GLUE, and all others."""

USUAL = (Config().method, Config().size)
"""The method and size that a run has by default, which the paper reports too."""


def tradeoff(study: RunTable, suites: Sequence[str] = SUITES) -> Data:
    """Return Fig. 1 and 3: trained parameters against the score minus full fine-tuning's, percentiles across tasks.

    Fig. 1 has the suite `all`, Fig. 3 the two others. Points of one method are comparable if they are `over` the same
    tasks.
    """
    tasks = by_task(row for row in study.rows if row.plain)
    gaps: dict[tuple[str, str, int | str | None], list[tuple[str, int, float]]] = {}
    for task, rows in tasks.items():
        full = study.best(row for row in rows if row.method == "full")
        if not full:
            continue
        whole = _shown(full)
        suite = "GLUE" if (rows[0].catalog or "").startswith("glue/") else "further"
        for (method, option), mine in _forms(rows).items():
            chosen = study.best(mine)
            if not chosen:
                continue
            point = task, chosen[0].trained, _shown(chosen) - whole
            for name in {"all", suite}.intersection(suites):
                gaps.setdefault((name, method, option), []).append(point)
    found: Data = []
    for (suite, method, option), points in sorted(gaps.items(), key=lambda item: str(item[0])):
        marks = np.percentile([gap for _, _, gap in points], _FRACTIONS)
        named = {f"p{q}": float(value) for q, value in zip(_FRACTIONS, marks, strict=True)}
        place = {"suite": suite, "method": method, "option": option, "tasks": len(points)}
        over = " ".join(task for task, _, _ in points)
        found.append({**place, "trained": median(trained for _, trained, _ in points), **named, "over": over})
    return sorted(found, key=lambda line: (str(line["suite"]), str(line["method"]), _number(line["trained"])))


def sizes(study: RunTable, *, spans: bool = False) -> Data:
    """Return Fig. 4 (Fig. 5 with `spans`): dev score against trained parameters, for every task with several sizes."""
    found: Data = []
    for task, rows in by_task(row for row in study.rows if row.plain).items():
        forms = {key: study.best(mine) for key, mine in _forms(rows).items()}
        several = sum(1 for (method, _), mine in forms.items() if mine and size_option(method)) > 2
        if find_kind(rows[0].record["task"]["kind"]).per_token != spans or not several:
            continue
        for (method, option), mine in forms.items():
            if mine:
                place = {"task": task, "metric": mine[0].metric, "method": method, "option": option}
                found.append({**place, "trained": mine[0].trained, **_spread(mine)})
    return sorted(found, key=lambda line: (str(line["task"]), str(line["method"]), _number(line["trained"])))


def curves(study: RunTable) -> Data:
    """Return loss and dev score by epoch, of the best setting of each method on each task; means over its seeds.

    A run whose head was fitted has no epochs.
    """
    found: Data = []
    for task, rows in by_task(row for row in study.rows if row.plain and not row.record.get("fitted")).items():
        for method in dict.fromkeys(row.method for row in rows):
            best = study.best(row for row in rows if row.method == method)
            histories = [row.record.get("history") or [] for row in best]
            for epoch in range(min(map(len, histories), default=0)):
                loss, dev = (_mean_of([one[epoch].get(name) for one in histories]) for name in ("loss", "score"))
                if loss is None or dev is None:
                    continue
                line = {"task": task, "metric": best[0].metric, "method": method, "option": best[0].option}
                found.append({**line, "epoch": epoch + 1, "loss": loss, "dev": 100 * dev, "seeds": len(best)})
    return found


def _mean_of(values: Sequence[Any]) -> float | None:
    return fmean(values) if values and all(isinstance(value, int | float) for value in values) else None


def few_sentence(data: Data, panels: int | None) -> str:
    """Return a sentence about the few tasks or seeds of a figure, or nothing if there are enough.

    `panels` is the most that it draws, one for each task; None if all tasks are in one.
    """
    found = []
    tasks = [int(line["tasks"] or 0) for line in data if "over" in line]
    if tasks and max(tasks) < _ENOUGH_TASKS:
        found.append(f"Only {max(tasks)} task{'s' * (max(tasks) > 1)}: percentiles across them say little.")
    seeds = [int(line["seeds"] or 0) for line in data if "seeds" in line]
    if seeds and max(seeds) == 1:
        found.append("One seed per point: differences may be chance.")
    elif seeds and min(seeds) < _ENOUGH_SEEDS:
        counts = str(max(seeds)) if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
        found.append(f"{counts} seeds per point: with few seeds, differences may be chance.")
    shown = {line["task"] for line in data if "task" in line}
    if panels is not None and len(shown) > panels:
        found.append(f"{panels} of {len(shown)} tasks are drawn; the CSV has all.")
    return " ".join(found)


def sigmas(study: RunTable) -> Data:
    """Return Fig. 6, right: dev score against the width of the initial Gaussian."""
    rows = [row for row in study.rows if row.sigma is not None and "pruned" not in row.record["config"]]
    return _curves(study, rows, "sigma", lambda row: row.sigma)


def rates(study: RunTable) -> Data:
    """Return Fig. 7: dev score against the learning rate, for each method in the form with the most of them."""
    return _curves(study, [row for row in study.rows if row.plain], "lr", lambda row: row.lr)


def ablations(study: RunTable) -> Data:
    """Return Fig. 6, left and centre: the change of each score in per cent without the adapters of a span."""
    return [
        {
            "package": found["package"],
            "first": span["first"],
            "last": span["last"],
            **{f"{name} change %": change for name, change in span["change"].items()},
        }
        for found in study.ablations
        for span in found["spans"]
    ]


def totals(study: RunTable) -> Data:
    """Return the parameters of all tasks together, in units of the encoder, against the number of tasks.

    Full copies share nothing, and a method without an encoder needs none; all others add to one encoder. Each method is
    shown with the option that is best on dev for each task, and adapters also with size 64 if there are other sizes.
    """
    per_task: dict[tuple[str, str], list[float]] = {}
    counted = [row for row in study.rows if row.plain and row.encoder and row.trained]
    options: dict[str, set[int | str]] = {}
    for row in counted:
        options.setdefault(row.method, set()).update(() if row.option is None else (row.option,))
    for rows in by_task(counted).values():
        forms: dict[tuple[str, str], list[RunRow]] = {}
        for row in rows:
            forms.setdefault((row.method, _best_of(row.method, options)), []).append(row)
            if (row.method, row.option) == USUAL and len(options[row.method]) > 1:
                forms.setdefault((row.method, str(row.option)), []).append(row)
        for form, mine in forms.items():
            if chosen := study.best(mine):
                per_task.setdefault(form, []).append(chosen[0].trained / chosen[0].encoder)
    return [
        {"method": method, "form": form, "tasks": count, "encoders": _shared(method) + count * fmean(shares)}
        for (method, form), shares in sorted(per_task.items())
        for count in range(1, SHARED_TASKS + 1)
    ]


def reliability(study: RunTable) -> Data:
    """Return how often answers of each bin of probabilities are right, over all seeds of each task's best setting."""
    found: Data = []
    for task, split, measured in _calibrated(study):
        bins: dict[float, list[Any]] = {}
        for one in (one for run in measured for one in run["reliability"]):
            bins.setdefault(round(one["from"], 6), []).append(one)
        error = fmean(run["calibration_error"] for run in measured)
        for start, mine in sorted(bins.items()):
            rows = sum(one["rows"] for one in mine)
            means = {
                key: sum(one["rows"] * one[key] for one in mine) / max(rows, 1) for key in ("confidence", "accuracy")
            }
            place = {"task": task, "split": split, "seeds": len(measured), "from": start, "rows": rows}
            found.append({**place, **means, "calibration_error": error})
    return found


def coverage(study: RunTable) -> Data:
    """Return how many of the most certain answers are right, the mean over the seeds of each task's best setting."""
    return [
        {
            **{"task": task, "split": split, "seeds": len(measured)},
            **{key: fmean(one[key] for one in same) for key in ("coverage", "abstain", "accuracy")},
        }
        for task, split, measured in _calibrated(study)
        for same in zip(*(run["coverage"] for run in measured), strict=False)
    ]


def _calibrated(study: RunTable) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield each task with the split that is shown, and that split's calibration in every run of the best setting."""
    for task, rows in by_task(study.rows).items():
        chosen = study.best(row for row in rows if row.record.get("calibration"))
        kept = [row.record["calibration"] for row in chosen]
        split = next((name for name in ("test", "dev") if kept and all(name in one for one in kept)), None)
        if split:
            yield task, split, [one[split] for one in kept]


def _best_of(method: str, options: Mapping[str, set[int | str]]) -> str:
    """Return the form of a method: its only option, `best` for several, empty for none."""
    found = options[method]
    return "best" if len(found) > 1 else "".join(map(str, found))


def _shared(method: str) -> int:
    """Return the number of encoders that the tasks of a method share."""
    return int(method != "full" and (method not in METHODS or METHODS[method].slot))


def _curves(study: RunTable, rows: Sequence[RunRow], name: str, place: Callable[[RunRow], float | None]) -> Data:
    """Return the dev score against one option, for each task and method with at least two values of it."""
    found: Data = []
    for task, mine in by_task(row for row in rows if place(row) is not None).items():
        forms = _forms(mine)
        widest = {
            method: max((form for form in forms if form[0] == method), key=lambda f: _variety(f, forms[f], place))
            for method in dict.fromkeys(method for method, _ in forms)
        }
        for method, option in widest.values():
            values = sorted({value for row in forms[method, option] if (value := place(row)) is not None})
            for value in values if len(values) > 1 else ():
                chosen = study.best(row for row in forms[method, option] if place(row) == value)
                if chosen:
                    line = {"task": task, "metric": chosen[0].metric, "method": method, "option": option, name: value}
                    found.append({**line, **_spread(chosen)})
    return found


def _variety(
    form: tuple[str, int | str | None], rows: Sequence[RunRow], place: Callable[[RunRow], float | None]
) -> tuple[int, bool, int]:
    """Return a sort key for the forms of a method: the number of values, then the usual size, so that panels agree."""
    return len({place(row) for row in rows}), form == USUAL, len(rows)


def _forms(rows: Iterable[RunRow]) -> dict[tuple[str, int | str | None], list[RunRow]]:
    """Group runs by method and the option that decides how many parameters it trains."""
    found: dict[tuple[str, int | str | None], list[RunRow]] = {}
    for row in rows:
        found.setdefault((row.method, row.option), []).append(row)
    return found


def _shown(rows: Sequence[RunRow]) -> float:
    return 100 * mean([row.shown for row in rows]).mean


def _spread(rows: Sequence[RunRow]) -> dict[str, Column]:
    found = mean([row.dev for row in rows])
    return {
        "dev": 100 * found.mean,
        "sem": None if found.sem is None else 100 * found.sem,
        "seeds": found.seeds,
        "chosen": rows[0].path.stem,
    }


def _number(value: Any) -> float:
    return float(value or 0)
