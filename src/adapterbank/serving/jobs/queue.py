"""Training as a service: data files in, runs queued, each in a process of its own, new versions in the bank. No HTTP.

<bank>/serving/runs.sqlite3     the table of runs
<bank>/serving/data/<run>.csv   what a run trains on; goes when the run has ended, as do its <run>.tokens
<bank>/serving/.owner           locked by the one server that starts runs; others of the same bank only queue them
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from adapterbank.errors import AdapterbankError, StorageError
from adapterbank.serving.jobs.options import check
from adapterbank.serving.jobs.run_store import RunStore, TrainingRun
from adapterbank.serving.jobs.uploads import Upload
from adapterbank.serving.jobs.worker_process import listen, trained
from adapterbank.storage import cache, files
from adapterbank.storage.bank import Bank

log = logging.getLogger("adapterbank.serving")

ATTEMPTS = 3
"""So often is a run begun whose process, or server, is killed before it has done another epoch."""
_STALE = 3600.0
"""Seconds after which a file that belongs to no run is litter."""


class JobQueueFull(AdapterbankError):
    """As many runs are queued as may be."""


class KeyQueueFull(AdapterbankError):
    """As many runs of one key are queued as may be."""


class JobQueue:
    """The runs of one bank; those of the server that started first are the ones that go on."""

    def __init__(
        self,
        bank: str | Path,
        *,
        backbone: str | None = None,
        weights: int | None = None,
        device: str = "auto",
        precision: str = "auto",
        workers: int = 1,
        threads: int | None = None,
        largest: int = 256 << 20,
        waiting: int = 100,
    ) -> None:
        """Look at a bank's runs; `start` begins to work on them.

        Args:
            bank: The bank's folder.
            backbone: Where its encoder is; as the bank says without it.
            weights: Descriptor of the encoder's tensors (`encoder.shared.share`), so that runs need no copy of them.
            device: auto, cpu, cuda or cuda:N.
            precision: auto, fp32 or bf16.
            workers: How many runs go on at once.
            threads: CPU threads of a run; without it one less than there are cores, which is left to serving.
            largest: Bytes of a data file.
            waiting: How many runs may be queued.
        """
        opened = Bank.open(bank)
        self.bank, self.backbone = opened.path, backbone or opened.backbone["name"]
        self._device = {"device": device, "precision": precision}
        self._weights, self._workers, self.largest, self._waiting = weights, workers, largest, waiting
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 1)
        self._folder = self.bank / "serving"
        self._data = self._folder / "data"
        files.make_folder(self._data)
        for folder in (self._folder, self._data):
            folder.chmod(0o700)  # users' texts, and what the table of runs quotes of them
        self.runs = RunStore(self._folder / "runs.sqlite3")
        self._closing, self._wake = threading.Event(), threading.Event()
        self._crew: list[threading.Thread] = []
        self._said = ""  # of what hinders us

    # --- asking -------------------------------------------------------------------------------------------

    def upload(self, format: str, asked_by: str | None = None, each: int | None = None) -> Upload:
        """Begin to take a data file in; use it in a `with`. It is refused where its run would be: see `submit`."""
        self._admit(asked_by, each, *self.runs.waiting(asked_by))
        return Upload(self._data, format, self.largest)

    def submit(
        self,
        task: str,
        options: Mapping[str, Any],
        upload: Upload,
        asked_by: str | None = None,
        each: int | None = None,
    ) -> TrainingRun:
        """Queue a run on a file that has come in whole; `each` is how many of who asks may be queued, None for any."""
        name, chosen = check(task, options, upload.format)
        data = upload.finish()
        try:
            run = self.runs.add(name, chosen, data, asked_by, upload.id, partial(self._admit, asked_by, each))
        except BaseException:
            upload.path.unlink(missing_ok=True)
            raise
        self._wake.set()
        return run

    def _admit(self, asked_by: str | None, each: int | None, queued: int, own: int) -> None:
        if queued >= self._waiting:
            raise JobQueueFull(f"{queued} runs are queued already; try again when some have ended.")
        if each is not None and own >= each:
            told = f"{own} runs of the key {asked_by!r} are queued already"
            raise KeyQueueFull(f"{told}; cancel one, or try again when one has begun.")

    def get(self, id: str, after: int = 0) -> TrainingRun:
        """Give a run, with its epochs after a number."""
        return self.runs.get(id, after)

    def list(self, limit: int = 100, may: Callable[[str], bool] = lambda task: True) -> list[TrainingRun]:
        """Give the runs, newest first, of tasks that may be seen."""
        return self.runs.list(limit, may=may)

    def numbers(self) -> dict[str, float]:
        """Count the runs that wait and those under way."""
        found = self.runs.counts()
        return {f"runs_{state}": found.get(state, 0) for state in ("queued", "running")}

    def cancel(self, id: str) -> TrainingRun:
        """Stop a run; one that has ended stays as it is."""
        run = self.runs.cancel(id)
        if run.over:
            self._clear(run)
            self.runs.forget_old()
        return run

    # --- working ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to work on what is queued."""
        self.begin()

    async def stop(self) -> None:
        """Stop working; a run on its way is queued again, and goes on after its last epoch."""
        await asyncio.to_thread(self.close)

    def begin(self) -> None:
        """See `start`."""
        if self._crew:
            return
        self._closing.clear()
        self._crew = [threading.Thread(target=self._own, name="training", daemon=True)]
        self._crew[0].start()

    def close(self) -> None:
        """See `stop`."""
        self._closing.set()
        self._wake.set()
        for thread in self._crew:
            thread.join()
        self._crew = []

    def _own(self) -> None:
        """Wait until no other server starts this bank's runs, put in order what the last one left, and work."""
        with self._owned() as owned:
            while owned and not self._closing.is_set():
                try:
                    for run in self.runs.list(-1, "running"):
                        self._broken_off(run, "the server was killed")
                    self._sweep_litter()
                    break
                except Exception as error:
                    self._hindered(error)
            crew = range(self._workers if owned else 0)
            workers = [threading.Thread(target=self._work, name="training", daemon=True) for _ in crew]
            for thread in workers:
                thread.start()
            for thread in workers:
                thread.join()

    @contextlib.contextmanager
    def _owned(self) -> Iterator[bool]:
        """Wait until the bank's runs are ours; False where that never came."""
        path, held = self._folder / ".owner", None
        while held is None and not self._closing.is_set():
            try:
                held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if held is not None:
                    os.close(held)
                held = None
                self._hindered(None if isinstance(error, BlockingIOError) else error)
        try:
            yield held is not None
        finally:
            if held is not None:
                os.close(held)

    def _hindered(self, error: Exception | None, run: TrainingRun | None = None) -> None:
        """Wait a moment for what may pass, and say once what it is: None for what is no fault."""
        said = "" if error is None else f"{type(error).__name__}: {error}"
        if said and said != self._said:
            log.error("hindered", exc_info=error, extra={"fields": {"run": run.id if run else None}})
        self._said = said
        self._closing.wait(1.0)

    def _work(self) -> None:
        """Do one run after the other. What hinders us (a full disk) may pass, so nothing ends this but `close`."""
        run: TrainingRun | None = None
        hindered = ""
        while not self._closing.is_set():
            try:
                if run is not None:
                    self._broken_off(run, hindered)
                    run = None
                self._wake.clear()
                run = self.runs.begin()
                if run is None:
                    self._wake.wait(1.0)  # another server of this bank may queue one
                    continue
                self._train(run)
                self._clear(ended := self.runs.get(run.id))
                # Not the failure: it may quote the data.
                log.info("run", extra={"fields": {"run": run.id, "task": run.task, "state": ended.state}})
                run = None
                self.runs.forget_old()
                self._said = ""
            except Exception as error:
                hindered = f"the server was hindered ({type(error).__name__})"
                self._hindered(error, run)

    def _train(self, run: TrainingRun) -> None:
        """Have a run done by a process, and write down what it says and how it ends."""
        again = run.newest is not None
        if not again:
            run = self._remember_newest(run)
        heard: dict[str, Any] = {"history": run.history[-1:], "notes": run.notes}
        with trained(self._order(run, again), self._surroundings(run), self._weights) as child:
            asked = listen(child, lambda said: self._hear(run.id, said, heard), lambda: self._wanted(run.id))
        self._judge(run, heard, asked, child.returncode)

    def _wanted(self, id: str) -> str:
        """Say whether a running run is to stop, and why."""
        with contextlib.suppress(StorageError):  # a table that is in use for long is no reason to
            return "close" if self._closing.is_set() else "cancel" if self.runs.cancelling(id) else ""
        return ""

    def _surroundings(self, run: TrainingRun) -> dict[str, str]:
        # A cache of its own: tokens are texts too, and must not outlast the data they were sent in.
        own = {cache.FOLDER: str(self._cache(run)), "TOKENIZERS_PARALLELISM": "false"}
        return {**own, "OMP_NUM_THREADS": str(self._threads)}

    def _order(self, run: TrainingRun, again: bool) -> dict[str, Any]:
        return {
            "bank": str(self.bank),
            "backbone": self.backbone,
            "weights": self._weights,
            "task": run.task,
            "file": str(self._file(run)),
            "options": run.options,
            "device": self._device,
            "threads": self._threads,
            "again": again,
            "newest": run.newest,
        }

    def _remember_newest(self, run: TrainingRun) -> TrainingRun:
        versions = [0]
        with contextlib.suppress(AdapterbankError):
            versions += Bank.open(self.bank).versions(run.task)
        self.runs.update(run.id, newest=max(versions))
        return self.runs.get(run.id)

    def _hear(self, id: str, message: Mapping[str, Any], heard: dict[str, Any]) -> None:
        """Write down what a run says of itself."""
        heard |= {name: message[name] for name in ("done", "failed") if name in message}
        news: dict[str, Any] = {name: message[name] for name in ("progress", "kept") if name in message}
        if "note" in message and message["note"] not in heard["notes"]:  # one that goes on says some of them again
            heard["notes"] = news["notes"] = [*heard["notes"], message["note"]]
        if "epoch" in message:  # a run that goes on may do an epoch again that was told of, but not kept
            row, told = message["epoch"], heard["history"]
            news |= {"epochs": [row]} | ({} if told and row["epoch"] <= told[-1]["epoch"] else {"attempts": 1})
            heard["history"] = [row]
        late = heard.pop("unwritten", {})
        news = {**late, **news} | ({"epochs": late["epochs"] + news.get("epochs", [])} if "epochs" in late else {})
        try:
            self.runs.update(id, **news)
        except StorageError:  # it may pass: the next report is written down with this one
            heard["unwritten"] = news

    def _judge(self, run: TrainingRun, heard: Mapping[str, Any], asked: str, code: int) -> None:
        """Decide how a run has ended, by its last word and its exit."""
        if "done" in heard:
            self.runs.end(run.id, "done", **heard["done"])
        elif "failed" in heard:
            self.runs.end(run.id, "failed", failure=heard["failed"])
        elif asked and self.runs.cancelling(run.id):
            self.runs.end(run.id, "cancelled")
        elif asked == "close":
            self.runs.put_back(run.id, counts=False)
        else:
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            self._broken_off(run, f"its process ended with {name}")

    def _broken_off(self, run: TrainingRun, why: str) -> None:
        """Queue a run again that did not end by itself, unless that has happened too often."""
        if self.runs.cancelling(run.id):
            self.runs.end(run.id, "cancelled")
        elif (begun := self.runs.get(run.id).attempts) < ATTEMPTS:
            self.runs.put_back(run.id, counts=True)
        else:
            told = f"The run was broken off {begun} times before another epoch was done; the last time {why}."
            self.runs.end(run.id, "failed", failure=f"{told} If memory is short, try a smaller batch or fewer rows.")
        self._clear(self.runs.get(run.id))

    # --- clearing up --------------------------------------------------------------------------------------

    def _file(self, run: TrainingRun) -> Path:
        return self._data / f"{run.id}.{run.data['format']}"

    def _cache(self, run: TrainingRun) -> Path:
        return self._data / f"{run.id}.tokens"

    def _clear(self, run: TrainingRun) -> None:
        """Remove what an ended run no longer needs: its data, and the state that it would go on from.

        What cannot be removed now is when the next server starts; no run waits for that.
        """
        paths = [self._file(run), self._cache(run), *([self.bank / "runs" / run.kept] if run.kept else [])]
        for path in paths if run.over else []:
            try:
                files.discard(path)
            except (OSError, AdapterbankError) as error:
                log.error("not removed", extra={"fields": {"run": run.id, "problem": type(error).__name__}})

    def _sweep_litter(self) -> None:
        """Remove what a killed server left: of runs that had just ended, and files whose run was never written down."""
        runs = self.runs.list(-1)
        for run in runs:
            self._clear(run)
        known = {path.name for run in runs if not run.over for path in (self._file(run), self._cache(run))}
        limit = time.time() - _STALE
        for path in self._data.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in known and path.stat().st_mtime < limit:
                    files.discard(path)
