"""The service under load, compared with direct calls of the engine and with `adapters` switching tasks, taking turns.

    python bench/serving.py load --peers .venv-bench/bin/python --out bench/results/serving_cpu.json
    python bench/serving.py start --tasks 1000 --out bench/results/serving_start.json
    python bench/serving.py soak --minutes 60 --out bench/results/serving_soak.json
    python bench/serving.py inside --device cuda --shape base --tasks 1000 --texts 32 --clients 64
    python bench/serving.py inside --pretend 4 --shape tiny --tasks 1000 --texts 32 --clients 64

`load`: HTTP clients at full speed, with 8 texts per request and with one; then at half of that rate. `start`: time from
the start of the process to ready, and memory with every task resident. `soak`: 80 % load for a long time, every answer
compared with the engine's own. `inside`: batching and engine without HTTP, compared with the engine given texts and
with computing only; with --pretend and a tiny shape, with a simulated GPU. Banks of random tasks are created in
--folder and kept for later runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import random_bank
import torch
import wire
from pretended import Pretended

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.inference.engine import Engine
from adapterbank.runtime import use_few_threads_for_texts
from adapterbank.serving.service.protocol import Ask
from adapterbank.serving.service.registry import ServedTask
from adapterbank.serving.service.service import BankService
from adapterbank.tasks.spec import Examples, Task

TOKENS = 16
"""Tokens of each text."""
POOL = 512
"""Number of different texts."""
DIFFERENT = 16
"""Random tasks for `inside`: drawing a thousand takes longer than measuring. Each task has its own memory."""


def parse() -> argparse.Namespace:
    """Read the options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["load", "start", "soak", "inside"])
    options.add_argument("--backbone", default="minilm")
    options.add_argument("--shape", default="", help="inside: use a random encoder of this shape (base)")
    options.add_argument("--device", default="cpu")
    options.add_argument("--pretend", type=float, default=0, help="inside: ms that a simulated GPU takes for 256 rows")
    options.add_argument("--tasks", type=int, default=50)
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--texts", type=int, default=8, help="texts per request")
    options.add_argument("--seconds", type=float, default=15, help="duration of each measurement")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--minutes", type=float, default=60)
    options.add_argument("--share", type=float, default=0.8, help="soak: share of the highest rate")
    options.add_argument("--peers", default="", help="Python of an environment with `adapters`")
    options.add_argument("--folder", default=str(Path(tempfile.gettempdir(), "adapterbank-bench")))
    options.add_argument("--out", default="")
    return options.parse_args()


@contextlib.contextmanager
def serving(
    bank: Path, device: str = "cpu", environment: dict[str, str] | None = None
) -> Iterator[tuple[str, int, subprocess.Popen[str], float]]:
    """Start a server; yields host, port, process and the seconds until it was ready."""
    started = ["-c", "from adapterbank.cli.entry import main; main()"]
    command = [sys.executable, *started, "serve", "--bank", str(bank), "--port", "0", "--no-train", "--device", device]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
        try:
            port = 0
            while not port or not _is_ready(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read())
                log.seek(0)
                found = re.search(r"http://[^:]+:(\d+)", log.read())
                port = int(found[1]) if found else 0
                time.sleep(0.05)
            yield "127.0.0.1", port, process, time.perf_counter() - began
        finally:
            process.terminate()
            process.wait()


def _is_ready(port: int) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def asks(texts: list[str], tasks: int, each: int, seed: int = 0) -> Callable[[int], wire.Request]:
    """Draw requests by number: one task, some texts."""
    drawn = random.Random(seed)
    made = []
    for _ in range(4096):
        task = random_bank.name(drawn.randrange(tasks))
        body = json.dumps({"texts": drawn.choices(texts, k=each)}).encode()
        made.append((f"/v1/tasks/{task}/predict", body))
    return lambda number: made[number % len(made)]


def full_batches(engine: Engine, texts: list[str], tasks: int, each: int = 1) -> list[list[tuple[str, Examples]]]:
    """Draw calls that fill a batch, with a minimum number of texts per task."""
    rows = engine.tokens_at_once // TOKENS
    drawn = random.Random(1)
    calls = []
    for _ in range(16):
        requests: dict[str, list[str]] = {}
        named = drawn.sample(range(tasks), min(tasks, rows // each))
        for i in range(rows):
            requests.setdefault(random_bank.name(named[i % len(named)]), []).append(drawn.choice(texts))
        calls.append([(task, Examples(mine)) for task, mine in requests.items()])
    return calls


def paced(call: Callable[[Any], object], given: Sequence[Any], rows: int, seconds: float) -> float:
    """Call repeatedly with a fixed number of rows; return rows per second."""
    for one in given[:2]:
        call(one)
    began, done = time.perf_counter(), 0
    for one in itertools.cycle(given):
        call(one)
        done += rows
        if (spent := time.perf_counter() - began) >= seconds:
            return done / spent
    raise AssertionError


def direct(engine: Engine, texts: list[str], tasks: int, seconds: float, each: int = 1) -> float:
    """Call the engine with full batches of texts; return texts per second."""
    calls = full_batches(engine, texts, tasks, each)
    return paced(engine.predict, calls, engine.tokens_at_once // TOKENS, seconds)


def computing(engine: Engine, texts: list[str], tasks: int, seconds: float, each: int = 1) -> float:
    """Call the engine with full batches of tokens, without decoding outputs; return texts per second."""
    given = []
    for call in full_batches(engine, texts, tasks, each):
        prepared = engine.prepare(call)
        rows = [(row, one.handle) for one in prepared for row in one.rows.tokens]
        given.append(([row for row, _ in rows], [known for _, known in rows]))
    return paced(lambda one: engine.compute(*one), given, engine.tokens_at_once // TOKENS, seconds)


def filled(backbone: Backbone, options: argparse.Namespace, different: int = sys.maxsize) -> Engine:
    """Return an engine that holds all tasks; beyond the first `different` ones, tasks reuse the weights of others."""
    make = partial(Pretended, milliseconds=options.pretend) if options.pretend else Engine
    engine = make(backbone, device=options.device)
    spec = random_bank.plan(backbone, options.size)
    drawn = lru_cache(min(different, DIFFERENT))(partial(random_bank.tensors, backbone, options.size))
    for number in range(options.tasks):
        task = Task(random_bank.name(number), "classification", ("text",), "label", ("no", "yes"), "accuracy")
        engine.put(task.name, task, spec, drawn(number % different), 128)
    return engine


def made(options: argparse.Namespace) -> tuple[Backbone, Path]:
    """Return the encoder and a bank of random tasks on it."""
    backbone = load(options.backbone)
    bank = Path(options.folder, f"{backbone.sha256[:8]}-{options.size}-{options.tasks}")
    random_bank.make(bank, backbone, options.tasks, options.size)
    return backbone, bank


def measure_load(options: argparse.Namespace) -> dict[str, Any]:
    """See the module's docstring."""
    backbone, bank = made(options)
    texts = random_bank.texts(backbone, POOL, TOKENS)
    engine = filled(backbone, options)
    found: dict[str, Any] = {"rounds": []}
    peers = _peers(options, backbone, texts)
    with serving(bank) as (host, port, _, _):

        def press(each: int) -> wire.Tally:
            make = asks(texts, options.tasks, each)
            return asyncio.run(wire.press(host, port, make, clients=options.clients, seconds=options.seconds))

        press(8)
        for _ in range(options.rounds):
            eight, one = press(8), press(1)
            mine = {
                "engine_texts_per_second": direct(engine, texts, options.tasks, options.seconds),
                "eight": eight.summary() | {"texts_per_second": 8 * eight.requests_per_second},
                "one": one.summary() | {"texts_per_second": one.requests_per_second},
                "adapters_rows_per_second": peers() if peers else None,
            }
            for each, name in ((8, "eight"), (1, "one")):
                rate = mine[name]["requests_per_second"] / 2
                make = asks(texts, options.tasks, each, seed=2)
                half = wire.pace(host, port, make, clients=options.clients, seconds=options.seconds, rate=rate)
                mine[f"half_{name}"] = asyncio.run(half).summary()
            found["rounds"].append(mine)
            print(json.dumps(mine), file=sys.stderr, flush=True)
    rounds = found["rounds"]
    found["eight_over_engine"] = median(r["eight"]["texts_per_second"] / r["engine_texts_per_second"] for r in rounds)
    if peers:
        found["one_over_adapters"] = median(
            r["one"]["texts_per_second"] / r["adapters_rows_per_second"] for r in rounds
        )
    found["half_p99_ms"] = {n: median(r[f"half_{n}"]["p99_ms"] for r in rounds) for n in ("eight", "one")}
    return found


def _peers(options: argparse.Namespace, backbone: Backbone, texts: list[str]) -> Callable[[], float] | None:
    if not options.peers:
        return None
    rows = [[int(i) for i in row.ids] for row in backbone.tokenize(texts[:64])]
    setup = {"backbone": str(backbone.folder), "tasks": options.tasks, "size": options.size, "rows": rows}
    told = json.dumps({**setup, "seconds": options.seconds})

    def run() -> float:
        command = [options.peers, str(Path(__file__).with_name("switching.py"))]
        out = subprocess.run(command, input=told, capture_output=True, text=True, check=True).stdout
        return float(json.loads(out)["rows_per_second"])

    return run


def measure_start(options: argparse.Namespace) -> dict[str, Any]:
    """See the module's docstring."""
    import psutil

    backbone, bank = made(options)
    texts = random_bank.texts(backbone, POOL, TOKENS)
    seconds, megabytes = [], []
    for _ in range(options.rounds):
        with serving(bank) as (host, port, process, took):
            make = asks(texts, options.tasks, 8)
            asyncio.run(wire.press(host, port, make, clients=8, seconds=10))
            seconds.append(round(took, 2))
            megabytes.append(round(psutil.Process(process.pid).memory_info().rss / 1e6))
    return {"tasks": options.tasks, "size": options.size, "ready_seconds": seconds, "resident_mb": megabytes}


def measure_soak(options: argparse.Namespace) -> dict[str, Any]:
    """See the module's docstring."""
    import psutil

    backbone, bank = made(options)
    texts = random_bank.texts(backbone, 64, TOKENS)
    engine = filled(backbone, options)
    known = {
        random_bank.name(n): dict(zip(texts, engine.predict([(random_bank.name(n), Examples(texts))])[0], strict=True))
        for n in range(options.tasks)
    }
    del engine
    make = asks(texts, options.tasks, options.texts)

    def check(number: int, answer: Any) -> bool:
        path, body = make(number)
        task = path.split("/")[3]
        wanted = [known[task][text] for text in json.loads(body)["texts"]]
        return answer["task"] == task and all(
            abs(mine["probabilities"][label] - p) <= 1e-5
            for mine, one in zip(answer["predictions"], wanted, strict=True)
            for label, p in (one.probabilities or {}).items()
        )

    samples: list[float] = []
    with serving(bank) as (host, port, process, _):
        top = asyncio.run(wire.press(host, port, make, clients=options.clients, seconds=options.seconds, check=check))
        rate = options.share * top.requests_per_second
        tallies = []
        ends = time.perf_counter() + 60 * options.minutes
        while time.perf_counter() < ends:
            left = min(60.0, ends - time.perf_counter())
            went = wire.pace(host, port, make, clients=options.clients, seconds=left, rate=rate, check=check)
            tallies.append(asyncio.run(went))
            samples.append(round(psutil.Process(process.pid).memory_info().rss / 1e6, 1))
            print(f"{samples[-1]} MB", tallies[-1].summary(), file=sys.stderr, flush=True)
    statuses: dict[int, int] = {}
    for tally in tallies:
        for status, count in tally.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    whole = wire.Tally(sum(t.seconds for t in tallies), [s for t in tallies for s in t.times], statuses)
    whole.wrong = sum(tally.wrong for tally in tallies)
    return {"rate": round(rate, 1), "resident_mb_by_minute": samples, **whole.summary()}


@contextlib.contextmanager
def inside(options: argparse.Namespace) -> Iterator[tuple[BankService, list[str]]]:
    """Yield a service of many tasks without HTTP, and texts.

    A bank of them all would be gigabytes: they are put into the engine and the registry by hand.
    """
    from shapes import SHAPES, save

    with tempfile.TemporaryDirectory() as folder:
        shape = options.shape and save(SHAPES[options.shape], Path(folder, "encoder"))
        backbone = load(shape or options.backbone)
        bank = random_bank.make(Path(folder, "bank"), backbone, 1, options.size, first=options.tasks)
        engine = filled(backbone, options, different=DIFFERENT)
        engine.use_graphs()
        if engine.ahead:
            use_few_threads_for_texts()  # as a server does
        service = BankService(bank, engine)
        package = bank.get(random_bank.name(options.tasks))
        for name in engine.residents:
            known = engine.slots.find(name)
            assert known is not None
            service.registry._served[name] = ServedTask(package, known, name)
        yield service, random_bank.texts(backbone, POOL, TOKENS)


async def press(service: BankService, texts: list[str], options: argparse.Namespace) -> float:
    """Send requests at full speed; return texts per second."""
    drawn = random.Random(3)
    names = [random_bank.name(drawn.randrange(options.tasks)) for _ in range(2048)]
    asks = itertools.cycle([Ask(name, drawn.choices(texts, k=options.texts), None) for name in names])
    done, began = 0, time.perf_counter()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < began + options.seconds:
            ask = next(asks)
            await service.predict([ask])
            done += len(ask.texts)

    await asyncio.gather(*(client() for _ in range(options.clients)))
    return done / (time.perf_counter() - began)


def measure_inside(options: argparse.Namespace) -> dict[str, Any]:
    """See the module's docstring."""

    async def whole(service: BankService, texts: list[str]) -> list[dict[str, float]]:
        await service.start()
        rounds: list[dict[str, float]] = []
        for _ in range(1 + options.rounds):  # the first round compiles
            mine = service.engine, texts, options.tasks, options.seconds, options.texts
            rounds.append(
                {
                    "compute_texts_per_second": await asyncio.to_thread(computing, *mine),
                    "engine_texts_per_second": await asyncio.to_thread(direct, *mine),
                    "service_texts_per_second": await press(service, texts, options),
                }
            )
        await service.stop()
        return rounds

    with inside(options) as made:
        first, *rounds = asyncio.run(whole(*made))
    ratio = median(r["service_texts_per_second"] / r["engine_texts_per_second"] for r in rounds)
    return {"first_round": first, "rounds": rounds, "service_over_engine": ratio}


def main() -> None:
    """Measure, and write the results."""
    from machine import machine

    options = parse()
    what: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "load": measure_load,
        "start": measure_start,
        "soak": measure_soak,
        "inside": measure_inside,
    }
    found = what[options.what](options)
    chosen = {k: v for k, v in vars(options).items() if k not in ("out", "folder", "peers")}
    found = {"options": chosen, "machine": machine(torch.device(options.device)), "cores": os.cpu_count(), **found}
    text = json.dumps(found, indent=1) + "\n"
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
