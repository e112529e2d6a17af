"""Claims about connections: the head of a request is limited in size and time with either parser."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvicorn

from adapterbank.serving.http import connections
from adapterbank.serving.http.app import create_app
from serving.dummy import Dummy
from serving.small_bank import PATIENCE, until


async def talk(http, parts, service=None):
    """Send the parts of a request to a server with this parser; return what it sends until the connection ends."""
    app = create_app(service or Dummy(), page=False)
    given = {"port": 0, "http": http, "log_config": None, "lifespan": "off"}
    config = uvicorn.Config(app, **given, timeout_keep_alive=PATIENCE)  # a slow test must not run into it
    config.load()
    config.http_protocol_class = connections.bounded(config.http_protocol_class)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        found = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    server.should_exit = True
    await serving
    return found


@pytest.fixture(params=["h11", "httptools"])
def http(request):
    pytest.importorskip(request.param)
    return request.param


def test_a_head_without_an_end_is_rejected(http):
    parts = [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "] + [b"a" * 20_000] * 40
    found = asyncio.run(talk(http, parts))
    assert found.startswith(b"HTTP/1.1 431 ") or not found  # a reset may overtake the answer


def test_a_silent_connection_is_closed(http, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.2)
    assert asyncio.run(talk(http, [])) == b""
    assert asyncio.run(talk(http, [b"GET /hea"])) == b""


def test_a_large_body_after_a_small_head_is_read_whole(http):
    text = b"a" * 90_000
    body = b'{"text": "' + text + b'"}'
    head = b"POST /v1/tasks/length/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: %b\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    first, last = head % b"keep-alive", head % b"close"
    found = asyncio.run(talk(http, [first + body, first + body[:70_000], body[70_000:], last + body]))
    assert found.count(b"90000.0") == 3


def test_a_second_head_that_stalls_is_rejected_too(http, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.3)
    first = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = asyncio.run(talk(http, [first, b"GET /hea"]))
    assert found.count(b" 200 ") == 1


class Slow(Dummy):
    async def predict(self, asks):
        await asyncio.sleep(0.8)
        return await super().predict(asks)


def test_a_response_may_take_longer_than_a_head(http, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.5)
    head = b"POST /v1/tasks/length/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: 15\r\n\r\n"
    found = asyncio.run(talk(http, [head + b'{"text": "abc"}'], Slow()))
    assert b"3.0" in found


@pytest.mark.parametrize("size", [70_000, 300_000])
def test_a_complete_head_above_the_bound_is_refused(http, size):
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"a" * size + b"\r\n\r\n"
    found = asyncio.run(talk(http, [head]))
    assert found.startswith(b"HTTP/1.1 431 ") or not found
    assert b" 200 " not in found
    small = head.replace(b"a" * size, b"a" * 60_000)
    assert asyncio.run(talk(http, [small])).startswith(b"HTTP/1.1 200 ")
