"""Drawings of confidence: how often answers of a probability are right, and how right the most certain rows are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterbank.analysis.plotting import LOOKS, floats, make_panels, ordered, split, with_legend
from adapterbank.analysis.series import Data
from adapterbank.analysis.titles import task_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_reliability(data: Data, most: int) -> Figure:
    """Draw each task's share of right answers against their probability; the area of a point is its share of rows."""
    tasks = ordered({str(line["task"]) for line in data})[:most]
    figure, axes = make_panels(len(tasks))
    colour = next(iter(LOOKS.values()))[0]
    for axis, task in zip(axes, tasks, strict=True):
        mine = [line for line in data if line["task"] == task]
        x, y, rows = (floats(mine, key) for key in ("confidence", "accuracy", "rows"))
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        axis.plot(x, y, color=colour, linewidth=1)
        axis.scatter(x, y, [8 + 120 * count / sum(rows) for count in rows], color=colour, zorder=3)
        axis.set(xlabel="probability", ylabel="share of right answers", xlim=(0, 1.02), ylim=(0, 1.02))
        axis.set_title(f"{task_title(task)}, {mine[0]['split']}: calibration error {mine[0]['calibration_error']:.3f}")
    return figure


def draw_coverage(data: Data, most: int) -> Figure:
    """Draw each task's share of right answers against the share of rows that are answered."""
    figure, (axis,) = make_panels(1, width=6, height=3.2)
    for k, (task, lines) in enumerate(split(data, "task")[:most]):
        colour, marker = list(LOOKS.values())[k % len(LOOKS)][:2]
        x, y = (floats(lines, key) for key in ("coverage", "accuracy"))
        percent = [[100 * value for value in values] for values in (x, y)]
        axis.plot(*percent, color=colour, marker=marker, label=f"{task_title(task)}, {lines[0]['split']}")
    axis.set(xlabel="rows that are answered (%), the most certain", ylabel="right answers (%)")
    return with_legend(figure, [axis])
