"""Rows that share a text: below the lowest layer that a row's task changes, the text is computed once. Knows no tasks.

Several tasks may be asked of one text. Below the lowest layer in which a slot has tensors of its own, its row has the
hidden states of the bare encoder, and so has every other such row of that text. So the layers run in stages. In each,
rows of one text that no slot has changed yet are a single row of the bare encoder:

    layers 0 to 2     text                    tasks a and b change layers from 3 on, c from 5 on
    layers 3 and 4    a  b  text
    layers 5 on       a  b  c
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from adapterbank.encoder.batch import Tokens, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import hidden_below, run_layers
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks

RouteOf = Callable[[Sequence[tuple[int | None, int]]], Route]
"""Rows (slot, tokens), those of one slot adjacent -> their route."""
Row = tuple[bytes, bytes, int | None]
"""A text, and the slot that has changed its hidden states; None below all that slots change."""


def shared_below(
    config: EncoderConfig, stacks: Stacks, tokens: Sequence[Tokens], slots: Sequence[int | None], route_of: RouteOf
) -> tuple[int, Tensor] | None:
    """Return a layer and the hidden states `[T, hidden]` that it reads, for all rows; None if no work is shared.

    From this layer on, each row is computed on its own.
    """
    texts = [(row.ids.tobytes(), row.types.tobytes()) for row in tokens]
    counts = Counter(texts)
    if len(counts) == len(texts):
        return None
    lowest = {slot: config.layers if slot is None else min(stacks.slot(slot).lowest, config.layers) for slot in slots}
    highest = max(lowest[slot] for text, slot in zip(texts, slots, strict=True) if counts[text] > 1)
    if highest == 0:
        return None
    states: dict[Row, Tensor] = {}
    rows: list[Row] = [(*text, None) for text in texts]
    for start, end in pairwise(sorted({0, highest, *(n for n in lowest.values() if n < highest)})):
        own = [(*text, slot if lowest[slot] <= start else None) for text, slot in zip(texts, slots, strict=True)]
        found = {row: (given, before) for row, given, before in zip(own, tokens, rows, strict=True)}
        distinct = sorted(found, key=lambda row: -1 if row[2] is None else row[2])
        batch = pack([found[row][0] for row in distinct], stacks.device)
        route = route_of([(row[2], len(found[row][0])) for row in distinct])
        if start == 0:
            x = hidden_below(config, route, batch, end)
        else:
            x = run_layers(
                config, route, batch, torch.cat([states[found[row][1]] for row in distinct]), range(start, end)
            )
        states, rows = dict(zip(distinct, x.split(list(batch.lengths)), strict=True)), own
    return highest, torch.cat([states[row] for row in rows])
