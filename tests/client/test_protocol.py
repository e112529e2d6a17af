"""Claims about the calls: when they are sent again, and how responses, pauses and event streams are read."""

from __future__ import annotations

import pytest

from adapterbank.client.protocol import Calls, EventStream, RunWaiter, exchange, pause
from adapterbank.client.replies import HttpReply, RunStatus
from adapterbank.errors import InputError, ServiceError


class Described(Calls):
    """Returns the description of a call instead of sending it."""

    url, retries = "here", 4

    def _run(self, steps):
        return next(steps)


calls = Described()


@pytest.fixture
def reviews(tmp_path):
    file = tmp_path / "reviews.csv"
    file.write_text("text,label\ngood,1\nbad,0\n", encoding="utf-8")
    return file


def test_a_wait_gives_up_a_server_that_stays_unavailable():
    now = [0.0]
    waiter = RunWaiter(None, clock=lambda: now[0])
    gone = HttpReply(lost="refused").error("here")
    now[0] = 299
    waiter.missed(gone)
    assert not waiter.update(RunStatus("r", "mine", "running"))
    now[0] = 598
    waiter.missed(gone)
    now[0] = 600
    with pytest.raises(ServiceError, match="does not respond"):
        waiter.missed(gone)


def carry_out(call, replies, retries=4):
    """Carry a call out with these replies; return how many were used, and the result or the error."""
    steps, used, reply = exchange(call, retries, "here"), 0, None
    try:
        while True:
            step = steps.send(reply)
            if step is call:
                used, reply = used + 1, replies[used]
    except StopIteration as end:
        return used, end.value
    except ServiceError as error:
        return used, error


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_request_that_a_proxy_lost_is_sent_again_if_it_may_be(reviews, status):
    lost = HttpReply(status)
    assert carry_out(calls.run("r"), [lost, lost, HttpReply(200, {"id": "r", "task": "t", "state": "done"})])[0] == 3
    used, error = carry_out(calls.train("mine", reviews), [lost])
    assert (used, error.status) == (1, status)
    assert "not as adapterbank does" in str(error)


def test_a_training_request_that_may_have_arrived_is_not_sent_twice(reviews):
    lost, never = HttpReply(lost="timed out"), HttpReply(lost="refused", unsent=True)
    good = HttpReply(202, {"id": "r"})
    call = calls.train("mine", reviews)
    assert carry_out(call, [never, good]) == (2, "r")
    used, error = carry_out(call, [lost, good])
    assert used == 1
    assert isinstance(error, ServiceError)
    assert carry_out(calls.runs(), [lost, HttpReply(200, {"runs": []})]) == (2, [])
    assert carry_out(calls.rollback("a"), [lost])[0] == 1
    assert carry_out(calls.remove("a"), [lost])[0] == 1


def test_a_response_of_another_service_is_reported_clearly():
    assert "not as adapterbank does" in str(carry_out(calls.runs(), [HttpReply(404, None)])[1])
    assert "cannot read" in str(carry_out(calls.runs(), [HttpReply(200, {"hello": 1})])[1])
    assert "cannot read" in str(carry_out(calls.runs(), [HttpReply(200, None)])[1])
    assert "cannot read" in str(carry_out(calls.tasks(), [HttpReply(200, {"backbone": {}, "tasks": [{}]})])[1])


def test_unknown_fields_of_a_newer_server_are_ignored():
    body = {"task": "a", "version": 1, "predictions": [{"label": "x", "mood": "good"}]}
    assert carry_out(calls.predict("a", ["t"]), [HttpReply(200, body)])[1][0].label == "x"


@pytest.mark.parametrize("jitter", [0.0, 1.0])
def test_pauses_grow_and_are_never_shorter_than_the_server_asks_for(jitter):
    free = [pause(attempt, None, jitter) for attempt in range(12)]
    assert free == sorted(free)
    assert max(free) <= 37.5
    assert pause(0, "7", jitter) >= 7
    assert pause(0, "7", jitter) <= 8.75
    assert pause(0, "600", jitter) is None
    assert pause(0, "Wed, 21 Oct 2026 07:28:00 GMT", jitter) == free[0]


def test_events_are_parsed_as_the_standard_says():
    stream = EventStream()
    lines = [": hello", "", "event: progress", 'data: {"a":', "data: 1}", "id: 4", "", "data:{}", ""]
    found = [event for line in lines if (event := stream.feed(line))]
    assert [(event.kind, event.data) for event in found] == [("progress", {"a": 1}), ("", {})]


@pytest.mark.parametrize("state", ["queued", "running", None])
def test_a_stream_that_ends_before_its_run_raises_an_error(state):
    stream = EventStream()
    for line in ["event: state", f'data: {{"state": "{state}"}}', ""] if state else []:
        stream.feed(line)
    with pytest.raises(ServiceError, match="The stream ended before its run"):
        stream.end()
    for line in ["event: state", 'data: {"state": "failed"}', ""]:
        stream.feed(line)
    stream.end()


def test_one_string_in_the_place_of_texts_is_an_error_before_anything_is_sent():
    with pytest.raises(InputError, match="texts is one string, 'hello'; give a list"):
        calls.predict("a", "hello")


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_wait_goes_on_while_a_proxy_reports_that_the_server_is_unavailable(status):
    now = [0.0]
    waiter = RunWaiter(None, clock=lambda: now[0])
    waiter.missed(ServiceError("not as adapterbank does", "", status))
    with pytest.raises(ServiceError):
        waiter.missed(ServiceError("a mistake of ours", "internal", status))
    now[0] = 301
    with pytest.raises(ServiceError):
        waiter.missed(ServiceError("not as adapterbank does", "", status))
