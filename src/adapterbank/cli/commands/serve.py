"""`adapterbank serve`: the bank over HTTP."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterbank import config
from adapterbank.cli import serve_options as options
from adapterbank.cli.console import AsJson, BackboneName, Device, Precision, print_json, say
from adapterbank.errors import ConfigError, InputError, StorageError
from adapterbank.serving.service.bank_mirror import REFRESH, Mirror, is_url
from adapterbank.storage.bank import Bank
from adapterbank.storage.files import storage_errors

if TYPE_CHECKING:
    from adapterbank.serving.build import ServerSettings
    from adapterbank.serving.http.auth import Keys

HELP = """Serve the tasks of a bank over HTTP, with a page at / and the interface described at /docs.

Example: adapterbank serve --bank bank

Example: curl localhost:8000/v1/tasks/sentiment/predict --json '{"text": "What a film!"}'

Example: adapterbank serve --bank new --create --backbone minilm (an empty bank: train on the page, or by HTTP)

Example: adapterbank serve --bank s3://bucket/bank --keys keys.json --host 0.0.0.0

Example: adapterbank serve --bank s3://bucket/bank --engine ray --replicas 1:8 --cpus-per-replica 4

Tasks that are put into the bank or removed from it are followed. On an address that others can reach it starts with
API keys only: adapterbank keys add --help
"""
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_ENGINES = ("local", "ray")
_PATIENCE = 30
"""Seconds that requests under way may take when the server stops."""


def command(
    bank: options.BankPlace,
    create: options.Creates = False,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    keys: options.KeysFile = None,
    budget: options.Budget = None,
    queue: options.Queue = None,
    max_texts: options.MaxTexts = 256,
    max_characters: options.MaxCharacters = 100_000,
    max_runs: options.MaxRuns = 10,
    train: options.Trains = True,
    page: options.HasPage = True,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    refresh: options.Refresh = REFRESH,
    engine: options.EngineName = "local",
    ray_address: options.RayAddress = None,
    replicas: options.Replicas = "1",
    cpus_per_replica: options.CpusPerReplica = 1,
    target_requests: options.TargetRequests = 32,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDS):
        raise InputError("Serving needs some libraries more: pip install 'adapterbank[serve]'")
    _check(engine, device, precision)
    new = _to_make(bank, backbone) if create else None
    mirror = Mirror(bank, every=refresh) if is_url(bank) else None
    locks = find_keys(bank, host, keys, mirror.path if mirror else new)
    with listening(host, port) as door:
        if new and backbone:
            _make(new, backbone)
        taken = door.getsockname()[1]
        tell = functools.partial(_say_where, bank, host, taken, json)
        from adapterbank.serving.build import ServerSettings
        from adapterbank.serving.service.protocol import Limits

        settings = ServerSettings(
            bank if mirror else str(Path(bank.removeprefix("file://")).absolute()),
            backbone,
            device,
            precision,
            locked=locks is not None,
            keys=os.path.abspath(keys) if keys else None,
            budget=budget * 1_000_000 if budget else None,
            queue=queue,
            limits=Limits(texts=max_texts, characters=max_characters, runs=max_runs),
            page=page,
            refresh=refresh,
            untrained=mirror.refusal if mirror and train else "",
        )
        if engine == "local":
            _serve_here(settings, mirror, train, door, tell)
            return
    if mirror:
        mirror.close()  # each replica has its own
    size = {"cpus": cpus_per_replica, "target": target_requests}
    _serve_on_ray(settings, train, (replicas, size), {"host": host, "port": taken, "address": ray_address}, tell)


def _check(engine: str, device: str, precision: str) -> None:
    """Tell a slip before anything is loaded."""
    config.parse({"device": device, "precision": precision})
    if engine not in _ENGINES:
        raise ConfigError([f"engine is {engine!r}; it must be one of {', '.join(_ENGINES)}."])
    if engine == "ray" and ":" in device:
        raise ConfigError([f"device is {device!r}, but each replica of the engine ray has a GPU of its own; use cuda."])


def _to_make(bank: str, backbone: str | None) -> Path | None:
    """Give where a bank is to be made; None where there is one."""
    if is_url(bank):
        raise InputError(
            f"--create makes a folder of this machine a bank, and {bank} is a URL; make it here and copy it."
        )
    path = Path(bank.removeprefix("file://"))
    with storage_errors(path):
        if (path / "bank.json").exists():
            return None
    if backbone is None:
        raise InputError(f"To make the bank {path}, name its encoder with --backbone.")
    return path


def _make(path: Path, backbone: str) -> None:
    """Make an empty bank, whose tasks can then be trained over HTTP."""
    from adapterbank.encoder.backbone import load

    Bank.open(path, load(backbone).reference, create=True)
    say(f"adapterbank: {path} is a new bank, for the encoder {backbone}.")


def find_keys(bank: str, host: str, file: str | None, path: Path | None = None) -> Keys | None:
    """Give the keys to ask for; none are needed where only this machine can reach the server.

    Args:
        bank: The bank as the user names it.
        host: Address to listen on.
        file: File of keys; the bank's without it.
        path: The bank's folder, where `bank` is none.
    """
    from adapterbank.serving.http.auth import FILE, Keys
    from adapterbank.serving.http.origin import is_loopback

    found = Keys(file or (path or Bank.open(bank.removeprefix("file://")).path) / FILE)
    if found.list():
        return found
    if file is not None and not Path(file).exists():
        raise InputError(f"There is no file of keys {file}; make one: adapterbank keys add --keys {file} --help")
    where = f"--keys {file or 'FILE'}" if file or path else f"--bank {bank}"
    how = f"adapterbank keys add {where} --name NAME --scope predict"
    if found.path.exists():  # somebody wanted keys, and has revoked the last
        raise InputError(f"{found.path} has no key left; delete it to serve without keys, or make one: {how}")
    if not is_loopback(host):
        raise InputError(f"Others can reach {host}, so the server starts with keys only; make one: {how}")
    return None


def listening(host: str, port: int) -> contextlib.closing[socket.socket]:
    """Take the port before anything is loaded, so that one in use is told at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        door = socket.create_server((host, port), family=family, backlog=1024)
        # Only where a socket says that it is TCP does asyncio send what is written at once: an answer's body would
        # else wait until the client's system has acknowledged its head, which on Linux takes 40 ms.
        named = socket.socket(door.family, door.type, socket.IPPROTO_TCP, fileno=door.detach())
        return contextlib.closing(named)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0].lower()  # Python adds the address once more
        what = f"{host} port {port} cannot be listened on: {why}"
        raise InputError(f"{what}; choose another --host or --port.") from error


def _serve_here(
    settings: ServerSettings, mirror: Mirror | None, train: bool, door: socket.socket, tell: Callable[[], None]
) -> None:
    """Serve in this process."""
    from adapterbank.serving.build import build
    from adapterbank.serving.http.telemetry import log_to

    def jobs(weights: int | None) -> Any:
        chosen = {"backbone": settings.backbone, "device": settings.device, "precision": settings.precision}
        return _jobs(settings.bank, {**chosen, "weights": weights})

    log_to()
    app = build(settings, mirror, jobs=jobs if train and mirror is None else None)
    tell()
    _run(app, door)


def _serve_on_ray(
    settings: ServerSettings,
    train: bool,
    scale: tuple[str, dict[str, int]],
    where: dict[str, Any],
    tell: Callable[..., None],
) -> None:
    """Serve on a cluster until asked to stop; then let replicas answer what they have."""
    from adapterbank.serving.ray_serve import UNTRAINED, Scale, deployed, parse_replicas

    number, size = scale
    chosen = Scale(*parse_replicas(number), **size)
    settings = replace(settings, untrained=settings.untrained or (UNTRAINED if train else ""))
    asked = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt), deployed(settings, chosen, **where) as as_told:
        signal.signal(signal.SIGTERM, asked)  # Ray has one of its own, which would not wait
        tell(told=as_told)
        threading.Event().wait()
    say("adapterbank: stopped.")


def _say_where(bank: str, host: str, port: int, json: bool, told: bool = True) -> None:
    """Say where the server listens; on a cluster that listens already, nobody here knows."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}" if told else None
    if json:
        print_json({"bank": bank, "address": address})
    say(f"adapterbank: serving {bank} on {address or 'the address of the Ray Serve that runs already'}")


def _jobs(bank: str, about: dict[str, Any]) -> Any:
    """Give what trains; a bank that cannot be written to is served all the same."""
    from adapterbank.serving.jobs.queue import JobQueue

    try:
        return JobQueue(bank, **about)
    except (StorageError, OSError) as error:
        say(f"adapterbank: nothing can be trained here, as the bank cannot be written to ({error}).")
        return None


def _run(app: Any, door: socket.socket) -> None:
    """Serve until asked to stop; then answer what is queued and refuse the rest."""
    import uvicorn

    from adapterbank.serving.http.connections import bounded

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.draining = True
            super().handle_exit(sig, frame)

    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_PATIENCE)
    config.load()
    config.http_protocol_class = bounded(config.http_protocol_class)
    with contextlib.suppress(KeyboardInterrupt):  # the signal that stopped it, raised once more
        Server(config).run(sockets=[door])
    say("adapterbank: stopped.")
