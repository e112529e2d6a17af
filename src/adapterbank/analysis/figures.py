"""Figures: columns of numbers to matplotlib drawings with their CSV. Knows `series`, never records; needs extra `plot`.

Made for print: one colour, marker and line a method, of a palette that the colour-blind tell apart (Okabe and Ito).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterbank import storage
from adapterbank.analysis import series
from adapterbank.analysis.rows import Study
from adapterbank.analysis.series import Data
from adapterbank.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS: Mapping[str, tuple[str, str, str]] = {
    "adapter": ("#0072B2", "o", "adapters"),
    "full": ("#000000", "s", "full fine-tuning"),
    "top": ("#D55E00", "^", "top layers (variable)"),
    "layernorm": ("#009E73", "D", "LayerNorm only"),
    "lora": ("#CC79A7", "v", "LoRA"),
    "bitfit": ("#E69F00", "P", "BitFit"),
    "feature": ("#56B4E9", "X", "feature (head only)"),
    "automl": ("#777777", "p", "AutoML, no encoder"),
}
"""Method -> colour, marker, name."""
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.4,
    "svg.hashsalt": "adapterbank",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
}
_METRICS = {
    "accuracy_f1": "accuracy and F1",
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews": "Matthews",
    "pearson_spearman": "Pearson, Spearman",
    "span_f1": "F1",
    "spearman": "Spearman",
}
"""Metric -> its name on an axis, where that is not its own."""
_PANELS = 6
"""Tasks drawn side by side at most; the CSV has all."""
_FIRST = ("glue-mnli", "glue-cola")
"""Tasks that the paper drew come first."""


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
        with _plotting().rc_context(_STYLE):
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


def draw_all(study: Study) -> list[Drawing]:
    """Draw every figure that a study has numbers for, one encoder after the other."""
    found = []
    for backbone in study.backbones or [""]:
        mine, suffix = study.of(backbone), study.suffix(backbone) if backbone else ""
        title = f" ({Path(backbone).name})" if backbone else ""
        for sort in _FIGURES:
            data = sort.numbers(mine)
            with _plotting().rc_context(_STYLE):
                figure = sort.draw(data, mine) if data else None
            missing = "" if data else f"needs {sort.need}"
            found.append(Drawing(sort.name + suffix, sort.title + title, data, figure, missing, sort.caption))
    return found


def _plotting() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InputError("Figures need matplotlib: pip install 'adapterbank[plot]'.") from None
    return matplotlib


def _panels(count: int, width: float = 3.3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(3, count) if count != 4 else 2
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.2, width * columns), height * rows))
    axes = [figure.add_subplot(rows, columns, k + 1) for k in range(count)]
    return figure, axes


# --- the figures --------------------------------------------------------------------------------------------


def _tradeoff(data: Data, suites: Sequence[tuple[str, str]]) -> Figure:
    here = [(suite, title) for suite, title in suites if any(line["suite"] == suite for line in data)]
    figure, axes = _panels(len(here), width=4.2, height=3.3)
    for axis, (suite, title) in zip(axes, here, strict=True):
        mine = [line for line in data if line["suite"] == suite]
        for method, lines in _split(mine, "method"):
            colour, marker, name = _look(method)
            x, low, middle, high = (_floats(lines, key) for key in ("trained", "p20", "p50", "p80"))
            if not any(x):
                _level(axis, method, middle)
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
    return _with_legend(figure, axes)


def _counted_tasks(lines: Data) -> str:
    """Say of how many tasks each point is: methods and sizes may have been run on some of them alone."""
    counts = {int(line["tasks"] or 0) for line in lines}
    few, many = min(counts), max(counts)
    return f"{many} task{'s' * (many > 1)}" if few == many else f"{few} to {many} tasks a point"


def _sizes(data: Data, _: Study) -> Figure:
    return _by_task(data, "trained", "trained parameters per task")


def _rates(data: Data, _: Study) -> Figure:
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
    tasks = _ordered({str(line["task"]) for line in data})[:_PANELS]
    figure, axes = _panels(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        mine = [line for line in data if line["task"] == task]
        for method, lines in _split(mine, "method"):
            lines = sorted(lines, key=lambda line: float(line[place] or 0))
            if any(_floats(lines, place)):
                _errorbar(axis, method, lines, place, _form(method, lines))
            else:
                _level(axis, method, _floats(lines, "dev"))
        axis.set(xscale="log", xlabel=label, ylabel=f"{_metric(mine[0]['metric'])}, dev", title=task)
    return _with_legend(figure, axes)


def _ablation(data: Data, study: Study) -> Figure:
    found = sorted(study.ablations, key=lambda one: _rank(one["task"]["name"]))[:_PANELS]
    many = max(len(one["layers"]) for one in found) > 6
    figure, axes = _panels(len(found), width=5.0 if many else 3.9, height=4.3 if many else 3.4)
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


def _sigmas(data: Data, _: Study) -> Figure:
    figure, (axis,) = _panels(1, width=6, height=3.2)
    for k, (task, lines) in enumerate(_split(data, "task")):
        colour, marker = list(_LOOKS.values())[k % len(_LOOKS)][:2]
        lines = sorted(lines, key=lambda line: float(line["sigma"] or 0))
        x, y, error = _points(lines, "sigma")
        axis.errorbar(
            x, y, yerr=error, color=colour, marker=marker, capsize=2, label=f"{task} ({_metric(lines[0]['metric'])})"
        )
    axis.set(xscale="log", xlabel="σ of the initial adapter weights", ylabel="score on dev")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _totals(data: Data, _: Study) -> Figure:
    figure, (axis,) = _panels(1, width=6, height=3.2)
    for (method, form), lines in _by_form(data):
        colour, marker, name = _look(method)
        dash = "--" if (method, form) == ("adapter", "best") else "-"
        label = f"{name}, {form}" if form == "best" else f"{name} {form}".strip()
        x, y = _floats(lines, "tasks"), _floats(lines, "encoders")
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
    numbers: Callable[[Study], Data]
    draw: Callable[[Data, Study], Figure]
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


# --- parts of a drawing -------------------------------------------------------------------------------------


def _errorbar(axis: Axes, method: str, lines: Data, place: str, name: str) -> None:
    colour, marker = _look(method)[:2]
    x, y, error = _points(lines, place)
    axis.errorbar(x, y, yerr=error, color=colour, marker=marker, capsize=2, label=name)


def _level(axis: Axes, method: str, scores: Sequence[float]) -> None:
    """Draw a method that trains nothing of an encoder as a line: it has no place on a logarithmic axis."""
    colour, _, name = _look(method)
    axis.axhline(max(scores), color=colour, linestyle="--", linewidth=1.2, label=name)


def _with_legend(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Put one legend below all panels, where it hides no point."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [look[2] for look in _LOOKS.values()]
    order = sorted(found, key=lambda label: next((k for k, name in enumerate(names) if label.startswith(name)), 99))
    columns = max(1, min(len(found), int(figure.get_figwidth() / 1.9)))  # inches of the longest name
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * -(-len(found) // columns))  # its lines take nothing from the panels
    figure.legend([found[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _metric(name: Any) -> str:
    """Name a metric for a reader; a score is in points, hundredths."""
    return f"{_METRICS.get(str(name), str(name))} × 100"


def _points(lines: Data, place: str) -> tuple[list[float], list[float], list[float]]:
    """Give x, y and the standard error; a point of one seed has none."""
    return _floats(lines, place), _floats(lines, "dev"), _floats(lines, "sem")


def _floats(lines: Data, key: str) -> list[float]:
    return [float(line[key] or 0) for line in lines]


def _form(method: str, lines: Data) -> str:
    options = {line["option"] for line in lines}
    return _look(method)[2] + (f" {options.pop()}" if len(options) == 1 and None not in options else "")


def _look(method: str) -> tuple[str, str, str]:
    return _LOOKS.get(method, ("#999999", "h", method))


def _split(data: Data, key: str) -> list[tuple[str, Data]]:
    names = _ordered(dict.fromkeys(str(line[key]) for line in data))
    if key == "method":
        names.sort(key=lambda name: list(_LOOKS).index(name) if name in _LOOKS else len(_LOOKS))
    return [(name, [line for line in data if str(line[key]) == name]) for name in names]


def _by_form(data: Data) -> list[tuple[tuple[str, str], Data]]:
    forms = dict.fromkeys((str(line["method"]), str(line["form"])) for line in data)
    found = [(form, [line for line in data if (line["method"], line["form"]) == form]) for form in forms]
    return sorted(found, key=lambda item: list(_LOOKS).index(item[0][0]) if item[0][0] in _LOOKS else len(_LOOKS))


def _ordered(tasks: Iterable[str]) -> list[str]:
    return sorted(tasks, key=_rank)


def _rank(task: str) -> tuple[int, str]:
    return _FIRST.index(task) if task in _FIRST else len(_FIRST), task
