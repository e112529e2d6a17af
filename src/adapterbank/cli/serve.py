"""`adapterbank serve`: the bank over HTTP."""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Annotated, Any

import typer

from adapterbank.cli.console import BackboneName, BankPath, Device, Precision, say
from adapterbank.errors import InputError

HELP = """Serve the tasks of a bank over HTTP, with a page at / and the interface described at /docs.

Example: adapterbank serve --bank bank

Example: curl localhost:8000/v1/tasks/sentiment/predict --json '{"text": "What a film!"}'
"""
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "pydantic")


def command(
    bank: BankPath,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=0, max=65535)] = 8000,
    budget: Annotated[
        int | None, typer.Option("--budget", help="Megabytes that tasks may take in memory (default: any).", min=1)
    ] = None,
    queue: Annotated[
        int | None, typer.Option("--queue", help="Tokens that may wait (default: sixteen batches).", min=1)
    ] = None,
    backbone: BackboneName = None,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """See `HELP`."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDS):
        raise InputError("Serving needs some libraries more: pip install 'adapterbank[serve]'")
    keys: Any = None
    if keys is None and not is_loopback(host):
        raise InputError(f"{host} can be reached by others; make a key first: adapterbank keys add NAME --bank {bank}")
    import uvicorn

    from adapterbank.api import open_bank
    from adapterbank.engine import Engine
    from adapterbank.serving.app import create_app
    from adapterbank.serving.service import BankService
    from adapterbank.serving.watch import log_to

    opened = open_bank(bank, backbone, device=device, precision=precision)
    engine = Engine(opened.backbone, device=device, precision=precision, budget=budget * 1_000_000 if budget else None)
    log_to()
    app = create_app(BankService(opened.bank, engine, queue=queue), keys=keys)
    say(f"adapterbank: serving {bank} on http://{host}:{port}")
    uvicorn.run(app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=30)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
