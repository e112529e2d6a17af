"""The soak: 80 % of what the server can do, while tasks come, go and change, clients leave and others are slow.

    steady      never change; asked most
    moving      get new versions, are rolled back; each answer is compared with that of the version it names
    guests      are put and removed; while they are away, 404 is the right answer

Ordinary clients ask at a fixed rate; one request in fifty is cut off, before or after its body has been sent. Fifty
slow clients send their head or body byte by byte, or read the answer late. Memory is judged by `memory_verdict`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trials.frame import Case, Stage, Trial
from trials.server import KINDS, Row, Server, TrialBank

CLIENTS, SLOW = 32, 50
SHARE = 0.8
"""Share of the measured capacity that is asked for."""
STEADY, MOVING, GUESTS = 12, 4, 4
NUMBERS = 6
"""How many different weights each kind has."""
CUT = 0.02
"""Share of requests whose client leaves before the answer."""
DEADLINE = 60.0
"""Seconds after which a request without an answer is lost."""
IDLE = 3.0
"""Seconds after which a client opens a new connection: the server closes idle ones after five."""
CHANGE_EVERY = 0.7
"""Seconds between two changes of the bank."""
SERVED_WITHIN = 30.0
"""Seconds within which a change must be served, on however busy a machine; the longest one is told."""
COLLECT_EVERY = 50
"""Changes between two calls of gc."""
WARM_UP = 600.0
"""Seconds before memory is judged: caches, pools and the allocator's arenas fill in this time."""
JUDGED_FROM = 900.0
"""Length of a soak in seconds from which memory is judged."""
GROWTH = 0.03
"""Share by which memory may grow after the warm-up: allocators keep some."""


@dataclass
class Soak:
    """The state of one soak."""

    stage: Stage
    known: TrialBank
    server: Server
    ends: float
    counts: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    """Seconds until the slowest change was served."""
    slowest: float = 0.0
    """Seconds that the slowest answer took."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and resident megabytes."""

    @property
    def over(self) -> bool:
        """Whether the time is up, or the server has ended."""
        return time.monotonic() >= self.ends or self.server.process.poll() is not None

    def fail(self, case: Case, what: str, **evidence: Any) -> None:
        """Record a failure; of each sort the first ones with a file."""
        self.counts[what] += 1
        if self.counts[what] <= 20:
            self.stage.fail(case, what, **evidence)


@dataclass(frozen=True)
class Question:
    """A request and what to compare its answer with."""

    task: str
    rows: list[Row]

    @property
    def message(self) -> bytes:
        """The request as it is sent."""
        body: dict[str, Any] = {"texts": [text for text, _ in self.rows]}
        if self.rows[0][1] is not None:
            body["pairs"] = [pair for _, pair in self.rows]
        data = json.dumps(body).encode()
        head = f"POST /v1/tasks/{self.task}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def draw_question(known: TrialBank, draw: random.Random) -> Question:
    """Draw a request for any task; a task keeps its kind, so its rows fit every version."""
    sort = draw.choices(("steady", "moving", "guest"), (6, 3, 1))[0]
    number = draw.randrange({"steady": STEADY, "moving": MOVING, "guest": GUESTS}[sort])
    return Question(f"{sort}-{number}", draw.choices(known.common(kind_of(number), NUMBERS), k=draw.randint(1, 8)))


def kind_of(number: int) -> str:
    """Return the kind of the tasks with a number."""
    return [*KINDS][number % len(KINDS)]


class Wire:
    """One connection, opened when it is needed."""

    def __init__(self, port: int) -> None:
        self.port, self.used = port, 0.0
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def open(self) -> asyncio.StreamWriter:
        """Return the writer of a fresh or lately used connection."""
        if self.writer is None or self.writer.is_closing() or time.monotonic() - self.used > IDLE:
            self.close()
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self.writer

    async def exchange(self, message: bytes) -> tuple[int, bytes]:
        """Send a request and return the status and body of its answer."""
        (await self.open()).write(message)
        return await self.receive()

    async def receive(self) -> tuple[int, bytes]:
        """Read an answer."""
        assert self.reader is not None
        lines = (await self.reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        body = await self.reader.readexactly(length)
        self.used = time.monotonic()
        if b"connection: close" in lines:
            self.close()
        return int(lines[0].split()[1]), body

    def close(self, *, reset: bool = False) -> None:
        """Close the connection; `reset` as a machine that vanishes."""
        if self.writer is not None:
            if reset and (plain := self.writer.get_extra_info("socket")) is not None:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.writer.transport.abort() if reset else self.writer.close()
            self.writer = None


def judge(soak: Soak, case: Case, question: Question, status: int, body: bytes) -> None:
    """Compare an answer with the right one."""
    evidence = {"task": question.task, "rows": question.rows, "status": status, "body": body}
    if status == 404 and question.task.startswith("guest"):
        soak.counts["away"] += 1
        return
    if status != 200:
        soak.fail(case, f"answered with {status}", **evidence)
        return
    right = False
    with contextlib.suppress(ValueError, LookupError, TypeError):  # what is no such answer is wrong
        found = json.loads(body)
        name, version, answers = found["task"], found["version"], found["predictions"]
        right = name == question.task and all(
            soak.known.is_right(name, version, row, one) for row, one in zip(question.rows, answers, strict=True)
        )
    soak.counts["right"] += right
    if not right:
        soak.fail(case, "a wrong answer", **evidence)


async def ask(soak: Soak, case: Case, wire: Wire) -> None:
    """Send one request and judge its answer, or leave before it comes."""
    question = draw_question(soak.known, case.random)
    message = question.message
    if case.random.random() < CUT:
        soak.counts["left"] += 1
        cut = case.random.choice((len(message), case.random.randrange(1, len(message))))
        with contextlib.suppress(OSError):
            (await wire.open()).write(message[:cut])
            await asyncio.sleep(case.random.choice((0, 0.001, 0.01)))
        wire.close(reset=case.random.random() < 0.5)
        return
    began = time.monotonic()
    try:
        async with asyncio.timeout(DEADLINE):
            status, body = await wire.exchange(message)
            while status == 429:  # a refusal under load: asked again, as the answer says
                soak.counts["refused (429), asked again"] += 1
                await asyncio.sleep(1)
                status, body = await wire.exchange(message)
    except (OSError, EOFError, TimeoutError) as error:
        wire.close()
        soak.fail(case, "no answer", task=question.task, error=repr(error), request=message)
        return
    soak.slowest = max(soak.slowest, time.monotonic() - began)
    judge(soak, case, question, status, body)


async def client(soak: Soak, cases: Iterator[Case], rate: float) -> None:
    """Ask at a fixed rate, or as fast as answers come where the rate is 0; one that falls behind does not catch up."""
    wire, due = Wire(soak.server.port), time.monotonic()
    for case in cases:
        if soak.over:
            break
        await ask(soak, case, wire)
        if rate:
            due = max(due + case.random.expovariate(rate), time.monotonic() - 1)
            await asyncio.sleep(max(0.0, min(due, soak.ends) - time.monotonic()))
    wire.close()


async def slow_client(soak: Soak, case: Case) -> None:
    """Send or read byte by byte, again and again; what was sent whole in time is answered rightly."""
    draw = case.random
    while not soak.over:
        sort = draw.choice(("head", "body", "answer"))
        question, wire = draw_question(soak.known, draw), Wire(soak.server.port)
        message = question.message
        start = message.index(b"\r\n\r\n") + 4
        slow = message[:start] if sort == "head" else message[start:] if sort == "body" else b""
        pause = draw.uniform(5, 20) / max(1, len(slow)) if sort == "body" else draw.uniform(0.1, 1.0)
        try:
            async with asyncio.timeout(DEADLINE):
                writer = await wire.open()
                writer.write(message[: message.index(slow)] if slow else message)
                for place in range(len(slow)):
                    writer.write(slow[place : place + 1])
                    await writer.drain()
                    await asyncio.sleep(min(pause, max(0.0, soak.ends - time.monotonic())))
                    if soak.over:
                        return
                writer.write(message[start:] if sort == "head" else b"")
                if sort == "answer":
                    await asyncio.sleep(pause)
                status, body = await wire.receive()
            judge(soak, case, question, status, body)
        except (OSError, EOFError, TimeoutError) as error:
            soak.counts["slow heads cut off"] += sort == "head"
            if sort != "head" and not soak.over:  # a head must arrive within 30 s, and these do not
                soak.fail(case, f"no answer to a client with a slow {sort}", error=repr(error), request=message)
        finally:
            wire.close()
        soak.counts["slow requests"] += 1


def change(soak: Soak, draw: random.Random, here: dict[str, bool]) -> tuple[str, int | None]:
    """Change the bank; return a task and the version of it that is to be served, None for no task."""
    known, server = soak.known, soak.server
    if draw.random() < 0.5:
        number = draw.randrange(MOVING)
        name = f"moving-{number}"
        if draw.random() < 0.3:
            status, told = server.ask("POST", f"/v1/tasks/{name}/rollback")
            if status == 200:
                return name, int(told["version"])
            if status != 409:  # there is no earlier version
                raise RuntimeError(f"rollback of {name}: {status} {told}")
        return name, known.put(name, draw.randrange(NUMBERS), kind_of(number))
    number = draw.randrange(GUESTS)
    name = f"guest-{number}"
    here[name] = not here.get(name, False)
    if here[name]:
        return name, known.put(name, draw.randrange(NUMBERS), kind_of(number))
    if draw.random() < 0.5:
        known.bank.remove(name)
    else:
        status, told = server.ask("DELETE", f"/v1/tasks/{name}")
        if status != 200:
            raise RuntimeError(f"removal of {name}: {status} {told}")
    return name, None


def is_served(server: Server, name: str, version: int | None) -> bool:
    """Whether the server answers for a task with this version; None: that it has no such task."""
    status, told = server.ask("GET", f"/v1/tasks/{name}", seconds=DEADLINE)
    return status == 404 if version is None else status == 200 and told["version"] == version


async def churn(soak: Soak, case: Case) -> None:
    """Change the bank again and again, and see that each change is served."""
    here: dict[str, bool] = {}
    while not soak.over:
        try:
            name, version = await asyncio.to_thread(change, soak, case.random, here)
            began = time.monotonic()
            while not await asyncio.to_thread(is_served, soak.server, name, version):
                await asyncio.sleep(0.05)
                if time.monotonic() - began > SERVED_WITHIN:
                    soak.fail(case, "a change is not served", task=name, version=version)
                    break
            soak.longest = max(soak.longest, time.monotonic() - began)
            soak.counts["changes"] += 1
            if soak.counts["changes"] % COLLECT_EVERY == 0:
                await asyncio.to_thread(soak.known.bank.gc)
        except Exception as error:
            soak.fail(case, "a change failed", error=repr(error))
        await asyncio.sleep(CHANGE_EVERY)


async def watch(soak: Soak) -> None:
    """Sample the server's memory."""
    began = time.monotonic()
    while not soak.over:
        with contextlib.suppress(OSError):
            soak.memory.append((time.monotonic() - began, soak.server.figures()["megabytes"]))
        await asyncio.sleep(min(10.0, max(0.0, soak.ends - time.monotonic())))


def memory_verdict(samples: list[tuple[float, float]]) -> tuple[bool, str]:
    """Return whether memory is flat, and how that was judged.

    Of the samples after the first ten minutes, the median of the last third may be at most 3 % above the median of the
    first third. Medians, because a batch in progress counts in a single sample; thirds, because a leak goes on.
    """
    if not samples or samples[-1][0] < JUDGED_FROM:
        return True, f"not judged: the soak was shorter than {JUDGED_FROM / 60:.0f} minutes"
    judged = [megabytes for seconds, megabytes in samples if seconds >= WARM_UP]
    third = max(1, len(judged) // 3)
    first, last = statistics.median(judged[:third]), statistics.median(judged[-third:])
    told = f"median {first:.0f} MB in the first third after ten minutes, {last:.0f} MB in the last"
    return last <= first * (1 + GROWTH), told


async def measure(soak: Soak, cases: Iterator[Case], seconds: float) -> float:
    """Return how many requests per second the server answers at most; these are judged too."""
    ends, soak.ends = soak.ends, time.monotonic() + seconds
    before, began = soak.stage.tries, time.monotonic()
    await asyncio.gather(*(client(soak, cases, 0) for _ in range(CLIENTS)))
    soak.ends = ends
    return (soak.stage.tries - before) / (time.monotonic() - began)


async def load(soak: Soak) -> None:
    """Measure the capacity, then ask for a share of it until the time is up."""
    cases = soak.stage.cases()
    capacity = await measure(soak, cases, min(20.0, max(1.0, soak.stage.left / 8)))
    soak.stage.note("capacity, requests/s", round(capacity, 1))
    await asyncio.gather(
        watch(soak),
        churn(soak, soak.stage.case(-1)),
        *(slow_client(soak, soak.stage.case(-2 - number)) for number in range(SLOW)),
        *(client(soak, cases, SHARE * capacity / CLIENTS) for _ in range(CLIENTS)),
    )


def run(stage: Stage) -> None:
    """See the module's docstring. A failure depends on the others' timing, so `--repeat` runs the whole soak again."""
    stage.only = None
    known = TrialBank(stage.folder, seed=stage.seed)
    for sort, count in (("steady", STEADY), ("moving", MOVING)):
        for number in range(count):
            known.put(f"{sort}-{number}", number % NUMBERS, kind_of(number))
    for kind in KINDS:
        known.common(kind, NUMBERS)
    server = Server(known.bank.path)
    stage.closing.callback(server.kill)
    before = server.figures()
    soak = Soak(stage, known, server, time.monotonic() + stage.seconds)
    asyncio.run(load(soak))
    finish(soak, before)


def finish(soak: Soak, before: dict[str, float]) -> None:
    """Judge the server as a whole, and note the figures."""
    stage, server, case = soak.stage, soak.server, soak.stage.case(-1)
    if server.process.poll() is not None:
        stage.fail(case, "the server has ended", status=server.process.returncode, log=list(server.tail))
        return
    if broken := server.broken():
        stage.fail(case, f"the server counts {broken:.0f} answers as 5xx", errors=list(server.errors))
    if server.failed:
        stage.fail(case, f"the log has {server.failed} traces", errors=list(server.errors))
    flat, told = memory_verdict(soak.memory)
    if not flat:
        stage.fail(case, "memory is not flat", told=told, samples=soak.memory)
    after = server.figures()
    if not server.stop():
        stage.fail(case, "the server did not stop within its time")
    stage.note("requests", dict(soak.counts))
    stage.note("memory", told)
    stage.note(
        "memory in MB, samples of equal distance",
        [round(mb) for _, mb in soak.memory[:: max(1, len(soak.memory) // 60)]],
    )
    stage.note("open files and threads", {name: [before[name], after[name]] for name in ("files", "threads")})
    stage.note("slowest answer and slowest change, s", [round(soak.slowest, 2), round(soak.longest, 2)])


TRIAL = Trial(
    name="soak",
    promise=(
        "A server at 80 % of its capacity answers every request rightly and without a 5xx while tasks change, clients "
        "leave and fifty clients are slow, and its memory stays flat after ten minutes."
    ),
    full=0,
    run=run,
    weight=4.0,
)
