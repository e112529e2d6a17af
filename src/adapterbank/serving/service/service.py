"""The service: batching, desk, shelf and engine put together. Knows no HTTP.

    event loop          requests come; their tasks are looked up, their parcels counted
    thread, one         texts that came meanwhile are tokenised, about as many at a time as make a batch
    thread, one         slots that are not in memory are loaded; only then do their rows become ready
    threads, lanes      take batches of rows of all tasks, have them computed and turn the outputs into answers: one
                        for a GPU, one for each core of a CPU

So texts of the next batch are tokenised while the device computes this one. A GPU works by itself: its lane launches
the next batch before it answers the last. More threads than these would not help: they all want Python's interpreter,
and each time that one has to wait for it costs more than what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from adapterbank.encoder.batch import Tokens
from adapterbank.inference.engine import Engine, Prepared
from adapterbank.inference.graph_runner import Wait
from adapterbank.inference.slot_cache import TaskHandle
from adapterbank.runtime import use_one_thread
from adapterbank.serving.service.admin import TaskAdmin
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.serving.service.protocol import FAILED, Ask, Refusal, Reply
from adapterbank.serving.service.registry import TaskRegistry
from adapterbank.serving.service.requests import PendingRequest, check, guess, refusal, settle
from adapterbank.serving.service.scheduler import Full, Parcel, Part, Scheduler
from adapterbank.storage.bank import Bank
from adapterbank.tasks.spec import Examples

log = logging.getLogger("adapterbank.serving")

WAIT = 0.004
"""Seconds that a row waits for company: a fraction of what a batch takes."""
_TURN = 0.001
"""Seconds after which a thread lets another run, instead of Python's 5 ms: a lane gives the interpreter away with all
that it asks of the device, and has to wait to get it back."""
_CORE_TOKENS = 1024
"""Tokens of a batch that one core computes: larger ones are no cheaper by the token, and others wait longer."""
_GPU_TOKENS = 4096
"""The same for a GPU, which has several before it: 256 rows of 16 tokens."""


class BankService:
    """A bank that answers."""

    def __init__(
        self,
        bank: Bank,
        engine: Engine,
        *,
        queue: int | None = None,
        wait: float = WAIT,
        lanes: int | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """Serve the tasks of a bank with an engine.

        `queue` is how many tokens may wait, sixteen times what the engine takes at once without it. `lanes` is how many
        batches are computed at once: on a CPU one for each core, each with one thread, as threads that share a small
        batch spend much of their time waiting for each other. A bank that is a `mirror` is followed, and not changed.
        """
        self.bank, self.engine, self.mirror = bank, engine, mirror
        self.shelf = TaskRegistry(bank, engine)
        self._desk = TaskAdmin(bank, engine, self.shelf, mirror)
        self.lanes = lanes or engine.lanes
        most = _GPU_TOKENS if engine.ahead else _CORE_TOKENS if self.lanes > 1 else engine.tokens_at_once
        bound = queue or 16 * engine.tokens_at_once
        self.batching = Scheduler(budget=min(engine.tokens_at_once, most), bound=bound, wait=wait, lanes=self.lanes)
        self._turn = threading.Condition()
        self._fresh: deque[Parcel] = deque()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="slots")
        self._threads: list[threading.Thread] = []
        self._hears: list[Callable[[int, int, float, float], None]] = []
        self._counts = {"batches": 0, "rows": 0, "tokens": 0}
        self._open = True
        self._turns = sys.getswitchinterval()

    # --- the face ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See `terms.Service`."""
        return self.shelf.ready and self._open

    @property
    def alive(self) -> bool:
        """Whether it computes, or would if it was asked."""
        return self._open and all(thread.is_alive() for thread in self._threads)

    async def start(self) -> None:
        """See `terms.Service`."""
        if not self._open:
            raise RuntimeError("a service that has stopped stays so; make another")
        if self._threads:
            return
        sys.setswitchinterval(min(_TURN, self._turns))
        for i in range(self.lanes):
            self._threads.append(threading.Thread(target=self._compute_all, name=f"compute {i}", daemon=True))
            self._threads[i].start()
        if self.mirror:
            self.mirror.follow()
        self.shelf.follow()

    async def stop(self) -> None:
        """See `terms.Service`."""
        with self._turn:
            self._open = False
            self._turn.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self.shelf.stop)
        if self.mirror:
            await asyncio.to_thread(self.mirror.close)
        for pool in (self._loader, self._texts):
            await asyncio.to_thread(pool.shutdown)
        sys.setswitchinterval(self._turns)

    async def predict(self, asks: Sequence[Ask]) -> list[Reply]:
        """See `terms.Service`."""
        loop = asyncio.get_running_loop()
        held = [await self._desk.find(ask.task) for ask in asks]
        jobs = [PendingRequest(ask, one, loop, loop.create_future()) for ask, one in zip(asks, held, strict=True)]
        for job in jobs:
            check(job)
        parcels = [Parcel(job.held.key, job, guess(job)) for job in jobs]
        self._enter(parcels)
        try:
            found = await asyncio.gather(*(job.future for job in jobs))
        except BaseException:
            self._cancel(parcels)
            for job in jobs:  # what nobody will ask for must not be complained of
                job.future.cancel()
                _ = job.future.done() and not job.future.cancelled() and job.future.exception()
            raise
        manifests = [job.held.package.manifest for job in jobs]
        return [Reply(m.name, m.version, mine) for m, mine in zip(manifests, found, strict=True)]

    async def tasks(self) -> dict[str, Any]:
        """See `terms.Service`."""
        return await self._desk.tasks()

    async def task(self, ref: str) -> dict[str, Any]:
        """See `terms.Service`."""
        return await self._desk.task(ref)

    async def remove(self, ref: str) -> None:
        """See `terms.Service`."""
        await self._desk.remove(ref)

    async def rollback(self, ref: str) -> int:
        """See `terms.Service`."""
        return await self._desk.rollback(ref)

    def numbers(self) -> Mapping[str, float]:
        """See `terms.Service`."""
        slots = self.engine.slots
        return {
            **self._counts,
            "queue_tokens": self.batching.waiting,
            "tasks": self.shelf.count,
            "problems": len(self.shelf.problems),
            "resident": len(self.engine.stacks),
            "evictions": slots.evictions,
            "loads": slots.loads,
        }

    def on_batch(self, hear: Callable[[int, int, float, float], None]) -> None:
        """See `terms.Service`."""
        self._hears.append(hear)

    # --- the way of a request ---------------------------------------------------------------------------

    def _enter(self, parcels: list[Parcel]) -> None:
        """Count all parcels of a request in, or none."""
        with self._turn:
            if not self._open:
                raise Refusal("not_ready", "The server is stopping; ask another, or again soon.", retry_after=1)
            try:
                self.batching.enter(parcels, time.monotonic())
            except Full as full:
                raise Refusal("overloaded", f"Too much is waiting: {full}", retry_after=full.retry_after) from full
            idle = not self._fresh
            self._fresh.extend(parcels)
        if idle:
            self._texts.submit(self._prepare_all)

    def _cancel(self, parcels: list[Parcel]) -> None:
        with self._turn:
            for parcel in parcels:
                self.batching.cancel(parcel)
                self.engine.slots.leave(parcel.value.held.known)
            self._turn.notify_all()

    def _prepare_all(self) -> None:
        """Tokenise what has come."""
        while fresh := self._take_fresh():
            jobs = [parcel.value for parcel in fresh]
            requests = [(job.held.known, Examples(job.ask.texts, job.ask.pairs)) for job in jobs]
            prepared: list[Prepared | Exception]
            try:
                prepared = list(self.engine.tokenise(requests))
            except BaseException:  # one of them is at fault: each by itself
                prepared = [self._tokenise_one(*one) for one in requests]
            self._make_ready(list(zip(fresh, prepared, strict=True)))

    def _take_fresh(self) -> list[Parcel]:
        """Give what is to be tokenised next: about a batch, so that it can be computed while the rest is tokenised."""
        fresh: list[Parcel] = []
        tokens = 0
        with self._turn:
            while self._fresh and tokens < self.batching.budget:
                parcel = self._fresh.popleft()
                if parcel.inside:
                    fresh.append(parcel)
                    tokens += parcel.counted
            if not fresh:
                self._turn.notify_all()  # who waits for an end may have waited for these
        return fresh

    def _make_ready(self, parcels: list[tuple[Parcel, Prepared | Exception]]) -> None:
        """Let parcels be computed, or say why not; those whose slot is not in memory once it is."""
        done: list[PendingRequest] = []
        failed: list[tuple[PendingRequest, Exception]] = []
        with self._turn:
            for parcel, found in parcels:
                job: PendingRequest = parcel.value
                try:
                    if isinstance(found, Exception):
                        raise found
                    if job.prepared is None and self.engine.slots.wants_loading(job.held.known):
                        self._loader.submit(self._load, parcel, found)
                    else:
                        self.batching.make_ready(parcel, [len(row) for row in found.rows.tokens])
                        done += [] if found.rows.tokens else [job]  # nothing was asked
                    job.prepared = found
                except Exception as error:
                    self.batching.cancel(parcel)
                    failed.append((job, error))
            self._turn.notify_all()
        self._answer(
            [(job, []) for job in done] + [(job, refusal(error, job, self.bank.path)) for job, error in failed]
        )

    def _load(self, parcel: Parcel, prepared: Prepared) -> None:
        """Load a slot before its rows are computed, so that rows of other tasks do not wait for it."""
        found: Prepared | Exception = prepared
        try:
            if parcel.inside:
                self.engine.slots.load_ahead(parcel.value.held.known)
        except Exception as error:
            found = error
        self._make_ready([(parcel, found)])
        if not parcel.inside:  # cancelled meanwhile
            self.engine.slots.leave(parcel.value.held.known)

    def _tokenise_one(self, known: TaskHandle, examples: Examples) -> Prepared | Exception:
        try:
            return self.engine.tokenise([(known, examples)])[0]
        except Exception as error:
            return error
        except BaseException as error:  # so a panic of the tokenizer, which is no reason to tokenise nothing more
            return RuntimeError(type(error).__name__)

    def _compute_all(self) -> None:
        """Compute batch after batch until the service stops and nothing is left."""
        if self.lanes > 1:
            use_one_thread()
        launched: deque[tuple[list[Part], float, Wait]] = deque()
        landed = 0.0
        while (batch := self._next(len(launched))) or launched:
            if batch:
                launched.append((batch, time.monotonic(), self._launch(batch)))
            if not batch or len(launched) > self.engine.ahead:
                done, began, wait = launched.popleft()
                given = self._land(done, wait)
                began, landed = max(began, landed), time.monotonic()
                self._count(done, landed - began)
                self._answer_all(done, given)

    def _count(self, batch: list[Part], seconds: float) -> None:
        rows, tokens = sum(map(len, batch)), sum(part.tokens for part in batch)
        with self._turn:
            self._counts["batches"] += 1
            self._counts["rows"] += rows
            self._counts["tokens"] += tokens
            self.batching.computed(tokens, seconds)
        for hear in self._hears:
            try:
                hear(rows, tokens, min(1.0, tokens / self.batching.budget), seconds)
            except Exception as error:  # who listens must not end the service
                log.error("failed", exc_info=error)

    def _next(self, launched: int) -> list[Part]:
        """Wait for the next batch; none while some are launched, or when the service has stopped and all is answered.

        A device that has enough to do is not given a batch that could still grow.
        """
        with self._turn:
            while True:
                due = self.batching.due_in(time.monotonic())
                if due is not None and (due <= 0 or not self._open) and (launched < 2 or self.batching.full):
                    return self.batching.take()
                if launched or (due is None and not self._open and not self._fresh and not self.batching.waiting):
                    return []
                self._turn.wait(due)

    def _launch(self, batch: list[Part]) -> Wait:
        """Have a batch computed; what is given waits for the outputs, or tells why there are none."""
        tokens: list[Tokens] = []
        tasks: list[TaskHandle | None] = []
        for part in batch:
            prepared = part.parcel.value.prepared
            tokens += prepared.rows.tokens[part.start : part.stop]
            tasks += [prepared.known] * len(part)
        try:
            return self.engine.launch(tokens, tasks)
        except Exception as error:
            return partial(_fail, error)

    def _land(self, batch: list[Part], wait: Wait) -> list[list[np.ndarray] | Exception]:
        """Wait for a batch; gives the outputs of each part, or why there are none."""
        try:
            given = iter(wait())
            return [list(islice(given, len(part))) for part in batch]
        except Exception as error:  # one of them is at fault: each by itself
            return [error] if len(batch) == 1 else [self._land([part], self._launch([part]))[0] for part in batch]

    def _answer_all(self, batch: list[Part], given: list[list[np.ndarray] | Exception]) -> None:
        try:
            self._finish(batch, given)
        except Exception as error:  # a lane must not end for it, nor anybody wait for ever
            log.error("failed", exc_info=error)
            self._answer([(part.parcel.value, Refusal("internal", FAILED)) for part in batch])

    def _finish(self, batch: list[Part], given: list[list[np.ndarray] | Exception]) -> None:
        """Turn outputs into answers, of those asks that have them all."""
        done: list[tuple[PendingRequest, Any]] = []
        for part, outs in zip(batch, given, strict=True):
            job: PendingRequest = part.parcel.value
            if isinstance(outs, Exception):
                done.append((job, refusal(outs, job, self.bank.path)))
                continue
            job.given[part.start] = outs
            if sum(map(len, list(job.given.values()))) == len(part.parcel.sizes):  # another lane may add to it
                done.append((job, self._told(job)))
        self._answer(done)

    def _told(self, job: PendingRequest) -> Any:
        assert job.prepared is not None
        try:
            given = [out for _, outs in sorted(job.given.items()) for out in outs]
            return self.engine.tell(job.prepared, given, job.ask.best)
        except Exception as error:
            return refusal(error, job, self.bank.path)

    def _answer(self, done: list[tuple[PendingRequest, Any]]) -> None:
        """Hand answers to who waits for them, all of one loop in one go."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[PendingRequest, Any]]] = {}
        for job, found in done:
            loops.setdefault(job.loop, []).append((job, found))
        for loop, mine in loops.items():
            with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
                loop.call_soon_threadsafe(settle, mine)


def _fail(error: Exception) -> list[np.ndarray]:
    raise error
