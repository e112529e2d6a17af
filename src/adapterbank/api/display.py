"""What is shown of tasks, runs and scores, as plain text and as HTML without scripts. Knows no torch.

Everything is a list of tables (`ReportTable`), so that a terminal and a notebook show the same. Names, labels and
messages may come from files that others wrote: all cells are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from adapterbank.api.plain_text import LONGEST, escaped, format_count, format_size
from adapterbank.kinds.kind import ReportTable
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import short
from adapterbank.methods import shown_fields
from adapterbank.storage.package import Manifest

TASKS = ["task", "version", "kind", "dev", "metric", "method", "trained", "size", "created"]
_CELL = 'style="text-align: left; vertical-align: top; white-space: pre-wrap"'
_ROWS = 100
"""Rows of a table in a notebook; the object has all of them."""


def to_text(tables: Iterable[ReportTable]) -> str:
    """Return tables as plain text: a title, then columns."""
    return "\n".join(line.rstrip() for table in tables for line in _lines(table))


def to_html(tables: Iterable[ReportTable]) -> str:
    """Return tables as HTML."""
    return f"<div>{''.join(map(_html, tables))}</div>"


def _lines(table: ReportTable) -> Iterable[str]:
    if table.title:
        yield escaped(table.title)
    rows = [[_cell(cell) for cell in row] for row in (table.header, *table.rows) if row]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))


def _html(table: ReportTable) -> str:
    title = f"<p><b>{escape(escaped(table.title))}</b></p>" if table.title else ""
    head = "".join(f"<th {_CELL}>{escape(_cell(cell))}</th>" for cell in table.header)
    rows = "".join(
        f"<tr>{''.join(f'<td {_CELL}>{escape(_cell(cell))}</td>' for cell in row)}</tr>" for row in table.rows[:_ROWS]
    )
    more = f"<p>{len(table.rows) - _ROWS:,} more rows</p>" if len(table.rows) > _ROWS else ""
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return title + (f"<table>{head}<tbody>{rows}</tbody></table>{more}" if rows else "")


def _cell(value: str) -> str:
    return escaped(short(value, LONGEST))


def task_list(found: Sequence[Manifest], backbone: str = "", below: Sequence[Manifest] = ()) -> list[ReportTable]:
    """Return the table of tasks, and what they cost together; `below` are further packages that they stand on."""
    if not found:
        return [ReportTable("There are no tasks yet.")]
    return [ReportTable("", TASKS, [task_row(one) for one in found]), ReportTable(total(found, backbone, below))]


def task_row(m: Manifest) -> list[str]:
    """Return a task's line in a list."""
    metric = m.task["metric"]
    score = m.metrics.get("dev", {}).get(metric)
    method = " ".join([m.method["name"], *(str(value) for value in [*shown_fields(m.method).values()][:1])])
    cells = [m.name, str(m.version), m.task["kind"], "-" if score is None else f"{score:.4f}", metric, method,
             f"{m.params['percent']:.2f} %", format_size(m.bytes), m.created[:10]]  # fmt: skip
    return [short(cell, LONGEST) for cell in cells]


def total(found: Sequence[Manifest], backbone: str, below: Sequence[Manifest] = ()) -> str:
    """Return a sentence that compares the size of all tasks with that of one fine-tuned encoder per task.

    What several tasks stand on counts once, whether it is among the tasks or one of the packages `below`.
    """
    encoder = found[0].params["encoder"]
    each = {(m.name, m.version): m.params["trained"] for m in (*found, *below)}
    times = (encoder + sum(each.values())) / encoder
    return (
        f"{format_count(len(found), 'task')} on {backbone or found[0].backbone['name']}: {times:.2f}× the encoder's "
        f"parameters in total, instead of {len(found)}× with one fine-tuned copy per task"
    )


def manifest_facts(m: Manifest) -> dict[str, str]:
    """Return what is shown of a version, by name, in order."""
    shown = [f"{name} {_plain(value)}" for name, value in shown_fields(m.method).items()]
    made_with = m.fingerprint.get("stamp", {}).get("torch", "unknown")
    recipe = _joined(f"{k} {v}" for k, v in m.recipe.items() if v is not None and not isinstance(v, dict | list))
    return {
        "task": f"{m.name}@{m.version}, {m.task['kind']}, reads {_joined(m.task['text'], ' and ')}",
        "labels": _joined(m.task["labels"]) or "-",
        **_confidence(m.task),
        **{
            f"{s} scores": _joined(f"{k} {v:.4f}" for k, v in got.items() if k != "rows")
            for s, got in m.metrics.items()
        },
        "method": _joined([m.method["name"], *shown]),
        "pooling": m.method["head"]["pooling"],
        "trained": f"{m.params['trained']:,} parameters, {m.params['percent']:.2f} % of the encoder",
        "size": format_size(m.bytes),
        "backbone": f"{m.backbone['name']} ({m.backbone['sha256'][:12]})",
        "recipe": f"{recipe}, seed {m.seed}",
        **_standing(m.requires),
        **_started(m.recipe.get("start_from")),
        **_averaged(m.recipe.get("soup")),
        **_pruned(m.recipe.get("pruned")),
        "data": _joined(f"{s} {d['rows']} rows ({d['sha256'][:12]})" for s, d in m.data.items()),
        "created": f"{m.created} by adapterbank {m.library}, torch {made_with}",
        **{f"note {number}": note for number, note in enumerate(m.notes, 1)},
    }


def _confidence(task: dict[str, Any]) -> dict[str, str]:
    """Return what was fitted on dev after training, if anything was."""
    temperature, thresholds = task.get("temperature"), task.get("thresholds") or []
    parts = [f"temperature {temperature:.2f}"] if temperature else []
    if thresholds:
        chosen = zip(task["labels"], thresholds, strict=False)
        parts.append(f"thresholds {_joined(f'{label} {cut:g}' for label, cut in chosen)}")
    return {"confidence": "; ".join(parts)} if parts else {}


def result(record: Mapping[str, Any]) -> list[ReportTable]:
    """Return what is shown of a run: its scores, its size, its epochs, its notes."""
    metric, params = record["task"]["metric"], record["params"]
    name = record["package"] or f"{record['task']['name']} (no package)"
    scores = [
        [split, *(f"{value:.4f}" for key in (metric, "majority") if (value := found.get(key)) is not None)]
        for split, found in record["metrics"].items()
    ]
    wide = max((len(row) for row in scores), default=0)
    header = ["split", metric, "majority"][:wide]
    share = f" ({params['percent']:.2f} % of the encoder)" if record["package"] else ""
    cost = f"{format_size(record['bytes'])}, {record['seconds']:.0f} s"
    facts = f"{params['trained']:,} trained parameters{share}, {cost}"
    notes = [ReportTable("", (), [["note", note] for note in record["notes"]])] if record["notes"] else []
    rows = [row + ["-"] * (wide - len(row)) for row in scores]
    return [ReportTable(name, header, rows), ReportTable(facts), *notes]


def evaluation(report: Mapping[str, Any], kind: str, labels: Sequence[str]) -> list[ReportTable]:
    """Return what is shown of a task's scores on labelled rows."""
    rows = f" on {format_count(report['rows'], 'row')}" if "rows" in report else ""
    numbers = {name: value for name, value in report.items() if isinstance(value, float)}
    own, intervals = report["metric"], report.get("intervals", {})
    scores = [
        [name, f"{value:.4f}", _interval(intervals.get(name))]
        for name, value in sorted(numbers.items(), key=lambda item: item[0] != own)
    ]
    notes = [ReportTable("", (), [["note", note] for note in report["notes"]])] if report.get("notes") else []
    return [ReportTable(f"{report['task']}{rows}", (), scores), *KINDS[kind].tables(report, labels), *notes]


def _interval(bounds: Sequence[float] | None) -> str:
    return f"95 %: {bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""


def _joined(parts: Iterable[str], between: str = ", ") -> str:
    return between.join(short(part, LONGEST) for part in parts)


def _standing(found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    on = _joined(f"{one['name']}@{one['version']} ({one['weights_sha256'][:12]})" for one in found)
    return {"stands on": on} if found else {}


def _started(found: Mapping[str, Any] | None) -> dict[str, str]:
    return {"started from": f"{found['package']} ({found['weights_sha256'][:12]})"} if found else {}


def _averaged(found: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    return {"average of": _joined(f"{one['package']} ({one['weights_sha256'][:12]})" for one in found)} if found else {}


def _pruned(found: Mapping[str, Any] | None) -> dict[str, str]:
    if not found:
        return {}
    layers = ", ".join(map(str, found["removed"]))
    scores = f"{found['metric']} {found['before']:.4f} before, {found['after']:.4f} after"
    return {"pruned": f"{found.get('from', 'an earlier version')} without the adapters of layers {layers}: {scores}"}


def _plain(value: Any) -> str:
    """Write an option's value as a user would give it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
