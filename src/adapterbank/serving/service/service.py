"""The service: scheduler, registry, admin and engine put together. Knows no HTTP.

    event loop          requests arrive; their tasks are looked up, their rows queued
    one thread          tokenises the texts that have arrived, about one batch at a time
    one thread          loads slots that are not in memory; only then are their rows ready
    threads (lanes)     take batches of rows of all tasks, have them computed and turn the outputs into predictions:
                        one for a GPU, one per core of a CPU

So the texts of the next batch are tokenised while the device computes this one. A GPU works asynchronously: its lane
launches the next batch before it answers the last. More threads would not help: they all need Python's interpreter
lock, and each wait for it costs more than the work they would do.
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
from typing import Any

from adapterbank.inference.engine import Engine, Prepared
from adapterbank.inference.graph_runner import Wait
from adapterbank.inference.slot_cache import TaskHandle
from adapterbank.runtime import use_one_thread
from adapterbank.serving.daemon_pool import DaemonPool
from adapterbank.serving.heartbeat import Heartbeat, Stalls
from adapterbank.serving.service.admin import TaskAdmin
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.serving.service.batches import Outputs, land, launch, most_seconds
from adapterbank.serving.service.protocol import FAILED, STOPPING, Ask, Refusal, Reply
from adapterbank.serving.service.registry import TaskRegistry
from adapterbank.serving.service.requests import (
    PendingRequest,
    estimate_tokens,
    finish,
    make_requests,
    resolve,
    to_refusal,
    tokenising_seconds,
)
from adapterbank.serving.service.scheduler import Part, QueueFull, RowGroup, Scheduler
from adapterbank.storage.bank import Bank
from adapterbank.tasks.spec import Examples

log = logging.getLogger("adapterbank.serving")

WAIT = 0.004
"""Seconds that a row waits for others to join its batch: a fraction of the time of a batch."""
_SWITCH_INTERVAL = 0.001
"""Python's switch interval in seconds, instead of 5 ms: a lane releases the interpreter lock with every call to the
device, and has to wait to get it back."""
_CORE_TOKENS = 1024
"""Tokens of a batch on one core: larger batches are no cheaper per token, and other rows wait longer."""
_GPU_TOKENS = 4096
"""The same for a GPU, which has several batches queued: 256 rows of 16 tokens."""
_STOPPING = 30.0
"""Seconds that `stop` waits for requests in progress."""
_LEAVING = 1.0
"""Seconds that `stop` waits for a thread that no request waits for."""


class BankService:
    """Answers requests for the tasks of a bank."""

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

        Args:
            bank: The bank.
            engine: Computes the predictions.
            queue: How many tokens may wait; by default sixteen times what the engine takes at once.
            wait: Seconds that a row waits for others to join its batch.
            lanes: How many batches are computed at once. On a CPU the default is one per core, each with one thread,
                because threads that share a small batch spend much of their time waiting for each other.
            mirror: The mirror that the bank is a copy of, if it is one; it is followed, and the bank is read-only.
        """
        self.bank, self.engine, self.mirror = bank, engine, mirror
        self.registry = TaskRegistry(bank, engine)
        self._admin = TaskAdmin(bank, engine, self.registry, mirror)
        self.lanes = lanes or engine.lanes
        most = _GPU_TOKENS if engine.ahead else _CORE_TOKENS if self.lanes > 1 else engine.tokens_at_once
        bound = queue or 16 * engine.tokens_at_once
        self.scheduler = Scheduler(budget=min(engine.tokens_at_once, most), bound=bound, wait=wait, lanes=self.lanes)
        self._condition = threading.Condition()
        self.arrived: deque[RowGroup] = deque()
        """Groups that are not tokenised yet."""
        self._texts, self._loader = DaemonPool(1, "texts"), DaemonPool(1, "slots")
        self._threads: list[threading.Thread] = []
        self._lane_beats = [Heartbeat() for _ in range(self.lanes)]
        self._text_beat, self._loader_beat = Heartbeat(), Heartbeat()
        self._pending: set[PendingRequest] = set()
        self._callbacks: list[Callable[[int, int, float, float], None]] = []
        self._counts = {"batches": 0, "rows": 0, "tokens": 0}
        self._open = True
        self._switch_interval = sys.getswitchinterval()

    # --- the interface ----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See `protocol.Service`; not while the tokenizer or all lanes stand still."""
        lanes = all(beat.stalled() for beat in self._lane_beats)
        return self.registry.ready and self._open and not lanes and not self._text_beat.stalled()

    @property
    def alive(self) -> bool:
        """Whether the service runs and all its threads are alive."""
        return self._open and all(thread.is_alive() for thread in self._threads)

    async def start(self) -> None:
        """See `protocol.Service`."""
        if not self._open:
            raise RuntimeError("a service cannot be started again; create another one")
        if self._threads:
            return
        sys.setswitchinterval(min(_SWITCH_INTERVAL, self._switch_interval))
        for i, beat in enumerate(self._lane_beats):
            thread = threading.Thread(target=self._compute_all, args=(beat,), name=f"compute {i}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if self.mirror:
            self.mirror.follow()
        self.registry.follow()

    async def stop(self) -> None:
        """See `protocol.Service`."""
        with self._condition:
            self._open = False
            self._condition.notify_all()
        await self._end_lanes()
        await asyncio.to_thread(self.registry.stop)
        if self.mirror:
            await asyncio.to_thread(self.mirror.close)
        for pool in (self._loader, self._texts):
            await asyncio.to_thread(pool.shutdown, patience=_LEAVING)
        self._admin.close()
        sys.setswitchinterval(self._switch_interval)

    async def _end_lanes(self) -> None:
        """Wait until what is queued is answered; a lane that stands still keeps nobody waiting for longer."""
        end = time.monotonic() + _STOPPING
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < end:
            await asyncio.sleep(0.005)
            if not self._pending:
                end = min(end, time.monotonic() + _LEAVING)
        self._answer([(pending, Refusal("not_ready", STOPPING, retry_after=1)) for pending in self._pending.copy()])

    def stalled(self) -> Stalls:
        """See `protocol.Service`."""
        parts: dict[str, Any] = {"bank": self.registry, **({"mirror": self.mirror} if self.mirror else {})}
        parts |= {"tokenizer": self._text_beat, "slot loader": self._loader_beat}
        parts |= {f"lane {i}": beat for i, beat in enumerate(self._lane_beats)}
        return {name: part.stalled() for name, part in parts.items()}

    async def predict(self, asks: Sequence[Ask]) -> list[Reply]:
        """See `protocol.Service`."""
        loop = asyncio.get_running_loop()
        tasks = [await self._admin.find(ask.task) for ask in asks]
        requests = make_requests(asks, tasks, loop)
        groups = [RowGroup(pending.served.key, pending, estimate_tokens(pending)) for pending in requests]
        self._enter(groups)
        self._pending.update(requests)
        try:
            found = await asyncio.gather(*(pending.future for pending in requests))
        except BaseException:
            self._cancel(groups)
            for pending in requests:  # asyncio must not warn of exceptions that are never retrieved
                pending.future.cancel()
                _ = pending.future.done() and not pending.future.cancelled() and pending.future.exception()
            raise
        finally:
            self._pending.difference_update(requests)
        manifests = [pending.served.package.manifest for pending in requests]
        rows = [len(pending.ask.texts) for pending in requests]
        return [Reply(m.name, m.version, mine, n) for m, mine, n in zip(manifests, found, rows, strict=True)]

    async def tasks(self) -> dict[str, Any]:
        """See `protocol.Service`."""
        return await self._admin.tasks()

    async def task(self, ref: str) -> dict[str, Any]:
        """See `protocol.Service`."""
        return await self._admin.task(ref)

    async def remove(self, ref: str) -> None:
        """See `protocol.Service`."""
        await self._admin.remove(ref)

    async def rollback(self, ref: str) -> int:
        """See `protocol.Service`."""
        return await self._admin.rollback(ref)

    def numbers(self) -> Mapping[str, float]:
        """See `protocol.Service`."""
        slots = self.engine.slots
        return {
            **self._counts,
            "queue_tokens": self.scheduler.waiting,
            "tasks": self.registry.count,
            "problems": len(self.registry.all_problems()),
            "resident": len(self.engine.stacks),
            "evictions": slots.evictions,
            "loads": slots.loads,
        }

    def on_batch(self, callback: Callable[[int, int, float, float], None]) -> None:
        """See `protocol.Service`."""
        self._callbacks.append(callback)

    # --- the path of a request --------------------------------------------------------------------------

    def _enter(self, groups: list[RowGroup]) -> None:
        """Queue all groups of a request, or none."""
        with self._condition:
            if not self._open:
                raise Refusal("not_ready", STOPPING, retry_after=1)
            try:
                self.scheduler.enter(groups, time.monotonic())
            except QueueFull as error:
                raise Refusal("overloaded", f"The server is busy: {error}", retry_after=error.retry_after) from error
            idle = not self.arrived
            self.arrived.extend(groups)
        if idle:
            self._texts.submit(self._prepare_all)

    def _cancel(self, groups: list[RowGroup]) -> None:
        with self._condition:
            for group in groups:
                self.scheduler.cancel(group)
                self.engine.slots.leave(group.value.served.handle)
            self._condition.notify_all()

    def _prepare_all(self) -> None:
        """Tokenise what has arrived."""
        while arrived := self._take_arrived():
            asks = [(group.value.served.handle, group.value.ask) for group in arrived]
            texts = [(handle, Examples(ask.texts, ask.pairs)) for handle, ask in asks]
            prepared: list[Prepared | Exception]
            allowed = tokenising_seconds(examples for _, examples in texts)
            with self._text_beat.work(f"tokenising {len(texts)} requests", allowed):
                try:
                    prepared = list(self.engine.tokenise(texts))
                except BaseException:  # one of them is at fault: tokenise each alone
                    prepared = [self._tokenise_one(*one) for one in texts]
            self._make_ready(list(zip(arrived, prepared, strict=True)))

    def _take_arrived(self) -> list[RowGroup]:
        """Return what to tokenise next: about one batch, so that it can be computed while the rest is tokenised."""
        arrived: list[RowGroup] = []
        tokens = 0
        with self._condition:
            while self.arrived and tokens < self.scheduler.budget:
                group = self.arrived.popleft()
                if group.queued:
                    arrived.append(group)
                    tokens += group.counted
            if not arrived:
                self._condition.notify_all()  # a lane that waits for the end may have waited for these
        return arrived

    def _make_ready(self, groups: list[tuple[RowGroup, Prepared | Exception]]) -> None:
        """Make groups ready, or refuse them; a group whose slot is not in memory becomes ready once it is loaded."""
        done: list[PendingRequest] = []
        failed: list[tuple[PendingRequest, Exception]] = []
        with self._condition:
            for group, found in groups:
                pending: PendingRequest = group.value
                try:
                    if isinstance(found, Exception):
                        raise found
                    if pending.prepared is None and self.engine.slots.wants_loading(pending.served.handle):
                        self._loader.submit(self._load, group, found)
                    else:
                        self.scheduler.make_ready(group, [len(row) for row in found.rows.tokens])
                        done += [] if found.rows.tokens else [pending]  # a request without rows
                    pending.prepared = found
                except Exception as error:
                    self.scheduler.cancel(group)
                    failed.append((pending, error))
            self._condition.notify_all()
        refused = [(pending, to_refusal(error, pending, self.bank.path)) for pending, error in failed]
        self._answer([*((pending, []) for pending in done), *refused])

    def _load(self, group: RowGroup, prepared: Prepared) -> None:
        """Load a slot before its rows are ready, so that rows of other tasks do not wait for it."""
        found: Prepared | Exception = prepared
        try:
            if group.queued:
                with self._loader_beat.work(f"loading {group.value.served.package.ref}"):
                    self.engine.slots.load_ahead(group.value.served.handle)
        except Exception as error:
            found = error
        self._make_ready([(group, found)])
        if not group.queued:  # cancelled meanwhile
            self.engine.slots.leave(group.value.served.handle)

    def _tokenise_one(self, handle: TaskHandle, examples: Examples) -> Prepared | Exception:
        try:
            return self.engine.tokenise([(handle, examples)])[0]
        except Exception as error:
            return error
        except BaseException as error:  # such as a panic of the tokenizer, which must not end this thread
            return RuntimeError(type(error).__name__)

    def _compute_all(self, beat: Heartbeat) -> None:
        """Compute batches until the service stops and nothing is left."""
        if self.lanes > 1:
            use_one_thread()
        launched: deque[tuple[list[Part], float, Wait]] = deque()
        landed = 0.0
        while (batch := self._next(len(launched))) or launched:
            allowed = most_seconds(batch or launched[0][0], self.scheduler.pace, compiles=self.engine.ahead > 0)
            with beat.work("computing a batch", allowed):
                if batch:
                    launched.append((batch, time.monotonic(), launch(self.engine, batch)))
                if batch and len(launched) <= self.engine.ahead:
                    continue
                done, began, wait = launched.popleft()
                outputs = land(self.engine, done, wait, beat)
                began, landed = max(began, landed), time.monotonic()
                self._count(done, landed - began)
                self._answer_all(done, outputs)

    def _count(self, batch: list[Part], seconds: float) -> None:
        rows, tokens = sum(map(len, batch)), sum(part.tokens for part in batch)
        with self._condition:
            self._counts["batches"] += 1
            self._counts["rows"] += rows
            self._counts["tokens"] += tokens
            self.scheduler.computed(tokens, seconds)
        for callback in self._callbacks:
            try:
                callback(rows, tokens, min(1.0, tokens / self.scheduler.budget), seconds)
            except Exception as error:  # a callback must not end the service
                log.error("failed", exc_info=error)

    def _next(self, launched: int) -> list[Part]:
        """Wait for the next batch; return none if some are launched, or if the service has stopped and all is answered.

        A busy device does not get a batch that could still grow.
        """
        with self._condition:
            while True:
                due = self.scheduler.due_in(time.monotonic())
                if due is not None and (due <= 0 or not self._open) and (launched < 2 or self.scheduler.full):
                    return self.scheduler.take()
                if launched or (due is None and not self._open and not self.arrived and not self.scheduler.waiting):
                    return []
                self._condition.wait(due)

    def _answer_all(self, batch: list[Part], outputs: list[Outputs]) -> None:
        try:
            self._finish(batch, outputs)
        except Exception as error:  # the lane must go on, and no request may wait for ever
            log.error("failed", exc_info=error)
            self._answer([(part.group.value, Refusal("internal", FAILED)) for part in batch])

    def _finish(self, batch: list[Part], outputs: list[Outputs]) -> None:
        """Turn outputs into predictions for the requests that are complete."""
        done: list[tuple[PendingRequest, Any]] = []
        for part, outs in zip(batch, outputs, strict=True):
            pending: PendingRequest = part.group.value
            if isinstance(outs, Exception):
                done.append((pending, to_refusal(outs, pending, self.bank.path)))
                continue
            pending.outputs[part.start] = outs
            if sum(map(len, list(pending.outputs.values()))) == len(part.group.sizes):  # another lane may add outputs
                done.append((pending, finish(self.engine, pending, self.bank.path)))
        self._answer(done)

    def _answer(self, done: list[tuple[PendingRequest, Any]]) -> None:
        """Pass results to their requests, all of one event loop at once."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[PendingRequest, Any]]] = {}
        for pending, found in done:
            loops.setdefault(pending.loop, []).append((pending, found))
        for loop, mine in loops.items():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(resolve, mine)
