"""What a server is made of, as plain values that can be sent to another machine, and the app made of them. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.shared_memory import share
from adapterbank.inference.engine import Engine
from adapterbank.runtime import use_few_threads_for_texts
from adapterbank.serving.http.app import DEFAULT_LIMITS, create_app
from adapterbank.serving.http.auth import FILE, Keys
from adapterbank.serving.service.bank_mirror import REFRESH, Mirror, is_url
from adapterbank.serving.service.protocol import Limits
from adapterbank.serving.service.service import BankService
from adapterbank.storage.bank import Bank


@dataclass(frozen=True)
class ServerSettings:
    """The wishes of who starts a server."""

    bank: str
    """Folder or URL."""
    backbone: str | None = None
    """Where its encoder is; as the bank says without it."""
    device: str = "auto"
    precision: str = "auto"
    locked: bool = False
    """Whether requests need a key. A file of keys that is missing then lets nobody in."""
    keys: str | None = None
    """The file of keys; the bank's own without it."""
    budget: int | None = None
    """Bytes that tasks may take in memory."""
    queue: int | None = None
    """Tokens that may wait."""
    limits: Limits = DEFAULT_LIMITS
    page: bool = True
    refresh: float = REFRESH
    """Seconds between two looks at a bank behind a URL."""
    untrained: str = ""
    """Why nothing can be trained here, for who tries to; empty where the routes are simply not there."""


def mirrored(settings: ServerSettings) -> Mirror | None:
    """Give a mirror of a bank behind a URL, which has none of its tasks yet; None for a folder."""
    return Mirror(settings.bank, every=settings.refresh) if is_url(settings.bank) else None


def build(
    settings: ServerSettings,
    mirror: Mirror | None = None,
    *,
    jobs: Callable[[int | None], Any] | None = None,
    replica: str = "",
) -> FastAPI:
    """Load the encoder and make the app; `app.state.service` is what answers.

    Args:
        settings: What is wanted.
        mirror: See `mirrored`; it is brought up to date first, and closed with the service.
        jobs: Makes what trains, given the descriptor of the encoder's tensors.
        replica: Its name, where it is one of several.
    """
    if mirror:
        mirror.refresh_all()
    path = mirror.path if mirror else Path(settings.bank.removeprefix("file://"))
    backbone = checkpoint.load(settings.backbone or Bank.open(path).backbone["name"])
    bank = Bank.open(path, backbone.reference)
    encoder, weights = share(backbone) if jobs else (backbone, None)
    engine = Engine(encoder, device=settings.device, precision=settings.precision, budget=settings.budget)
    engine.run_programs()
    if engine.ahead:
        use_few_threads_for_texts()
    service = BankService(bank, engine, queue=settings.queue, mirror=mirror)
    app = create_app(
        service,
        jobs=jobs(weights) if jobs else None,
        keys=Keys(settings.keys or path / FILE) if settings.locked else None,
        limits=settings.limits,
        page=settings.page,
        local=True,
        replica=replica,
        untrained=settings.untrained,
    )
    app.state.service = service
    return app
