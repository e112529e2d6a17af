"""An ask on its way through the service: what it waits for and weighs, what is told when it fails. No threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapterbank.errors import AdapterbankError, BankError, InputError, PackageDamaged, StorageError
from adapterbank.inference.engine import Prepared
from adapterbank.kinds.table import KINDS
from adapterbank.serving.service.protocol import FAILED, REQUEST, Ask, Refusal
from adapterbank.serving.service.registry import ServedTask
from adapterbank.serving.service.scheduler import Full

log = logging.getLogger("adapterbank.serving")

_CHARACTERS = 3
"""A token's characters, guessed low: what waits is rather thought more than less."""


@dataclass(eq=False)
class PendingRequest:
    """An ask on its way."""

    ask: Ask
    held: ServedTask
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[dict[str, Any]]]
    prepared: Prepared | None = None
    given: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """The outputs that have come, by the first row of each part."""
    request: str = field(default_factory=REQUEST.get)
    """What the log calls the request that it belongs to."""


def as_refusals(act: Callable[[], Any], bank: Path) -> Any:
    """Do what may fail for want of a task of a bank."""
    try:
        return act()
    except PackageDamaged as error:
        raise Refusal("damaged", shown(error, bank)) from error
    except BankError as error:
        raise Refusal("unknown_version", shown(error, bank)) from error
    except InputError as error:  # a name that is none of the bank's, or could be none
        raise Refusal("unknown_task", shown(error, bank)) from error
    except StorageError as error:
        raise Refusal("conflict", shown(error, bank)) from error


def shown(message: object, bank: Path) -> str:
    """Give a message with its files named from the bank on: where that lies is nobody's business who asks."""
    text = str(message).replace(f"adapterbank tasks --bank {bank}", "GET /v1/tasks").replace(f"{bank}/", "")
    return text.replace(str(bank), "the bank") if bank.is_absolute() else text


def settle(done: list[tuple[PendingRequest, Any]]) -> None:
    """Give answers, or refusals, to who waits for them; in their own loop."""
    for job, found in done:
        if job.future.done():
            continue
        if isinstance(found, Exception):
            job.future.set_exception(found)
        else:
            job.future.set_result(found)


def check(job: PendingRequest) -> None:
    """A task reads one text a row, or two."""
    columns = job.held.known.about.task.text
    if (job.ask.pairs is None) == (len(columns) == 2):
        what = f"two texts a row ({' and '.join(columns)}); give pairs too" if len(columns) == 2 else "one text a row"
        remedy = "" if len(columns) == 2 else "; give no pairs"
        raise Refusal("bad_request", f"{job.held.package.ref} reads {what}{remedy}.")


def guess(job: PendingRequest) -> int:
    """Guess at an ask's tokens without tokenising it."""
    held = job.held.known.about
    longest = 1 << 30 if KINDS[held.task.kind].windows else held.max_length
    lengths = [len(text) for text in job.ask.texts]
    if job.ask.pairs is not None:
        lengths = [a + len(b) for a, b in zip(lengths, job.ask.pairs, strict=True)]
    return sum(min(longest, 3 + length // _CHARACTERS) for length in lengths)


def refusal(error: Exception, job: PendingRequest, bank: Path) -> Exception:
    """Say what a failure is to who asked."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Full):
        return Refusal("overloaded", f"Too much is waiting: {error}", retry_after=error.retry_after)
    if isinstance(error, InputError):
        return Refusal("bad_request", shown(error, bank))
    if isinstance(error, AdapterbankError):  # its slot was not in memory, and cannot be loaded
        if job.held.known.gone or _is_gone(job.held.package.path):
            return Refusal("unknown_task", "The task was removed while the request waited; see GET /v1/tasks.")
        return Refusal("damaged", shown(error, bank))
    # Of which the log shows kind and place, not the message: it may quote a text.
    log.error("failed", exc_info=error, extra={"fields": {"request_id": job.request}})
    return Refusal("internal", FAILED)


def _is_gone(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # it is there, and cannot be read
        return False
