"""Tokens of any slots, in any order, to head outputs. Knows no tasks by name, no files and no training.

`outputs`, which is `launch` and a wait, is the one way there: training's dev scores, `predict`, `evaluate` and `audit`
all come through it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import forward
from adapterbank.encoder.prefix_cache import Prefix
from adapterbank.inference.graph_runner import ROWS, GraphRunner, Wait
from adapterbank.kinds.table import KINDS
from adapterbank.slots import heads
from adapterbank.slots.routing import Route, Segment
from adapterbank.slots.stack import Stacks

TOKENS_AT_ONCE = 4096
"""Padded tokens of one batch: fills two CPU cores, and fits any memory."""
_GPU_TOKENS = 16384
"""The same for a GPU, which has to be asked for each kernel."""
_LAUNCHED = 8
"""Batches of one call that a device has before it: beyond, the host waits for the first."""


def tokens_at_once(device: torch.device) -> int:
    """Return the most tokens of a batch on a device."""
    return _GPU_TOKENS if device.type == "cuda" else TOKENS_AT_ONCE


def outputs(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: Sequence[int | None],
    prefix: Prefix | None = None,
    mixed: GraphRunner | None = None,
) -> list[np.ndarray]:
    """Return each row's head outputs through its own slot, in the order of the rows; `prefix` is of these very rows.

    `[outputs]` a row, `[tokens, 2]` for spans, and the mean hidden state `[hidden]` for rows of no slot (None). With
    `mixed`, batches run as programs, but for those of a slot that changes most of the encoder.
    """
    return launch(config, stacks, tokens, slots, prefix, mixed)()


def launch(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: Sequence[int | None],
    prefix: Prefix | None = None,
    mixed: GraphRunner | None = None,
) -> Wait:
    """Set a device to work on what `outputs` gives; what is given waits for it. Without programs all is done here."""
    found: dict[int, np.ndarray] = {}
    launched: deque[tuple[list[int], Wait]] = deque()

    def land() -> None:
        order, wait = launched.popleft()
        found.update(zip(order, wait(), strict=True))

    groups = _groups(stacks, slots, mixed)
    limit = tokens_at_once(stacks.device)
    with torch.inference_mode():
        for chosen in by_length(tokens, limit, groups, *((ROWS, mixed.filled) if mixed else ())):
            if mixed and not prefix and not _alone(stacks, slots[chosen[0]]):
                with contextlib.suppress(torch.OutOfMemoryError):  # then as any other batch
                    mine, theirs = [tokens[i] for i in chosen], [slots[i] for i in chosen]
                    launched.append((chosen, mixed.launch(mine, theirs)))
                    if len(launched) > _LAUNCHED:
                        land()
                    continue
            order = sorted(chosen, key=lambda i: _number(slots[i]))
            batch = pack([tokens[i] for i in order], stacks.device)
            route = Route(stacks, segments([(slots[i], len(tokens[i])) for i in order]))
            known = prefix.rows(order, batch) if prefix else None
            hidden = forward(config, route, batch, first=prefix.first if prefix else 0, prefix=known)
            given = heads.outputs(hidden, batch, route)
            found.update(zip(order, by_row(given, route.segments, stacks, batch.lengths), strict=True))

    def wait() -> list[np.ndarray]:
        while launched:
            land()
        return [found[i] for i in range(len(tokens))]

    return wait


def segments(rows: Sequence[tuple[int | None, int]]) -> list[Segment]:
    """Join adjacent rows (slot, length) of one slot."""
    joined = ((slot, [length for _, length in group]) for slot, group in groupby(rows, key=lambda row: row[0]))
    return [Segment(slot, len(lengths), sum(lengths)) for slot, lengths in joined]


def _number(slot: int | None) -> int:
    return -1 if slot is None else slot


def _alone(stacks: Stacks, slot: int | None) -> bool:
    return slot is not None and stacks.plan(slot).alone


def _groups(stacks: Stacks, slots: Sequence[int | None], mixed: GraphRunner | None) -> list[int]:
    """Number the groups of rows that may share a batch.

    Rows of a slot that changes most of the encoder are by themselves; all others may mix, in a program those of one
    family.
    """
    found = {slot: _group(stacks, slot, mixed) for slot in dict.fromkeys(slots)}
    return [found[slot] for slot in slots]


def _group(stacks: Stacks, slot: int | None, mixed: GraphRunner | None) -> int:
    if slot is None:
        return -1
    if _alone(stacks, slot):
        return -2 - slot
    return stacks.slot(slot).family if mixed else -1


def by_row(
    given: Sequence[Tensor], parts: Sequence[Segment], stacks: Stacks, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Take the head outputs of segments apart, row by row."""
    rows: list[np.ndarray] = []
    for tensor, part in zip(given, parts, strict=True):
        array = tensor.float().cpu().numpy()
        if part.slot is not None and KINDS[stacks.plan(part.slot).head.kind].per_token:
            mine = lengths[len(rows) : len(rows) + part.rows]
            rows.extend(np.split(array, np.cumsum(mine)[:-1]))
        else:
            rows.extend(array)
    return rows
