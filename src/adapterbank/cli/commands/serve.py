"""`adapterbank serve`: serve a bank over HTTP."""

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
from adapterbank.cli.console import print_json, print_message
from adapterbank.cli.options import AsJson, BackboneName, Device, EngineName, RayAddress, check_engine
from adapterbank.errors import ConfigError, InputError, StorageError
from adapterbank.install import extra_command
from adapterbank.serving.service.bank_mirror import REFRESH, Mirror, is_url
from adapterbank.storage.bank import Bank
from adapterbank.storage.files import storage_errors
from adapterbank.tasks.limits import TableLimits

if TYPE_CHECKING:
    from adapterbank.serving.build import ServerSettings
    from adapterbank.serving.http.auth import Keys
    from adapterbank.serving.jobs.queue import QueueLimits
    from adapterbank.serving.service.protocol import Limits

HELP = """Serve the tasks of a bank over HTTP.

The web page is at /, the API documentation at /docs. Tasks that are added to the bank or removed from it are picked up
while the server runs. On an address that other machines can reach, the server requires API keys: adapterbank keys add
--help

Example: adapterbank serve --bank bank

Example: curl localhost:8000/v1/tasks/sentiment/predict --json '{"text": "What a film!"}'

Example: adapterbank serve --bank new --create --backbone minilm (an empty bank; train on the page or over HTTP)

Example: adapterbank serve --bank s3://bucket/bank --keys keys.json --host 0.0.0.0

Example: adapterbank serve --bank s3://bucket/bank --engine ray --replicas 1:8 --cpus-per-replica 4
"""
REQUIRED = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
"""Libraries of the extra `serve`."""
_GRACE_SECONDS = 30
"""Time that open requests have to finish when the server stops."""


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
    max_upload_rows: options.MaxUploadRows = 1_000_000,
    max_upload_text: options.MaxUploadText = 1_000_000,
    max_run_minutes: options.MaxRunMinutes = 1440,
    max_run_memory: options.MaxRunMemory = None,
    train: options.Trains = True,
    page: options.HasPage = True,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: options.MeasuredPrecision = None,
    refresh: options.Refresh = REFRESH,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    replicas: options.Replicas = "1",
    cpus_per_replica: options.CpusPerReplica = 1,
    target_requests: options.TargetRequests = 32,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    _check(engine, device, precision)
    new = _new_bank(bank, backbone) if create else None
    mirror = Mirror(bank, every=refresh) if is_url(bank) else None
    required_keys = find_keys(bank, host, keys, mirror.path if mirror else new)
    with listening(host, port) as listener:
        _create(new, backbone)
        bound_port = listener.getsockname()[1]
        announce = functools.partial(_print_address, bank, host, bound_port, json)
        from adapterbank.serving.build import ServerSettings

        settings = ServerSettings(
            bank if mirror else str(Path(bank.removeprefix("file://")).absolute()),
            backbone,
            device,
            precision,
            locked=required_keys is not None,
            keys=os.path.abspath(keys) if keys else None,
            budget=budget * 1_000_000 if budget else None,
            queue=queue,
            limits=_limits(texts=max_texts, characters=max_characters, runs=max_runs),
            training=_training_limits(max_upload_rows, max_upload_text, max_run_minutes, max_run_memory),
            page=page,
            refresh=refresh,
            untrained=mirror.refusal if mirror and train else "",
        )
        if engine == "local":
            _serve_here(settings, mirror, train, listener, announce)
            return
    scale = {"cpus": cpus_per_replica, "target": target_requests}
    where = {"host": host, "port": bound_port, "address": ray_address}
    _serve_on_ray(settings, mirror, train, (replicas, scale), where, announce)


def _limits(**values: int) -> Limits:
    from adapterbank.serving.service.protocol import Limits

    return Limits(**values)


def _training_limits(rows: int, text: int, minutes: float, megabytes: int | None) -> QueueLimits:
    from adapterbank.serving.jobs.queue import QueueLimits

    memory = megabytes * 1_000_000 if megabytes else None
    return QueueLimits(table=TableLimits(rows=rows, text=text), minutes=minutes, memory=memory)


def _check(engine: str, device: str, precision: str | None) -> None:
    """Check the libraries and the options before anything is loaded."""
    if any(importlib.util.find_spec(name) is None for name in REQUIRED):
        raise InputError(f"Serving requires additional libraries; install them with: {extra_command('serve')}")
    config.parse({"device": device, "precision": precision or "auto"})
    check_engine(engine)
    if engine == "ray" and ":" in device:
        raise ConfigError([f"device is {device!r}, but each Ray replica has its own GPU; use cuda."])
    if engine == "ray" and precision == "auto":
        raise ConfigError(["precision is 'auto', but each Ray replica would measure for itself; name one, as int8."])


def _new_bank(bank: str, backbone: str | None) -> Path | None:
    """Return the folder in which to create a bank; None if the bank exists."""
    if is_url(bank):
        raise InputError(
            f"--create makes a bank in a local folder, but {bank} is a URL; create the bank locally and copy it there."
        )
    path = Path(bank.removeprefix("file://"))
    with storage_errors(path):
        if (path / "bank.json").exists():
            return None
    if backbone is None:
        raise InputError(f"The bank {path} does not exist yet; name the encoder to create it for with --backbone.")
    return path


def _create(path: Path | None, backbone: str | None) -> None:
    """Create an empty bank, whose tasks can then be trained over HTTP, unless there is nothing to create."""
    if path is None or backbone is None:
        return
    from adapterbank.encoder.backbone import load

    Bank.open(path, load(backbone).reference, create=True)
    print_message(f"adapterbank: created the bank {path} for the encoder {backbone}.")


def find_keys(bank: str, host: str, file: str | None, path: Path | None = None) -> Keys | None:
    """Return the API keys that requests must present; None on a loopback address of a bank without keys.

    Args:
        bank: The bank as the user named it.
        host: Address to listen on.
        file: File of keys; by default the bank's.
        path: The bank's local folder, if `bank` is a URL or does not exist yet.
    """
    from adapterbank.serving.http.auth import FILE, Keys
    from adapterbank.serving.http.origin import is_loopback

    found = Keys(file or (path or Bank.open(bank.removeprefix("file://")).path) / FILE)
    if found.list():
        return found
    if file is not None and not Path(file).exists():
        raise InputError(
            f"{file} does not exist; create it with: adapterbank keys add --keys {file} --name NAME --scope predict"
        )
    where = f"--keys {file or 'FILE'}" if file or path else f"--bank {bank}"
    how = f"adapterbank keys add {where} --name NAME --scope predict"
    if found.path.exists():  # keys were in use, and the last one was revoked
        raise InputError(f"{found.path} contains no keys; delete it to serve without keys, or add one with: {how}")
    if not is_loopback(host):
        raise InputError(f"Other machines can reach {host}, so the server requires API keys; add one with: {how}")
    return None


def listening(host: str, port: int) -> contextlib.closing[socket.socket]:
    """Bind the port before anything is loaded, so that a port in use is reported at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=1024)
        # asyncio sets TCP_NODELAY only on sockets whose protocol is IPPROTO_TCP. Without it the body of a response
        # waits until the client's system has acknowledged the head, which takes 40 ms on Linux.
        return contextlib.closing(socket.socket(bound.family, bound.type, socket.IPPROTO_TCP, fileno=bound.detach()))
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0].lower()  # Python repeats the address there
        raise InputError(f"Cannot listen on {host} port {port}: {why}; choose another --host or --port.") from error


def _serve_here(
    settings: ServerSettings, mirror: Mirror | None, train: bool, listener: socket.socket, announce: Callable[[], None]
) -> None:
    """Serve in this process."""
    from adapterbank.serving.build import build
    from adapterbank.serving.http.telemetry import log_to

    def jobs(weights: int | None) -> Any:
        chosen = {"backbone": settings.backbone, "device": settings.device, "precision": settings.precision or "auto"}
        return _jobs(settings.bank, {**chosen, "weights": weights, "limits": settings.training})

    log_to()
    app = build(settings, mirror, jobs=jobs if train and mirror is None else None)
    if app.state.choice:
        print_message(f"adapterbank: {app.state.choice}")
    announce()
    _run(app, listener)


def _serve_on_ray(
    settings: ServerSettings,
    mirror: Mirror | None,
    train: bool,
    scale: tuple[str, dict[str, int]],
    where: dict[str, Any],
    announce: Callable[..., None],
) -> None:
    """Serve on a cluster until a stop signal; then let the replicas finish their open requests."""
    from adapterbank.serving.ray_serve import UNTRAINED, Scale, deployed, parse_replicas

    if mirror:
        mirror.close()  # each replica has its own
    number, size = scale
    chosen = Scale(*parse_replicas(number), **size)
    settings = replace(settings, untrained=settings.untrained or (UNTRAINED if train else ""))
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(KeyboardInterrupt), deployed(settings, chosen, **where) as at_address:
        signal.signal(signal.SIGTERM, handler)  # Ray installs its own, which would not wait
        announce(known=at_address)
        threading.Event().wait()
    print_message("adapterbank: stopped.")


def _print_address(bank: str, host: str, port: int, json: bool, known: bool = True) -> None:
    """Print where the server listens; it is not `known` if Ray Serve was already running on the cluster."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}" if known else None
    if json:
        print_json({"bank": bank, "address": address})
    print_message(f"adapterbank: serving {bank} on {address or 'the address of the running Ray Serve instance'}")


def _jobs(bank: str, about: dict[str, Any]) -> Any:
    """Return the queue of training runs; None, with a message, if the bank cannot be written to."""
    from adapterbank.serving.jobs.queue import JobQueue

    try:
        return JobQueue(bank, **about)
    except (StorageError, OSError) as error:
        print_message(f"adapterbank: training is disabled because the bank cannot be written to ({error}).")
        return None


def _run(app: Any, listener: socket.socket) -> None:
    """Serve until a stop signal; then answer the queued requests and reject new ones."""
    import uvicorn

    from adapterbank.serving.http.connections import bounded

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.draining = True
            super().handle_exit(sig, frame)

    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS)
    config.load()
    config.http_protocol_class = bounded(config.http_protocol_class)
    with contextlib.suppress(KeyboardInterrupt):  # the stop signal, raised again
        Server(config).run(sockets=[listener])
    print_message("adapterbank: stopped.")
