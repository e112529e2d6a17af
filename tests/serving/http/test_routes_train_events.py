"""Claims about following runs over HTTP, and about a task that is trained and served at once."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pyarrow
import pyarrow.parquet

from adapterbank.inference.engine import Engine
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.routes_train import follow
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.jobs.run_store import RunStore
from adapterbank.serving.service.service import BankService
from adapterbank.storage.bank import Bank
from serving.dummy import calling
from serving.small_bank import PATIENCE
from serving.training import DATA, FAST, events, new_bank
from small_data import reviews

PATH = "/v1/tasks/sentiment/train"


async def take(generator, count):
    return [await anext(generator) for _ in range(count)]


def test_events_replay_the_epochs_then_follow_every_change_and_end_with_the_run(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    id = runs.add("t", {"epochs": 3}, DATA, None).id
    runs.begin()
    now = {"epoch": 2, "epochs": 3, "step": 5, "steps": 9, "loss": 0.4, "rows_per_second": 90.0}
    row = {"epoch": 1, "loss": 0.5, "score": 0.75, "seconds": 1.5}
    runs.update(id, progress=now, history=[row])

    async def read(after):
        return runs.get(id, after)

    async def run():
        stream = follow(read, 0.1, lambda: False)
        first = await take(stream, 3)
        beat = await anext(stream)
        last = {**row, "epoch": 2, "score": 0.8}
        runs.update(id, progress={**now, "step": 6}, history=[row, last])
        second = await take(stream, 1)
        runs.end(id, "done", version=4)
        return first, beat, second, [part async for part in stream]

    first, beat, second, rest = asyncio.run(run())
    assert [name for name, _ in events("".join(first))] == ["progress", "progress", "state"]
    replayed, current, state = (value for _, value in events("".join(first)))
    assert replayed == {**now, **row, "step": 3}
    assert current == now
    assert (state["state"], state["history"]) == ("running", [row])
    assert beat.startswith(":")
    assert beat.endswith("\n\n")
    ((_, ended),) = events("".join(second))
    assert (ended["epoch"], ended["step"], ended["score"]) == (2, 6, 0.8)
    (name, last) = events("".join(rest))[-1]
    assert (name, last["state"], last["version"]) == ("state", "done", 4)


def test_a_stream_ends_when_its_reader_disconnects_or_the_server_stops(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    id = runs.add("t", {}, DATA, None).id
    reads, stopping = [], []

    async def read(after):
        reads.append(1)
        return runs.get(id, after)

    async def run():
        stream = follow(read, 60, lambda: bool(stopping))
        await anext(stream)
        await stream.aclose()
        seen = len(reads)
        await asyncio.sleep(0.6)
        assert len(reads) == seen
        stopping.append(1)
        return [part async for part in follow(read, 60, lambda: bool(stopping))]

    assert len(asyncio.run(run())) == 1


def parquet(rows):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": [t for t, _ in rows], "label": [y for _, y in rows]}), sink)
    return sink.getvalue().to_pybytes()


def test_a_trained_task_is_served_at_once_and_so_is_its_next_version(tmp_path, bert):
    bank = Bank.open(new_bank(tmp_path / "bank", bert))
    app = create_app(BankService(bank, Engine(bert, device="cpu")), jobs=JobQueue(bank.path, threads=1), page=False)
    query = "&".join(f"{name}={value}" for name, value in {**FAST, "epochs": 4}.items())
    rows = reviews(24)
    texts = [text for text, _ in rows]

    async def trained(client: httpx.AsyncClient, format, body):
        sent = await client.post(f"{PATH}?{query}&format={format}", content=body)
        assert sent.status_code == 202, sent.text
        stream = await client.get(f"/v1/runs/{sent.json()['id']}/events")
        return events(stream.text)

    async def predicted(client: httpx.AsyncClient, version):
        end = time.monotonic() + PATIENCE
        while True:
            answer = await client.post("/v1/tasks/sentiment/predict", json={"texts": texts})
            if answer.status_code == 200 and answer.json()["version"] == version:
                return answer.json()
            assert time.monotonic() < end, answer.text
            await asyncio.sleep(0.05)

    async def run():
        async with calling(app) as client:
            lines = "".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows).encode()
            first = await trained(client, "jsonl", lines)
            one = await predicted(client, 1)
            second = await trained(client, "parquet", parquet(rows))
            return first, one, second, await predicted(client, 2)

    first, one, second, two = asyncio.run(run())
    ended = first[-1][1]
    assert (ended["state"], ended["version"], second[-1][1]["version"]) == ("done", 1, 2)
    scores = {value["epoch"]: value["score"] for name, value in first if name == "progress" and "score" in value}
    assert [*scores] == [1, 2, 3, 4]
    assert scores == {row["epoch"]: row["score"] for row in ended["history"]}
    assert ended["metrics"]["dev"]["accuracy"] == max(scores.values())
    assert [row["label"] for row in one["predictions"]] == [row["label"] for row in two["predictions"]]
    assert set(one["predictions"][0]["probabilities"]) == {"negative", "positive"}


def test_a_stream_reads_each_epoch_once_and_all_of_them_when_the_state_changes(tmp_path):
    runs = RunStore(tmp_path / "runs.sqlite3")
    running = runs.add("t", {"epochs": 3}, DATA, None).id
    runs.begin()
    requested = []

    async def read(after):
        requested.append(after)
        return runs.get(running, after)

    async def run():
        stream, parts = follow(read, 60, lambda: False), []
        for epoch in range(1, 6):
            runs.update(running, epochs=[{"epoch": epoch, "loss": 0.25, "score": 0.5, "seconds": 1.0}], progress=None)
            parts.append(await anext(stream))
            if epoch == 1:
                parts.append(await anext(stream))  # its state
        runs.end(running, "done", version=1)
        return parts, [part async for part in stream]

    parts, last = asyncio.run(run())
    progress = [json.loads(part.partition("data: ")[2]) for part in parts if part.startswith("event: progress")]
    assert [value["epoch"] for value in progress] == [*range(1, 6)]
    assert [*dict.fromkeys(requested)] == [0, 1, 2, 3, 4, 5]
    assert requested.count(0) == 2
    assert len(json.loads(last[-1].partition("data: ")[2])["history"]) == 5
