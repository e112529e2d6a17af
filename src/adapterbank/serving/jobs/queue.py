"""The queue of training runs: takes data files, trains each run in a process of its own, adds versions to the bank.

    <bank>/serving/runs.sqlite3     the table of runs
    <bank>/serving/data/<run>.csv   the data of a run; deleted when the run has ended, like its <run>-dev.csv, …
    <bank>/serving/.owner           locked by the one server that starts runs; others of the same bank only queue them

Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adapterbank.errors import AdapterbankError, StorageError
from adapterbank.serving.heartbeat import Heartbeat, Stalls
from adapterbank.serving.jobs.options import check
from adapterbank.serving.jobs.run_recorder import RunRecorder, interrupt
from adapterbank.serving.jobs.run_row import FORMATS, TrainingRun
from adapterbank.serving.jobs.run_store import RunStore
from adapterbank.serving.jobs.uploads import OTHERS, Upload, data_files
from adapterbank.serving.jobs.worker_process import GRACE, listen, start_worker
from adapterbank.storage import cache, files
from adapterbank.storage.bank import Bank
from adapterbank.tasks.limits import DEFAULT_TABLE_LIMITS, TableLimits

log = logging.getLogger("adapterbank.serving")

RETRY = 1.0
"""Seconds until something that failed, and may be temporary, is tried again."""
_STALE = 3600.0
"""Seconds after which a file that belongs to no run is deleted."""
_STARTING = 60.0
"""Seconds until a worker says that it is alive: it imports torch first, at a low priority."""
_SILENT = 4.0
"""Seconds without a word of a worker, which says once a second that it is alive, until it stands still."""
_SLACK = 5.0
"""Seconds for writing down the end of a run whose worker has ended."""


class JobQueueFull(AdapterbankError):
    """The queue is full."""


class KeyQueueFull(AdapterbankError):
    """One key has as many queued runs as it may have."""


@dataclass(frozen=True)
class QueueLimits:
    """How much a queue takes."""

    upload: int = 256 << 20
    """Bytes of a data file."""
    waiting: int = 100
    """Number of runs that may be queued."""
    workers: int = 1
    """Number of runs that train at once."""
    table: TableLimits = DEFAULT_TABLE_LIMITS
    """What a data file may hold once it is decoded."""
    minutes: float = 24 * 60
    """Time that a run may take, in all its attempts."""
    memory: int | None = None
    """Bytes of memory that the process of a run may take; by default half of the machine's."""


DEFAULT_QUEUE_LIMITS = QueueLimits()


class JobQueue:
    """The runs of one bank; of several servers, the first one trains them."""

    def __init__(
        self,
        bank: str | Path,
        *,
        backbone: str | None = None,
        weights: int | None = None,
        device: str = "auto",
        precision: str = "auto",
        threads: int | None = None,
        limits: QueueLimits = DEFAULT_QUEUE_LIMITS,
    ) -> None:
        """Open the runs of a bank; `start` begins to train them.

        Args:
            bank: The bank's folder.
            backbone: The location of the encoder; by default the bank's.
            weights: A file descriptor of the encoder's tensors (`encoder.shared_memory.share`), so that runs need no
                copy of them.
            device: auto, cpu, cuda or cuda:N.
            precision: auto, fp32, bf16 or int8.
            threads: CPU threads of a run; by default one less than there are cores, which is left for serving.
            limits: How much the queue takes.
        """
        opened = Bank.open(bank)
        self.bank, self.backbone, self.limits = opened.path, backbone or opened.backbone["name"], limits
        self._device = {"device": device, "precision": precision}
        self._weights = weights
        self._heartbeats = [Heartbeat() for _ in range(limits.workers)]
        self._owner = Heartbeat()
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 1)
        self._folder = self.bank / "serving"
        self._data = self._folder / "data"
        files.make_folder(self._data)
        for folder in (self._folder, self._data):
            folder.chmod(0o700)  # users' texts, and the table of runs, which may quote them
        self.runs = RunStore(self._folder / "runs.sqlite3")
        self._closing, self._wake = threading.Event(), threading.Event()
        self._threads_running: list[threading.Thread] = []
        self._last_problem = ""

    # --- requests -----------------------------------------------------------------------------------------

    def upload(self, format: str, asked_by: str | None = None, per_key: int | None = None, **sizes: int) -> Upload:
        """Start an upload, for use in a `with`; it is refused where its run would be, see `submit`."""
        self._admit(asked_by, per_key, *self.runs.waiting(asked_by))
        return Upload(self._data, format, self.limits.upload, sizes)

    def submit(
        self,
        task: str,
        options: Mapping[str, Any],
        upload: Upload,
        asked_by: str | None = None,
        per_key: int | None = None,
    ) -> TrainingRun:
        """Queue a run on a complete upload; `per_key` limits the queued runs of `asked_by`, None for no limit."""
        name, chosen = check(task, options, upload.format)
        data = upload.finish()
        try:
            run = self.runs.add(name, chosen, data, asked_by, upload.id, partial(self._admit, asked_by, per_key))
        except BaseException:
            upload.discard()
            raise
        self._wake.set()
        return run

    def _admit(self, asked_by: str | None, per_key: int | None, queued: int, own: int) -> None:
        if queued >= self.limits.waiting:
            raise JobQueueFull(f"The queue is full with {queued} runs; try again when some have ended.")
        if per_key is None:
            return
        # As many as are still free, as in `service.scheduler`, so that there is space left for the next key.
        free = self.limits.waiting - queued
        if own >= min(per_key, free):
            limit = "the limit" if own >= per_key else f"as many as are still free of {self.limits.waiting} places"
            problem = f"The key {asked_by!r} has {own} queued runs, which is {limit}"
            raise KeyQueueFull(f"{problem}; cancel one, or try again when one has started.")

    def get(self, id: str, after: int = 0) -> TrainingRun:
        """Return a run with its epochs after a number."""
        return self.runs.get(id, after)

    def list(self, limit: int = 100, may: Callable[[str], bool] = lambda task: True) -> list[TrainingRun]:
        """Return runs, newest first, of the tasks that `may` allows."""
        return self.runs.list(limit, may=may)

    def numbers(self) -> dict[str, float]:
        """Return the number of queued and of running runs."""
        found = self.runs.counts()
        return {f"runs_{state}": found.get(state, 0) for state in ("queued", "running")}

    def cancel(self, id: str) -> TrainingRun:
        """Cancel a run; one that has ended does not change."""
        run = self.runs.cancel(id)
        if run.over:
            self._delete_data(run)
            self.runs.forget_old()
        return run

    # --- training -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to train the queued runs."""
        self.begin()

    async def stop(self) -> None:
        """Stop training; a run in progress is queued again, and resumes after its last epoch."""
        await asyncio.to_thread(self.close)

    def begin(self) -> None:
        """See `start`."""
        if self._threads_running:
            return
        self._closing.clear()
        self._threads_running = [threading.Thread(target=self._run_as_owner, name="training", daemon=True)]
        self._threads_running[0].start()

    def close(self) -> None:
        """See `stop`."""
        self._closing.set()
        self._wake.set()
        for thread in self._threads_running:
            thread.join(GRACE + _SLACK)  # one that hangs with the disk is not waited for
        self._threads_running = []

    def _run_as_owner(self) -> None:
        """Wait until no other server trains this bank's runs, tidy up what it left, and train."""
        with self._owned() as owned:
            while owned and not self._closing.is_set():
                try:
                    with self._owner.work("tidying up the table of runs", retried=True):
                        self.runs.end_damaged()
                        for run in self.runs.list(-1, "running"):
                            self._interrupted(run, "the server was killed")
                        self.clean_up()
                    break
                except Exception as error:
                    self._pause(error)
            beats = self._heartbeats if owned else []
            workers = [threading.Thread(target=self._work, args=(one,), name="training", daemon=True) for one in beats]
            for thread in workers:
                thread.start()
            for thread in workers:
                thread.join()

    @contextlib.contextmanager
    def _owned(self) -> Iterator[bool]:
        """Wait for the lock on the bank's runs; yield False if the queue is closed before."""
        path, lock = self._folder / ".owner", None
        while lock is None and not self._closing.is_set():
            try:
                with self._owner.work("locking the table of runs", retried=True):
                    lock = _try_lock(path)
                if lock is None:
                    self._pause(None)
            except OSError as error:
                self._pause(error)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    def _pause(self, error: Exception | None, run: TrainingRun | None = None) -> None:
        """Wait a moment, and log the problem once; None for a wait that is not a problem."""
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        if problem and problem != self._last_problem:
            log.error("training blocked", exc_info=error, extra={"fields": {"run": run.id if run else None}})
        self._last_problem = problem
        self._closing.wait(RETRY)

    def stalled(self) -> Stalls:
        """Return the threads that train, and what stands still in each; never waits."""
        return {
            "training": self._owner.stalled(),
            **{f"training {i}": beat.stalled() for i, beat in enumerate(self._heartbeats)},
        }

    def _work(self, beat: Heartbeat) -> None:
        """Train one run after the other. A problem (a full disk) may be temporary, so only `close` ends this."""
        run: TrainingRun | None = None
        problem = ""
        while not self._closing.is_set():
            try:
                with beat.work("reading the table of runs", retried=True):
                    if run is not None:
                        self._interrupted(run, problem)
                        run = None
                    self._wake.clear()
                    run = self.runs.begin()
                if run is None:
                    self._wake.wait(RETRY)  # another server of this bank may queue one
                    continue
                with beat.work(f"run {run.id}", _STARTING):
                    self.train(run)
                with beat.work(f"tidying up run {run.id}"):
                    self._delete_data(ended := self.runs.get(run.id))
                # Not the failure, which may quote the data.
                log.info("run", extra={"fields": {"run": run.id, "task": run.task, "state": ended.state}})
                run = None
                self.runs.forget_old()
                self._last_problem = ""
            except Exception as error:
                problem = f"the server had an error ({type(error).__name__})"
                self._pause(error, run)

    def train(self, run: TrainingRun) -> None:
        """Train a run in a process, and record its reports and its end."""
        resuming = run.newest is not None
        if not resuming:
            run = self._note_newest(run)
        recorder = RunRecorder(self.runs, run)
        with start_worker(self.job(run, resuming=resuming), self._environment(run), self._weights) as process:
            reason = listen(process, partial(self._hear, recorder), lambda: self.stop_reason(run.id, recorder.spent))
        recorder.finish(reason, process.returncode)

    def _hear(self, recorder: RunRecorder, message: Mapping[str, Any]) -> None:
        """Record a message of a worker, each of which is a sign of life."""
        for beat in self._heartbeats:
            beat.beat(f"run {recorder.id}", _SILENT)
        recorder.record(message)

    def stop_reason(self, id: str, spent: float = 0.0) -> str:
        """Return why a running run has to stop: `close`, `cancel`, a sentence if it has taken too long, or nothing."""
        if self._closing.is_set():
            return "close"
        with contextlib.suppress(StorageError):  # a table that is locked for long is no reason to stop
            if self.runs.cancelling(id):
                return "cancel"
        limit = self.limits.minutes
        if spent < 60 * limit:
            return ""
        return f"The run took more than {limit:g} minutes, which is the limit; use fewer rows or epochs."

    def _environment(self, run: TrainingRun) -> dict[str, str]:
        # A cache of its own: tokens are texts too, and must not outlive the data.
        own = {cache.FOLDER: str(self._cache(run)), "TOKENIZERS_PARALLELISM": "false"}
        return {**own, "OMP_NUM_THREADS": str(self._threads)}

    def job(self, run: TrainingRun, *, resuming: bool) -> dict[str, Any]:
        """Return the description of a run that its worker gets."""
        found = data_files(self._data, run.id, run.data["format"])
        return {
            "bank": str(self.bank),
            "backbone": self.backbone,
            "weights": self._weights,
            "task": run.task,
            "file": str(found["train"]),
            "others": {name: str(found[name]) for name in OTHERS if name in run.data},
            "options": run.options,
            "device": self._device,
            "threads": self._threads,
            "resuming": resuming,
            "newest": run.newest,
            "limits": {
                "table": asdict(self.limits.table),
                "memory": self.limits.memory,
                "seconds": 60 * self.limits.minutes,
            },
        }

    def _note_newest(self, run: TrainingRun) -> TrainingRun:
        newest = 0
        with contextlib.suppress(AdapterbankError):
            newest = Bank.open(self.bank).newest(run.task)
        self.runs.update(run.id, newest=newest)
        return self.runs.get(run.id)

    def _interrupted(self, run: TrainingRun, why: str) -> None:
        interrupt(self.runs, run.id, why)
        self._delete_data(self.runs.get(run.id))

    # --- cleaning up --------------------------------------------------------------------------------------

    def _cache(self, run: TrainingRun) -> Path:
        return self._data / f"{run.id}.tokens"

    def _delete_data(self, run: TrainingRun) -> None:
        """Delete what an ended run no longer needs: its data, and the state that it would resume from.

        What cannot be deleted now is deleted when the next server starts; no run waits for that.
        """
        paths = [path for ending in FORMATS for path in data_files(self._data, run.id, ending).values()]
        paths += [self._cache(run), *([self.bank / "runs" / run.kept] if run.kept else [])]
        for path in paths if run.over else []:
            try:
                files.discard(path)
            except (OSError, AdapterbankError) as error:
                log.error("not removed", extra={"fields": {"run": run.id, "problem": type(error).__name__}})

    def clean_up(self) -> None:
        """Delete what a killed server left: data of ended runs, and old files that belong to no run."""
        runs = self.runs.list(-1)
        for run in runs:
            self._owner.beat()
            self._delete_data(run)
        needed = {run.id for run in runs if not run.over}
        limit = time.time() - _STALE
        for path in self._data.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if re.split(r"[.-]", path.name)[0] not in needed and path.stat().st_mtime < limit:
                    files.discard(path)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock on a file; None if another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock
