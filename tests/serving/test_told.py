"""Claims about what is told to whom: the log knows a failure's request, a key its own runs, nobody the bank's URL."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from adapterbank.client import protocol
from adapterbank.errors import ServiceError, StorageError
from adapterbank.serving.http import routes_train
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.http.telemetry import JsonLines
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.jobs.run_store import RunStore
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.serving.service.protocol import CODES
from adapterbank.serving.service.service import BankService
from serving.dummy import Dummy, ask, calling
from serving.small_bank import until
from serving.training import left, new_bank, send, table

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def lines():
    """Give what the server's log says from here on."""
    told = []

    class Lines(logging.Handler):
        def emit(self, record):
            told.append(json.loads(JsonLines().format(record)))

    handler, logger = Lines(), logging.getLogger("adapterbank.serving")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


@pytest.fixture
def jobs(tmp_path, bert):
    class Idle(JobQueue):
        """Jobs that nobody works on."""

        def begin(self):
            """Do nothing."""

    return Idle(new_bank(tmp_path / "bank", bert))


def test_a_batch_that_breaks_is_logged_under_the_id_of_the_request_that_it_was_for(small, lines):
    small.put("a")
    service = BankService(small.bank, small.engine(), lanes=1)

    def broken(*given):
        raise RuntimeError("cannot compute 'a secret'")

    service.engine.launch = broken

    async def run():
        async with calling(create_app(service, page=False)) as client:
            await until(lambda: service.ready)
            path, body = "/v1/tasks/a/predict", {"text": "a secret"}
            return [await client.post(path, json=body, headers={"X-Request-Id": f"r-{i}"}) for i in range(2)]

    answers = asyncio.run(run())
    assert [answer.json()["error"]["request_id"] for answer in answers] == ["r-0", "r-1"]
    failed = [line for line in lines if line["event"] == "failed"]
    assert [(line["request_id"], line["problem"]) for line in failed] == [
        ("r-0", "RuntimeError"),
        ("r-1", "RuntimeError"),
    ]
    assert "secret" not in json.dumps(lines)


def test_a_table_that_cannot_be_used_is_told_and_the_log_says_more(jobs, lines, monkeypatch):
    app = create_app(Dummy(), jobs=jobs, page=False)

    def fail(*given):
        raise StorageError(f"The table of runs {jobs.bank} cannot be used.")

    monkeypatch.setattr(RunStore, "_open", fail)
    answer = ask(app, "GET", "/v1/runs", headers={"X-Request-Id": "r-9"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    assert str(jobs.bank) not in answer.text
    assert [(line["request_id"], line["problem"]) for line in lines if line["event"] == "hindered"] == [
        ("r-9", "StorageError")
    ]


def test_a_key_for_some_tasks_sees_its_runs_however_many_others_there_are(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(routes_train, "LISTED", 3)
    keys = Keys(tmp_path / "keys.json")
    header = {"Authorization": f"Bearer {keys.add('alice', ['train'], ['mine'])}"}
    mine = [send(jobs, "mine").id for _ in range(4)]
    for _ in range(5):
        send(jobs, "other")
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    assert [run["id"] for run in ask(app, "GET", "/v1/runs", headers=header).json()["runs"]] == mine[:0:-1]


def test_one_key_holds_half_of_the_places_for_files_and_streams(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(routes_train, "SENDING", 4)
    keys = Keys(tmp_path / "keys.json")
    alice, bob = ({"Authorization": f"Bearer {keys.add(name, ['train'])}"} for name in ("alice", "bob"))
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    path = "/v1/tasks/sentiment/train?format=csv"

    async def run():
        go = asyncio.Event()

        async def slowly():
            yield table()
            await go.wait()

        async with calling(app) as client:
            slow = [asyncio.ensure_future(client.post(path, content=slowly(), headers=alice)) for _ in range(2)]
            await until(lambda: len(left(jobs)) == 2)
            more = await client.post(path, content=table(), headers=alice)
            other = await client.post(path, content=table(), headers=bob)
            go.set()
            return more, other, await asyncio.gather(*slow), await client.post(path, content=table(), headers=alice)

    more, other, slow, later = asyncio.run(run())
    assert (more.status_code, more.json()["error"]["code"]) == (429, "overloaded")
    assert more.json()["error"]["message"].startswith("2 data files are sent with the key 'alice' already;")
    assert [one.status_code for one in (other, *slow, later)] == [202] * 4


def test_nobody_is_told_where_a_bank_behind_a_url_lies(small, tmp_path):
    pytest.importorskip("fsspec")
    mirror = Mirror(f"local://{small.bank.path}")
    try:
        assert str(tmp_path) not in mirror.refusal
    finally:
        mirror.close()


def test_all_codes_are_in_the_docs_with_their_status():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    for code, status in CODES.items():
        assert any(f"`{code}`" in row.split("|")[1] and str(status) in row.split("|")[2] for row in rows), code


def test_the_document_says_that_a_removal_may_be_refused():
    responses = create_app(Dummy(), page=False).openapi()["paths"]["/v1/tasks/{task}"]["delete"]["responses"]
    assert responses["409"]["description"] == "conflict"


@pytest.mark.parametrize("status", [500, 502, 504])
def test_who_waits_for_a_run_waits_too_while_a_proxy_says_that_the_server_is_away(status):
    now = [0.0]
    waiting = protocol.Waiting(None, clock=lambda: now[0])
    waiting.missed(ServiceError("not as adapterbank does", "", status))
    with pytest.raises(ServiceError):
        waiting.missed(ServiceError("a mistake of ours", "internal", status))
    now[0] = 301
    with pytest.raises(ServiceError):
        waiting.missed(ServiceError("not as adapterbank does", "", status))
