"""Claims about the client: both kinds send and read the same, retry where that can help, and pass on the messages."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")

import adapterbank
from adapterbank.client import protocol
from adapterbank.errors import InputError, ServiceError, TrainingError
from adapterbank.install import extra_command
from adapterbank.serving.http import routes_train
from adapterbank.serving.http.auth import Keys
from serving.sample_server import Faults, SampleService, ScriptedJobs, make_app, sample_tasks, served


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def service():
    return SampleService(sample_tasks())


@pytest.fixture
def jobs(tmp_path):
    return ScriptedJobs(tmp_path / "bank")


@pytest.fixture
def url(service, jobs, faults):
    with served(make_app(service, faults, jobs=jobs, page=False)) as address:
        yield address


class Awaited:
    """The async client, called like the other."""

    def __init__(self, *args, **options):
        self.args, self.options = args, options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        async def ask(*args, **options):
            async with adapterbank.AsyncClient(*self.args, **self.options) as client:
                found = getattr(client, name)(*args, **options)
                return [one async for one in found] if name == "events" else await found

        return lambda *args, **options: asyncio.run(ask(*args, **options))


@pytest.fixture(params=[adapterbank.Client, Awaited], ids=["sync", "async"])
def connect(request):
    return request.param


@pytest.fixture
def no_pause(monkeypatch):
    """Do not wait between two attempts, and record how long it would have been."""
    waited, pause = [], protocol.pause
    monkeypatch.setattr(protocol, "pause", lambda attempt, *rest: waited.append(pause(attempt, *rest)) or 0.0)
    return waited


@pytest.fixture
def reviews(tmp_path):
    file = tmp_path / "reviews.csv"
    file.write_text("text,label\ngood,1\nbad,0\n", encoding="utf-8")
    return file


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    def methods(cls):
        return {
            name: (str(inspect.signature(value)).replace("AsyncIterator", "Iterator"), inspect.getdoc(value))
            for name, value in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    found = methods(adapterbank.Client)
    assert found == methods(adapterbank.AsyncClient)
    assert set(found) == {
        *("predict", "predict_rows", "tasks", "task", "remove", "rollback", "train", "runs", "run", "cancel"),
        *("wait", "events", "health", "ready", "close"),
    }
    files = "path: 'str | Path', *, dev: 'str | Path | None' = None, test: 'str | Path | None' = None"
    assert found["train"][0] == f"(self, task: 'str', {files}, **options: 'Any') -> 'str'"
    assert found["wait"][0].endswith("-> 'RunStatus'")


def test_predictions_come_back_typed_and_in_order(connect, url):
    with connect(url) as client:
        found = client.predict("markup@1", ["a text", "another text"])
        assert [(one.task, one.version) for one in found] == [("markup", 1)] * 2
        assert sum(found[0].probabilities.values()) == pytest.approx(1)
        assert found[0].probabilities != found[1].probabilities
        rows = client.predict_rows(
            [
                {"task": "task-10", "text": "12345"},
                {"task": "task-15", "text": "who", "pair": "Alice did"},
                {"task": "task-05", "text": "x"},
            ]
        )
        assert [row.task for row in rows] == ["task-10", "task-15", "task-05"]
        assert rows[0].value == 0.5
        assert (rows[1].answer, rows[1].start, rows[1].end) == ("Alice", 0, 5)
        assert rows[2].labels == ("red",)


def test_an_answer_that_is_not_certain_enough_is_none(connect, url):
    with connect(url) as client:
        (found,) = client.predict("markup@1", ["a text"], abstain=1.0)
        assert (found.label, found.other) == (None, None)
        assert sum(found.probabilities.values()) == pytest.approx(1)
        (row,) = client.predict_rows([{"task": "markup", "text": "a text"}], abstain=1.0)
        assert row.label is None


def test_a_name_of_the_catalog_is_sent_as_the_bank_has_it(connect, url, faults):
    with connect(url) as client, pytest.raises(ServiceError):
        client.predict("glue/mrpc", ["a"], ["b"], best=3, explain=True)
    method, path, body = faults.requests[-1]
    assert (method, path) == ("POST", "/v1/tasks/glue-mrpc/predict")
    assert json.loads(body) == {"texts": ["a"], "pairs": ["b"], "best": 3, "explain": True}


def test_tasks_are_listed_with_the_encoder_and_the_problems(connect, url, service):
    service.problems = [{"task": "broken", "message": "It is damaged."}]
    with connect(url) as client:
        found = client.tasks()
        assert len(found) == 50
        assert next(iter(found)).name == "task-00"
        assert found.tasks[1].labels[1] == "plain"
        assert found.backbone["name"] == "minilm"
        assert found.problems == ({"task": "broken", "message": "It is damaged."},)
        assert client.task("task-00")["ablation"]["metric"] == "accuracy"
        assert client.rollback("task-03") == {"task": "task-03", "version": 1}
        assert client.remove("task-03") == {"removed": "task-03"}
        assert len(client.tasks()) == 49


def test_a_server_is_alive_before_it_is_ready(connect, url, service):
    service.ready = False
    with connect(url) as client:
        assert (client.health(), client.ready()) == (True, False)
        service.ready = True
        assert (client.health(), client.ready()) == (True, True)


def test_a_run_is_queued_followed_and_waited_for(connect, url, faults, jobs, reviews, monkeypatch):
    monkeypatch.setattr(protocol, "POLL", 0.0)
    with connect(url) as client:
        id = client.train("mine", reviews, epochs=2, size=8)
        assert faults.requests[-1][2] == reviews.read_bytes()
        assert client.run(id).options == {"epochs": 2, "size": 8}
        seen = []
        done = client.wait(id, seen.append)
        assert done == seen[-1]
        assert (done.state, done.version, len(done.history)) == ("done", 1, 2)
        events = list(client.events(id))
        assert [event.kind for event in events] == ["progress", "progress", "state"]
        assert [event.data.get("score") for event in events[:2]] == [pytest.approx(0.7), pytest.approx(0.8)]
        assert events[-1].data["state"] == "done"
        assert [run.id for run in client.runs()] == [id]


def test_a_run_is_followed_while_it_trains(connect, url, jobs, reviews):
    jobs.steps = 0
    with connect(url) as client:
        id = client.train("mine", reviews)
        threading.Timer(0.5, lambda: setattr(jobs, "steps", 6)).start()
        events = list(client.events(id))
    states = [event.data["state"] for event in events if event.kind == "state"]
    assert states in (["queued", "running", "done"], ["running", "done"])
    assert [event.data["epoch"] for event in events if "score" in event.data] == [1, 2]


def test_a_run_that_fails_or_is_cancelled_raises_a_training_error(connect, url, jobs, reviews):
    jobs.steps = 0
    with connect(url) as client:
        id = client.train("mine", reviews)
        client.cancel(id)
        with pytest.raises(TrainingError, match=f"Run {id} of 'mine' was cancelled"):
            client.wait(id)
        id = client.train("mine", reviews)
        while not jobs.runs.end(id, "failed", failure="The loss is not a number."):
            time.sleep(0.01)  # until it has begun
        with pytest.raises(TrainingError, match=r"^The loss is not a number"):
            client.wait(id)
        with pytest.raises(ServiceError, match="There is no run 'run9'"):
            list(client.events("run9"))


def test_a_restart_of_the_server_does_not_end_a_wait(connect, url, faults, reviews, monkeypatch):
    monkeypatch.setattr(protocol, "POLL", 0.0)
    with connect(url, retries=0) as client:
        id = client.train("mine", reviews)
        faults.refuse = [(503, "not_ready", {})] * 3
        assert client.wait(id).state == "done"
        faults.refuse = [(404, "unknown_run", {})]
        with pytest.raises(ServiceError, match="unknown_run"):
            client.wait(id)


def test_an_error_has_the_servers_message_and_code(connect, url):
    with connect(url) as client, pytest.raises(ServiceError, match=r"is not a task of this bank. Did you") as caught:
        client.predict("markdown", ["a"])
    assert (caught.value.code, caught.value.status) == ("unknown_task", 404)
    assert len(caught.value.request_id) == 32
    assert isinstance(caught.value, adapterbank.AdapterbankError)


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (429, "rate_limited"), (503, "not_ready")])
def test_a_request_to_a_busy_server_is_sent_again(connect, url, faults, no_pause, status, code):
    faults.refuse = [(status, code, {"Retry-After": "2"})] * 3
    with connect(url) as client:
        assert len(client.tasks()) == 50
    assert len(faults.requests) == 4
    assert all(2 <= wait <= 2.5 for wait in no_pause)


def test_the_number_of_attempts_is_limited(connect, url, faults, no_pause):
    faults.refuse = [(429, "overloaded", {})] * 9
    with connect(url, retries=2) as client, pytest.raises(ServiceError, match="Refused with overloaded"):
        client.tasks()
    assert len(faults.requests) == 3


@pytest.mark.parametrize(("status", "code"), [(503, "damaged"), (500, "internal"), (422, "bad_request")])
def test_a_permanent_error_is_not_retried(connect, url, faults, no_pause, status, code):
    faults.refuse = [(status, code, {})] * 9
    with connect(url) as client, pytest.raises(ServiceError, match=f"Refused with {code}"):
        client.tasks()
    assert len(faults.requests) == 1


def test_a_key_is_sent(connect, service, faults, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    secret = keys.add("reader", ["predict"])
    with served(make_app(service, faults, keys=keys, page=False)) as url:
        with connect(url, key=secret) as client:
            assert len(client.tasks()) == 50
        with connect(url) as client, pytest.raises(ServiceError, match="requires a key") as caught:
            client.tasks()
    assert caught.value.code == "unauthorized"


def test_an_unreachable_server_is_reported_after_the_last_attempt(connect, no_pause):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with connect(address) as client, pytest.raises(ServiceError, match=r"does not respond .* running there"):
            client.predict("a", ["b"])
        assert len(no_pause) == 4
        with connect(address) as client, pytest.raises(ServiceError, match="does not respond"):
            list(client.events("run1"))
        with connect(address) as client:
            assert client.health() is False


def test_events_that_end_before_their_run_raise_an_error(connect, url, jobs, reviews, monkeypatch):
    async def cut_off(*_):
        yield routes_train.event("state", {"state": "running"})

    monkeypatch.setattr(routes_train, "follow", cut_off)
    with connect(url) as client:
        id = client.train("mine", reviews)
        with pytest.raises(ServiceError, match="The stream ended before its run"):
            list(client.events(id))


def test_a_file_that_cannot_be_read_is_an_error_before_anything_is_sent(connect, url, faults, tmp_path):
    with connect(url) as client, pytest.raises(InputError, match="cannot be read: No such file"):
        client.train("a", tmp_path / "none.csv")
    assert faults.requests == []


def test_a_compressed_file_is_sent_uncompressed(connect, url, faults, tmp_path, reviews):
    packed = tmp_path / "reviews.csv.gz"
    packed.write_bytes(gzip.compress(reviews.read_bytes()))
    with connect(url) as client:
        client.train("mine", packed)
    assert faults.requests[-1][2] == reviews.read_bytes()


def test_without_httpx_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "import adapterbank\n"
        "try: adapterbank.Client('http://x')\n"
        "except adapterbank.AdapterbankError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert found.stdout == f"The client needs httpx: {extra_command('serve')}\nFalse\n"


def test_dev_and_test_files_are_sent_after_the_training_file(connect, url, faults, jobs, tmp_path, reviews):
    held = tmp_path / "held out.csv.gz"
    held.write_bytes(gzip.compress(b"text,label\na,1\n"))
    with connect(url) as client:
        id = client.train("mine", reviews, dev=held, test=reviews)
        assert faults.requests[-1][2] == reviews.read_bytes() + b"text,label\na,1\n" + reviews.read_bytes()
        assert jobs.get(id).data["dev"] == 15
        with pytest.raises(InputError, match="The files are csv and jsonl; give files of one format"):
            client.train("mine", reviews, dev=tmp_path / "dev.jsonl")
