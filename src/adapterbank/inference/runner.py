"""The runner: from tokens of any slots, in any order, to head outputs. Knows no task names, files or training.

Everything goes through `outputs`, which is `launch` followed by a wait: dev scores, `predict`, `evaluate` and `audit`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import forward
from adapterbank.encoder.kernels.launch import CompilerError
from adapterbank.encoder.prefix_cache import Prefix
from adapterbank.inference.graph_runner import ROWS, GraphRunner, Wait
from adapterbank.inference.shared_texts import shared_below
from adapterbank.inference.threads import batch_tokens, run_batches
from adapterbank.kinds.table import KINDS
from adapterbank.slots import heads
from adapterbank.slots.routing import Route, Segment
from adapterbank.slots.stack import Stacks

TOKENS_AT_ONCE = 4096
"""The most padded tokens of a batch on a CPU: enough for two cores, and little memory."""
_GPU_TOKENS = 16384
"""The same for a GPU, where each kernel has a launch cost."""
_MAX_LAUNCHED = 8
"""The most batches of one call in flight; beyond that, the host waits for the first."""


def tokens_at_once(device: torch.device) -> int:
    """Return the most padded tokens of a batch on a device."""
    return _GPU_TOKENS if device.type == "cuda" else TOKENS_AT_ONCE


def outputs(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: Sequence[int | None],
    prefix: Prefix | None = None,
    graph_runner: GraphRunner | None = None,
) -> list[np.ndarray]:
    """Return each row's head outputs through its own slot, in the order of the rows; `prefix` belongs to these rows.

    A row's outputs are `[outputs]`, `[tokens, 2]` for spans, or the mean hidden state `[hidden]` for no slot (None).
    With `graph_runner`, batches run as captured graphs, except those of slots that it does not cover.
    """
    return launch(config, stacks, tokens, slots, prefix, graph_runner)()


def launch(
    config: EncoderConfig,
    stacks: Stacks,
    tokens: Sequence[Tokens],
    slots: Sequence[int | None],
    prefix: Prefix | None = None,
    graph_runner: GraphRunner | None = None,
) -> Wait:
    """Launch what `outputs` computes; return a function that waits for it. Without graphs, this computes everything."""
    results: dict[int, np.ndarray] = {}
    launched: deque[tuple[list[int], Wait]] = deque()

    def collect() -> None:
        order, wait = launched.popleft()
        results.update(zip(order, wait(), strict=True))

    def route_of(rows: Sequence[tuple[int | None, int]]) -> Route:
        return Route(stacks, segments(rows))

    @torch.inference_mode()
    def run(chosen: Sequence[int]) -> None:
        order = sorted(chosen, key=lambda i: _number(slots[i]))
        batch = pack([tokens[i] for i in order], stacks.device)
        route = route_of([(slots[i], len(tokens[i])) for i in order])
        lower: tuple[int, Tensor] | None
        if prefix:
            lower = prefix.first, prefix.rows(order, batch)
        else:
            mine = [tokens[i] for i in order], [slots[i] for i in order]
            lower = shared_below(config, stacks, *mine, route_of)
        first, below = lower or (0, None)
        hidden = forward(config, route, batch, first=first, prefix=below)
        by_segment = heads.outputs(hidden, batch, route)
        results.update(zip(order, by_row(by_segment, route.segments, stacks, batch.lengths), strict=True))

    groups = _groups(stacks, slots, graph_runner)
    if stacks.device.type == "cpu" and graph_runner is None:
        sizes = [len(row.ids) for row in tokens]
        chosen_rows = list(by_length(tokens, batch_tokens(sum(sizes)), groups))
        counts = [sum(sizes[i] for i in rows) for rows in chosen_rows]
        run_batches([partial(run, rows) for rows in chosen_rows], counts)
        return lambda: [results[i] for i in range(len(tokens))]
    limit = tokens_at_once(stacks.device)
    with torch.inference_mode():
        for chosen in by_length(tokens, limit, groups, *((ROWS, graph_runner.padded_length) if graph_runner else ())):
            if graph_runner and not prefix and graph_runner.covers(slots[chosen[0]]):
                with contextlib.suppress(torch.OutOfMemoryError, CompilerError):  # then without a graph
                    batch_slots = [slots[i] for i in chosen]
                    launched.append((chosen, graph_runner.launch([tokens[i] for i in chosen], batch_slots)))
                    if len(launched) > _MAX_LAUNCHED:
                        collect()
                    continue
            run(chosen)

    def wait() -> list[np.ndarray]:
        while launched:
            collect()
        return [results[i] for i in range(len(tokens))]

    return wait


def segments(rows: Sequence[tuple[int | None, int]]) -> list[Segment]:
    """Join adjacent rows (slot, length) of one slot into segments."""
    joined = ((slot, [length for _, length in group]) for slot, group in groupby(rows, key=lambda row: row[0]))
    return [Segment(slot, len(lengths), sum(lengths)) for slot, lengths in joined]


def _number(slot: int | None) -> int:
    return -1 if slot is None else slot


def _groups(stacks: Stacks, slots: Sequence[int | None], graph_runner: GraphRunner | None) -> list[int]:
    """Return the group number of each row; rows of one group can share a batch.

    A slot that changes whole layers has its own group. All others share one, or with graphs one for each family.
    """
    groups: dict[int | None, int] = {None: -1}
    for slot in dict.fromkeys(slots):
        if slot is not None:
            resident = stacks.slot(slot)
            shared = resident.family if graph_runner and resident.in_place else -1
            groups[slot] = -2 - slot if resident.alone else shared
    return [groups[slot] for slot in slots]


def by_row(
    outputs: Sequence[Tensor], parts: Sequence[Segment], stacks: Stacks, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Split the head outputs of segments into rows."""
    rows: list[np.ndarray] = []
    for tensor, part in zip(outputs, parts, strict=True):
        array = tensor.float().cpu().numpy()
        if part.slot is not None and KINDS[stacks.plan(part.slot).head.kind].per_token:
            part_lengths = lengths[len(rows) : len(rows) + part.rows]
            rows.extend(np.split(array, np.cumsum(part_lengths)[:-1]))
        else:
            rows.extend(array)
    return rows
