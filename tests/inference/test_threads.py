"""`inference.threads`: batches run on threads that share nothing, each once, and the caller's threads stay as set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from adapterbank.inference import threads
from adapterbank.inference.engine import Engine
from adapterbank.inference.threads import batch_tokens, run_batches
from adapterbank.tasks.spec import Examples


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def seen_by(sizes):
    """Run batches of these sizes; return the thread of each and its number of torch's threads."""
    seen = {}

    def batch(number):
        seen[number] = threading.current_thread().name, torch.get_num_threads()

    run_batches([lambda n=n: batch(n) for n in range(len(sizes))], sizes)
    return [seen[n] for n in range(len(sizes))]


def test_a_small_batch_has_one_thread_and_a_large_one_all(two_threads):
    assert [count for _, count in seen_by([13])] == [1]
    assert [count for _, count in seen_by([500])] == [2]
    assert torch.get_num_threads() == 2


def test_several_batches_have_one_thread_each_that_is_not_the_callers(two_threads):
    found = seen_by([300] * 7)
    assert {count for _, count in found} == {1}
    assert all(name.startswith("adapterbank-cpu") for name, _ in found)
    assert torch.get_num_threads() == 2


def test_with_one_thread_batches_run_one_after_the_other_where_they_are():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert seen_by([300, 300]) == [(threading.current_thread().name, 1)] * 2
        assert batch_tokens(100_000) == 4096
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_batch_reaches_the_caller_whose_threads_stay_as_set(two_threads):
    def fail():
        raise ValueError("broken")

    for sizes in ([13], [300, 300]):
        with pytest.raises(ValueError, match="broken"):
            run_batches([fail] * len(sizes), sizes)
        assert torch.get_num_threads() == 2


def test_batches_are_large_enough_for_a_product_and_small_enough_for_every_thread(two_threads):
    assert batch_tokens(100) == threads._SMALLEST
    assert batch_tokens(4 * 1000) == 1000
    assert batch_tokens(10**6) == threads._LARGEST


def test_texts_have_the_same_answers_on_threads_as_on_one(bert, two_threads):
    engine = Engine(bert, device="cpu")
    texts = [f"the cat sat on {n} mats" + " and a dog" * (n % 5) for n in range(90)]
    found = engine.predict([(None, Examples(texts))])[0]
    torch.set_num_threads(1)
    alone = engine.predict([(None, Examples(texts))])[0]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)


FORKED = """
import os, torch
from adapterbank.inference.threads import run_batches
torch.set_num_threads(2)
run_batches([lambda: None] * 4, [300] * 4)
child = os.fork()
if not child:
    found = []
    run_batches([lambda: found.append(1)] * 4, [300] * 4)
    os._exit(0 if len(found) == 4 else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


LATE = """
import threading, time
from adapterbank.inference.threads import run_batches
import torch
torch.set_num_threads(2)
def later():
    threading.main_thread().join()
    for sizes in ([13], [300] * 4):
        found = []
        run_batches([lambda: found.append(1)] * len(sizes), sizes)
        print(len(found), flush=True)
threading.Thread(target=later).start()
"""


def test_batches_run_after_the_main_thread_has_ended():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "4"]), done.stderr


def test_threads_that_start_beside_a_small_batch_have_all_cores(two_threads):
    seen_by([13])
    seen, began, stop = [], threading.Event(), threading.Event()

    def small():
        began.set()
        stop.wait(10)

    running = threading.Thread(target=lambda: run_batches([small], [13]))
    running.start()
    began.wait(10)
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    stop.set()
    running.join()
    assert seen == [2]
