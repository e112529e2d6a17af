"""The app on Ray Serve: replicas, autoscaling and health checks. Knows Ray; nothing below does.

A replica is what `adapterbank serve` is on one machine: an encoder, a queue, a registry that follows the bank. Ray's
proxies send each request to the less busy of two replicas, replace a replica that dies, and let one that stops answer
its open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapterbank.errors import InputError, ServiceError
from adapterbank.install import extra_command
from adapterbank.serving.build import ServerSettings, build, mirrored
from adapterbank.serving.http.telemetry import NUMBERS, log_to
from adapterbank.studies.ray_sweep import join

NAME = "adapterbank"
"""The application's name on the cluster."""
UNTRAINED = (
    "A server on Ray does not train; train with `adapterbank train`, or serve the same bank with --engine local."
)
_GRACE = 30.0
"""Seconds that open requests have when a replica stops."""
_ONGOING = 1000
"""Concurrent requests of one replica: so many that its own queue, which counts tokens, is the limit."""
_REPORT = 5.0
"""Seconds between two reports of a replica's numbers."""


@dataclass(frozen=True)
class Scale:
    """The number of replicas and their size."""

    least: int = 1
    most: int = 1
    cpus: int = 1
    """CPUs and threads of one replica."""
    target: int = 32
    """Concurrent requests that one replica should have, queued and computed."""


def parse_replicas(text: str) -> tuple[int, int]:
    """Parse `2` or `1:4`."""
    least, colon, most = text.partition(":")
    found = (least, most if colon else least)
    if not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in found) or int(least) > int(found[1]):
        raise InputError(f"replicas is {text!r}; give a number, or the least and the most, as in 1:4.")
    return int(least), int(found[1])


@contextlib.contextmanager
def deployed(
    settings: ServerSettings, scale: Scale, *, host: str, port: int, address: str | None = None
) -> Iterator[bool]:
    """Serve on a cluster until the `with` ends; yield whether Ray Serve listens on the requested address.

    Args:
        settings: What to serve; every machine must be able to read its files.
        scale: The number of replicas.
        host: The address of the proxies, one on each machine with a replica.
        port: Their port. If Ray Serve runs on the cluster already, its address does not change.
        address: The cluster; by default RAY_ADDRESS, or a new cluster on this machine.
    """
    ray, serve = libraries()
    began = not ray.is_initialized()
    if began:
        join(ray, address)
    try:
        there = bool(serve.status().proxies)
        if there and not settings.locked:
            how = "add keys (adapterbank keys add --help), or stop it with: serve shutdown"
            raise InputError(f"Ray Serve runs on this cluster already and may be public, so keys are required; {how}.")
        if not there:
            serve.start(
                http_options={"host": host, "port": port},
                logging_config={"enable_access_log": False, "log_level": "WARNING"},
            )
        try:
            _run(ray, serve, settings, scale)
            yield not there
        finally:
            with contextlib.suppress(TimeoutError):  # replicas answer their open requests while the proxies still run
                serve.delete(NAME)
            if not there:
                serve.shutdown()
    finally:
        if began:
            ray.shutdown()


def libraries() -> tuple[Any, Any]:
    """Return the modules `ray` and `ray.serve`."""
    try:
        import ray
        from ray import serve
    except ImportError:
        raise InputError(f"The engine ray needs Ray Serve: {extra_command('ray,serve')}") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray, serve


def _run(ray: Any, serve: Any, settings: ServerSettings, scale: Scale) -> None:
    """Deploy, and wait until a replica is ready."""
    gpus = 1 if settings.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    if scale.least == scale.most:
        number: dict[str, Any] = {"num_replicas": scale.least}
    else:
        number = {"autoscaling_config": autoscaling(scale)}
    deployment = serve.deployment(
        replica_class(serve, settings, scale.cpus, os.getcwd()),
        name=NAME,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": gpus},
        max_ongoing_requests=_ONGOING,
        max_queued_requests=_ONGOING,
        graceful_shutdown_timeout_s=_GRACE,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=15,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **number,
    )
    try:
        serve.run(deployment.bind(), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ServiceError(f"No replica could be started: {_reason(serve) or error}") from error


def autoscaling(scale: Scale) -> dict[str, Any]:
    """Return when Ray Serve adds a replica (ten seconds above the target) and removes one (five minutes below)."""
    return {
        "min_replicas": scale.least,
        "max_replicas": scale.most,
        "target_ongoing_requests": scale.target,
        "look_back_period_s": 20,
        "upscale_delay_s": 10,
        "downscale_delay_s": 300,
    }


def _reason(serve: Any) -> str:
    """Return the last line of Ray Serve's message about a failed deployment, which is the exception's message."""
    for app in serve.status().applications.values():
        for deployment in app.deployments.values():
            lines = [line.strip() for line in str(deployment.message).splitlines() if line.strip()]
            if lines:
                return re.sub(r"^[\w.]+: ", "", lines[-1])
    return ""


def replica_class(serve: Any, settings: ServerSettings, threads: int, folder: str) -> Any:
    """Return the class of the replicas."""

    def app() -> Any:  # called on the replica
        return replica_app(settings, threads, folder)

    @serve.ingress(app)
    class Replica:
        app: Any

        def check_health(self) -> None:
            """Raise when the replica should be replaced."""
            if not self.app.state.service.alive:
                raise RuntimeError("The service has stopped computing.")

    return Replica


def replica_app(settings: ServerSettings, threads: int, folder: str) -> Any:
    """Create the app within a replica; it starts only when the bank's tasks are loaded."""
    import torch

    torch.set_num_threads(threads)
    log_to(sys.stderr)
    with contextlib.chdir(folder) if Path(folder).is_dir() else contextlib.nullcontext():
        app = build(settings, mirrored(settings), replica=_name())
    app.add_middleware(_WithoutRequestId)
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def until_ready(app: Any) -> AsyncIterator[None]:
        async with lifespan(app):
            while not app.state.service.ready:
                await asyncio.sleep(0.05)
            reporting = asyncio.create_task(_report(app.state.service))
            yield
            reporting.cancel()

    app.router.lifespan_context = until_ready
    return app


def _name() -> str:
    """Return Ray's name for this replica, which its own metrics have too."""
    from ray import serve

    return str(serve.get_replica_context().replica_tag)


async def _report(service: Any) -> None:
    """Report a replica's numbers to Ray, whose metrics have them by replica."""
    from ray.serve import metrics

    gauges = {name: metrics.Gauge(f"adapterbank_{name}", what) for name, (_, what) in NUMBERS.items()}
    while True:
        for name, value in service.numbers().items():
            gauges[name].set(value)
        await asyncio.sleep(_REPORT)


class _WithoutRequestId:
    """Removes the header of the request id, because Ray's proxy adds its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
            await send(message)

        await self.app(scope, receive, send_without_id)
