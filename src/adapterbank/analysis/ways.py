"""Ways to train beside the plain one: what starting from a task, standing on one, mixtures and averages gain."""

from __future__ import annotations

from adapterbank.analysis.paired import compare, gaps_by_seed
from adapterbank.analysis.run_table import RECIPES, RunRow, RunTable, by_task
from adapterbank.analysis.series import USUAL, Data


def ways(study: RunTable) -> Data:
    """Return the difference of each way to train from plain runs of the same size, by task and over all."""
    gaps: dict[tuple[str, str], dict[str, list[float]]] = {}
    for task, rows in by_task(study.rows).items():
        others = (row for row in rows if not row.plain and row.variant.keys() <= {*RECIPES})
        for label, method in dict.fromkeys((row.label, row.method) for row in others):
            mine = study.best(row for row in rows if row.label == label)
            plain = study.best(row for row in rows if row.plain and _compared(mine[0], row)) if mine else []
            if found := gaps_by_seed(mine, plain, lambda row: row.shown):
                gaps.setdefault((label, method), {})[task] = found
    lines: Data = []
    for (label, method), by in sorted(gaps.items()):
        about = {"way": label, "method": method}
        for task, differences in [*by.items(), ("", None)]:
            tested = compare(list(by.values()) if differences is None else [differences])
            lines.append(
                {**about, "task": task, "difference": tested.difference, "sem": tested.sem, "pairs": tested.pairs}
            )
    return lines


def _compared(mine: RunRow, plain: RunRow) -> bool:
    """Return whether a way is compared with a plain run: of its size, or of any if it joins other tasks' adapters."""
    return plain.method == USUAL[0] if "fuse" in mine.variant else _size(plain) == _size(mine)


def _size(row: RunRow) -> tuple[str, int | str | None]:
    """Return the method and its size, of adapters that are narrowed the first one."""
    first = row.option.partition("to")[0] if isinstance(row.option, str) else row.option
    return row.method, int(first) if isinstance(first, str) and first.isdigit() else first
