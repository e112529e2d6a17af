"""`adapterbank serve`: the bank over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterbank.bank import Bank
from adapterbank.cli.console import AsJson, BackboneName, BankPath, Device, Precision, print_json, say
from adapterbank.errors import InputError, StorageError

if TYPE_CHECKING:
    from adapterbank.serving.keys import Keys

HELP = """Serve the tasks of a bank over HTTP, with a page at / and the interface described at /docs.

Example: adapterbank serve --bank bank

Example: curl localhost:8000/v1/tasks/sentiment/predict --json '{"text": "What a film!"}'

Tasks that are put into the bank or removed from it are followed. On an address that others can reach it starts with
API keys only: adapterbank keys add --help
"""
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "pydantic")
_PATIENCE = 30
"""Seconds that requests under way may take when the server stops."""


def command(
    bank: BankPath,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    keys: Annotated[
        str | None, typer.Option("--keys", help="File of API keys (default: the bank's, where it has some).")
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--budget", help="Megabytes that tasks may take in memory (default: any).", min=1)
    ] = None,
    queue: Annotated[
        int | None, typer.Option("--queue", help="Tokens that may wait (default: 65,536; 262,144 on a GPU).", min=1)
    ] = None,
    max_texts: Annotated[int, typer.Option("--max-texts", help="Texts of one request.", min=1)] = 256,
    max_characters: Annotated[int, typer.Option("--max-characters", help="Characters of one text.", min=1)] = 100_000,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Take data files and train on them.")] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Show a page at /.")] = True,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDS):
        raise InputError("Serving needs some libraries more: pip install 'adapterbank[serve]'")
    locks = find_keys(bank, host, keys)
    with listening(host, port) as door:
        from adapterbank.api import open_bank
        from adapterbank.encoder.shared import share
        from adapterbank.engine import Engine
        from adapterbank.serving.app import create_app
        from adapterbank.serving.service import BankService
        from adapterbank.serving.terms import Limits
        from adapterbank.serving.watch import log_to

        opened = open_bank(bank, backbone, device=device, precision=precision)
        encoder, weights = share(opened.backbone) if train else (opened.backbone, None)
        engine = Engine(encoder, device=device, precision=precision, budget=budget * 1_000_000 if budget else None)
        engine.run_programs()
        about = {"backbone": backbone, "weights": weights, "device": device, "precision": precision}
        log_to()
        app = create_app(
            BankService(opened.bank, engine, queue=queue),
            jobs=_jobs(bank, about) if train else None,
            keys=locks,
            limits=Limits(texts=max_texts, characters=max_characters),
            page=page,
            local=True,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}"
        if json:
            print_json({"bank": bank, "address": address})
        say(f"adapterbank: serving {bank} on {address}")
        _run(app, door)


def find_keys(bank: str, host: str, file: str | None) -> Keys | None:
    """Give the keys to ask for; none are needed where only this machine can reach the server."""
    from adapterbank.serving.gate import is_loopback
    from adapterbank.serving.keys import FILE, Keys

    found = Keys(file or Bank.open(bank).path / FILE)
    if found.list():
        return found
    if file is not None and not Path(file).exists():
        raise InputError(f"There is no file of keys {file}; make one: adapterbank keys add --keys {file} --help")
    how = f"adapterbank keys add {f'--keys {file}' if file else f'--bank {bank}'} --name NAME --scope predict"
    if found.path.exists():  # somebody wanted keys, and has revoked the last
        raise InputError(f"{found.path} has no key left; delete it to serve without keys, or make one: {how}")
    if not is_loopback(host):
        raise InputError(f"Others can reach {host}, so the server starts with keys only; make one: {how}")
    return None


def listening(host: str, port: int) -> contextlib.closing[socket.socket]:
    """Take the port before anything is loaded, so that one in use is told at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return contextlib.closing(socket.create_server((host, port), family=family, backlog=1024))
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0].lower()  # Python adds the address once more
        what = f"{host} port {port} cannot be listened on: {why}"
        raise InputError(f"{what}; choose another --host or --port.") from error


def _jobs(bank: str, about: dict[str, Any]) -> Any:
    """Give what trains; a bank that cannot be written to is served all the same."""
    from adapterbank.serving.jobs import Jobs

    try:
        return Jobs(bank, **about)
    except (StorageError, OSError) as error:
        say(f"adapterbank: nothing can be trained here, as the bank cannot be written to ({error}).")
        return None


def _run(app: Any, door: socket.socket) -> None:
    """Serve until asked to stop; then answer what is queued and refuse the rest."""
    import uvicorn

    from adapterbank.serving.connections import bounded

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
