"""Tables 1 and 2 with the paper's numbers beside ours, and the table of all runs. Knows rows; draws and trains nothing.

A cell is the mean over seeds of the setting that is best on dev, in points, with the standard error of the mean.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from adapterbank.analysis import paper
from adapterbank.analysis.run_table import RunRow, RunTable, best, by_task, mean
from adapterbank.encoder.sources import SOURCES

_PAPERS_SHARE = 3.6
"""Per cent of the encoder's parameters that the paper's adapters train a task."""


@dataclass(frozen=True)
class _Line:
    """The runs among which a line of table 1 chooses."""

    method: str
    option: int | None = None
    share: float = math.inf
    """The most that a run may train, in per cent of the encoder."""

    def has(self, row: RunRow) -> bool:
        fits = not row.encoder or 100 * row.trained <= self.share * row.encoder
        return row.method == self.method and (self.option is None or row.option == self.option) and fits


_LINES = {
    "full fine-tuning": _Line("full"),
    "adapters, best size": _Line("adapter"),
    f"adapters, best size up to {_PAPERS_SHARE} %": _Line("adapter", share=_PAPERS_SHARE),
    "adapters 64": _Line("adapter", 64),
    "variable fine-tuning": _Line("top"),
    "LoRA": _Line("lora"),
    "BitFit": _Line("bitfit"),
    "LayerNorm only": _Line("layernorm"),
    "feature": _Line("feature"),
    "AutoML, no encoder": _Line("automl"),
}
"""The lines of table 1."""
_DASH = "–"
_CHOSEN = "Ours: mean ± s.e.m. over seeds of the setting that is best on dev, among those with the most seeds."


@dataclass(frozen=True)
class ResultTable:
    """Cells as they are printed."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Columns beside the first that hold words."""

    def csv(self) -> str:
        """Give the table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def with_ours(study: RunTable) -> list[ResultTable]:
    """Give tables 1 and 2, as far as there is a score of ours in them."""
    tasks = {row.catalog for row in _plain(study)}
    columns = {task for task, _, _ in paper.GLUE_COLUMNS.values()}
    made = ((glue, columns), (further, paper.FURTHER.keys()))
    return [make(study) for make, known in made if tasks & known]


def glue(study: RunTable) -> ResultTable:
    """Table 1: GLUE by method; ours on dev, with a line more for labelled test sets, the paper's from the server."""
    tasks = {rows[0].catalog: rows for rows in by_task(_plain(study)).values()}
    lines: list[tuple[str, ...]] = []
    for name, line in _LINES.items():
        chosen = {task: best(_of(tasks.get(task, []), line)) for task, _, _ in paper.GLUE_COLUMNS.values()}
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
            f"{_CHOSEN} The mean is over the columns that are filled. "
            "The paper: BERT-large, GLUE's server, and its mean is the server's own total.",
            *_seen(study),
            *_missing({title for title, (task, _, _) in paper.GLUE_COLUMNS.items() if task not in tasks}),
        ),
    )


def further(study: RunTable) -> ResultTable:
    """Table 2: the paper's seventeen further tasks, test accuracy."""
    tasks = {rows[0].catalog: rows for rows in by_task(_plain(study)).values()}
    titles = {"automl": "AutoML", "full": "full", "top": "variable", "adapter": "adapters"}
    lines, ours, theirs = [], dict[str, list[float]](), dict[str, list[float]]()
    for task, scores in paper.FURTHER.items():
        cells = []
        for k, method in enumerate(paper.FURTHER_METHODS):
            told, value = _cell(best(_of(tasks.get(task, []), _Line(method))), "test", "accuracy")
            said = scores[k]
            number, error = said if isinstance(said, tuple) else (said, None)
            if value is not None:
                ours.setdefault(method, []).append(value)
                theirs.setdefault(method, []).append(number)
            cells += [told, f"{number:.1f}" if error is None else f"{number:.1f} ± {error:.1f}"]
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
            f"{_CHOSEN} The paper: BERT-base.",
            "The last line is over the tasks that have a score of ours in that column.",
            *_missing({task for task in paper.FURTHER if task not in tasks}),
        ),
    )


def runs(study: RunTable) -> ResultTable:
    """List every run."""
    columns = ("record", "backbone", "task", "method", "lr", "epochs", "seed", "trained", "metric", "dev", "test", "s")
    lines = [
        (
            row.path.stem,
            row.backbone,
            row.task,
            row.label + ("" if row.plain else "*"),
            f"{row.lr:g}" if row.lr is not None else _DASH,
            str(row.epochs or _DASH),
            str(row.seed),
            f"{row.trained:,}",
            row.metric,
            *(f"{100 * score:.2f}" if score is not None else _DASH for score in (row.dev, row.test)),
            f"{row.record.get('seconds', 0):.0f}",
        )
        for row in sorted(study.rows, key=lambda row: (row.backbone, row.task, row.method, row.option or 0, row.seed))
    ]
    return ResultTable(
        "runs",
        "All runs",
        columns,
        tuple(lines),
        ("* a variant: other layers, sites, initialisation, pruned.",),
        ("backbone", "task", "method", "metric"),
    )


def smaller(study: RunTable) -> ResultTable:
    """List what automatic size and pruning came to."""
    lines = []
    for row in study.rows:
        if sizing := row.record.get("sizing"):
            lines.append((row.record["package"], "size auto", sizing["reason"]))
        if pruned := row.record.get("pruned"):
            told = f"without layers {', '.join(map(str, pruned['removed']))}: {pruned['metric']} "
            told += f"{100 * pruned['before']:.2f} before, {100 * pruned['after']:.2f} after"
            lines.append((row.record["package"], "pruned", told))
    columns = ("package", "how", "what came of it")
    return ResultTable("smaller", "Automatic size and pruning", columns, tuple(lines), words=columns)


def _plain(study: RunTable) -> Iterable[RunRow]:
    return (row for row in study.rows if row.plain)


def _of(rows: Iterable[RunRow], line: _Line) -> list[RunRow]:
    return [row for row in rows if line.has(row)]


def _cell(rows: Sequence[RunRow], split: str, metric: str) -> tuple[str, float | None]:
    """Print a mean over seeds, and give it."""
    values = [_value(row, split, metric) for row in rows]
    if not values or any(value is None for value in values):
        return _DASH, None
    found = mean([100 * value for value in values if value is not None])
    return f"{found.mean:.1f}" + ("" if found.sem is None else f" ± {found.sem:.1f}"), found.mean


def _value(row: RunRow, split: str, metric: str) -> float | None:
    scores: Any = row.record["metrics"].get(split)
    if not isinstance(scores, Mapping):
        return None
    value = scores.get(metric, scores.get(row.metric))
    return float(value) if value is not None else None


def _share(chosen: Sequence[Sequence[RunRow]]) -> str:
    shares = [100 * mine[0].trained / mine[0].encoder for mine in chosen if mine[0].encoder]
    if not shares:
        return _DASH
    share = fmean(shares)
    return f"{share:.2f} %" if share >= 0.01 or not share else f"{share:.1g} %"


def _average(cells: Mapping[str, tuple[str, float | None]]) -> str:
    return _mean([value for _, value in cells.values() if value is not None])


def _mean(values: Sequence[float] | None) -> str:
    return f"{fmean(values):.1f} ({len(values)})" if values else _DASH


def _seen(study: RunTable) -> list[str]:
    """Say which tasks an encoder is no stranger to."""
    known = {name: SOURCES[name].seen for name in study.backbones if name in SOURCES and SOURCES[name].seen}
    return [
        f"{name} is a sentence encoder trained on {seen}, among others: MNLI, RTE, QNLI and QQP are not new to it."
        for name, seen in known.items()
    ]


def _missing(names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"No records of: {', '.join(found)}."] if found else []
