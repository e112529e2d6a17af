"""A request on its way through the service: its size, its result, and its error if it fails. Starts no threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from adapterbank.errors import AdapterbankError, BankError, InputError, PackageDamaged, PackageRequired, StorageError
from adapterbank.inference.engine import Engine, Prepared
from adapterbank.inference.explain import Explainer, check_explainable, explained_json
from adapterbank.inference.predictions import check_abstain
from adapterbank.kinds.table import KINDS
from adapterbank.serving.heartbeat import BOUND
from adapterbank.serving.service.protocol import FAILED, REQUEST, Ask, Refusal
from adapterbank.serving.service.registry import ServedTask
from adapterbank.serving.service.scheduler import QueueFull
from adapterbank.serving.service.task_reader import NoAnswer
from adapterbank.tasks.spec import Examples

log = logging.getLogger("adapterbank.serving")

Result = TypeVar("Result")

_CHARACTERS = 3
"""Characters per token, a low estimate, so that the queue is rather over- than underestimated."""
_EXPLAINED = 4 << 20
"""Characters of all rows of a request with explanations: as many as the largest body has by default."""
_TOKENISED = 100_000
"""Characters per second that even a slow core tokenises."""


@dataclass(eq=False)
class PendingRequest:
    """An `Ask` that waits for its predictions."""

    ask: Ask
    served: ServedTask
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[dict[str, Any]]]
    prepared: Prepared | None = None
    outputs: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """The outputs so far, by the first row of each part."""
    request: str = field(default_factory=REQUEST.get)
    """The id of its HTTP request, for the log."""
    explainer: Explainer | None = None
    """Turns the predictions of its rows into predictions with explanations, where they were asked for."""


def make_requests(
    asks: Sequence[Ask], tasks: Sequence[ServedTask], loop: asyncio.AbstractEventLoop
) -> list[PendingRequest]:
    """Return the requests of some asks; refuse texts that do not fit the task, and explanations that take too much."""
    requests = [PendingRequest(ask, task, loop, loop.create_future()) for ask, task in zip(asks, tasks, strict=True)]
    for pending in requests:
        check_ask(pending)
    explained = [pending for pending in requests if pending.ask.explain]
    if explained and 2 * sum(len(text) for one in asks for text in (*one.texts, *(one.pairs or ()))) > _EXPLAINED:
        raise Refusal(
            "text_too_long", f"Explaining these texts takes more than {_EXPLAINED:,} characters; shorten them."
        )
    for pending in explained:
        try:
            check_explainable(pending.served.handle.about.task)
        except InputError as error:
            raise Refusal("bad_request", str(error)) from error
        texts = Examples(pending.ask.texts, pending.ask.pairs)
        pending.explainer = Explainer.of(texts, pending.ask.explain - 1)
    _check_size([pending.explainer for pending in explained if pending.explainer], asks)
    for pending in explained:
        assert pending.explainer is not None
        rows = pending.explainer.to_examples()
        pending.ask = replace(pending.ask, texts=rows.texts, pairs=rows.pairs)
    return requests


def _check_size(explainers: Sequence[Explainer], asks: Sequence[Ask]) -> None:
    """Refuse explanations of too many rows or characters, before these rows exist."""
    rows, characters = sum(one.rows for one in explainers), sum(one.characters for one in explainers)
    if explainers and rows > asks[0].explain:
        raise Refusal(
            "too_many_texts",
            f"Explaining these texts takes {rows} rows, one for each word and text, but a request may have "
            f"{asks[0].explain}; send fewer texts at once.",
        )
    if characters > _EXPLAINED:
        raise Refusal(
            "text_too_long",
            f"Explaining these texts takes {characters:,} characters, all of them once for each word, but may take "
            f"{_EXPLAINED:,}; shorten them.",
        )


def with_refusals(action: Callable[[], Result], bank: Path) -> Result:
    """Run an action on a task of the bank, and turn its errors into refusals."""
    try:
        return action()
    except PackageDamaged as error:
        raise Refusal("damaged", without_paths(error, bank)) from error
    except PackageRequired as error:
        raise Refusal("conflict", without_paths(error, bank)) from error
    except BankError as error:
        raise Refusal("unknown_version", without_paths(error, bank)) from error
    except InputError as error:  # an unknown or an invalid name
        raise Refusal("unknown_task", without_paths(error, bank)) from error
    except StorageError as error:
        raise Refusal("conflict", without_paths(error, bank)) from error


def without_paths(message: object, bank: Path) -> str:
    """Return a message with paths relative to the bank; clients must not learn where the bank is."""
    text = str(message).replace(f"adapterbank tasks --bank {bank}", "GET /v1/tasks").replace(f"{bank}/", "")
    return text.replace(str(bank), "the bank") if bank.is_absolute() else text


def resolve(done: list[tuple[PendingRequest, Any]]) -> None:
    """Set the results or errors of requests; runs in their event loop."""
    for pending, result in done:
        if pending.future.done():
            continue
        if isinstance(result, Exception):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)


def check_ask(pending: PendingRequest) -> None:
    """Refuse rows with one text for a task that reads two, the reverse, and a confidence of a task that has none."""
    task = pending.served.handle.about.task
    try:
        check_abstain(task, pending.ask.abstain)
    except InputError as error:
        raise Refusal("bad_request", str(error)) from error
    columns = task.text
    if (pending.ask.pairs is None) == (len(columns) == 2):
        pair = f"two texts per row ({' and '.join(columns)}); give pairs too"
        what = pair if len(columns) == 2 else "one text per row; give no pairs"
        raise Refusal("bad_request", f"{pending.served.package.ref} reads {what}.")


def estimate_tokens(pending: PendingRequest) -> int:
    """Estimate the tokens of a request without tokenising it."""
    about = pending.served.handle.about
    all_read = KINDS[about.task.kind].windows and about.windows != 1
    longest = 1 << 30 if all_read else about.max_length * max(1, about.windows)
    lengths = [len(text) for text in pending.ask.texts]
    if pending.ask.pairs is not None:
        lengths = [a + len(b) for a, b in zip(lengths, pending.ask.pairs, strict=True)]
    return sum(min(longest, 3 + length // _CHARACTERS) for length in lengths)


def tokenising_seconds(parts: Iterable[Examples]) -> float:
    """Return the seconds that tokenising may take before it stands still."""
    return BOUND + sum(len(text) for one in parts for text in (*one.texts, *(one.pairs or ()))) / _TOKENISED


def finish(engine: Engine, pending: PendingRequest, bank: Path) -> Any:
    """Turn the outputs of a request into its predictions, or into a refusal."""
    assert pending.prepared is not None
    try:
        outputs = [out for _, outs in sorted(pending.outputs.items()) for out in outs]
        found = engine.finish_json(pending.prepared, outputs, pending.ask.best, pending.ask.abstain)
        return explained_json(pending.explainer, found) if pending.explainer else found
    except Exception as error:
        return to_refusal(error, pending, bank)


def to_refusal(error: Exception, pending: PendingRequest, bank: Path) -> Exception:
    """Return the refusal that reports an error to the client."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        return Refusal("overloaded", f"The server is busy: {error}", retry_after=error.retry_after)
    if isinstance(error, InputError):
        return Refusal("bad_request", without_paths(error, bank))
    if isinstance(error, NoAnswer):
        return Refusal("damaged", str(error), retry_after=5)
    if isinstance(error, AdapterbankError):  # its slot was not in memory and cannot be loaded
        if pending.served.handle.removed or _is_gone(pending.served.package.path):
            return Refusal("unknown_task", "The task was removed while the request was queued; see GET /v1/tasks.")
        return Refusal("damaged", without_paths(error, bank))
    # The log gets the type and the place, not the message, which may quote a text.
    log.error("failed", exc_info=error, extra={"fields": {"request_id": pending.request}})
    return Refusal("internal", FAILED)


def _is_gone(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # it exists, but cannot be read
        return False
