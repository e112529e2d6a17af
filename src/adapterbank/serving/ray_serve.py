"""The app on Ray Serve: replicas, their number by their queues, their health. Knows Ray, and nothing below does.

A replica is what `adapterbank serve` is on one machine: an encoder, a queue, a shelf that follows the bank. Ray's
proxies hand requests to the replica with the fewer of two, start another when one dies, and let one that goes away
answer what it has.
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
from adapterbank.serving.build import ServerSettings, build, mirrored
from adapterbank.serving.http.telemetry import NUMBERS, log_to
from adapterbank.studies.ray_sweep import join

NAME = "adapterbank"
"""The application's name on the cluster."""
UNTRAINED = (
    "Nothing is trained by a server of several replicas; "
    "train with `adapterbank train`, or serve the same bank with --engine local."
)
_PATIENCE = 30.0
"""Seconds that requests under way may take when a replica stops."""
_ONGOING = 1000
"""Requests of one replica at once: so many that its own queue, which counts tokens, is what refuses."""
_NEWS = 5.0
"""Seconds between two reports of a replica's numbers."""


@dataclass(frozen=True)
class Scale:
    """How many replicas there are."""

    least: int = 1
    most: int = 1
    cpus: int = 1
    """CPUs, and threads, of one."""
    target: int = 32
    """Requests, queued and computed, that one should have at a time."""


def parse_replicas(text: str) -> tuple[int, int]:
    """Read `2`, or `1:4`."""
    least, colon, most = text.partition(":")
    found = (least, most if colon else least)
    if not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in found) or int(least) > int(found[1]):
        raise InputError(f"replicas is {text!r}; give a number, or the least and the most, as in 1:4.")
    return int(least), int(found[1])


@contextlib.contextmanager
def deployed(
    settings: ServerSettings, scale: Scale, *, host: str, port: int, address: str | None = None
) -> Iterator[bool]:
    """Serve on a cluster until the `with` ends; gives whether Ray Serve listens where it was told to.

    Args:
        settings: What is served; every machine must see its files.
        scale: How many replicas.
        host: Where the proxies listen, one on each machine with a replica.
        port: Likewise. A cluster on which Ray Serve runs already listens where it does.
        address: Of the cluster; without it that of RAY_ADDRESS, or one is started on this machine.
    """
    ray, serve = _libraries()
    began = not ray.is_initialized()
    if began:
        join(ray, address)
    try:
        there = bool(serve.status().proxies)
        if there and not settings.locked:
            how = "make some (adapterbank keys add --help), or stop it: serve shutdown"
            raise InputError(
                f"Ray Serve runs on this cluster already, on an address of its own, so keys are asked; {how}."
            )
        if not there:
            serve.start(
                http_options={"host": host, "port": port},
                logging_config={"enable_access_log": False, "log_level": "WARNING"},
            )
        try:
            _run(ray, serve, settings, scale)
            yield not there
        finally:
            with contextlib.suppress(TimeoutError):  # replicas answer what they have, while the proxies are there
                serve.delete(NAME)
            if not there:
                serve.shutdown()
    finally:
        if began:
            ray.shutdown()


def _libraries() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError:
        raise InputError("The engine ray needs Ray Serve: pip install 'adapterbank[ray,serve]'.") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray, serve


def _run(ray: Any, serve: Any, settings: ServerSettings, scale: Scale) -> None:
    """Deploy, and wait until a replica answers."""
    gpus = 1 if settings.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    if scale.least == scale.most:
        number: dict[str, Any] = {"num_replicas": scale.least}
    else:
        number = {"autoscaling_config": autoscaling(scale)}
    deployment = serve.deployment(
        _replica(serve, settings, scale.cpus, os.getcwd()),
        name=NAME,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": gpus},
        max_ongoing_requests=_ONGOING,
        max_queued_requests=_ONGOING,
        graceful_shutdown_timeout_s=_PATIENCE,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=15,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **number,
    )
    try:
        serve.run(deployment.bind(), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ServiceError(f"No replica could be started: {_why(serve) or error}") from error


def autoscaling(scale: Scale) -> dict[str, Any]:
    """Say when Ray Serve adds a replica (ten seconds above the target) and takes one away (five minutes below)."""
    return {
        "min_replicas": scale.least,
        "max_replicas": scale.most,
        "target_ongoing_requests": scale.target,
        "look_back_period_s": 20,
        "upscale_delay_s": 10,
        "downscale_delay_s": 300,
    }


def _why(serve: Any) -> str:
    """Give the last line of what Ray Serve says of a deployment that failed: the exception's own sentence."""
    for app in serve.status().applications.values():
        for deployment in app.deployments.values():
            lines = [line.strip() for line in str(deployment.message).splitlines() if line.strip()]
            if lines:
                return re.sub(r"^[\w.]+: ", "", lines[-1])
    return ""


def _replica(serve: Any, settings: ServerSettings, threads: int, folder: str) -> Any:
    """Give the class that Ray Serve makes replicas of."""

    def app() -> Any:  # called on the replica
        return _app(settings, threads, folder)

    @serve.ingress(app)
    class Replica:
        app: Any

        def check_health(self) -> None:
            """Raise when the replica should be replaced."""
            if not self.app.state.service.alive:
                raise RuntimeError("The service has stopped computing.")

    return Replica


def _app(settings: ServerSettings, threads: int, folder: str) -> Any:
    """Make the app within a replica; it starts when the bank's tasks are loaded, and not before."""
    import torch

    torch.set_num_threads(threads)
    log_to(sys.stderr)
    with contextlib.chdir(folder) if Path(folder).is_dir() else contextlib.nullcontext():
        app = build(settings, mirrored(settings), replica=_name())
    app.add_middleware(_OneId)
    begin = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def life(app: Any) -> AsyncIterator[None]:
        async with begin(app):
            while not app.state.service.ready:
                await asyncio.sleep(0.05)
            telling = asyncio.create_task(_tell(app.state.service))
            yield
            telling.cancel()

    app.router.lifespan_context = life
    return app


def _name() -> str:
    """Give what Ray calls this replica, in its own metrics too."""
    from ray import serve

    return str(serve.get_replica_context().replica_tag)


async def _tell(service: Any) -> None:
    """Hand a replica's numbers to Ray, whose own metrics have them by replica."""
    from ray.serve import metrics

    gauges = {name: metrics.Gauge(f"adapterbank_{name}", what) for name, (_, what) in NUMBERS.items()}
    while True:
        for name, value in service.numbers().items():
            gauges[name].set(value)
        await asyncio.sleep(_NEWS)


class _OneId:
    """Leaves the header of the request id to Ray's proxy, which would add a second one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
            await send(message)

        await self.app(scope, receive, sending)
