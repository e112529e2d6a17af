"""Draw the curves of `curves.py` from its JSON: one PNG and one CSV next to each file. Requires only matplotlib.

Usage: python bench/plots.py bench/results/curves_cpu.json bench/results/curves_cuda.json
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
"""Okabe and Ito's palette, which colour-blind readers can distinguish; markers and dashes distinguish lines in grey."""
STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"))
PANELS = {
    "tasks": ("Inference against tasks resident", "tasks resident"),
    "runs": ("Training against runs at once", "runs at once"),
    "length": ("Against sequence length", "tokens a row"),
    "batch": ("Against batch size", "rows in a batch"),
}
COLUMNS = ("curve", "series", "x", "case", "median_ms", "low_ms", "high_ms", "samples", "put_ms", "resident", "peak_mb")


def plain(value: float, _: int = 0) -> str:
    """Format a number: 4,096 and 0.5."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def fixed(points: list[dict[str, Any]], curve: str) -> str:
    """Return a description of what does not vary in a panel."""
    rows, _, length = points[0]["case"].partition(" x ")
    if curve == "length":
        return f"{rows} rows"
    return f"{length} tokens a row" if curve == "batch" else f"{rows} rows of {length} tokens"


def panel(axes: Any, points: list[dict[str, Any]], curve: str) -> None:
    """Draw one curve's series: medians, and quartiles as a band."""
    for i, name in enumerate(dict.fromkeys(point["series"] for point in points)):
        mine = sorted((point for point in points if point["series"] == name), key=lambda point: point["x"])
        x = [point["x"] for point in mine]
        colour, (marker, line) = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        axes.plot(x, [p["median_ms"] for p in mine], line, marker=marker, color=colour, label=name, markersize=4.5)
        low, high = zip(*(point["quartiles_ms"] for point in mine), strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    title, label = PANELS[curve]
    axes.set_title(f"{title} ({fixed(points, curve)})", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({point["x"] for point in points}))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.xaxis.set_minor_formatter(NullFormatter())
    scale(axes, points)
    axes.set_xlabel(label)
    axes.set_ylabel("ms per run and step" if curve == "runs" else "ms per batch")
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axes.legend(fontsize=7, framealpha=0.9)


def scale(axes: Any, points: list[dict[str, Any]]) -> None:
    """Use a logarithmic axis if the times span more than a factor of four, else one that starts at 0."""
    times = [point["median_ms"] for point in points]
    if max(times) <= 4 * min(times):
        axes.set_ylim(0, 1.45 * max(times))  # room for the legend
        return
    axes.set_yscale("log")
    if max(times) < 30 * min(times):
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: plain(v) if f"{v:e}"[0] in "25" else ""))
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.yaxis.set_major_formatter(FuncFormatter(plain))


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw all panels of one device."""
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name in PANELS:
        for point in (p for p in found["points"] if p["curve"] == name):
            case = point["case"] if name == "tasks" else ""  # a panel of its own for each length
            curves.setdefault((name, case), []).append(point)
    plt.rcParams.update({"font.size": 8, "lines.linewidth": 1.3})
    figure, grid = plt.subplots(-(-len(curves) // 2), 2, figsize=(8.2, 3.2 * -(-len(curves) // 2)), squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.remove()
    for axes, ((name, _), points) in zip(grid.flat, curves.items(), strict=False):
        panel(axes, points, name)
    stamp, settings = found["stamp"], found["settings"]
    clock = "" if found.get("clock", "wall") == "wall" else ", processor time"
    where = stamp["device"] if stamp["device"] != "cpu" else f"{stamp['threads']} CPU thread(s), {stamp['cpu']}"
    figure.suptitle(
        f"{where}, {stamp['precision']}, torch {stamp['torch']}, {settings['shape']} shape{clock}; "
        "medians, quartiles shaded",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=200)
    plt.close(figure)


def tabulate(found: dict[str, Any], path: Path) -> None:
    """Write the same points as CSV."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for point in found["points"]:
            low, high = point["quartiles_ms"]
            table.writerow({**point, "low_ms": low, "high_ms": high})


def main() -> None:
    """Draw every file given, next to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        found = json.loads(path.read_text())
        draw(found, path.with_suffix(".png"))
        tabulate(found, path.with_suffix(".csv"))


if __name__ == "__main__":
    main()
