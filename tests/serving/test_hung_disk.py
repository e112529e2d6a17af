"""Promise: a server whose disk hangs for one task answers for the others, names it, and ends when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from serving.small_bank import PATIENCE

HANGING = """
import builtins, io, os, threading
calls = [(os, "stat"), (os, "open"), (os, "scandir"), (os, "listdir"), (io, "open"), (builtins, "open")]
for module, name in calls:
    def call(path, *args, real=getattr(module, name), **kwargs):
        if {part!r} in str(path) and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()
        return real(path, *args, **kwargs)
    setattr(module, name, call)
from adapterbank.cli.entry import main
main()
"""


def get(address, path, value=None):
    data = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def wait_for(address, path, true):
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if true(found := get(address, path)):
                return found
        except urllib.error.HTTPError as error:
            error.close()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_a_server_whose_disk_hangs_for_one_task_answers_and_ends(small):
    small.put("sentiment")
    small.put("hung", 1)
    script = HANGING.format(part="tasks/hung")
    words = ["serve", "--port", "0", "--device", "cpu", "--bank", str(small.bank.path)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        line = process.stderr.readline()
        assert "serving" in line, line
        address = line.split()[-1].strip()
        ready = wait_for(address, "/readyz", lambda found: found["stalled"])
        assert ready["status"] == "ready"
        assert ready["stalled"][0].startswith("bank: reading hung for ")
        assert get(address, "/v1/tasks/sentiment/predict", {"text": "the cat sat"})["version"] == 1
        found = get(address, "/v1/tasks")
        assert [task["name"] for task in found["tasks"]] == ["sentiment"]
        assert [one["task"] for one in found["problems"]] == ["hung"]
        with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE) as answer:
            assert 'adapterbank_stalled{part="bank"} 1.0' in answer.read().decode()
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        lines = process.stderr.read().splitlines()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 0
    assert lines[-1] == "adapterbank: stopped."
    (stalled,) = [event for event in map(json.loads, lines[:-1]) if event["event"] == "stalled"]
    assert (stalled["part"], stalled["work"].partition(" for ")[0]) == ("bank", "reading hung")
