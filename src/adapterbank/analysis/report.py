"""One HTML page about a study: tables, figures, every record, how to reproduce it. Computes no numbers."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from adapterbank import __version__
from adapterbank.analysis import summary, tables
from adapterbank.analysis.figures import Drawing
from adapterbank.analysis.run_table import RunTable
from adapterbank.analysis.tables import ResultTable
from adapterbank.config import Config

_FOLDED, _FOLDED_ROWS = ("settings", "shared", "notes"), 12
"""Tables that are folded, and from how many rows on."""
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>adapterbank: report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.35rem; margin-top: 2.4rem; } h3 { font-size: 1.15rem; margin-top: 1.8rem; }
h4 { font-size: 1rem; margin: 1.4rem 0 .6rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th.word, td.word { text-align: left; } thead th { border-bottom: 2px solid #555; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
tr.paper td, tr.paper td:first-child { color: #555; background: #f6f6f6; }
.wide { overflow-x: auto; } figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
.note, figcaption { color: #555; font-size: 13px; } .missing { color: #7a4b00; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: 12px; } summary { cursor: pointer; }
nav { background: #f6f6f6; padding: .8rem 1.2rem; border-radius: 6px; } nav h2 { font-size: 1rem; margin: 0; }
nav ul { margin: .3rem 0; padding-left: 1.2rem; } nav > ul { columns: 18rem; } nav li { break-inside: avoid; }
table[id^=notes] td.word:last-child { white-space: normal; min-width: 24rem; }
@media print { details { display: none; } }
@media (max-width: 700px) { figure img { max-width: none; } }
</style>
</head>
<body>
<h1>adapterbank: report</h1>
<p>$summary</p>
<nav aria-label="Contents"><h2>Contents</h2>$contents</nav>
$body
</body>
</html>
""")


@dataclass(frozen=True)
class _Part:
    """A part of the page: its tables and figures, each with an anchor and a title for the contents."""

    key: str
    title: str
    items: Sequence[tuple[str, str, str]]
    """Anchor, title, HTML."""

    def html(self) -> str:
        """Return the part with its heading."""
        return f'<h2 id="{self.key}">{self.title}</h2>\n' + "".join(text for _, _, text in self.items)

    def contents(self) -> str:
        """Return its entry in the contents."""
        inner = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in self.items if key)
        return f'<li><a href="#{self.key}">{self.title}</a>{f"<ul>{inner}</ul>" if inner else ""}</li>'


def page(study: RunTable, drawings: Sequence[Drawing], folders: Sequence[str]) -> str:
    """Return the page of a study as HTML: the study itself first, then what can be compared with the paper."""
    own, papers = ([one for one in drawings if one.own is mine] for mine in (True, False))
    parts = [
        _Part("study", "This study", _by_backbone(study, summary.own_tables)),
        _Part("own-figures", "Curves, confidence and size", [_figure(one) for one in own if one.figure]),
        _Part("tables", "The paper's tables", _by_backbone(study, tables.with_ours)),
        _Part("figures", "The paper's figures", [_figure(one) for one in papers if one.figure]),
    ]
    parts = [part for part in parts if part.items] or [_Part("study", "This study", [("", "", _none())])]
    parts.append(_Part("reproduce", "How to reproduce", [("", "", _not_drawn(drawings) + _reproduce(study, folders))]))
    parts.append(_Part("every-run", "Runs", [("", "", _table(tables.smaller(study)) + _runs(study))]))
    contents = f"<ul>{''.join(part.contents() for part in parts)}</ul>"
    body = "".join(part.html() for part in parts)
    return _PAGE.substitute(summary=escape(_summary(study)), contents=contents, body=body)


def _summary(study: RunTable) -> str:
    tasks = {row.task for row in study.rows}
    left_out = f" {_counted(len(study.problems), 'file')} left out: see How to reproduce." if study.problems else ""
    return (
        f"{_counted(len(study.rows), 'run')}, {_counted(len(tasks), 'task')}, on "
        f"{', '.join(study.backbones) or 'no encoder'}, {_counted(len(study.ablations), 'ablation')}. Every number is "
        f"computed from the records below.{left_out} Written by adapterbank {__version__}."
    )


def _by_backbone(study: RunTable, make: Callable[[RunTable], Sequence[ResultTable]]) -> list[tuple[str, str, str]]:
    """Return the tables of each encoder, which is named if there are several."""
    found = []
    for name in study.backbones:
        suffix, several = study.suffix(name), len(study.backbones) > 1
        for table in make(study.of(name)):
            shown = replace(table, title=f"{table.title} ({Path(name).name})") if several else table
            found.append((f"{table.name}{suffix}", shown.title, _folded_table(shown, suffix)))
    return found


def _folded_table(table: ResultTable, suffix: str) -> str:
    """Return a table; a long one of options, settings or notes is folded."""
    text = _table(table, suffix)
    if table.name not in _FOLDED or len(table.rows) <= _FOLDED_ROWS:
        return text
    return f"<details><summary>{escape(table.title)}: {_counted(len(table.rows), 'row')}</summary>{text}</details>\n"


def _not_drawn(drawings: Sequence[Drawing]) -> str:
    missing = [f"{one.title}: {one.missing}" for one in drawings if one.missing]
    if not missing:
        return ""
    items = "".join(f'<li class="missing">{escape(one)}</li>' for one in missing)
    return f"<details><summary>Figures that are not drawn: {len(missing)}</summary><ul>{items}</ul></details>\n"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(table: ResultTable, suffix: str = "", linked: bool = False) -> str:
    """Return a table as HTML, with links to records in the first cells if `linked`; empty for a table without rows."""
    if not table.rows:
        return ""
    words = [k for k, name in enumerate(table.columns) if k == 0 or name in table.words]
    head = _line("th", list(map(escape, table.columns)), words)
    rows = "".join(f"<tr{_kind(row)}>{_line('td', _cells(row, linked), words)}</tr>\n" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>\n' for note in table.notes)
    return (
        f'<h4>{escape(table.title)}</h4>\n<div class="wide"><table id="{table.name}{suffix}">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n{notes}"
    )


def _cells(row: Sequence[str], linked: bool) -> list[str]:
    first = f'<a href="#{escape(_anchor(row[0]))}">{escape(row[0])}</a>' if linked else escape(row[0])
    return [first, *map(escape, row[1:])]


def _line(tag: str, cells: Sequence[str], words: Sequence[int]) -> str:
    """Return a row of cells, with text aligned left and numbers aligned right."""
    marks = (' class="word"' if k in words else "" for k in range(len(cells)))
    return "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True))


def _kind(row: Sequence[str]) -> str:
    return ' class="paper"' if row[0].startswith("paper:") else ""


def _figure(drawing: Drawing) -> tuple[str, str, str]:
    image = f"data:image/svg+xml;base64,{base64.b64encode(drawing.svg()).decode()}"
    numbers = f"data:text/csv;base64,{base64.b64encode(drawing.csv().encode()).decode()}"
    text = (
        f'<figure id="{drawing.name}"><h3>{escape(drawing.title)}</h3>'
        f'<div class="wide"><img alt="{escape(drawing.title)}" src="{image}"></div>'
        f"<figcaption>{escape(drawing.caption)} Numbers: "
        f'<a download="{drawing.name}.csv" href="{numbers}">{drawing.name}.csv</a></figcaption></figure>\n'
    )
    return drawing.name, drawing.title, text


def _reproduce(study: RunTable, folders: Sequence[str]) -> str:
    words = shlex.join(word for folder in folders for word in ("--records", folder))
    problems = "".join(f'<p class="missing">{escape(text)}</p>\n' for text in study.problems)
    return (
        f"<pre>adapterbank report {escape(words)} --out report.html\n"
        f"adapterbank figures {escape(words)} --out figures</pre>"
        "<p>To repeat a run, use the options in the <code>config</code> of its record.</p>\n" + problems
    )


def _runs(study: RunTable) -> str:
    """Return the list of runs, and every record and ablation in full."""
    found = [
        _details(row.path.stem, f"{row.task}, {row.label}, seed {row.seed}", row.record, command(row.record["config"]))
        for row in study.rows
    ]
    found += [_details(f"{one['package']}-{k}", "ablation", one) for k, one in enumerate(study.ablations, 1)]
    return _table(tables.runs(study), linked=True) + _notes(study) + "<h4>Records</h4>\n" + "".join(found)


def _notes(study: RunTable) -> str:
    """Return what runs told about their data and results, each sentence once, with links to the runs."""
    told: dict[str, list[str]] = {}
    for row in study.rows:
        for note in row.record.get("notes") or ():
            name, anchor = escape(f"{row.task} {row.label} seed {row.seed}"), escape(_anchor(row.path.stem))
            told.setdefault(note, []).append(f'<a href="#{anchor}">{name}</a>')
    rows = "".join(f"<li>{escape(note)} <small>({', '.join(links)})</small></li>\n" for note, links in told.items())
    return f'<h4>Notes</h4>\n<ul id="notes">\n{rows}</ul>\n' if rows else ""


def _details(name: str, what: str, value: Mapping[str, Any], again: str = "") -> str:
    how = f"<p><code>{escape(again)}</code></p>" if again else ""
    # The anchor is inside, so that a browser that follows the link opens the element around it.
    return (
        f"<details><summary>{escape(name)}: {escape(what)}</summary>"
        f'<div id="{escape(_anchor(name))}">{how}'
        f"<pre>{escape(json.dumps(value, indent=1, ensure_ascii=False))}</pre></div></details>\n"
    )


def command(config: Mapping[str, Any]) -> str:
    """Return the command that trains a config again; data that was given from Python is not part of it."""
    words = ["adapterbank", "train", "--bank", "bank"]
    for field in fields(Config):
        value, flag = config.get(field.name), field.name.replace("_", "-")
        if value is None or (value == field.default and field.name != "backbone") or field.name not in config:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def _anchor(name: str) -> str:
    return f"record-{name}"


def _none() -> str:
    return '<p class="missing">There are no records of this.</p>\n'
