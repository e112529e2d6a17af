"""Claims about the process of a worker: its reports are read, and it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys

from adapterbank.serving.jobs.run_recorder import RunRecorder
from adapterbank.serving.jobs.worker_process import listen
from serving.training import send


def python(code):
    """Start a process in place of a worker."""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_a_worker_that_does_not_stop_is_killed(idle, monkeypatch):
    monkeypatch.setattr("adapterbank.serving.jobs.worker_process.GRACE", 0.3)
    run = send(idle)
    recorder = RunRecorder(idle.runs, idle.runs.begin())
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
    with python(stubborn) as child:
        assert listen(child, lambda message: idle.cancel(run.id), lambda: idle.stop_reason(run.id)) == "cancel"
    assert child.returncode == -signal.SIGKILL
    recorder.finish("cancel", child.returncode)
    assert idle.get(run.id).state == "cancelled"


def test_output_of_a_library_is_not_taken_for_a_report():
    messages = []
    with python(r"print('loading...\n3\n[]\n\x00\n{\"done\": 1}\n{\"half')") as child:
        assert listen(child, messages.append, lambda: "") == ""
    assert [message for message in messages if message] == [{"done": 1}]


def test_a_worker_has_ended_even_if_a_process_it_started_runs_on():
    begin = "import subprocess, sys; print('{}', flush=True); subprocess.Popen([sys.executable, '-c', "
    with python(begin + "'import time; time.sleep(20)'])") as child:
        messages = []
        assert listen(child, messages.append, lambda: "") == ""
        assert (child.poll(), messages) == (0, [{}])
