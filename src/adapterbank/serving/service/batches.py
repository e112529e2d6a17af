"""Batches of rows through the engine: launched, waited for, and checked. Knows no queue and no threads.

If a batch fails, or an output is no number that can be sent, each part is computed alone: one task at fault must not
affect the requests that share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np

from adapterbank.encoder.batch import Tokens
from adapterbank.inference.engine import Engine
from adapterbank.inference.graph_runner import Wait
from adapterbank.inference.predictions import are_usable
from adapterbank.inference.slot_cache import TaskHandle
from adapterbank.serving.heartbeat import BOUND, Heartbeat
from adapterbank.serving.service.protocol import Refusal
from adapterbank.serving.service.scheduler import Part

Outputs = list[np.ndarray] | Exception
"""The outputs of the rows of a part, or its error."""

_SLOW = 10
"""A batch stands still when it takes so many times as long as the last ones did, and longer than `BOUND`."""
_FIRST = 60.0
"""Seconds for a batch before any was measured."""
_COMPILING = 120.0
"""Seconds for a batch on a GPU: the first request for a new method compiles."""


def most_seconds(batch: Sequence[Part], pace: float, *, compiles: bool) -> float:
    """Return the seconds that a batch may take, at a pace of tokens per second, before it stands still."""
    if compiles:
        return _COMPILING
    return max(BOUND, _SLOW * sum(part.tokens for part in batch) / pace) if pace else _FIRST


def launch(engine: Engine, batch: Sequence[Part]) -> Wait:
    """Launch a batch; return a function that waits for the outputs or raises."""
    tokens: list[Tokens] = []
    tasks: list[TaskHandle | None] = []
    for part in batch:
        prepared = part.group.value.prepared
        tokens += prepared.rows.tokens[part.start : part.stop]
        tasks += [prepared.handle] * len(part)
    try:
        return engine.launch(tokens, tasks)
    except Exception as error:
        return partial(_fail, error)


def land(engine: Engine, batch: Sequence[Part], wait: Wait, heartbeat: Heartbeat) -> list[Outputs]:
    """Wait for a batch; return the outputs of each part, or its error."""
    found: list[Outputs]
    try:
        computed = wait()
        outputs = iter(computed)
        parts = [list(islice(outputs, len(part))) for part in batch]
        sendable = are_usable(computed)
        found = [mine if sendable else _checked(part, mine) for part, mine in zip(batch, parts, strict=True)]
    except Exception as error:
        found = [error] * len(batch)
    if len(batch) > 1:
        for i, part in enumerate(batch):
            if isinstance(found[i], Exception):
                heartbeat.beat()
                found[i] = land(engine, [part], launch(engine, [part]), heartbeat)[0]
    return found


def _checked(part: Part, outputs: list[np.ndarray]) -> Outputs:
    """Return the outputs of a part, or a refusal if they cannot be sent."""
    if are_usable(outputs):
        return outputs
    ref = part.group.value.served.package.ref
    remedy = "roll back to an earlier version, or train it again"
    return Refusal("damaged", f"{ref} gives no finite number for a text of this request; {remedy}.")


def _fail(error: Exception) -> list[np.ndarray]:
    raise error
