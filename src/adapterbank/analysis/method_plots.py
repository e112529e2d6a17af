"""Figures of methods and ways to train as wholes: what many tasks take, what a way gains. Draws columns of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterbank.analysis import series
from adapterbank.analysis.plotting import by_form, floats, look, make_panels, split
from adapterbank.analysis.series import USUAL, Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_totals(data: Data) -> Figure:
    """Draw the parameters of all tasks together."""
    figure, (axis,) = make_panels(1, width=6, height=3.2)
    for (method, form), lines in by_form(data):
        colour, marker, name = look(method)
        dash = "--" if (method, form) == (USUAL[0], "best") else "-"
        label = f"{name}, {form}" if form == "best" else f"{name} {form}".strip()
        x, y = floats(lines, "tasks"), floats(lines, "encoders")
        axis.plot(x, y, color=colour, marker=marker, markevery=3, linestyle=dash, label=label)
    axis.set(xlabel="tasks", ylabel="parameters of all tasks (× encoder)", yscale="log", xlim=(1, series.SHARED_TASKS))
    low, high = axis.get_ylim()
    low, high = min(low, 0.95), max(high, 2.1)  # one and two encoders are always visible
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks([1, 5, 10, 15, 20])
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def draw_ways(data: Data) -> Figure:
    """Draw how far each way to train is above the plain one, task by task and over all."""
    found = split(data, "way")
    figure, (axis,) = make_panels(1, width=6, height=1.0 + 0.35 * len(found))
    for place, (_, lines) in enumerate(found):
        colour = look(str(lines[0]["method"]))[0]
        tasks = [line for line in lines if line["task"]]
        axis.plot(floats(tasks, "difference"), [place] * len(tasks), ".", color=colour, alpha=0.45, markersize=5)
        (whole,) = (line for line in lines if not line["task"])
        bars = floats([whole], "sem")
        axis.errorbar(floats([whole], "difference"), [place], xerr=bars, fmt="D", color=colour, capsize=3)
    axis.axvline(0, color="#000000", linewidth=0.8)
    axis.set_yticks(range(len(found)), [name for name, _ in found])
    axis.set(xlabel="points above plain runs of the same size", ylabel="way to train", ylim=(len(found) - 0.5, -0.5))
    return figure
