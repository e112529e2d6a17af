"""Figures: columns of numbers as matplotlib drawings for print, with their CSV. Needs the extra `plot`.

The numbers come from `series`, never from records; the parts of a drawing are in `plotting`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterbank.analysis import series
from adapterbank.analysis.confidence_plots import draw_coverage, draw_reliability
from adapterbank.analysis.method_plots import draw_totals, draw_ways
from adapterbank.analysis.plotting import (
    LOOKS,
    STYLE,
    add_note,
    draw_heatmap,
    draw_level,
    draw_line,
    floats,
    form_name,
    look,
    make_panels,
    metric_name,
    ordered,
    plotting,
    points,
    rank,
    split,
    with_legend,
)
from adapterbank.analysis.run_table import RunTable
from adapterbank.analysis.series import Data
from adapterbank.analysis.titles import task_title
from adapterbank.analysis.ways import ways
from adapterbank.storage import files
from adapterbank.studies.selection import RULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = 6
"""The largest number of tasks drawn side by side; the CSV has all."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its numbers."""

    name: str
    title: str
    data: Data = field(repr=False)
    figure: Figure | None = field(default=None, repr=False)
    missing: str = ""
    """Why there is no figure."""
    caption: str = ""
    """The meaning of its points, lines and bars."""
    own: bool = False
    """Whether it shows any study, and is not one of the paper's figures."""

    def csv(self) -> str:
        """Return the numbers as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(
            text, list(dict.fromkeys(key for line in self.data for key in line)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(self.data)
        return text.getvalue()

    def svg(self) -> bytes:
        """Return the figure as SVG; equal numbers give equal bytes."""
        return self._bytes("svg", metadata={"Date": None})

    def _bytes(self, format: str, **options: Any) -> bytes:
        assert self.figure is not None
        with plotting().rc_context(STYLE):
            found = io.BytesIO()
            self.figure.savefig(found, format=format, **options)
        return found.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write CSV, SVG and PNG files into a folder and return their paths; none if there is no figure."""
        if self.figure is None:
            return []
        formats = {"csv": self.csv().encode(), "svg": self.svg(), "png": self._bytes("png", dpi=300)}
        for ending, data in formats.items():
            files.atomic_write(folder / f"{self.name}.{ending}", data)
        return [folder / f"{self.name}.{ending}" for ending in formats]


def draw_all(study: RunTable) -> list[Drawing]:
    """Draw every figure for which a study has numbers, one encoder after the other."""
    found = []
    rule = RULES[study.by].text
    for kind, backbone, part in _parts(study):
        name = kind.title + (f" ({Path(backbone).name})" if backbone else "")
        data = kind.numbers(part)
        few = series.few_sentence(data, _PANELS if kind.panels else None)
        with plotting().rc_context(STYLE):
            figure = kind.draw(data, part) if data else None
            if figure and few:
                add_note(figure, few)
        missing = "" if data else f"needs {kind.need}"
        caption = " ".join(filter(None, (kind.caption.format(rule=rule), few)))
        found.append(Drawing(_name(kind, study, backbone), name, data, figure, missing, caption, kind.own))
    return found


def figure_data(study: RunTable) -> dict[str, Data]:
    """Return the numbers of every figure by its name, without drawing it; empty for a figure without numbers."""
    return {_name(kind, study, backbone): kind.numbers(part) for kind, backbone, part in _parts(study)}


def _parts(study: RunTable) -> Iterator[tuple[_FigureKind, str, RunTable]]:
    """Yield each kind of figure for each encoder, with the runs of that encoder."""
    for backbone in study.backbones or [""]:
        part = study.of(backbone)
        for kind in _FIGURES:
            yield kind, backbone, part


def _name(kind: _FigureKind, study: RunTable, backbone: str) -> str:
    return kind.name + (study.suffix(backbone) if backbone else "")


# --- the figures --------------------------------------------------------------------------------------------


def _tradeoff(data: Data, suites: Sequence[tuple[str, str]]) -> Figure:
    here = [(suite, title) for suite, title in suites if any(line["suite"] == suite for line in data)]
    figure, axes = make_panels(len(here), width=4.2, height=3.3)
    for axis, (suite, title) in zip(axes, here, strict=True):
        mine = [line for line in data if line["suite"] == suite]
        for method, lines in split(mine, "method"):
            for _, comparable in split(lines, "over"):
                _draw_quantiles(axis, method, comparable, most=max(floats(mine, "tasks")))
        axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="trained parameters per task", title=f"{title}: {_counted_tasks(mine)}")
        axis.set_ylabel("score − full fine-tuning (points)")
    return with_legend(figure, axes)


def _draw_quantiles(axis: Axes, method: str, lines: Data, *, most: float) -> None:
    """Draw the points of a method over the same tasks, hollow if these are not all tasks of the panel."""
    colour, marker, name = look(method)
    x, low, middle, high = (floats(lines, key) for key in ("trained", "p20", "p50", "p80"))
    if not any(x):
        draw_level(axis, method, middle)
        return
    inside = colour if lines[0]["tasks"] == most else "white"
    axis.plot(x, middle, color=colour, marker=marker, markerfacecolor=inside, label=name, zorder=3)
    if len(x) > 1:
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        bars = [[middle[0] - low[0]], [high[0] - middle[0]]]
        axis.errorbar(x, middle, yerr=bars, color=colour, capsize=3)


def _counted_tasks(lines: Data) -> str:
    """Return the number of tasks per point, a range if some methods or sizes were run on fewer tasks."""
    counts = {int(line["tasks"] or 0) for line in lines}
    few, many = min(counts), max(counts)
    return f"{many} task{'s' * (many > 1)}" if few == many else f"{few} to {many} tasks per point"


def _sizes(data: Data, _: RunTable) -> Figure:
    return _by_task(data, "trained", "trained parameters per task")


def _rates(data: Data, _: RunTable) -> Figure:
    figure = _by_task(data, "lr", "peak learning rate")
    values = sorted({float(line["lr"] or 0) for line in data})
    for axis in figure.axes:
        axis.set_xticks(values, [_power(value) for value in values], rotation=60, fontsize=8)
        axis.minorticks_off()
    return figure


def _power(value: float) -> str:
    """Return a learning rate as text: 3e-4, 1.5e-4."""
    digits, power = f"{value:.6e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _by_task(data: Data, place: str, label: str) -> Figure:
    tasks = ordered({str(line["task"]) for line in data})[:_PANELS]
    figure, axes = make_panels(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        mine = [line for line in data if line["task"] == task]
        for method, lines in split(mine, "method"):
            lines = sorted(lines, key=lambda line: float(line[place] or 0))
            if any(floats(lines, place)):
                draw_line(axis, method, lines, place, form_name(method, lines))
            else:
                draw_level(axis, method, floats(lines, "dev"))
        axis.set(xscale="log", xlabel=label, ylabel=f"{metric_name(mine[0]['metric'])}, dev", title=task_title(task))
    return with_legend(figure, axes)


def _curves(data: Data, value: str) -> Figure:
    tasks = ordered({str(line["task"]) for line in data})[:_PANELS]
    figure, axes = make_panels(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        mine = [line for line in data if line["task"] == task]
        for method, lines in split(mine, "method"):
            colour, marker, name = look(method)
            axis.plot(floats(lines, "epoch"), floats(lines, value), color=colour, marker=marker, label=name)
        what = "training loss" if value == "loss" else f"{metric_name(mine[0]['metric'])}, dev"
        axis.set(xlabel="epoch", ylabel=what, title=task_title(task))
        axis.locator_params(axis="x", integer=True)
    return with_legend(figure, axes)


def _ablation(data: Data, study: RunTable) -> Figure:
    found = sorted(study.ablations, key=lambda one: rank(one["task"]["name"]))[:_PANELS]
    many = max(len(one["layers"]) for one in found) > 6
    figure, axes = make_panels(len(found), width=5.0 if many else 3.9, height=4.3 if many else 3.4)
    for axis, one in zip(axes, found, strict=True):
        metric = "accuracy" if "accuracy" in one["whole"] else one["metric"]
        drawn = draw_heatmap(axis, one, metric)
        name = f"{task_title(one['task']['name'])}: {metric} {100 * one['whole'][metric]:.1f} with all adapters"
        axis.set(xlabel="last layer without adapters", ylabel="first layer without adapters", title=name)
        figure.colorbar(drawn, ax=axis, shrink=0.85).set_label(f"change of {metric} (%)")
    return figure


def _sigmas(data: Data, _: RunTable) -> Figure:
    figure, (axis,) = make_panels(1, width=6, height=3.2)
    for k, (task, lines) in enumerate(split(data, "task")):
        colour, marker = list(LOOKS.values())[k % len(LOOKS)][:2]
        lines = sorted(lines, key=lambda line: float(line["sigma"] or 0))
        x, y, error = points(lines, "sigma")
        axis.errorbar(
            x,
            y,
            yerr=error,
            color=colour,
            marker=marker,
            capsize=2,
            label=f"{task_title(task)} ({metric_name(lines[0]['metric'])})",
        )
    axis.set(xscale="log", xlabel="σ of the initial adapter weights", ylabel="score on dev")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


_CHOSEN = "If several settings share a place, it shows {rule}."
_BARS = f"Mean over seeds; bars: ± the standard error of the mean, none for a single seed. {_CHOSEN}"
_BANDS = (
    "Points: the median across tasks; bands and bars: the 20th to 80th percentile. Lines join points over the same "
    "tasks; hollow points are over fewer tasks than the others of a panel. GLUE and SQuAD are scored on dev, "
    f"other tasks on test if it has labels. {_CHOSEN}"
)


@dataclass(frozen=True)
class _FigureKind:
    """One kind of figure."""

    name: str
    title: str
    numbers: Callable[[RunTable], Data]
    draw: Callable[[Data, RunTable], Figure]
    need: str
    """The runs that it requires."""
    caption: str
    """With `{rule}` in place of the text of the rule by which settings are chosen."""
    own: bool = False
    """See `Drawing.own`."""
    panels: bool = True
    """Whether each task has a panel of its own, of which some may be left out."""


_EPOCHS = "Mean over the seeds of {rule}, by method. The best epoch on dev is kept."
_FIGURES = (
    _FigureKind(
        "curves",
        "Dev score by epoch",
        series.curves,
        lambda data, _: _curves(data, "dev"),
        "runs with epochs",
        _EPOCHS,
        own=True,
    ),
    _FigureKind(
        "losses",
        "Training loss by epoch",
        series.curves,
        lambda data, _: _curves(data, "loss"),
        "runs with epochs",
        _EPOCHS,
        own=True,
    ),
    _FigureKind(
        "fig1",
        "Fig. 1: trained parameters against score, all tasks",
        lambda study: series.tradeoff(study, ["all"]),
        lambda data, _: _tradeoff(data, [("all", "all tasks")]),
        "runs of 'full' and of another method on the same task",
        _BANDS,
    ),
    _FigureKind(
        "fig3",
        "Fig. 3: trained parameters against score, by suite",
        lambda study: series.tradeoff(study, ["further", "GLUE"]),
        lambda data, _: _tradeoff(data, [("further", "further tasks"), ("GLUE", "GLUE (dev)")]),
        "runs of 'full' and of another method on the same task",
        _BANDS,
    ),
    _FigureKind(
        "fig4",
        "Fig. 4: score against trained parameters",
        series.sizes,
        _sizes,
        "three sizes of adapters or top layers",
        _BARS,
    ),
    _FigureKind(
        "fig5",
        "Fig. 5: SQuAD F1 against trained parameters",
        lambda study: series.sizes(study, spans=True),
        _sizes,
        "three sizes on a span task",
        _BARS,
    ),
    _FigureKind(
        "fig6-ablation",
        "Fig. 6: adapters removed by span of layers",
        series.ablations,
        _ablation,
        "adapterbank ablate",
        "Each cell: the change of the score, in per cent, without the adapters of all layers from the row's to the "
        "column's, without retraining. Zero is no change; a positive change is an improvement.",
    ),
    _FigureKind(
        "fig6-sigma", "Fig. 6: initialisation", series.sigmas, _sigmas, "two values of --sigma on one task", _BARS
    ),
    _FigureKind("fig7", "Fig. 7: learning rate", series.rates, _rates, "two learning rates on one task", _BARS),
    _FigureKind(
        "reliability",
        "Confidence: right answers by probability",
        series.reliability,
        lambda data, _: draw_reliability(data, _PANELS),
        "runs of a task with probabilities, by this release",
        "Points: answers of a range of probabilities, larger for more rows. On the dotted line, as many are right as "
        "the probability says; below it, answers are too certain. All seeds of {rule}; test if it was scored.",
        own=True,
    ),
    _FigureKind(
        "coverage",
        "Confidence: right answers against the rows that are answered",
        series.coverage,
        lambda data, _: draw_coverage(data, _PANELS),
        "runs of a task with probabilities, by this release",
        "The share of right answers among the most certain rows, as predict --abstain would leave them. Of multi-label "
        "tasks, all labels of a row must be right. The mean over seeds of {rule}; test if it was scored.",
        own=True,
    ),
    _FigureKind(
        "ways",
        "Ways to train, against the plain one",
        ways,
        lambda data, _: draw_ways(data),
        "runs with --start-from, --on, --fuse, --mix, --average or a size such as 64to32, and plain ones",
        "Small points: a task, the mean difference of runs with the same seed from plain runs of that size; of fused "
        "tasks, from the best plain adapters. Large points: the mean over tasks; bars: ± its standard error over "
        "seeds. {rule}.",
        own=True,
        panels=False,
    ),
    _FigureKind(
        "totals",
        "Parameters of all tasks together",
        series.totals,
        lambda data, _: draw_totals(data),
        "any run",
        "The parameters of so many tasks together, in units of the encoder, if each task adds the average of these "
        "runs. Best: the size, rank or number of layers that is best on dev for each task. AutoML needs no encoder.",
        own=True,
    ),
)
