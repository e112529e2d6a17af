"""Claims about the pool of daemon threads: it works like any pool, and a call that hangs does not keep a process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from adapterbank.serving.daemon_pool import DaemonPool
from serving.small_bank import PATIENCE


def test_calls_run_in_at_most_so_many_threads_and_errors_come_back():
    pool = DaemonPool(2, "test")
    meeting = threading.Barrier(2, timeout=PATIENCE)
    first, second = pool.submit(meeting.wait), pool.submit(meeting.wait)
    assert {first.result(PATIENCE), second.result(PATIENCE)} == {0, 1}
    names = {pool.submit(threading.get_ident).result(PATIENCE) for _ in range(20)}
    assert len(names) <= 2
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(PATIENCE)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_one_thread_runs_calls_in_order_and_a_cancelled_call_is_skipped():
    pool, go, done = DaemonPool(1, "test"), threading.Event(), []
    pool.submit(go.wait, PATIENCE)
    later = [pool.submit(done.append, i) for i in range(5)]
    assert later[2].cancel()
    go.set()
    pool.shutdown()
    assert done == [0, 1, 3, 4]


def test_a_call_that_hangs_does_not_keep_the_process():
    script = (
        "import threading; from adapterbank.serving.daemon_pool import DaemonPool\n"
        "pool = DaemonPool(1, 'x'); pool.submit(threading.Event().wait); pool.shutdown(patience=0.01); print('ended')"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert found.stdout == "ended\n"
