"""Figures: columns of numbers to matplotlib drawings with their CSV. Knows `series`, never records; needs extra `plot`.

Made for print: one colour, marker and line a method, of a palette that the colour-blind tell apart (Okabe and Ito).
"""

from __future__ import annotations

import csv
import io
import re
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
    "automl": ("#777777", "*", "AutoML, no encoder"),
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
    several = len(study.backbones) > 1
    found = []
    for backbone in study.backbones or [""]:
        mine = study.of(backbone)
        suffix = "-" + re.sub(r"[^A-Za-z0-9.]+", "-", Path(backbone).name) if several else ""
        title = f" ({Path(backbone).name})" if backbone else ""
        for name, heading, numbers, draw, need in _FIGURES:
            data = numbers(mine)
            with _plotting().rc_context(_STYLE):
                figure = draw(data, mine) if data else None
            found.append(Drawing(f"{name}{suffix}", heading + title, data, figure, "" if data else f"needs {need}"))
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
        count = max(int(line["tasks"] or 0) for line in mine)
        axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="trained parameters per task", title=f"{title}: {count} task{'s' * (count > 1)}")
        axis.set_ylabel("score − full fine-tuning (points)")
    return _with_legend(figure, axes)


def _sizes(data: Data, _: Study) -> Figure:
    return _by_task(data, "trained", "trained parameters per task")


def _rates(data: Data, _: Study) -> Figure:
    figure = _by_task(data, "lr", "peak learning rate")
    values = sorted({float(line["lr"] or 0) for line in data})
    for axis in figure.axes:
        axis.set_xticks(values, [f"{value:.0e}".replace("e-0", "e-") for value in values], rotation=60, fontsize=8)
        axis.minorticks_off()
    return figure


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
        axis.set(xscale="log", xlabel=label, ylabel=f"{mine[0]['metric']} on dev (points)", title=task)
    return _with_legend(figure, axes)


def _ablation(data: Data, study: Study) -> Figure:
    found = sorted(study.ablations, key=lambda one: _rank(one["task"]["name"]))[:_PANELS]
    figure, axes = _panels(len(found), width=3.9, height=3.4)
    for axis, one in zip(axes, found, strict=True):
        metric = "accuracy" if "accuracy" in one["whole"] else one["metric"]
        drawn = _heatmap(axis, one, metric)
        axis.set(xlabel="last layer without adapters", ylabel="first layer without adapters", title=one["package"])
        figure.colorbar(drawn, ax=axis, shrink=0.85).set_label(f"change of {metric} (%)")
    return figure


def _heatmap(axis: Axes, one: Mapping[str, Any], metric: str) -> Any:
    """Draw a span's change as a cell, with its number."""
    layers = one["layers"]
    cells = {(s["first"], s["last"]): s["change"][metric] for s in one["spans"] if s["change"][metric] is not None}
    grid = [[cells.get((first, last), float("nan")) for last in layers] for first in layers]
    deepest = min([-1.0, *cells.values()])
    drawn = axis.imshow(grid, cmap="viridis", vmin=deepest, vmax=0, origin="upper")
    axis.grid(False)
    axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    digits, size = (0, 6.5) if len(layers) > 6 else (1, 8)
    for (first, last), change in cells.items():
        colour = "white" if change < 0.5 * deepest else "black"
        text = f"{round(change, digits) + 0.0:.{digits}f}"  # no minus before a zero
        axis.text(layers.index(last), layers.index(first), text, ha="center", va="center", size=size, color=colour)
    return drawn


def _sigmas(data: Data, _: Study) -> Figure:
    figure, (axis,) = _panels(1, width=6, height=3.2)
    for k, (task, lines) in enumerate(_split(data, "task")):
        colour, marker = list(_LOOKS.values())[k % len(_LOOKS)][:2]
        lines = sorted(lines, key=lambda line: float(line["sigma"] or 0))
        x, y, error = _points(lines, "sigma")
        axis.errorbar(x, y, yerr=error, color=colour, marker=marker, capsize=2, label=f"{task} ({lines[0]['metric']})")
    axis.set(xscale="log", xlabel="σ of the initial adapter weights", ylabel="score on dev (points)")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _totals(data: Data, _: Study) -> Figure:
    figure, (axis,) = _panels(1, width=6, height=3.2)
    for (method, form), lines in _by_form(data):
        colour, marker, name = _look(method)
        dash = "--" if form == "best" and any(line["form"] == "64" for line in data) and method == "adapter" else "-"
        label = f"{name}, {form}" if form else name
        x, y = _floats(lines, "tasks"), _floats(lines, "encoders")
        axis.plot(x, y, color=colour, marker=marker, markevery=3, linestyle=dash, label=label)
    axis.set(xlabel="tasks", ylabel="parameters of all tasks (encoders)", yscale="log", xlim=(1, series.SHARED_TASKS))
    ticks = [1, 2, 5, 10, 20]
    axis.set_yticks(ticks, [f"{tick}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks([1, 5, 10, 15, 20])
    figure.legend(loc="outside right upper", frameon=False)
    return figure


_FIGURES: Sequence[tuple[str, str, Callable[[Study], Data], Callable[[Data, Study], Figure], str]] = (
    (
        "fig1",
        "Fig. 1: trained parameters against score, all tasks",
        series.tradeoff,
        lambda data, _: _tradeoff(data, [("all", "all tasks")]),
        "runs of 'full' and of another method on the same task",
    ),
    (
        "fig3",
        "Fig. 3: trained parameters against score, by suite",
        series.tradeoff,
        lambda data, _: _tradeoff(data, [("further", "further tasks"), ("GLUE", "GLUE (dev)")]),
        "runs of 'full' and of another method on the same task",
    ),
    ("fig4", "Fig. 4: score against trained parameters", series.sizes, _sizes, "three sizes of adapters or top layers"),
    (
        "fig5",
        "Fig. 5: SQuAD F1 against trained parameters",
        lambda study: series.sizes(study, spans=True),
        _sizes,
        "three sizes on a span task",
    ),
    (
        "fig6-ablation",
        "Fig. 6: adapters removed by span of layers",
        series.ablations,
        _ablation,
        "adapterbank ablate",
    ),
    ("fig6-sigma", "Fig. 6: initialisation", series.sigmas, _sigmas, "two values of --sigma on one task"),
    ("fig7", "Fig. 7: learning rate", series.rates, _rates, "two learning rates on one task"),
    ("totals", "Parameters of all tasks together", series.totals, _totals, "any run"),
)
"""Name, title, numbers, drawing, and what must be there."""


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
    figure.legend([found[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False)
    return figure


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
