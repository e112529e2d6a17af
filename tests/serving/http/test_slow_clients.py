"""Promise: clients that send heads and bodies byte by byte, or read nothing, hold up no other and are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest
import uvicorn

from adapterbank.serving.http import bodies, connections
from adapterbank.serving.http.app import create_app
from serving.dummy import Dummy
from serving.small_bank import PATIENCE, until

SLOW = 50
HEAD = b"POST /v1/tasks/length/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Content-Length: 100000\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(service, http="auto"):
    config = uvicorn.Config(create_app(service, page=False), http=http, port=0, log_config=None, lifespan="off")
    config.load()
    config.http_protocol_class = connections.bounded(config.http_protocol_class)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    yield server, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def drip(port, whole, each):
    """Send `whole`, then one byte after the other until the server ends the connection; return what it sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.ensure_future(_read(reader))
    with contextlib.suppress(ConnectionError):
        writer.write(whole)
        while not answer.done():
            writer.write(each)
            await writer.drain()
            await asyncio.sleep(0.02)
    writer.close()
    return await asyncio.wait_for(answer, PATIENCE)


async def _read(reader):
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1000):
            found += part
    return found


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_fifty_slow_clients_hold_up_nobody_and_are_cut_off(monkeypatch, http):
    pytest.importorskip(http)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 1.5)
    monkeypatch.setattr(bodies, "BODY_TIMEOUT", 1.5)

    async def run():
        async with serving(Dummy(), http) as (_, port):
            heads = [asyncio.ensure_future(drip(port, b"GET /healthz HTTP/1.1\r\nX: ", b"a")) for _ in range(SLOW // 2)]
            texts = [asyncio.ensure_future(drip(port, HEAD, b" ")) for _ in range(SLOW // 2)]
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                found = [await client.post("/v1/tasks/length/predict", json={"text": "abc"}) for _ in range(20)]
            return [answer.status_code for answer in found], await asyncio.gather(*heads), await asyncio.gather(*texts)

    found, heads, texts = asyncio.run(run())
    assert found == [200] * 20
    assert set(heads) == {b""}
    assert all(b" 408 " in text.partition(b"\r\n")[0] + b" " for text in texts)
    assert all(b"too_slow" in text for text in texts)


class Large(Dummy):
    async def tasks(self):
        found = await super().tasks()
        return {**found, "tasks": found["tasks"] * 10_000}


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_a_client_that_does_not_read_is_cut_off(monkeypatch, http):
    pytest.importorskip(http)
    monkeypatch.setattr(connections, "WRITE_TIMEOUT", 0.3)

    async def run():
        async with serving(Large(), http) as (server, port):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                client.send(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await until(lambda: server.server_state.connections)
                await until(lambda: not server.server_state.connections)

    asyncio.run(run())


def test_a_client_that_reads_slowly_gets_everything(monkeypatch):
    monkeypatch.setattr(connections, "WRITE_TIMEOUT", 0.5)

    async def run():
        async with serving(Large()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            size = 0
            while part := await asyncio.wait_for(reader.read(400_000), PATIENCE):
                size += len(part)
                await asyncio.sleep(0.02)
            writer.close()
            return size, int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])

    received, announced = asyncio.run(run())
    assert received == announced
