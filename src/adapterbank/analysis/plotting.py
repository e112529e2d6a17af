"""What figures are made of: looks, panels, lines with errors, legends. Knows columns of numbers, not what they mean.

One colour, marker and line a method, of a palette that the colour-blind tell apart (Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.analysis.series import Data
from adapterbank.errors import InputError

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
"""Metric -> its name on an axis, where that is not its own."""
_FIRST = ("glue-mnli", "glue-cola")
"""Tasks that the paper drew come first."""


def plotting() -> Any:
    """Give matplotlib, or say how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("Figures need matplotlib: pip install 'adapterbank[plot]'.") from None
    return matplotlib


def make_panels(count: int, width: float = 3.3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Give a figure with so many panels side by side."""
    from matplotlib.figure import Figure

    columns = min(3, count) if count != 4 else 2
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.2, width * columns), height * rows))
    axes = [figure.add_subplot(rows, columns, k + 1) for k in range(count)]
    return figure, axes


def draw_line(axis: Axes, method: str, lines: Data, place: str, name: str) -> None:
    """Draw the points of a method with their errors."""
    colour, marker = look(method)[:2]
    x, y, error = points(lines, place)
    axis.errorbar(x, y, yerr=error, color=colour, marker=marker, capsize=2, label=name)


def draw_level(axis: Axes, method: str, scores: Sequence[float]) -> None:
    """Draw a method that trains nothing of an encoder as a line: it has no place on a logarithmic axis."""
    colour, _, name = look(method)
    axis.axhline(max(scores), color=colour, linestyle="--", linewidth=1.2, label=name)


def with_legend(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Put one legend below all panels, where it hides no point."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [look[2] for look in LOOKS.values()]
    order = sorted(found, key=lambda label: next((k for k, name in enumerate(names) if label.startswith(name)), 99))
    columns = max(1, min(len(found), int(figure.get_figwidth() / 1.9)))  # inches of the longest name
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.17 * -(-len(found) // columns))  # its lines take nothing from the panels
    figure.legend([found[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def metric_name(name: Any) -> str:
    """Name a metric for a reader; a score is in points, hundredths."""
    return f"{_METRICS.get(str(name), str(name))} × 100"


def points(lines: Data, place: str) -> tuple[list[float], list[float], list[float]]:
    """Give x, y and the standard error; a point of one seed has none."""
    return floats(lines, place), floats(lines, "dev"), floats(lines, "sem")


def floats(lines: Data, key: str) -> list[float]:
    """Give a column as numbers; what is not there is 0."""
    return [float(line[key] or 0) for line in lines]


def form_name(method: str, lines: Data) -> str:
    """Name a method, with its size if all lines have the same."""
    options = {line["option"] for line in lines}
    return look(method)[2] + (f" {options.pop()}" if len(options) == 1 and None not in options else "")


def look(method: str) -> tuple[str, str, str]:
    """Give a method's colour, marker and name."""
    return LOOKS.get(method, ("#999999", "h", method))


def split(data: Data, key: str) -> list[tuple[str, Data]]:
    """Part lines by what stands in a column, in the order in which it is shown."""
    names = ordered(dict.fromkeys(str(line[key]) for line in data))
    if key == "method":
        names.sort(key=lambda name: list(LOOKS).index(name) if name in LOOKS else len(LOOKS))
    return [(name, [line for line in data if str(line[key]) == name]) for name in names]


def by_form(data: Data) -> list[tuple[tuple[str, str], Data]]:
    """Part lines by method and form, in the order of the methods."""
    forms = dict.fromkeys((str(line["method"]), str(line["form"])) for line in data)
    found = [(form, [line for line in data if (line["method"], line["form"]) == form]) for form in forms]
    return sorted(found, key=lambda item: list(LOOKS).index(item[0][0]) if item[0][0] in LOOKS else len(LOOKS))


def ordered(tasks: Iterable[str]) -> list[str]:
    """Sort tasks: those that the paper drew first."""
    return sorted(tasks, key=rank)


def rank(task: str) -> tuple[int, str]:
    """Give a task's place among others."""
    return _FIRST.index(task) if task in _FIRST else len(_FIRST), task
