"""The settings of a server, as plain values that another machine can receive, and the app built from them. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.quickest import choose_layout
from adapterbank.encoder.shared_memory import share
from adapterbank.inference.engine import Engine
from adapterbank.runtime import find_device, keep_few_primitives, use_few_threads_for_texts
from adapterbank.serving.http.app import DEFAULT_LIMITS, create_app
from adapterbank.serving.http.auth import FILE, Keys
from adapterbank.serving.jobs.queue import DEFAULT_QUEUE_LIMITS, QueueLimits
from adapterbank.serving.service.bank_mirror import REFRESH, Mirror, is_url
from adapterbank.serving.service.protocol import Limits
from adapterbank.serving.service.service import BankService
from adapterbank.storage.bank import Bank

UNWRITABLE = "This server cannot write to its bank and does not train; make the bank writable, and start it again."


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server."""

    bank: str
    """Folder or URL of the bank."""
    backbone: str | None = None
    """The location of the encoder; by default the bank's."""
    device: str = "auto"
    precision: str | None = None
    """By default fp32 on a CPU and bf16 on a GPU; with `auto`, a CPU measures for a second which is the quickest."""
    locked: bool = False
    """Whether requests need a key. If the key file is missing, every request is refused."""
    keys: str | None = None
    """The key file; by default the bank's."""
    budget: int | None = None
    """Bytes of memory for the tasks."""
    queue: int | None = None
    """Tokens that may be queued."""
    limits: Limits = DEFAULT_LIMITS
    training: QueueLimits = DEFAULT_QUEUE_LIMITS
    page: bool = True
    refresh: float = REFRESH
    """Seconds between two refreshes of a bank behind a URL."""
    untrained: str = ""
    """Why the server does not train, for clients that try; empty if the address is simply not found."""


def mirrored(settings: ServerSettings) -> Mirror | None:
    """Return a mirror of a bank behind a URL, which has no tasks yet; None for a folder."""
    return Mirror(settings.bank, every=settings.refresh) if is_url(settings.bank) else None


def build(
    settings: ServerSettings,
    mirror: Mirror | None = None,
    *,
    jobs: Callable[[int | None], Any] | None = None,
    replica: str = "",
) -> FastAPI:
    """Load the encoder and create the app; its `state` has the `service` and the precision's `choice`, if measured.

    Args:
        settings: The settings.
        mirror: See `mirrored`; it is refreshed first, and closed with the service.
        jobs: Returns the queue of training runs, given the descriptor of the encoder's tensors; None if the bank
            cannot be written to.
        replica: Its name, if it is one of several.
    """
    keep_few_primitives()
    if mirror:
        mirror.refresh_all()
    path = mirror.path if mirror else Path(settings.bank.removeprefix("file://"))
    backbone = checkpoint.load(settings.backbone or Bank.open(path).backbone["name"])
    bank = Bank.open(path, backbone.reference)
    encoder, weights = share(backbone) if jobs else (backbone, None)
    measured = settings.precision == "auto" and find_device(settings.device).type == "cpu"
    choice = choose_layout(encoder) if measured else None
    precision = choice.layout if choice else settings.precision or "auto"
    engine = Engine(encoder, device=settings.device, precision=precision, budget=settings.budget)
    engine.use_graphs()
    if engine.ahead:
        use_few_threads_for_texts()
    service = BankService(bank, engine, queue=settings.queue, mirror=mirror)
    queue = jobs(weights) if jobs else None
    app = create_app(
        service,
        jobs=queue,
        keys=Keys(settings.keys or path / FILE) if settings.locked else None,
        limits=settings.limits,
        page=settings.page,
        local=True,
        replica=replica,
        untrained=settings.untrained or (UNWRITABLE if jobs and queue is None else ""),
    )
    app.state.service, app.state.choice = service, choice
    return app
