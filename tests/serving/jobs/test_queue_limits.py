"""Claims about the limits of the queue: in total and per key, also for concurrent uploads."""

from __future__ import annotations

import asyncio

import pytest

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.jobs.queue import JobQueue, JobQueueFull, KeyQueueFull, QueueLimits
from adapterbank.serving.service.protocol import Limits
from serving.dummy import Dummy, ask, calling
from serving.small_bank import until
from serving.training import left, new_bank, send, table

PATH = "/v1/tasks/sentiment/train?format=csv"


class Idle(JobQueue):
    """A queue whose runs are not started."""

    def begin(self):
        """Do nothing."""


@pytest.fixture
def jobs(tmp_path, bert):
    return Idle(new_bank(tmp_path / "bank", bert), limits=QueueLimits(waiting=8))


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.json")


@pytest.fixture
def header(keys):
    def make(name, *scopes):
        return {"Authorization": f"Bearer {keys.add(name, scopes)}"}

    return make


@pytest.fixture
def app(jobs, keys):
    return create_app(Dummy(), jobs=jobs, keys=keys, limits=Limits(runs=2), page=False)


def sent(app, headers, count=1):
    return [ask(app, "POST", PATH, content=table(), headers=headers) for _ in range(count)]


def test_a_key_has_a_limit_of_queued_runs_and_other_keys_are_not_affected(app, jobs, header):
    alice, bob = header("alice", "train"), header("bob", "train", "predict")
    answers = sent(app, alice, 3)
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    error = answers[2].json()["error"]
    assert (error["code"], answers[2].headers["retry-after"]) == ("too_many_runs", "60")
    assert error["message"].startswith("The key 'alice' has 2 queued runs, which is the limit;")
    assert [answer.status_code for answer in sent(app, bob, 2)] == [202, 202]
    assert len(left(jobs)) == 4  # nothing of the one that was refused


def test_a_run_that_starts_or_is_cancelled_frees_its_place(app, jobs, header):
    alice = header("alice", "train")
    first, second = (answer.json()["id"] for answer in sent(app, alice, 2))
    assert jobs.runs.begin().id == first
    assert [answer.status_code for answer in sent(app, alice, 2)] == [202, 429]
    assert ask(app, "DELETE", f"/v1/runs/{second}", headers=alice).status_code == 200
    assert [answer.status_code for answer in sent(app, alice, 2)] == [202, 429]


def test_a_key_leaves_half_of_the_free_places_to_others(jobs, keys, header):
    app = create_app(Dummy(), jobs=jobs, keys=keys, limits=Limits(runs=100), page=False)
    counts = []
    for name in ("alice", "bob", "carol"):
        answers = sent(app, header(name, "train"), 5)
        counts.append([answer.status_code for answer in answers].count(202))
        assert answers[-1].json()["error"]["code"] == "too_many_runs"
    assert counts == [4, 2, 1]
    message = answers[-1].json()["error"]["message"]
    assert "has 1 queued runs, which is as many as are still free of 8 places" in message


def test_only_the_total_limit_applies_to_an_admin(app, header):
    answers = sent(app, header("root", "admin"), 9)
    assert [answer.status_code for answer in answers] == [*[202] * 8, 429]
    assert answers[8].json()["error"]["code"] == "overloaded"


def test_only_the_total_limit_applies_without_keys(jobs):
    answers = sent(create_app(Dummy(), jobs=jobs, limits=Limits(runs=2), page=False), {}, 9)
    assert [answer.status_code for answer in answers] == [*[202] * 8, 429]


def test_concurrent_uploads_do_not_exceed_the_limit_of_a_key(app, jobs, header):
    alice = header("alice", "train")

    async def run():
        go = asyncio.Event()

        async def body():
            yield table()
            await go.wait()

        async with calling(app) as client:
            posts = [asyncio.ensure_future(client.post(PATH, content=body(), headers=alice)) for _ in range(4)]
            await until(lambda: len(left(jobs)) == 4)
            go.set()
            return await asyncio.gather(*posts)

    statuses = sorted(answer.status_code for answer in asyncio.run(run()))
    assert statuses == [202, 202, 429, 429]
    assert len(left(jobs)) == 2


def test_concurrent_uploads_do_not_exceed_the_total_limit(tmp_path, bert):
    jobs = Idle(new_bank(tmp_path / "bank", bert), limits=QueueLimits(waiting=1))
    uploads = [jobs.upload("csv") for _ in range(2)]
    for upload in uploads:
        upload.write(table())
    jobs.submit("sentiment", {}, uploads[0])
    with uploads[1], pytest.raises(JobQueueFull):
        jobs.submit("sentiment", {}, uploads[1])
    assert jobs.runs.waiting(None) == (1, 0)


def test_the_runs_of_a_key_are_counted_by_its_name(jobs):
    def put(name):
        with jobs.upload("csv", name, 1) as upload:
            upload.write(table())
            jobs.submit("sentiment", {}, upload, name, 1)

    put("alice")
    put("bob")
    with pytest.raises(KeyQueueFull):
        put("alice")


def test_the_openapi_document_lists_the_error(app):
    description = app.openapi()["paths"]["/v1/tasks/{task}/train"]["post"]["responses"]["429"]["description"]
    assert "too_many_runs" in description


def test_the_number_of_queued_runs_is_limited(tmp_path, bert):
    jobs = Idle(new_bank(tmp_path / "bank", bert), limits=QueueLimits(waiting=2))
    first = send(jobs)
    send(jobs)
    with pytest.raises(JobQueueFull, match="The queue is full with 2 runs"):
        send(jobs)
    jobs.cancel(first.id)
    assert send(jobs).state == "queued"
