"""Promise: a client that leaves is counted as one that left (499): no error, no trace, nothing left behind."""

from __future__ import annotations

import asyncio
import logging

import pytest
import uvicorn

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.connections import bounded
from serving.dummy import Dummy
from serving.small_bank import until


async def leave(app, parts, enough=lambda seen: True):
    """Send parts of a request to a server, read until there is enough, and break the connection off."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    config.load()
    config.http_protocol_class = bounded(config.http_protocol_class)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.05)
    seen = b""
    while not enough(seen):
        seen += await reader.read(1000)
    writer.transport.abort()
    yield server
    server.should_exit = True
    await serving


def requests(caplog):
    return [record.fields for record in caplog.records if record.getMessage() == "request"]


def run(app, parts, caplog, **options):
    """Leave a request; return its fields in the log, once they are there."""
    caplog.set_level(logging.INFO, logger="adapterbank.serving")

    async def both():
        async for _ in leave(app, parts, **options):
            await until(lambda: requests(caplog))

    asyncio.run(both())
    (fields,) = requests(caplog)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    return fields


HEAD = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: 10000\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/tasks/length/predict", b"/v1/predict"])
def test_in_the_middle_of_a_body(path, caplog):
    app = create_app(Dummy(), page=False)
    fields = run(app, [HEAD % (path, b"application/json"), b'{"text": "abc'], caplog)
    assert fields["status"] == 499


def test_in_the_middle_of_an_upload(idle, caplog):
    app = create_app(Dummy(), jobs=idle, page=False)
    fields = run(app, [HEAD % (b"/v1/tasks/new/train", b"text/csv"), b"text,label\nfine,good\n"], caplog)
    assert fields["status"] == 499
    assert list((idle.bank / "serving" / "data").iterdir()) == []


def test_while_the_service_computes(caplog):
    service = Dummy()
    body = b'{"text": "abc"}'
    head = (HEAD % (b"/v1/tasks/slow/predict", b"application/json")).replace(b"10000", b"%d" % len(body))
    fields = run(create_app(service, page=False), [head + body], caplog)
    assert (fields["status"], service.cancelled) == (499, 1)


def test_while_it_follows_a_run(idle, caplog):
    run_id = idle.runs.add("t", {"epochs": 3}, {"format": "csv", "bytes": 1, "sha256": "0" * 64}, None).id
    app = create_app(Dummy(), jobs=idle, page=False)
    head = f"GET /v1/runs/{run_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    assert run(app, [head], caplog, enough=lambda seen: b"event: state" in seen)["status"] == 499
