"""One split cut into two: dev rows held out of training rows. It knows no tables and no tokens."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds.table import KINDS
from adapterbank.tasks.remarks import target_labels
from adapterbank.tasks.spec import Examples, Task


def split(examples: Examples, *, task: Task, fraction: float = 0.1, seed: int = 0) -> tuple[Examples, Examples]:
    """Split off a fraction for dev: the same rows for the same seed, with the same mix of single labels.

    Rows of the same text stay together, and at least one row of each label stays in training. Where no text is
    repeated, the rows are those that earlier releases chose.
    """
    # RandomState, because numpy guarantees that its stream never changes, unlike that of newer generators.
    from numpy.random import RandomState

    if len(examples) < 2:
        raise DataError(f"There are {len(examples)} rows; splitting off dev rows needs 2 or more.")
    if not 0 < fraction < 1:
        raise InputError(f"The fraction of dev rows is {fraction}; it must be between 0 and 1, such as 0.1.")
    draw = RandomState(seed)
    order: list[int] = draw.permutation(len(examples)).tolist()
    size = min(max(1, round(len(examples) * fraction)), len(examples) - 1)
    chosen = {row for rows in _held_out(examples, task, order, size) for row in rows}
    return (
        examples.select(row for row in range(len(examples)) if row not in chosen),
        examples.select(sorted(chosen)),
    )


def _held_out(examples: Examples, task: Task, order: Sequence[int], size: int) -> list[list[int]]:
    """Return the texts that become dev rows, each as the rows that have it."""
    kind, keys, targets = KINDS[task.kind], examples.keys(), examples.targets
    texts: dict[Any, list[int]] = {}
    for row in order:
        texts.setdefault(keys[row], []).append(row)
    if len(texts) < 2:
        raise DataError("All rows have the same text, so none can be held out for dev; give dev data.")
    classes = targets if kind.single_label else None  # the mix of these is kept
    groups: dict[Any, list[list[int]]] = {}
    for rows in texts.values():
        groups.setdefault(None if classes is None else classes[rows[0]], []).append(rows)
    labels = [target_labels(kind, target) for target in targets or [()] * len(examples)]
    left = Counter(label for mine in labels for label in mine)

    def take(rows: list[int], room: int) -> bool:
        mine = Counter(label for row in rows for label in labels[row])
        if len(rows) > room or any(left[label] <= count for label, count in mine.items()):
            return False
        left.subtract(mine)
        return True

    shares = _shares([sum(map(len, group)) for group in groups.values()], size)
    # First each class's share, then, where equal texts left room, any text that fits.
    parts = [*zip(groups.values(), shares, strict=True), ([*texts.values()], size)]
    found: dict[int, list[int]] = {}
    for group, share in parts:
        room = min(share, size - sum(map(len, found.values())))
        for rows in group if room else ():
            if room and rows[0] not in found and take(rows, room):
                found[rows[0]] = rows
                room -= len(rows)
    # If no text is small enough, or every class has a single row, dev still needs a row.
    smallest = sorted(texts.values(), key=len)
    return [*found.values()] or [next((rows for rows in smallest if take(rows, len(examples) - 1)), smallest[0])]


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    # Largest remainders: whole shares first, then one more where the remainder is largest; never a group's last row.
    exact = [size * wanted / sum(sizes) for size in sizes]
    most = [size - 1 for size in sizes]
    shares = [min(int(share), cap) for share, cap in zip(exact, most, strict=True)]
    # Of equal remainders the first, which is random too: groups are in the order of the shuffled rows.
    room = [(shares[place] - exact[place], place) for place in range(len(sizes)) if shares[place] < most[place]]
    heapq.heapify(room)
    for _ in range(min(wanted, sum(most)) - sum(shares)):
        _, place = heapq.heappop(room)
        shares[place] += 1
        if shares[place] < most[place]:
            heapq.heappush(room, (shares[place] - exact[place], place))
    return shares
