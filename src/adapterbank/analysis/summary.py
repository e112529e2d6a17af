"""A study as its own tables: scores with intervals, settings, cost, notes. Compares with no paper, draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean, median
from typing import Any

from adapterbank.analysis.plotting import rank
from adapterbank.analysis.run_table import RunRow, RunTable, by_setting, by_task, uses_encoder
from adapterbank.analysis.tables import ResultTable
from adapterbank.analysis.titles import task_title
from adapterbank.config import Config
from adapterbank.studies.selection import RULES, mean

_DASH = "–"
_LEVEL = 0.95
_SHARES = ("accuracy", "subset_accuracy", "exact_match")
"""Metrics that are the share of rows that are right, so that their rows alone give an interval."""
_SIGNED = ("matthews", "pearson", "spearman", "pearson_spearman")
"""Metrics that may be below 0."""
_PLACES = ("task", "train", "dev", "test", "data_root", "text", "text_pair", "label", "labels", "kind", "metric")
_NOT_SETTINGS = {*_PLACES, "method", "backbone", "seed", "device"}
"""Options that have columns of their own, or that say where a run took place."""


def own_tables(study: RunTable) -> list[ResultTable]:
    """Return the tables of a study that have rows."""
    made = (scores(study), settings(study), shared(study), cost(study), notes(study))
    return [table for table in made if table.rows]


def scores(study: RunTable) -> ResultTable:
    """Return the scores of the best setting of each method on each task."""
    lines = []
    for task, rows in _tasks(study):
        for method in dict.fromkeys(row.label for row in sorted(rows, key=_order)):
            if best := study.best(row for row in rows if row.label == method):
                lines.append(_score_line(task, best))
    columns = ("task", "method", "seeds", "train rows", "metric", "dev", "dev rows", "test", "test rows", "trained")
    return ResultTable("scores", "Scores", columns, tuple(lines), _score_notes(study), ("task", "method", "metric"))


def _score_line(task: str, best: Sequence[RunRow]) -> tuple[str, ...]:
    first = best[0]
    found = [cell for split in ("dev", "test") for cell in (with_interval(best, split), _rows(first, split))]
    trained = f"{100 * first.trained / first.encoder:.2f} %" if first.encoder and uses_encoder(first) else _DASH
    return task_title(task), first.label, str(len(best)), f"{first.train_rows:,}", first.metric, *found, trained


def _score_notes(study: RunTable) -> tuple[str, ...]:
    found = [f"Scores times 100, of {RULES[study.by].text}. In brackets: a 95 % interval."]
    found.append(
        "Of several seeds it is Student's interval of their mean, which says how much a repetition may differ; of a "
        "single run it is Wilson's, which says how much other rows may differ, and only a share of rows has one."
    )
    seeds = {len(study.best(rows)) for _, rows in _tasks(study)}
    if seeds and max(seeds) < 3:
        found.append("No setting has three seeds or more, so differences between methods may be chance.")
    return tuple(found)


def with_interval(rows: Sequence[RunRow], split: str) -> str:
    """Return the mean score of a setting's runs with its interval, in points."""
    values = [value for row in rows if (value := row.score(split, row.metric)) is not None]
    if not values:
        return _DASH
    found = mean(values)
    lowest = -1 if rows[0].metric in _SIGNED else 0
    bounds = _student(found.mean, found.sem, found.seeds) if found.sem is not None else _wilson(rows[0], split)
    bounds = bounds and (max(lowest, bounds[0]), min(1, bounds[1]))
    return f"{100 * found.mean:.1f}" + (f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]" if bounds else "")


def _student(middle: float, error: float, seeds: int) -> tuple[float, float]:
    from scipy.stats import t

    room = float(t.ppf((1 + _LEVEL) / 2, seeds - 1)) * error
    return middle - room, middle + room


def _wilson(row: RunRow, split: str) -> tuple[float, float] | None:
    from scipy.stats import binomtest

    value, rows = row.score(split, row.metric), _count(row, split)
    if row.metric not in _SHARES or value is None or not rows or not 0 <= value <= 1:
        return None
    bounds = binomtest(round(value * rows), rows).proportion_ci(_LEVEL, "wilson")
    return float(bounds.low), float(bounds.high)


def _count(row: RunRow, split: str) -> int:
    found = row.record["metrics"].get(split)
    return int(found.get("rows") or 0) if isinstance(found, Mapping) else 0


def _rows(row: RunRow, split: str) -> str:
    count = _count(row, split)
    return f"{count:,}" if count else _DASH


def settings(study: RunTable) -> ResultTable:
    """Return every setting by its options that differ within the study, the best on dev first."""
    varied = [name for name, values in _options(study).items() if len(values) > 1]
    lines = []
    for task, rows in _tasks(study):
        groups = [[row for row in group if row.dev is not None] for group in by_setting(rows)]
        groups = sorted((group for group in groups if group), key=lambda group: -fmean(row.dev or 0 for row in group))
        for group in groups:
            config, first = group[0].record["config"], group[0]
            chosen = [_text(config.get(name)) for name in varied]
            lines.append(
                (
                    task_title(task),
                    first.label,
                    *chosen,
                    str(len(group)),
                    with_interval(group, "dev"),
                    _seconds(group),
                )
            )
    columns = ("task", "method", *varied, "seeds", "dev", "s per run")
    note = ("Only options that differ between runs of this study; of a task the best on dev first.",)
    return ResultTable("settings", "Settings", columns, tuple(lines), note, ("task", "method"))


def shared(study: RunTable) -> ResultTable:
    """Return the options that all runs share."""
    lines = [(name, _text(*values)) for name, values in _options(study).items() if len(values) == 1]
    return ResultTable("shared", "Options of all runs", ("option", "value"), tuple(lines), words=("value",))


def _options(study: RunTable) -> dict[str, dict[Any, None]]:
    """Return the values of each option in the study's runs; a run without the option has its default."""
    found: dict[str, dict[Any, None]] = {}
    for field in (field for field in fields(Config) if field.name not in _NOT_SETTINGS):
        for row in study.rows:
            found.setdefault(field.name, {})[row.record["config"].get(field.name, field.default)] = None
    return found


def cost(study: RunTable) -> ResultTable:
    """Return what each method cost: time, parameters, bytes."""
    lines = []
    for method in dict.fromkeys(row.label for row in sorted(study.rows, key=_order)):
        rows = [row for row in study.rows if row.label == method]
        times = [float(row.record.get("seconds") or 0) for row in rows]
        speeds = [float(speed) for row in rows if (speed := row.record.get("examples_per_second"))]
        sizes = [float(size) for row in rows if (size := row.record.get("bytes"))]
        shares = [100 * row.trained / row.encoder for row in rows if row.encoder and uses_encoder(row)]
        lines.append(
            (
                method,
                str(len(rows)),
                _clock(sum(times)),
                f"{median(times):.0f}",
                f"{median(speeds):,.0f}" if speeds else _DASH,
                f"{fmean(row.trained for row in rows):,.0f}",
                f"{fmean(shares):.2f} %" if shares else _DASH,
                f"{fmean(sizes) / 1e6:.1f}" if sizes else _DASH,
            )
        )
    columns = ("method", "runs", "time in all", "s per run", "rows per s", "trained", "of the encoder", "MB per task")
    devices = sorted({str(device) for row in study.rows if (device := (row.record.get("stamp") or {}).get("device"))})
    where = (f"On {', '.join(devices)}. Runs that trained together share its time.",) if devices else ()
    return ResultTable("cost", "Cost", columns, tuple(lines), where)


def notes(study: RunTable) -> ResultTable:
    """Return what the runs noted, each note once for a task."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in study.rows:
        for note in row.record.get("notes") or ():
            found.setdefault((row.task, str(note)), []).append(f"{row.label} seed {row.seed}")
    lines = [(task_title(task), str(len(runs)), runs[0], note) for (task, note), runs in sorted(found.items())]
    columns = ("task", "runs", "such as", "note")
    return ResultTable("notes", "Notes of the runs", columns, tuple(lines), words=("such as", "note"))


def _tasks(study: RunTable) -> list[tuple[str, list[RunRow]]]:
    return sorted(by_task(study.rows).items(), key=lambda item: rank(item[0]))


def _order(row: RunRow) -> tuple[str, tuple[bool, int | str]]:
    return row.method, row.place


def _seconds(rows: Sequence[RunRow]) -> str:
    return f"{median(float(row.record.get('seconds') or 0) for row in rows):.0f}"


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)
