"""Claims about the limits of concurrent operations: in total, and for one key."""

from __future__ import annotations

import asyncio

import pytest

from adapterbank.serving.http import routes_train
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.http.concurrency import ConcurrencyLimit
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.service.protocol import Refusal
from serving.dummy import Dummy, calling
from serving.small_bank import until
from serving.training import left, new_bank, table


@pytest.fixture
def jobs(tmp_path, bert):
    class Idle(JobQueue):
        """A queue whose runs are not started."""

        def begin(self):
            """Do nothing."""

    return Idle(new_bank(tmp_path / "bank", bert))


def test_a_stream_is_counted_from_its_first_part_to_its_end():
    limit = ConcurrencyLimit(1, "streams")

    async def parts():
        yield "one"
        yield "two"

    async def run():
        stream = limit.wrap(parts(), None)
        limit.check(None)
        assert await anext(stream) == "one"
        with pytest.raises(Refusal, match="1 streams are open, which is the limit"):
            limit.check(None)
        await stream.aclose()
        limit.check(None)

    asyncio.run(run())


def test_one_key_may_have_half_of_the_uploads(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(routes_train, "MAX_UPLOADS", 4)
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
    assert more.json()["error"]["message"].startswith("2 uploads of the key 'alice' are open,")
    assert [one.status_code for one in (other, *slow, later)] == [202] * 4
