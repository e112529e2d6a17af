"""The process of one training run: reads its job from standard input and reports on standard output, in JSON lines.

It yields to serving: it has a lower priority, fewer threads, maps the encoder that the server has in memory, and is the
first to be killed when memory runs out. Its data, its memory and its CPU time are limited. It ends with the server,
whose end closes its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterbank import config as configs
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.runtime import total_memory
from adapterbank.storage.bank import Bank
from adapterbank.tasks.limits import TableLimits
from adapterbank.tasks.tables import read_table
from adapterbank.training import run_state
from adapterbank.training.builder import RunBuilder
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader, canonical, file_form
from adapterbank.training.job import Progress
from adapterbank.training.once import find_added, resolve_again
from adapterbank.training.run import run

if TYPE_CHECKING:
    from adapterbank.encoder.backbone import Backbone

NICENESS = 10
"""Next to a busy server, a worker gets a tenth of the CPU time that it would get alone."""
STOPPED, ORPHANED = 130, 3
"""Exit statuses: stopped on request; the server has ended."""
LEAST_MEMORY = 2 << 30
"""Bytes that a worker may always take; its libraries alone take some hundred megabytes."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")
"""How torch reports that memory has run out."""
ALIVE = 1.0
"""Seconds between two messages that say only that the process is alive."""
_REPORT = 0.2
"""Seconds between two reports of steps."""

Send = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Read the job and train; every end is reported, except by a kill."""
    signal.signal(signal.SIGTERM, _stop)
    send = _line_writer()
    line = sys.stdin.buffer.readline()
    if not line:
        return ORPHANED
    job = json.loads(line)
    threading.Thread(target=_exit_with_the_server, daemon=True).start()
    threading.Thread(target=_say_alive, args=(send,), daemon=True).start()
    _lower_priority()
    try:
        _limit_resources(job)
        with _exclusively(Path(job["file"])):
            send({"done": train(job, send)})
    except KeyboardInterrupt:
        return STOPPED
    except AdapterbankError as error:
        send({"failed": without_paths(" ".join(str(error).split()), job)})
    except Exception as error:
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
            send({"failed": "The run needs more memory than it may take; try a smaller batch, fewer rows or labels."})
            return 0
        # The place, but not the message: it may quote the data, and this is stored in the server's table.
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        send({"failed": f"The run failed because of a bug in adapterbank ({where}); please report it."})
    return 0


def train(job: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Train a job, or resume it; return the version, its metrics and the history of its epochs."""
    backbone = _backbone(job)
    paths = {"train": job["file"], **job.get("others", {})}
    named = {"task": job["task"], **paths, **job["device"], "backbone": backbone.name}
    config = configs.parse({**job["options"], **named})
    bank = Bank.open(job["bank"], backbone.reference)
    reader = read_data(job, config)
    builder = RunBuilder(backbone, reader=reader, bank=bank.path)
    resolved = resolve_again(builder, canonical(config), bank.path, job["newest"])
    send({"kept": resolved.hash})
    resuming = job["resuming"] and _can_resume(bank.runs_path / resolved.hash)
    if job["resuming"] and not resuming and (made := find_added(bank, resolved, job["newest"])):
        return _ending(made.manifest.version, made.manifest.metrics)  # only its report was lost
    result = run(
        config,
        backbone,
        bank.path,
        reader=reader,
        callbacks=Callbacks(watch=_watcher(send), note=lambda text: send({"note": without_paths(text, job)})),
        resuming=resuming,
    )
    assert result.package is not None  # methods without a package are refused before a run is queued
    rows = [{"epoch": i, **row} for i, row in enumerate(result.record["history"], 1)]
    return {**_ending(result.package.manifest.version, result.package.manifest.metrics), "history": rows}


def read_data(job: Mapping[str, Any], config: configs.Config) -> DatasetReader:
    """Read the data files of a job once, under its limits."""
    limits, form = TableLimits(**job["limits"]["table"]), file_form(config)
    paths = {"train": job["file"], **job.get("others", {})}
    return DatasetReader({name: read_table(path, limits, form) for name, path in paths.items()})


def _ending(version: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": version, "metrics": dict(metrics)}


def _backbone(job: Mapping[str, Any]) -> Backbone:
    import torch

    from adapterbank.encoder import backbone as checkpoint
    from adapterbank.encoder import shared_memory

    torch.set_num_threads(job["threads"])
    name, weights = job["backbone"], job["weights"]
    return checkpoint.load(name) if weights is None else shared_memory.attach(name, weights)


def _can_resume(folder: Path) -> bool:
    """Whether there is a finished epoch to resume from; a state that cannot be read is deleted."""
    try:
        return run_state.load(folder) is not None
    except InputError:
        run_state.forget(folder)
        return False


def _watcher(send: Send) -> Callable[[Progress], None]:
    """Return a callback that reports every epoch, and steps from time to time."""
    reported, began = 0.0, time.monotonic()

    def watch(progress: Progress) -> None:
        nonlocal reported, began
        now = time.monotonic()
        loss = progress.loss if math.isfinite(progress.loss) else None  # JSON has no other number
        shown = {
            "epoch": progress.epoch,
            "epochs": progress.epochs,
            "step": progress.step,
            "steps": progress.steps,
            "loss": loss,
            "rows_per_second": progress.rows_per_second,
        }
        if progress.score is not None:
            row = {"epoch": progress.epoch, "loss": loss, "score": progress.score, "seconds": now - began}
            send({"progress": shown, "epoch": row})
            reported, began = now, now
        elif now - reported >= _REPORT:
            send({"progress": shown})
            reported = now

    return watch


def without_paths(text: str, job: Mapping[str, Any]) -> str:
    """Return a message without paths of the server, which clients must not learn."""
    shown = text
    for file, name in (
        (job["file"], "the data file"),
        *((path, f"the {k} file") for k, path in job.get("others", {}).items()),
    ):
        shown = shown.replace(file, name).replace(Path(file).name, name)
    shown = shown.replace(f"{job['bank']}/", "")
    return shown[:1].upper() + shown[1:]


def _line_writer() -> Send:
    """Reserve standard output for the reports; anything else that is printed goes to standard error."""
    out, writing = os.dup(1), threading.Lock()
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(message).encode() + b"\n")
        with writing:
            while line:
                line = line[os.write(out, line) :]

    return send


def _say_alive(send: Send) -> None:
    """Send an empty message again and again; a process that is stopped, or hangs as a whole, sends none."""
    with contextlib.suppress(OSError):  # the server has ended
        while True:
            send({})
            time.sleep(ALIVE)


def _exit_with_the_server() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)  # at once, like a kill: the bank and the run's state survive that


def _limit_resources(job: Mapping[str, Any]) -> None:
    """Limit the memory and the CPU time of this process; the server limits its time.

    RLIMIT_DATA counts what a process writes to and owns alone: not the shared encoder, files, or what CUDA reserves.
    """
    import torch

    limits = job["limits"]
    memory = max(LEAST_MEMORY, limits["memory"] or total_memory(torch.device("cpu")) // 2)
    seconds = math.ceil((job["threads"] + 1) * limits["seconds"]) + 60
    for kind, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # not every system has all limits
            resource.setrlimit(kind, (most, most))


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError):  # only where the system has this file
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def _exclusively(file: Path) -> Iterator[None]:
    """Wait until no other process trains this run: one whose server was killed may need a moment to end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    except OSError:  # reading the data reports it better
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
