"""Claims about training over HTTP: uploads, runs, streams, and what each key may see."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import shutil
import sqlite3
from pathlib import Path

import pytest

from adapterbank.config import Config, resolve
from adapterbank.errors import StorageError
from adapterbank.serving.http import routes_train
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.http.routes_train import TYPES
from adapterbank.serving.jobs.options import OPTIONS
from adapterbank.serving.jobs.queue import JobQueue, QueueLimits
from adapterbank.serving.jobs.run_row import FORMATS
from adapterbank.serving.jobs.run_store import RunStore
from adapterbank.tasks.tables import READERS
from serving.dummy import Dummy, ask, calling
from serving.small_bank import PATIENCE, until
from serving.training import events, left, new_bank, send, table

CSV = {"Content-Type": "text/csv"}
PATH = "/v1/tasks/sentiment/train"


class Idle(JobQueue):
    """A queue whose runs are not started; `looks` counts how often they were read."""

    looks = 0

    def get(self, id, after=0):
        """Count the reads."""
        self.looks += 1
        return super().get(id, after)

    async def start(self):
        """Do nothing."""

    async def stop(self):
        """Do nothing."""


@pytest.fixture
def jobs(tmp_path, bert):
    return Idle(new_bank(tmp_path / "bank", bert), limits=QueueLimits(upload=10_000, waiting=3))


@pytest.fixture
def app(jobs):
    return create_app(Dummy(), jobs=jobs, page=False)


def test_a_key_starts_only_from_tasks_that_it_may_train(jobs, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    secret = keys.add("one", ["train"], tasks=["sentiment"])
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    headers = {**CSV, "Authorization": f"Bearer {secret}"}
    for start, status in (("other@1", 403), ("../other/1", 403), ("none", 202), ("sentiment@1", 202)):
        found = ask(app, "POST", f"{PATH}?start_from={start}", content=table(), headers=headers)
        assert found.status_code == status, (start, found.text)
    for query in ("start-from=other", "on=other@1", "on=other&start_from=none", "fuse=sentiment,%20other@1"):
        assert ask(app, "POST", f"{PATH}?{query}", content=table(), headers=headers).status_code == 403, query


def test_the_metrics_count_runs_and_omit_them_while_their_table_cannot_be_read(app, jobs):
    ask(app, "POST", PATH, content=table(), headers=CSV)
    found = ask(app, "GET", "/metrics").text
    assert "adapterbank_runs_queued 1.0" in found
    assert "adapterbank_runs_running 0.0" in found
    jobs.runs.begin()
    assert "adapterbank_runs_running 1.0" in ask(app, "GET", "/metrics").text
    jobs.runs.path.write_bytes(b"no table" * 1000)
    found = ask(app, "GET", "/metrics").text
    assert "adapterbank_runs" not in found
    assert "adapterbank_queue_tokens 7.0" in found


def test_the_metrics_do_not_wait_for_a_locked_table_of_runs(app, jobs):
    with contextlib.closing(sqlite3.connect(jobs.runs.path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE runs SET state = state")
        other.execute("COMMIT")
        found = ask(app, "GET", "/metrics").text
    assert "adapterbank_runs" not in found
    assert "adapterbank_queue_tokens 7.0" in found


def test_a_compressed_data_file_is_refused_before_it_is_read(app, jobs):
    answer = ask(app, "POST", PATH, content=gzip.compress(table()), headers={**CSV, "content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported")
    assert jobs.list() == []


# --- sending ------------------------------------------------------------------------------------------------


def test_a_run_is_queued_with_its_options_and_can_be_read(app, jobs):
    answer = ask(app, "POST", f"{PATH}?epochs=3&size=8&max-length=32", content=table(), headers=CSV)
    assert answer.status_code == 202
    run = answer.json()
    assert (run["task"], run["state"], run["started"], run["ended"]) == ("sentiment", "queued", None, None)
    assert run["options"] == {"epochs": 3, "size": 8, "max_length": 32}
    assert (run["data"]["format"], run["data"]["bytes"]) == ("csv", len(table()))
    assert run["progress"] == {**dict.fromkeys(("epoch", "step", "steps"), 0), "epochs": 3, "loss": None,
                               "rows_per_second": None}  # fmt: skip
    assert not {"version", "metrics", "failure"} & run.keys()
    assert ask(app, "GET", f"/v1/runs/{run['id']}").json() == run
    assert left(jobs) == [f"{run['id']}.csv"]
    assert (jobs.bank / "serving" / "data" / left(jobs)[0]).read_bytes() == table()


def test_runs_are_listed_newest_first(app, jobs):
    sent = [send(jobs).id for _ in range(3)]
    assert [run["id"] for run in ask(app, "GET", "/v1/runs").json()["runs"]] == sent[::-1]


@pytest.mark.parametrize(("type", "format"), [*TYPES.items(), ("text/csv; charset=utf-8", "csv"), ("TEXT/CSV", "csv")])
def test_the_format_is_that_of_the_content_type(app, type, format):
    answer = ask(app, "POST", PATH, content=b"x", headers={"Content-Type": type})
    assert answer.json()["data"]["format"] == format


def test_a_format_in_the_query_takes_precedence(app):
    answer = ask(app, "POST", f"{PATH}?format=jsonl", content=b"{}", headers=CSV)
    assert (answer.json()["data"]["format"], answer.json()["options"]) == ("jsonl", {})


def test_every_table_that_can_be_read_can_be_uploaded(app):
    assert {f".{name}" for name in FORMATS} == {*READERS}
    answer = ask(app, "POST", f"{PATH}?format=conll", content=b"Ann\tB-PER\n", headers=CSV)
    assert (answer.status_code, answer.json()["data"]["format"]) == (202, "conll")


@pytest.mark.parametrize(
    ("path", "body", "type", "status", "code", "message"),
    [
        (PATH, b"x", "text/html", 415, "unsupported", "add ?format= with one of csv"),
        (PATH, b"x", "", 415, "unsupported", "add ?format= with one of csv"),
        (f"{PATH}?format=csv", b"x", "multipart/form-data; boundary=a", 415, "unsupported", "send the file itself"),
        (f"{PATH}?format=xlsx", b"x", "text/csv", 422, "bad_request", "'xlsx' is not a format of data files."),
        (PATH, b"", "text/csv", 422, "bad_request", "no body"),
        (PATH, b"x" * 10_001, "text/csv", 413, "too_large", "larger than 10000 bytes"),
        (f"{PATH}?epochs=0", b"x", "text/csv", 422, "bad_request", "epochs is 0"),
        (f"{PATH}?epochs=1&epochs=2", b"x", "text/csv", 422, "bad_request", "'epochs' is given more than once"),
        (f"{PATH}?max-length=8&max_length=9", b"x", "text/csv", 422, "bad_request", "'max_length' is given more than"),
        (f"{PATH}?device=cuda", b"x", "text/csv", 422, "bad_request", "'device' is not an option of a request."),
        (f"{PATH}?train=/etc/passwd", b"x", "text/csv", 422, "bad_request", "'train' is not an option"),
        ("/v1/tasks/..%5Cx/train", b"x", "text/csv", 422, "bad_request", "cannot be a task name"),
        ("/v1/tasks/sentiment@1/train", b"x", "text/csv", 422, "bad_request", "write 'sentiment'"),
    ],
)
def test_an_invalid_training_request_is_refused_in_one_sentence_and_leaves_nothing(
    app, jobs, path, body, type, status, code, message
):
    answer = ask(app, "POST", path, content=body, headers={"Content-Type": type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert message in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]
    assert (jobs.list(), left(jobs)) == ([], [])


def test_the_limit_applies_to_a_body_without_a_length_too(app, jobs):
    async def parts():
        for _ in range(11):
            yield b"x" * 1000

    answer = ask(app, "POST", PATH, content=parts(), headers=CSV)
    assert answer.json()["error"]["code"] == "too_large"
    assert (jobs.list(), left(jobs)) == ([], [])


def test_a_full_queue_is_reported_at_once(app, jobs):
    for _ in range(3):
        send(jobs)
    answer = ask(app, "POST", PATH, content=table(), headers=CSV)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) > 0


def test_an_interrupted_upload_leaves_nothing_and_is_no_error_of_the_server(app, jobs, caplog):
    async def run():
        parts = iter([{"type": "http.request", "body": b"text,label\n", "more_body": True}])
        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"text/csv")], "http_version": "1.1", "scheme": "http"}  # fmt: skip
        seen = []

        async def receive():
            seen.append(left(jobs))
            return next(parts, {"type": "http.disconnect"})

        async def nowhere(message):
            answers.append(message.get("status"))

        await app(scope, receive, nowhere)
        return seen

    answers = []
    seen = asyncio.run(run())
    assert len(seen[-1]) == 1  # it was on its way
    assert answers == []  # nobody would read it
    assert "failed" not in [record.message for record in caplog.records]
    assert (jobs.list(), left(jobs)) == ([], [])


def test_a_file_that_would_fill_the_disk_is_refused(app, jobs, monkeypatch):
    free = shutil.disk_usage(jobs.bank).free
    monkeypatch.setattr(routes_train, "RESERVED_DISK", free + (1 << 40))
    answer = ask(app, "POST", PATH, content=table(), headers=CSV)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert "disk is nearly full" in answer.json()["error"]["message"]
    assert (jobs.list(), left(jobs)) == ([], [])


@pytest.mark.parametrize("pause", [5, 0.03], ids=["stands still", "trickles"])
def test_an_upload_that_stalls_is_refused_and_leaves_nothing(app, jobs, monkeypatch, pause):
    monkeypatch.setattr(routes_train, "STALL_TIMEOUT", 0.1)

    async def parts():
        for _ in range(50):
            yield b"x"
            await asyncio.sleep(pause)

    answer = ask(app, "POST", PATH, content=parts(), headers=CSV)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "too_slow")
    assert (jobs.list(), left(jobs)) == ([], [])


def test_the_number_of_uploads_is_limited_and_ended_ones_free_their_place(jobs, monkeypatch):
    monkeypatch.setattr(routes_train, "MAX_UPLOADS", 1)
    app = create_app(Dummy(), jobs=jobs, page=False)

    async def run():
        held = asyncio.Event()

        async def slowly():
            yield table()
            await held.wait()

        async with calling(app) as client:
            first = asyncio.ensure_future(client.post(PATH, content=slowly(), headers=CSV))
            await until(lambda: left(jobs))
            second = await client.post(PATH, content=table(), headers=CSV)
            held.set()
            return [(await first).status_code, second.status_code, (await client.post(PATH, content=table(),
                    headers=CSV)).status_code]  # fmt: skip

    assert asyncio.run(run()) == [202, 429, 202]


def test_an_unknown_run_is_not_found(app):
    for method, path in itertools.product(("GET", "DELETE"), ("/v1/runs/x", "/v1/runs/..%5Cx")):
        answer = ask(app, method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_run")
    assert ask(app, "GET", "/v1/runs/x/events").json()["error"]["code"] == "unknown_run"


def test_the_events_of_a_cancelled_run_end_with_its_state(app, jobs):
    id = send(jobs).id
    assert ask(app, "DELETE", f"/v1/runs/{id}").json()["state"] == "cancelled"
    answer = ask(app, "GET", f"/v1/runs/{id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    ((name, value),) = events(answer.text)
    assert (name, value["state"]) == ("state", "cancelled")


def test_the_document_names_every_option_and_format(app):
    route = ask(app, "GET", "/openapi.json").json()["paths"]["/v1/tasks/{task}/train"]["post"]
    assert {one["name"] for one in route["parameters"]} == {"task", "format", "dev_bytes", "test_bytes", *OPTIONS}
    defaults = {one["name"]: one["schema"]["default"] for one in route["parameters"] if "default" in one["schema"]}
    shell = resolve(Config())
    assert defaults == {name: value for name in OPTIONS if (value := getattr(shell, name)) is not None}
    assert "automl" not in str(route["parameters"])
    assert set(TYPES) == set(route["requestBody"]["content"])
    assert {"202", "413", "415", "422", "429"} <= route["responses"].keys()
    assert "200" not in route["responses"]


@pytest.mark.parametrize("chosen", [("dev", "test"), ("dev",), ("test",)])
def test_dev_and_test_files_follow_the_training_file(app, jobs, chosen):
    parts = {"train": table(), **{name: table(4) + name.encode() for name in chosen}}
    query = "&".join(f"{name}_bytes={len(parts[name])}" for name in chosen)
    run = ask(app, "POST", f"{PATH}?{query}", content=b"".join(parts.values()), headers=CSV).json()
    assert run["data"]["bytes"] == sum(map(len, parts.values()))
    assert {name: run["data"][name] for name in chosen} == {name: len(parts[name]) for name in chosen}
    job = jobs.job(jobs.get(run["id"]), resuming=False)
    found = {"train": job["file"], **job["others"]}
    assert {name: Path(path).read_bytes() for name, path in found.items()} == parts
    ask(app, "DELETE", f"/v1/runs/{run['id']}")
    assert left(jobs) == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("dev_bytes=0", "give the bytes of the dev file"),
        ("dev_bytes=-1", "give the bytes of the dev file"),
        ("test_bytes=many", "give the bytes of the test file"),
        ("dev_bytes=400&test_bytes=999999", "the training file and, after it, the dev and test file"),
    ],
)
def test_sizes_that_do_not_fit_the_body_are_refused(app, jobs, query, message):
    answer = ask(app, "POST", f"{PATH}?{query}", content=table(), headers=CSV)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (422, True)
    assert left(jobs) == []


# --- keys ---------------------------------------------------------------------------------------------------


def test_a_key_can_read_start_and_cancel_only_runs_of_its_tasks(jobs, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    mine, other = send(jobs, "mine").id, send(jobs, "other").id
    bearer = {
        name: {"Authorization": f"Bearer {keys.add(name, [scope], tasks)}"}
        for name, scope, tasks in [("one", "train", ["mine"]), ("all", "admin", None), ("none", "predict", None)]
    }

    def codes(who):
        paths = ["/v1/runs", f"/v1/runs/{mine}", f"/v1/runs/{other}", f"/v1/runs/{other}/events"][
            : None if who != "all" else 3
        ]
        got = [ask(app, "GET", path, headers=bearer.get(who, {})).status_code for path in paths]
        return [*got, ask(app, "DELETE", f"/v1/runs/{other}", headers=bearer[who]).status_code if who == "one" else 0]

    assert codes("one") == [200, 200, 403, 403, 403]
    assert codes("all") == [200, 200, 200, 0]
    assert codes("none") == [403, 403, 403, 403, 0]
    assert ask(app, "GET", "/v1/runs").status_code == 401
    assert [run["id"] for run in ask(app, "GET", "/v1/runs", headers=bearer["one"]).json()["runs"]] == [mine]
    sent = [ask(app, "POST", f"/v1/tasks/{task}/train", content=table(), headers={**CSV, **bearer["one"]}) for task in
            ("mine", "other")]  # fmt: skip
    assert [answer.status_code for answer in sent] == [202, 403]
    assert jobs.get(sent[0].json()["id"]).asked_by == "one"
    assert jobs.get(other).state == "queued"


def test_a_stream_ends_when_its_key_is_revoked(jobs, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    bearer = {"Authorization": f"Bearer {keys.add('one', ['train'])}"}
    id = send(jobs).id

    async def run():
        async with calling(app) as client:
            stream = asyncio.ensure_future(client.get(f"/v1/runs/{id}/events", headers=bearer))
            await until(lambda: jobs.looks > 2 or stream.done())  # the last of them its stream's
            assert not stream.done()
            keys.revoke("one")
            return await asyncio.wait_for(stream, PATIENCE)

    assert [name for name, _ in events(asyncio.run(run()).text)] == ["state"]
    assert jobs.get(id).state == "queued"


def test_the_number_of_streams_is_limited_and_ended_ones_free_their_place(jobs, monkeypatch):
    monkeypatch.setattr(routes_train, "MAX_STREAMS", 1)
    app = create_app(Dummy(), jobs=jobs, page=False)
    path = f"/v1/runs/{(id := send(jobs).id)}/events"

    async def run():
        async with calling(app) as client:
            first = asyncio.ensure_future(client.get(path))
            await until(lambda: jobs.looks > 2)  # the last of them its stream's
            second = await client.get(path)
            jobs.cancel(id)
            return [(await first).status_code, second.status_code, (await client.get(path)).status_code]

    assert asyncio.run(run()) == [200, 429, 200]


def test_a_key_for_some_tasks_sees_its_runs_among_many_others(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(routes_train, "LIST_LIMIT", 3)
    keys = Keys(tmp_path / "keys.json")
    header = {"Authorization": f"Bearer {keys.add('alice', ['train'], ['mine'])}"}
    jobs = Idle(jobs.bank)
    mine = [send(jobs, "mine").id for _ in range(4)]
    for _ in range(5):
        send(jobs, "other")
    app = create_app(Dummy(), jobs=jobs, keys=keys, page=False)
    assert [run["id"] for run in ask(app, "GET", "/v1/runs", headers=header).json()["runs"]] == mine[:0:-1]


def test_an_unusable_table_of_runs_is_refused_and_logged_with_its_reason(jobs, caplog, monkeypatch):
    app = create_app(Dummy(), jobs=jobs, page=False)

    def fail(*given):
        raise StorageError(f"The table of runs {jobs.bank} cannot be used.")

    monkeypatch.setattr(RunStore, "_open", fail)
    answer = ask(app, "GET", "/v1/runs", headers={"X-Request-Id": "r-9"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    assert str(jobs.bank) not in answer.text
    (record,) = [record for record in caplog.records if record.message == "storage error"]
    assert (record.fields["request_id"], record.exc_info[0]) == ("r-9", StorageError)
