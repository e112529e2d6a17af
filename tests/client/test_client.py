"""Claims about the client: both kinds ask and read the same, try again when that can help, and speak as the server."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")

import adapterbank
import stand_in
from adapterbank.client import protocol
from adapterbank.client.protocol import HttpReply, Stream, pause, talk
from adapterbank.errors import InputError, ServiceError, TrainingError
from stand_in import Trouble, event, make, many, served


@pytest.fixture
def trouble():
    return Trouble()


@pytest.fixture
def url(trouble):
    with served(make(many(), trouble)) as address:
        yield address


class Waiting:
    """The async client, called as the other is."""

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


@pytest.fixture(params=[adapterbank.Client, Waiting], ids=["sync", "async"])
def connect(request):
    return request.param


@pytest.fixture
def no_pause(monkeypatch):
    """Do not wait between two tries, and tell how long it would have been."""
    waited = []
    monkeypatch.setattr(protocol, "pause", lambda attempt, *rest: waited.append(pause(attempt, *rest)) or 0.0)
    return waited


@pytest.fixture
def reviews(tmp_path):
    file = tmp_path / "reviews.csv"
    file.write_text("text,label\ngood,1\nbad,0\n", encoding="utf-8")
    return file


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    def told(cls):
        return {
            name: (inspect.signature(value).parameters, inspect.getdoc(value))
            for name, value in vars(cls).items()
            if inspect.isfunction(value) and not name.startswith("_")
        }

    assert told(adapterbank.Client) == told(adapterbank.AsyncClient)
    assert {"predict", "predict_rows", "tasks", "task", "train", "run", "runs", "wait", "events"} <= set(
        told(adapterbank.Client)
    )


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


def test_a_name_of_the_catalog_is_asked_for_as_the_bank_has_it(connect, url, trouble):
    with connect(url) as client, pytest.raises(ServiceError):
        client.predict("glue/mrpc", ["a"], ["b"], best=3)
    method, path, body = trouble.asked[-1]
    assert (method, path) == ("POST", "/v1/tasks/glue-mrpc/predict")
    assert protocol.predict("glue/mrpc", ["a"], ["b"], 3).json == {"texts": ["a"], "pairs": ["b"], "best": 3}
    assert b"pairs" in body


def test_tasks_are_listed_with_the_encoder_and_the_problems(connect, url):
    with connect(url) as client:
        found = client.tasks()
        assert len(found) == 50
        assert next(iter(found)).name == "task-00"
        assert found.tasks[1].labels[1] == "plain"
        assert found.backbone["name"] == "minilm"
        assert client.task("task-00")["ablation"]["metric"] == "accuracy"
        assert client.remove("task-03") == {"removed": "task-03"}
        assert client.rollback("task-03") == {"task": "task-03", "default": 1}
        assert client.health() is True
        assert client.ready() is False


def test_a_run_is_queued_followed_and_waited_for(connect, url, trouble, reviews, monkeypatch):
    monkeypatch.setattr("adapterbank.client.client._POLL", 0.0)
    with connect(url) as client:
        id = client.train("mine", reviews, epochs=2, size=8)
        assert trouble.asked[-1][2] == reviews.read_bytes()
        assert client.run(id).options == {"format": "csv", "epochs": "2", "size": "8"}
        assert not client.run(id).over
        events = list(client.events(id))
        assert [event.kind for event in events] == ["state", *["progress"] * 6, "state"]
        assert events[3].data["score"] == pytest.approx(0.7)
        seen = []
        done = client.wait(id, seen.append)
        assert done == seen[-1]
        assert (done.state, done.version, len(done.history)) == ("done", 1, 2)
        assert [run.id for run in client.runs()] == [id]


def test_a_run_that_fails_or_is_cancelled_is_an_error_of_training(connect, url, trouble, reviews):
    with connect(url) as client:
        id = client.train("mine", reviews)
        assert client.cancel(id).state == "cancelled"
        with pytest.raises(TrainingError, match="Run run1 of 'mine' was cancelled"):
            client.wait(id)
        trouble.runs[id] |= {"state": "failed", "failure": "The loss is not a number."}
        with pytest.raises(TrainingError, match=r"^The loss is not a number"):
            client.wait(id)
        with pytest.raises(ServiceError, match="There is no run 'run9'"):
            list(client.events("run9"))


def test_a_server_that_is_started_again_is_waited_for(connect, url, trouble, reviews, monkeypatch, no_pause):
    monkeypatch.setattr("adapterbank.client.client._POLL", 0.0)
    with connect(url, retries=0) as client:
        id = client.train("mine", reviews)
        list(client.events(id))
        trouble.refuse = [(503, "not_ready", {})] * 3
        assert client.wait(id).state == "done"
        trouble.refuse = [(404, "unknown_run", {})]
        with pytest.raises(ServiceError, match="unknown_run"):
            client.wait(id)


def test_a_server_that_stays_away_is_given_up():
    now = [0.0]
    waiting = protocol.Waiting(None, clock=lambda: now[0])
    gone = HttpReply(lost="refused").error("here")
    now[0] = 299
    waiting.missed(gone)
    assert not waiting.heard(protocol.RunStatus("r", "mine", "running"))
    now[0] = 598
    waiting.missed(gone)
    now[0] = 600
    with pytest.raises(ServiceError, match="does not answer"):
        waiting.missed(gone)


def test_an_error_is_the_servers_sentence_with_its_code(connect, url):
    with connect(url) as client, pytest.raises(ServiceError, match=r"is not a task here. Did you mean") as caught:
        client.predict("markdown", ["a"])
    assert (caught.value.code, caught.value.status, caught.value.request_id) == ("unknown_task", 404, "r-1")
    assert isinstance(caught.value, adapterbank.AdapterbankError)


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (429, "rate_limited"), (503, "not_ready")])
def test_a_busy_server_is_asked_again(connect, url, trouble, no_pause, status, code):
    trouble.refuse = [(status, code, {"Retry-After": "2"})] * 3
    with connect(url) as client:
        assert len(client.tasks()) == 50
    assert len(trouble.asked) == 4
    assert all(2 <= wait <= 2.5 for wait in no_pause)


def test_the_tries_are_bounded(connect, url, trouble, no_pause):
    trouble.refuse = [(429, "overloaded", {})] * 9
    with connect(url, retries=2) as client, pytest.raises(ServiceError, match="Refused with overloaded"):
        client.tasks()
    assert len(trouble.asked) == 3


@pytest.mark.parametrize(("status", "code"), [(503, "damaged"), (500, "internal"), (422, "bad_request")])
def test_what_will_not_change_is_not_asked_again(connect, url, trouble, no_pause, status, code):
    trouble.refuse = [(status, code, {})] * 9
    with connect(url) as client, pytest.raises(ServiceError, match=f"Refused with {code}"):
        client.tasks()
    assert len(trouble.asked) == 1


def test_a_key_is_sent(connect, url, trouble):
    trouble.key = "secret"
    with connect(url, key="secret") as client:
        assert len(client.tasks()) == 50
    with connect(url) as client, pytest.raises(ServiceError, match="wants a key") as caught:
        client.tasks()
    assert caught.value.code == "unauthorized"


def test_a_server_that_is_not_there_is_told_after_the_last_try(connect, no_pause):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with connect(address) as client, pytest.raises(ServiceError, match=r"does not answer .* running there"):
            client.predict("a", ["b"])
        assert len(no_pause) == 4
        with connect(address) as client, pytest.raises(ServiceError, match="does not answer"):
            list(client.events("run1"))
        with connect(address) as client:
            assert client.health() is False


def conversation(call, replies, retries=4):
    """Hold a conversation with these replies; give how many were used, and the error or the answer."""
    talking, used = talk(call, retries, "here"), 0
    try:
        wanted = next(talking)
        while True:
            if wanted is None:
                used += 1
                wanted = talking.send(replies[used - 1])
            else:
                wanted = next(talking)
    except StopIteration as end:
        return used, end.value
    except ServiceError as error:
        return used, error


@pytest.mark.parametrize("status", [500, 502, 504])
def test_what_a_proxy_lost_is_sent_again_if_it_may_be(reviews, status):
    lost = HttpReply(status)
    assert (
        conversation(protocol.run("r"), [lost, lost, HttpReply(200, {"id": "r", "task": "t", "state": "done"})])[0] == 3
    )
    used, error = conversation(protocol.train("mine", reviews, {}), [lost])
    assert (used, error.status) == (1, status)
    assert "not as adapterbank does" in str(error)


def test_a_training_that_may_have_arrived_is_not_sent_twice(reviews):
    lost, never = HttpReply(lost="timed out"), HttpReply(lost="refused", unsent=True)
    good = HttpReply(202, {"id": "r"})
    call = protocol.train("mine", reviews, {})
    assert conversation(call, [never, good]) == (2, "r")
    used, error = conversation(call, [lost, good])
    assert used == 1
    assert isinstance(error, ServiceError)
    assert conversation(protocol.runs(), [lost, HttpReply(200, {"runs": []})]) == (2, [])
    assert conversation(protocol.rollback("a"), [lost])[0] == 1
    assert conversation(protocol.remove("a"), [lost])[0] == 1


def test_an_answer_of_another_service_is_told_in_a_sentence():
    assert "not as adapterbank does" in str(conversation(protocol.runs(), [HttpReply(404, None)])[1])
    assert "cannot read" in str(conversation(protocol.runs(), [HttpReply(200, {"hello": 1})])[1])
    assert "cannot read" in str(conversation(protocol.runs(), [HttpReply(200, None)])[1])
    assert "cannot read" in str(conversation(protocol.tasks(), [HttpReply(200, {"backbone": {}, "tasks": [{}]})])[1])


def test_fields_of_a_later_server_are_left_out():
    body = {"task": "a", "version": 1, "predictions": [{"label": "x", "mood": "good"}]}
    assert conversation(protocol.predict("a", ["t"], None, 0), [HttpReply(200, body)])[1][0].label == "x"


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_a_pause_grows_and_is_never_shorter_than_asked_for(luck):
    free = [pause(attempt, None, luck) for attempt in range(12)]
    assert free == sorted(free)
    assert max(free) <= 37.5
    assert pause(0, "7", luck) >= 7
    assert pause(0, "7", luck) <= 8.75
    assert pause(0, "600", luck) is None
    assert pause(0, "Wed, 21 Oct 2026 07:28:00 GMT", luck) == free[0]


def test_events_are_read_as_the_standard_has_them():
    stream = Stream()
    lines = [": hello", "", "event: progress", 'data: {"a":', "data: 1}", "id: 4", "", "data:{}", ""]
    found = [event for line in lines if (event := stream.feed(line))]
    assert [(event.kind, event.data) for event in found] == [("progress", {"a": 1}), ("", {})]


@pytest.mark.parametrize("state", ["queued", "running", None])
def test_a_stream_that_ends_before_its_run_is_told(state):
    stream = Stream()
    for line in ["event: state", f'data: {{"state": "{state}"}}', ""] if state else []:
        stream.feed(line)
    with pytest.raises(ServiceError, match="has ended, and its run has not"):
        stream.end()
    for line in ["event: state", 'data: {"state": "failed"}', ""]:
        stream.feed(line)
    stream.end()


def test_events_that_end_before_their_run_are_an_error(connect, url, trouble, reviews, monkeypatch):
    async def broken_off(run, trouble):
        yield event("state", {**run, "state": "running"})

    monkeypatch.setattr(stand_in, "story", broken_off)
    with connect(url) as client:
        id = client.train("mine", reviews)
        with pytest.raises(ServiceError, match="has ended, and its run has not"):
            list(client.events(id))


def test_input_that_cannot_be_sent_is_told_before_it_is(tmp_path):
    with pytest.raises(InputError, match="texts is one string, 'hello'; give a list"):
        protocol.predict("a", "hello", None, 0)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        protocol.train("a", tmp_path / "none.csv", {})


def test_without_httpx_the_extra_is_named():
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "import adapterbank\n"
        "try: adapterbank.Client('http://x')\n"
        "except adapterbank.AdapterbankError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert found.stdout == "The client needs httpx: pip install 'adapterbank[serve]'\nFalse\n"
