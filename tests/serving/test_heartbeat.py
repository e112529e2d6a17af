"""Claims about heartbeats: work that stands still is named for as long as it does, and logged once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

from adapterbank.serving import heartbeat
from adapterbank.serving.heartbeat import Heartbeat, Watchdog
from serving.small_bank import PATIENCE, until


def test_only_work_beyond_its_bound_stands_still():
    beat = Heartbeat(bound=1e-9)
    assert beat.stalled() == []
    with beat.work("reading x"):
        assert beat.stalled() == ["reading x for 0 s"]
        with beat.work("compiling", bound=PATIENCE):
            assert beat.stalled() == []
        assert beat.stalled() == ["reading x for 0 s"]
    assert beat.stalled() == []


def test_work_that_goes_on_does_not_stand_still(monkeypatch):
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beat = Heartbeat(bound=3)
    with beat.work("run 1"):
        now += 4
        assert beat.stalled() == ["run 1 for 4 s"]
        beat.beat("run 2")
        assert beat.stalled() == ["run 1 for 4 s"]
        beat.beat("run 1")
        assert beat.stalled() == []
        now += 2
        with beat.work("a step"):
            now += 2
        assert beat.stalled() == []  # a step is progress


def test_work_that_fails_and_is_tried_again_stands_still_until_it_succeeds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beat = Heartbeat(bound=3)
    for _ in range(5):
        with contextlib.suppress(OSError), beat.work("reading", retried=True):
            raise OSError
        now += 1
    assert beat.stalled() == ["reading for 5 s"]
    with beat.work("reading", retried=True):
        assert beat.stalled() == ["reading for 5 s"]
    assert beat.stalled() == []
    with contextlib.suppress(OSError), beat.work("reading once"):
        raise OSError
    now += 9
    assert beat.stalled() == []


def test_the_log_says_once_that_a_part_stands_still_and_once_that_it_goes_on(caplog):
    caplog.set_level(logging.INFO, logger="adapterbank.serving")
    dog = Watchdog(dict)
    for stalls in ({"bank": []}, {"bank": ["x for 4 s"]}, {"bank": ["x for 5 s"]}, {"bank": []}, {"bank": []}):
        dog.check(stalls)
    assert [(record.message, record.fields) for record in caplog.records] == [
        ("stalled", {"part": "bank", "work": "x for 4 s"}),
        ("recovered", {"part": "bank"}),
    ]


def test_an_event_loop_that_hangs_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(heartbeat, "_EVERY", 0.01)
    monkeypatch.setattr(heartbeat, "BOUND", 0.05)
    caplog.set_level(logging.INFO, logger="adapterbank.serving")
    seen = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record):
            if record.getMessage() == "stalled":
                seen.set()

    async def run():
        dog = Watchdog(lambda: {"bank": []})
        dog.start(asyncio.get_running_loop())
        logging.getLogger("adapterbank.serving").addHandler(handler := Seen())
        assert seen.wait(PATIENCE)  # this blocks the loop
        logging.getLogger("adapterbank.serving").removeHandler(handler)
        await until(lambda: "recovered" in caplog.messages)
        dog.stop()

    asyncio.run(run())
    assert caplog.records[0].fields["part"] == "event loop"
