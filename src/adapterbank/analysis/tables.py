"""Tables 1 and 2 with the paper's numbers beside ours, and the table of all runs. Draws and trains nothing.

A cell is the mean over the seeds of the best setting on dev, in points, with the standard error of the mean.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from statistics import fmean

from adapterbank.analysis import choices, paper
from adapterbank.analysis.paired import compare, gaps_by_task
from adapterbank.analysis.run_table import RECIPES, RunRow, RunTable, by_task, uses_encoder
from adapterbank.encoder.sources import SOURCES
from adapterbank.studies.selection import RULES, mean

_PAPERS_SHARE = 3.6
"""The share of the encoder's parameters that the paper's adapters train per task, in per cent."""


@dataclass(frozen=True)
class _TableLine:
    """The runs that compete for a line of table 1."""

    method: str
    option: int | None = None
    share: float = math.inf
    """The largest share of the encoder's parameters that a run may train, in per cent."""
    label: str = ""
    """The label of the runs of a variant; without it, plain runs compete."""

    def has(self, row: RunRow) -> bool:
        if self.label:
            return row.label == self.label
        fits = not row.encoder or 100 * row.trained <= self.share * row.encoder
        return row.plain and row.method == self.method and (self.option is None or row.option == self.option) and fits


_SMALL_ADAPTERS = f"adapters, best size up to {_PAPERS_SHARE} %"
_LINES = {
    "full fine-tuning": _TableLine("full"),
    "adapters, best size": _TableLine("adapter"),
    _SMALL_ADAPTERS: _TableLine("adapter", share=_PAPERS_SHARE),
    "adapters 64": _TableLine("adapter", 64),
    "variable fine-tuning": _TableLine("top"),
    "LoRA": _TableLine("lora"),
    "BitFit": _TableLine("bitfit"),
    "LayerNorm only": _TableLine("layernorm"),
    "feature": _TableLine("feature"),
    "AutoML, no encoder": _TableLine("automl"),
}
"""The lines of table 1 with plain runs."""
_DASH = "–"


@dataclass(frozen=True)
class ResultTable:
    """A table of printed cells."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Columns with text, in addition to the first."""

    def csv(self) -> str:
        """Return the table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def with_ours(study: RunTable) -> list[ResultTable]:
    """Return tables 1 and 2 of the paper with our scores; a table without any of our scores is omitted."""
    tasks = {row.catalog for row in study.rows}
    columns = {task for task, _, _ in paper.GLUE_COLUMNS.values()}
    both = {*columns, *paper.FURTHER}
    made = ((glue, columns), (compared, columns), (further, paper.FURTHER.keys()), (against_full, both))
    return [table for make, names in made if tasks & names and (table := make(study)).rows]


def glue(study: RunTable) -> ResultTable:
    """Return table 1, GLUE by method: ours on dev, and on labelled test sets; the paper's from the server."""
    tasks = {rows[0].catalog: rows for rows in by_task(study.rows).values()}
    lines: list[tuple[str, ...]] = []
    for name, line in _lines(study).items():
        chosen = {task: study.best(_of(tasks.get(task, []), line)) for task, _, _ in paper.GLUE_COLUMNS.values()}
        if not any(chosen.values()):
            continue
        share = _share([mine for mine in chosen.values() if mine])
        cells = {title: _cell(chosen[task], split, m) for title, (task, split, m) in paper.GLUE_COLUMNS.items()}
        lines.append((f"ours: {name}, dev", share, *(text for text, _ in cells.values()), _average(cells)))
        tests = {
            title: _cell(chosen[task], "test", m) for title, (task, s, m) in paper.GLUE_COLUMNS.items() if s == "dev"
        }
        if any(value is not None for _, value in tests.values()):
            found = [tests.get(title, (_DASH, None))[0] for title in paper.GLUE_COLUMNS]
            lines.append((f"ours: {name}, test", share, *found, _average(tests)))
    for name, (share, scores, total) in paper.GLUE.items():
        lines.append((f"paper: {name}, server", share, *(f"{score:.1f}" for score in scores), f"{total:.1f}"))
    return ResultTable(
        "table1",
        "Table 1: GLUE",
        ("", "trained", *paper.GLUE_COLUMNS, "mean"),
        tuple(lines),
        (
            "CoLA: Matthews correlation; MRPC, QQP: F1; STS-B: Spearman; others: accuracy; all times 100.",
            f"{_chosen(study)} The mean is over the columns with a score. "
            "The paper: BERT-large, scored by GLUE's server; its mean is the server's own total.",
            *_seen(study),
            *_missing({title for title, (task, _, _) in paper.GLUE_COLUMNS.items() if task not in tasks}),
        ),
    )


def compared(study: RunTable) -> ResultTable:
    """Return the difference between adapters and full fine-tuning in table 1, for each way to choose settings."""
    tasks = {rows[0].catalog: rows for rows in by_task(study.rows).values()}
    pairs = []
    for task, split, metric in paper.GLUE_COLUMNS.values():
        if split != "dev" or task not in tasks:
            continue
        sides = [choices.settings(_of(tasks[task], _LINES[name])) for name in (_SMALL_ADAPTERS, "full fine-tuning")]
        if all(sides):
            pairs.append(choices.Pair(sides[0], sides[1], partial(_points, metric=metric)))
    lines = [
        (
            found.chosen,
            *(_rounded(value, 2) for value in (found.ours, found.other, found.ours - found.other, found.sem)),
        )
        for found in choices.differences(study, pairs)
    ]
    return ResultTable(
        "table1-choice",
        "Table 1: how settings were chosen",
        ("settings of both chosen", _SMALL_ADAPTERS, "full fine-tuning", "difference", "s.e."),
        tuple(lines),
        (
            f"Mean over the {len(pairs)} tasks of table 1 that have both, dev. A method with more repeated settings is "
            "favoured if these are chosen on the mean over all seeds; the other lines choose alike.",
        ),
    )


def against_full(study: RunTable) -> ResultTable:
    """Return how far each method is above full fine-tuning, with paired tests over seeds and tasks."""
    tasks = {rows[0].catalog: rows for rows in by_task(study.rows).values() if rows[0].catalog}
    glue_metrics = {task: metric for task, split, metric in paper.GLUE_COLUMNS.values() if split == "dev"}
    parts = (
        ("GLUE, dev", "dev", glue_metrics),
        ("GLUE, test", "test", glue_metrics),
        ("further tasks, test", "test", dict.fromkeys(paper.FURTHER, "accuracy")),
    )
    chosen = {
        name: {task: study.best(_of(rows, line)) for task, rows in tasks.items()}
        for name, line in _lines(study).items()
    }
    full = chosen.pop("full fine-tuning")
    lines = []
    for (title, split, metrics), (name, rows) in itertools.product(parts, chosen.items()):
        if gaps := gaps_by_task(rows, full, split, metrics):
            found = compare(gaps)
            sem = _DASH if found.sem is None else _rounded(found.sem, 2)
            chances = map(_chance, (found.p_runs, found.p_tasks))
            counts = str(found.tasks), str(found.pairs)
            lines.append((f"{title}: {name}", *counts, _rounded(found.difference, 2), sem, *chances))
    return ResultTable(
        "against-full",
        "Methods against full fine-tuning",
        ("", "tasks", "pairs of runs", "difference", "s.e.", "p, runs", "p, tasks"),
        tuple(lines),
        (
            f"Both sides: the seeds of {RULES[study.by].text}. A pair of runs has one task and one seed. The "
            "difference is the mean over tasks, in points; its standard error is over seeds.",
            "p: how often a difference as large comes by chance. Runs: if the methods are equal on each of these "
            "tasks. Tasks: if each is as likely to be better on a task like these.",
        ),
    )


def further(study: RunTable) -> ResultTable:
    """Return table 2: the paper's seventeen further tasks, test accuracy."""
    tasks = {rows[0].catalog: rows for rows in by_task(study.rows).values()}
    titles = {"automl": "AutoML", "full": "full", "top": "variable", "adapter": "adapters"}
    lines, ours, theirs = [], dict[str, list[float]](), dict[str, list[float]]()
    for task, scores in paper.FURTHER.items():
        cells = []
        for k, method in enumerate(paper.FURTHER_METHODS):
            text, value = _cell(study.best(_of(tasks.get(task, []), _TableLine(method))), "test", "accuracy")
            printed = scores[k]
            number, error = printed if isinstance(printed, tuple) else (printed, None)
            if value is not None:
                ours.setdefault(method, []).append(value)
                theirs.setdefault(method, []).append(number)
            cells += [text, f"{number:.1f}" if error is None else f"{number:.1f} ± {error:.1f}"]
        lines.append((task.removeprefix("paper/").replace("_", " "), *cells))
    means = [_mean(of.get(method)) for method in paper.FURTHER_METHODS for of in (ours, theirs)]
    lines.append(("mean of the tasks we ran", *means))
    columns = [f"{who} {titles[method]}" for method in paper.FURTHER_METHODS for who in ("ours:", "paper:")]
    return ResultTable(
        "table2",
        "Table 2: the paper's further tasks, test accuracy",
        ("task", *columns),
        tuple(lines),
        (
            f"{_chosen(study)} The paper: BERT-base.",
            "The last line is the mean over the tasks for which that column has one of our scores.",
            *_missing({task for task in paper.FURTHER if task not in tasks}),
        ),
    )


def runs(study: RunTable) -> ResultTable:
    """Return the table of all runs."""
    columns = ("record", "backbone", "task", "method", "lr", "epochs", "seed", "trained", "metric", "dev", "test", "s")
    lines = [
        (
            row.path.stem,
            row.backbone,
            row.task,
            row.label,
            f"{row.lr:g}" if row.lr is not None else _DASH,
            str(row.epochs or _DASH),
            str(row.seed),
            f"{row.trained:,}",
            row.metric,
            *(f"{100 * score:.2f}" if score is not None else _DASH for score in (row.dev, row.test)),
            f"{row.record.get('seconds', 0):.0f}",
        )
        for row in sorted(study.rows, key=lambda row: (row.backbone, row.task, row.method, row.place, row.seed))
    ]
    return ResultTable(
        "runs",
        "All runs",
        columns,
        tuple(lines),
        (),
        ("backbone", "task", "method", "metric"),
    )


def smaller(study: RunTable) -> ResultTable:
    """Return the table of the results of automatic size and pruning."""
    lines = []
    for row in study.rows:
        if sizing := row.record.get("sizing"):
            lines.append((row.record["package"], "size auto", sizing["reason"]))
        if pruned := row.record.get("pruned"):
            result = f"without layers {', '.join(map(str, pruned['removed']))}: {pruned['metric']} "
            result += f"{100 * pruned['before']:.2f} before, {100 * pruned['after']:.2f} after"
            lines.append((row.record["package"], "pruned", result))
    columns = ("package", "how", "result")
    return ResultTable("smaller", "Automatic size and pruning", columns, tuple(lines), words=columns)


def _chosen(study: RunTable) -> str:
    return f"Ours: mean ± s.e.m. over the seeds of {RULES[study.by].text}."


def _lines(study: RunTable) -> dict[str, _TableLine]:
    """Return the lines of table 1: plain methods, then those that train in another way."""
    variants = sorted({r.label: r.method for r in study.rows if not r.plain and r.variant.keys() <= {*RECIPES}}.items())
    return _LINES | {label: _TableLine(method, label=label) for label, method in variants}


def _of(rows: Iterable[RunRow], line: _TableLine) -> list[RunRow]:
    return [row for row in rows if line.has(row)]


def _points(row: RunRow, metric: str) -> float:
    return 100 * (row.score("dev", metric) or 0.0)


def _cell(rows: Sequence[RunRow], split: str, metric: str) -> tuple[str, float | None]:
    """Return a mean over seeds as text and as a number."""
    values = [row.score(split, metric) for row in rows]
    if not values or any(value is None for value in values):
        return _DASH, None
    found = mean([100 * value for value in values if value is not None])
    return _rounded(found.mean) + ("" if found.sem is None else f" ± {_rounded(found.sem)}"), found.mean


def _rounded(value: float, digits: int = 1) -> str:
    """Return a score as text, a half rounded up; scores are quotients, so a half may be one bit off in binary."""
    found = Decimal(f"{value:.9f}").quantize(Decimal(10) ** -digits, ROUND_HALF_UP)
    return str(found or abs(found))  # without the sign of a zero


def _chance(value: float) -> str:
    return _rounded(value, 3) if value >= 0.001 else "< 0.001"


def _share(chosen: Sequence[Sequence[RunRow]]) -> str:
    """Return the mean share of the encoder's parameters that train; a method without an encoder has none."""
    shares = [100 * mine[0].trained / mine[0].encoder for mine in chosen if mine[0].encoder and uses_encoder(mine[0])]
    if not shares:
        return _DASH
    share = fmean(shares)
    return f"{share:.2f} %" if share >= 0.01 or not share else f"{share:.1g} %"


def _average(cells: Mapping[str, tuple[str, float | None]]) -> str:
    return _mean([value for _, value in cells.values() if value is not None])


def _mean(values: Sequence[float] | None) -> str:
    return f"{_rounded(fmean(values))} ({len(values)})" if values else _DASH


def _seen(study: RunTable) -> list[str]:
    """Return a note for each encoder whose training data included tasks of the table."""
    seen_by = {name: SOURCES[name].seen for name in study.backbones if name in SOURCES and SOURCES[name].seen}
    return [
        f"{name} is a sentence encoder trained on {seen}, among others: MNLI, RTE, QNLI and QQP are not new to it."
        for name, seen in seen_by.items()
    ]


def _missing(names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"No records of: {', '.join(found)}."] if found else []
