"""Claims about reading tasks: one that hangs holds up no other, and is read again when it answers."""

from __future__ import annotations

import threading
import time

import pytest

from adapterbank.serving.service.task_reader import NoAnswer, TaskReader
from serving.small_bank import PATIENCE


def wait_until(true):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def disk():
    """A disk that does not answer for the tasks `hung-…` until it is released."""

    class Disk:
        def __init__(self):
            self.released, self.read = threading.Event(), []

        def __call__(self, name):
            if name.startswith("hung"):
                assert self.released.wait(PATIENCE)
            self.read.append(name)
            return name.upper()

    disk = Disk()
    yield disk
    disk.released.set()


def test_tasks_that_hang_are_left_behind_and_read_when_they_answer(disk):
    reader = TaskReader(threads=2, patience=0.05)
    names = ["a", "hung-1", "b", "hung-2", "c", "hung-3", "d"]
    reader.each(names, disk)
    assert sorted(disk.read) == ["a", "b", "c", "d"]
    assert list(reader.hung()) == ["hung-1", "hung-2", "hung-3"]
    assert "the disk has not answered" in reader.hung()["hung-1"]
    assert [line.split(" for ")[0] for line in reader.stalled(0.0)] == [f"reading hung-{i}" for i in (1, 2, 3)]
    reader.each(names, disk)  # the hung ones are skipped
    assert sorted(disk.read) == [*"aabbccdd"]
    disk.released.set()
    wait_until(lambda: not reader.hung())
    reader.each(names, disk)
    assert disk.read.count("hung-1") == 2


def test_one_task_that_hangs_is_refused_at_once_from_then_on(disk):
    reader = TaskReader(patience=0.05)
    assert reader.one("a", lambda: disk("a")) == "A"
    with pytest.raises(NoAnswer, match=r"hung cannot be read: .* for 0 s; check the disk"):
        reader.one("hung", lambda: disk("hung"))
    with pytest.raises(NoAnswer):
        reader.one("hung", lambda: pytest.fail("it was read twice"))
    disk.released.set()
    wait_until(lambda: not reader.hung())
    assert reader.one("hung", lambda: disk("hung")) == "HUNG"


def test_a_large_file_has_more_time(disk):
    reader = TaskReader(patience=0.01)
    threading.Timer(0.1, disk.released.set).start()
    assert reader.one("hung", lambda: disk("hung"), size=int(PATIENCE) * (20 << 20)) == "HUNG"


def test_no_two_threads_work_on_one_task():
    reader, inside, most = TaskReader(threads=4, patience=PATIENCE), [], []

    def work():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    threads = [threading.Thread(target=lambda: [reader.one("a", work) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(most), len(most)) == (1, 80)


def test_an_error_is_that_of_the_work_and_stops_no_other_task():
    reader, done = TaskReader(patience=PATIENCE), []

    def work(name):
        done.append(name)
        if name == "b":
            raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        reader.each(["a", "b", "c"], work)
    assert done == ["a", "b", "c"]
    with pytest.raises(TimeoutError, match="of the work"):
        reader.one("b", lambda: work("b"))
