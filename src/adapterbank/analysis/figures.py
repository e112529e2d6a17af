"""Figures: columns of numbers to matplotlib drawings with their CSV. Knows `series`, never records; needs extra `plot`.

Made for print; what they are made of is in `panels`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterbank.analysis import series
from adapterbank.analysis.plotting import (
    LOOKS,
    STYLE,
    by_form,
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
from adapterbank.storage import files as storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = 6
"""Tasks drawn side by side at most; the CSV has all."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its numbers; `missing` says why there is none."""

    name: str
    title: str
    data: Data = field(repr=False)
    figure: Figure | None = field(default=None, repr=False)
    missing: str = ""
    caption: str = ""
    """What its points, lines and bars are."""

    def csv(self) -> str:
        """Give the numbers as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(
            text, list(dict.fromkeys(key for line in self.data for key in line)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(self.data)
        return text.getvalue()

    def svg(self) -> bytes:
        """Give the figure as SVG; the same numbers give the same bytes."""
        return self._bytes("svg", metadata={"Date": None})

    def _bytes(self, format: str, **options: Any) -> bytes:
        assert self.figure is not None
        with plotting().rc_context(STYLE):
            found = io.BytesIO()
            self.figure.savefig(found, format=format, **options)
        return found.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write CSV, SVG and PNG into a folder, and give their paths; nothing where there is nothing to draw."""
        if self.figure is None:
            return []
        files = {"csv": self.csv().encode(), "svg": self.svg(), "png": self._bytes("png", dpi=200)}
        for ending, data in files.items():
            storage.atomic_write(folder / f"{self.name}.{ending}", data)
        return [folder / f"{self.name}.{ending}" for ending in files]


def draw_all(study: RunTable) -> list[Drawing]:
    """Draw every figure that a study has numbers for, one encoder after the other."""
    found = []
    for backbone in study.backbones or [""]:
        mine, suffix = study.of(backbone), study.suffix(backbone) if backbone else ""
        title = f" ({Path(backbone).name})" if backbone else ""
        for sort in _FIGURES:
            data = sort.numbers(mine)
            with plotting().rc_context(STYLE):
                figure = sort.draw(data, mine) if data else None
            missing = "" if data else f"needs {sort.need}"
            found.append(Drawing(sort.name + suffix, sort.title + title, data, figure, missing, sort.caption))
    return found


# --- the figures --------------------------------------------------------------------------------------------


def _tradeoff(data: Data, suites: Sequence[tuple[str, str]]) -> Figure:
    here = [(suite, title) for suite, title in suites if any(line["suite"] == suite for line in data)]
    figure, axes = make_panels(len(here), width=4.2, height=3.3)
    for axis, (suite, title) in zip(axes, here, strict=True):
        mine = [line for line in data if line["suite"] == suite]
        for method, lines in split(mine, "method"):
            colour, marker, name = look(method)
            x, low, middle, high = (floats(lines, key) for key in ("trained", "p20", "p50", "p80"))
            if not any(x):
                draw_level(axis, method, middle)
                continue
            axis.plot(x, middle, color=colour, marker=marker, label=name)
            if len(x) > 1:
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            else:
                bars = [[middle[0] - low[0]], [high[0] - middle[0]]]
                axis.errorbar(x, middle, yerr=bars, color=colour, capsize=3)
        axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="trained parameters per task", title=f"{title}: {_counted_tasks(mine)}")
        axis.set_ylabel("score − full fine-tuning (points)")
    return with_legend(figure, axes)


def _counted_tasks(lines: Data) -> str:
    """Say of how many tasks each point is: methods and sizes may have been run on some of them alone."""
    counts = {int(line["tasks"] or 0) for line in lines}
    few, many = min(counts), max(counts)
    return f"{many} task{'s' * (many > 1)}" if few == many else f"{few} to {many} tasks a point"


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
    """Write a learning rate in full: 3e-4, 1.5e-4."""
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
        axis.set(xscale="log", xlabel=label, ylabel=f"{metric_name(mine[0]['metric'])}, dev", title=task)
    return with_legend(figure, axes)


def _ablation(data: Data, study: RunTable) -> Figure:
    found = sorted(study.ablations, key=lambda one: rank(one["task"]["name"]))[:_PANELS]
    many = max(len(one["layers"]) for one in found) > 6
    figure, axes = make_panels(len(found), width=5.0 if many else 3.9, height=4.3 if many else 3.4)
    for axis, one in zip(axes, found, strict=True):
        metric = "accuracy" if "accuracy" in one["whole"] else one["metric"]
        drawn = _heatmap(axis, one, metric)
        title = f"{one['package']}: {metric} {100 * one['whole'][metric]:.1f} with all adapters"
        axis.set(xlabel="last layer without adapters", ylabel="first layer without adapters", title=title)
        figure.colorbar(drawn, ax=axis, shrink=0.85).set_label(f"change of {metric} (%)")
    return figure


def _heatmap(axis: Axes, one: Mapping[str, Any], metric: str) -> Any:
    """Draw a span's change as a cell, with its number."""
    layers = one["layers"]
    cells = {(s["first"], s["last"]): s["change"][metric] for s in one["spans"] if s["change"][metric] is not None}
    grid = [[cells.get((first, last), float("nan")) for last in layers] for first in layers]
    deepest, highest = min([-1.0, *cells.values()]), max([0.0, *cells.values()])
    drawn = axis.imshow(grid, cmap="viridis", vmin=deepest, vmax=highest, origin="upper")
    axis.grid(False)
    axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    size = 6.5 if len(layers) > 6 else 8
    for (first, last), change in cells.items():
        colour = "white" if change < (deepest + highest) / 2 else "black"
        text = f"{round(change, 1) + 0.0:.{0 if change < -9.95 and len(layers) > 6 else 1}f}"  # no minus before a zero
        axis.text(layers.index(last), layers.index(first), text, ha="center", va="center", size=size, color=colour)
    return drawn


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
            label=f"{task} ({metric_name(lines[0]['metric'])})",
        )
    axis.set(xscale="log", xlabel="σ of the initial adapter weights", ylabel="score on dev")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _totals(data: Data, _: RunTable) -> Figure:
    figure, (axis,) = make_panels(1, width=6, height=3.2)
    for (method, form), lines in by_form(data):
        colour, marker, name = look(method)
        dash = "--" if (method, form) == ("adapter", "best") else "-"
        label = f"{name}, {form}" if form == "best" else f"{name} {form}".strip()
        x, y = floats(lines, "tasks"), floats(lines, "encoders")
        axis.plot(x, y, color=colour, marker=marker, markevery=3, linestyle=dash, label=label)
    axis.set(xlabel="tasks", ylabel="parameters of all tasks (× encoder)", yscale="log", xlim=(1, series.SHARED_TASKS))
    low, high = axis.get_ylim()
    low, high = min(low, 0.95), max(high, 2.1)  # one encoder and two are always in sight
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks([1, 5, 10, 15, 20])
    figure.legend(loc="outside right upper", frameon=False)
    return figure


_CHOSEN = "Of several settings in one place the best on dev is drawn, among those with the most seeds."
_BARS = f"Mean over seeds; bars: ± the standard error of the mean, none for a single seed. {_CHOSEN}"
_BANDS = (
    "Points: the median across tasks; bands and bars: their 20th to 80th percentile. GLUE and SQuAD are scored on dev, "
    f"other tasks on test where it has labels. {_CHOSEN}"
)


@dataclass(frozen=True)
class _Sort:
    """One sort of figure."""

    name: str
    title: str
    numbers: Callable[[RunTable], Data]
    draw: Callable[[Data, RunTable], Figure]
    need: str
    """What must be there."""
    caption: str


_FIGURES = (
    _Sort(
        "fig1",
        "Fig. 1: trained parameters against score, all tasks",
        lambda study: series.tradeoff(study, ["all"]),
        lambda data, _: _tradeoff(data, [("all", "all tasks")]),
        "runs of 'full' and of another method on the same task",
        _BANDS,
    ),
    _Sort(
        "fig3",
        "Fig. 3: trained parameters against score, by suite",
        lambda study: series.tradeoff(study, ["further", "GLUE"]),
        lambda data, _: _tradeoff(data, [("further", "further tasks"), ("GLUE", "GLUE (dev)")]),
        "runs of 'full' and of another method on the same task",
        _BANDS,
    ),
    _Sort(
        "fig4",
        "Fig. 4: score against trained parameters",
        series.sizes,
        _sizes,
        "three sizes of adapters or top layers",
        _BARS,
    ),
    _Sort(
        "fig5",
        "Fig. 5: SQuAD F1 against trained parameters",
        lambda study: series.sizes(study, spans=True),
        _sizes,
        "three sizes on a span task",
        _BARS,
    ),
    _Sort(
        "fig6-ablation",
        "Fig. 6: adapters removed by span of layers",
        series.ablations,
        _ablation,
        "adapterbank ablate",
        "Each cell: the score without the adapters of all layers from the row's to the column's, nothing trained "
        "again, as change in per cent of the score with all of them. Zero is no change; above zero is better.",
    ),
    _Sort("fig6-sigma", "Fig. 6: initialisation", series.sigmas, _sigmas, "two values of --sigma on one task", _BARS),
    _Sort("fig7", "Fig. 7: learning rate", series.rates, _rates, "two learning rates on one task", _BARS),
    _Sort(
        "totals",
        "Parameters of all tasks together",
        series.totals,
        _totals,
        "any run",
        "What so many tasks take together, in encoders, if each adds what the tasks of these runs added on average. "
        "Best: the size, rank or number of layers that is best on dev for each task. AutoML needs no encoder.",
    ),
)
