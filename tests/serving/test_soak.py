"""Promise: a real server answers thousands of requests while tasks change; the long soak is in bench/serving.py."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time

import httpx
import psutil
import pytest

import adapterbank
from adapterbank.tasks.spec import Examples
from serving.small_bank import text_of

CLIENTS, EACH, TASKS = 16, 120, 12
LEAK = 48e6
"""Bytes that a process may grow by from the first third of the requests to the last: allocators keep some."""


@pytest.fixture
def server(small, tmp_path):
    """Start a server; its address and process. Its log is written to a file, because nothing reads a pipe here."""
    for i in range(TASKS):
        small.put(f"task-{i}", seed=i)
    start = [sys.executable, "-c", "from adapterbank.cli.entry import main; main()", "serve", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as file:
        words = ["--bank", str(small.bank.path), "--device", "cpu", "--no-train"]
        process = subprocess.Popen([*start, *words], stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (found := re.search(r"http://\S+(?=\s)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        while httpx.get(f"{found[0]}/readyz").status_code != 200:  # until then, a task that is not loaded yet is a 503
            time.sleep(0.05)
        yield found[0], process, log
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_nothing_is_lost_swapped_or_leaked(small, server):
    address, process, log = server
    names = [f"task-{i}" for i in range(TASKS)]
    texts = [text_of(random.Random(i)) for i in range(40)]
    alone = small.alone(*names)
    wanted = {name: dict(zip(texts, alone.predict([(name, Examples(texts))])[0], strict=True)) for name in names}
    memory, wrong, versions = [], [], []

    async def client(number, asked):
        draw = random.Random(number)
        for k in range(EACH):
            name, mine = draw.choice(names), draw.choices(texts, k=draw.randint(1, 6))
            found = await asked.predict(name, mine)
            for text, one in zip(mine, found, strict=True):
                right = wanted[name][text]
                if (one.task, one.label) != (name, right.label) or any(
                    abs(one.probabilities[label] - p) > 1e-5 for label, p in right.probabilities.items()
                ):
                    wrong.append((name, text))
            if number == 0 and k % (EACH // 3) == EACH // 3 - 1:
                memory.append(psutil.Process(process.pid).memory_info().rss)
            if number == 1 and k % 10 == 0:
                put = await asyncio.to_thread(small.put, "guest", k)
                versions.append((await asked.predict("guest", [texts[0]]))[0].version)
                while k % 30 == 0 and versions[-1] < put.manifest.version:  # now and then as long as it takes
                    await asyncio.sleep(0.05)
                    versions.append((await asked.predict("guest", [texts[0]]))[0].version)

    async def run():
        async with adapterbank.AsyncClient(address, timeout=600) as asked:
            await asyncio.gather(*(client(number, asked) for number in range(CLIENTS)))

    asyncio.run(run())
    assert not wrong
    assert versions == sorted(versions)  # a new version may take a moment, and no old one comes back
    assert len(set(versions)) > 3
    assert memory[-1] - memory[0] < LEAK
    lines = log.read_text().splitlines()
    requests = [line for line in lines if '"event": "request"' in line and "/readyz" not in line]
    assert [line for line in requests if '"status": 5' in line] == []
    assert len(requests) > CLIENTS * EACH
