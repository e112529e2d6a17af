"""The parts of a figure: styles, panels, lines with error bars, legends. Knows columns of numbers, not their meaning.

Each method has its own colour, marker and line, from a palette for colour-blind readers (Okabe and Ito).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.analysis.series import Data
from adapterbank.errors import InputError
from adapterbank.install import extra_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: Mapping[str, tuple[str, str, str]] = {
    "adapter": ("#0072B2", "o", "adapters"),
    "full": ("#000000", "s", "full fine-tuning"),
    "top": ("#D55E00", "^", "top layers (variable)"),
    "layernorm": ("#009E73", "D", "LayerNorm only"),
    "lora": ("#CC79A7", "v", "LoRA"),
    "bitfit": ("#E69F00", "P", "BitFit"),
    "fusion": ("#882255", "h", "fused tasks"),
    "feature": ("#56B4E9", "X", "feature (head only)"),
    "automl": ("#777777", "p", "AutoML, no encoder"),
}
"""Method -> colour, marker, name."""
STYLE = {
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
"""Metric -> its name on an axis, if that differs."""
_FIRST = ("glue-mnli", "glue-cola")
"""The tasks of the paper's figures, which come first."""


def plotting() -> Any:
    """Return matplotlib, or explain how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(f"Figures need matplotlib: {extra_command('plot')}") from None
    return matplotlib


def make_panels(count: int, width: float = 3.3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels side by side."""
    from matplotlib.figure import Figure

    columns = min(3, count) if count != 4 else 2
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.2, width * columns), height * rows))
    axes = [figure.add_subplot(rows, columns, k + 1) for k in range(count)]
    return figure, axes


def draw_line(axis: Axes, method: str, lines: Data, place: str, name: str) -> None:
    """Draw the points of a method with error bars."""
    colour, marker = look(method)[:2]
    x, y, error = points(lines, place)
    axis.errorbar(x, y, yerr=error, color=colour, marker=marker, capsize=2, label=name)


def draw_level(axis: Axes, method: str, scores: Sequence[float]) -> None:
    """Draw a method that trains no encoder parameters as a line, because a logarithmic axis has no zero."""
    colour, _, name = look(method)
    axis.axhline(max(scores), color=colour, linestyle="--", linewidth=1.2, label=name)


def with_legend(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Add one legend below all panels, where it covers no point."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [look[2] for look in LOOKS.values()]
    order = sorted(found, key=lambda label: next((k for k, name in enumerate(names) if label.startswith(name)), 99))
    columns = max(1, min(len(found), int(figure.get_figwidth() / 1.9)))  # inches for the longest name
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * -(-len(found) // columns))  # so that the panels keep their size
    figure.legend([found[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def add_note(figure: Figure, text: str) -> None:
    """Add a sentence above the panels, so that it is part of the picture wherever it is shown."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(text, max(30, int(width * 15)))  # some fifteen letters of this size to an inch
    figure.set_size_inches(width, height + 0.18 * len(lines))  # so that the panels keep their size
    figure.suptitle("\n".join(lines), fontsize=7.5, color="#7a4b00")


def metric_name(name: Any) -> str:
    """Return the label of a metric; scores are in points (hundredths)."""
    return f"{_METRICS.get(str(name), str(name))} × 100"


def points(lines: Data, place: str) -> tuple[list[float], list[float], list[float]]:
    """Return x, y and the standard error, which is 0 for a single seed."""
    return floats(lines, place), floats(lines, "dev"), floats(lines, "sem")


def floats(lines: Data, key: str) -> list[float]:
    """Return a column as numbers, 0 for a missing value."""
    return [float(line[key] or 0) for line in lines]


def form_name(method: str, lines: Data) -> str:
    """Return the name of a method, with its size if all lines have the same."""
    options = {line["option"] for line in lines}
    return look(method)[2] + (f" {options.pop()}" if len(options) == 1 and None not in options else "")


def look(method: str) -> tuple[str, str, str]:
    """Return a method's colour, marker and name."""
    return LOOKS.get(method, ("#999999", "h", method))


def split(data: Data, key: str) -> list[tuple[str, Data]]:
    """Group lines by the value of a column, in display order."""
    names = ordered(dict.fromkeys(str(line[key]) for line in data))
    if key == "method":
        names.sort(key=lambda name: list(LOOKS).index(name) if name in LOOKS else len(LOOKS))
    return [(name, [line for line in data if str(line[key]) == name]) for name in names]


def by_form(data: Data) -> list[tuple[tuple[str, str], Data]]:
    """Group lines by method and form, in the order of the methods."""
    forms = dict.fromkeys((str(line["method"]), str(line["form"])) for line in data)
    found = [(form, [line for line in data if (line["method"], line["form"]) == form]) for form in forms]
    return sorted(found, key=lambda item: list(LOOKS).index(item[0][0]) if item[0][0] in LOOKS else len(LOOKS))


def ordered(tasks: Iterable[str]) -> list[str]:
    """Sort tasks, those of the paper's figures first."""
    return sorted(tasks, key=rank)


def rank(task: str) -> tuple[int, str]:
    """Return the sort key of a task."""
    return _FIRST.index(task) if task in _FIRST else len(_FIRST), task


def draw_heatmap(axis: Axes, one: Mapping[str, Any], metric: str) -> Any:
    """Draw the change for each span as a cell with its number."""
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
        text = (
            f"{round(change, 1) + 0.0:.{0 if change < -9.95 and len(layers) > 6 else 1}f}"  # no minus sign before zero
        )
        axis.text(layers.index(last), layers.index(first), text, ha="center", va="center", size=size, color=colour)
    return drawn
