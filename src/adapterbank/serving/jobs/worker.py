"""The process of one training run: told what to do on standard input, tells how it goes on standard output, in JSON.

It gives way to serving: it has a lower priority, fewer threads, maps the encoder that the server has in memory, and is
the first to go when memory runs out. It ends when the server does, whose end closes its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
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
from adapterbank.storage import files
from adapterbank.storage.bank import Bank
from adapterbank.training import run_state
from adapterbank.training.builder import ResolvedRun, RunBuilder
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader
from adapterbank.training.job import Progress
from adapterbank.training.run import run

if TYPE_CHECKING:
    from adapterbank.encoder.backbone import Backbone

NICENESS = 10
"""Beside a busy server, a tenth of what it would get alone."""
STOPPED, ORPHANED = 130, 3
"""Exit statuses: politely stopped; the server is gone."""
_BETWEEN = 0.2
"""Seconds between two reports of steps."""

Say = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Read the order, then train; every end is told, but that by a kill."""
    signal.signal(signal.SIGTERM, _stop)
    say = _line_writer()
    line = sys.stdin.buffer.readline()
    if not line:
        return ORPHANED
    order = json.loads(line)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    _give_way()
    try:
        with _alone(Path(order["file"])):
            say({"done": teach(order, say)})
    except KeyboardInterrupt:
        return STOPPED
    except AdapterbankError as error:
        say({"failed": _shown(" ".join(str(error).split()), order)})
    except MemoryError:
        say({"failed": "There is not enough memory for this run; try a smaller batch, or fewer rows."})
    except Exception as error:
        # Where, but not what: the text of a stray error may quote the data, and this goes into the server's table.
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        say({"failed": f"The run broke on an error that is not the data's fault ({where}); please report it."})
    return 0


def teach(order: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Train what was ordered, or go on with it; gives the version, its metrics and the learning curve."""
    backbone = _backbone(order)
    config = configs.parse({**order["options"], "task": order["task"], "train": order["file"], **order["device"],
                            "backbone": backbone.name})  # fmt: skip
    bank = Bank.open(order["bank"], backbone.reference)
    reader = DatasetReader()
    resolved = RunBuilder(backbone, reader=reader).resolve(config)
    say({"kept": resolved.hash})
    again = order["again"]
    if again and (made := _made_already(bank, resolved, order["newest"])):
        return made
    result = run(
        config,
        backbone,
        bank.path,
        reader=reader,
        callbacks=Callbacks(watch=_watcher(say), note=lambda text: say({"note": _shown(text, order)})),
        resuming=again and _can_go_on(bank.runs_path / resolved.hash),
    )
    assert result.package is not None  # methods without one are refused before a run is queued
    rows = [{"epoch": i, **row} for i, row in enumerate(result.record["history"], 1)]
    return {**_ending(result.package.manifest.version, result.package.manifest.metrics), "history": rows}


def _ending(version: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": version, "metrics": dict(metrics)}


def _backbone(order: Mapping[str, Any]) -> Backbone:
    import torch

    from adapterbank.encoder import backbone as checkpoint
    from adapterbank.encoder import shared_memory

    torch.set_num_threads(order["threads"])
    name, weights = order["backbone"], order["weights"]
    return checkpoint.load(name) if weights is None else shared_memory.attach(name, weights)


def _made_already(bank: Bank, resolved: ResolvedRun, newest: int) -> dict[str, Any] | None:
    """Find what this very run put into the bank before it was killed, so that nothing is put there twice."""
    config = resolved.config
    with contextlib.suppress(AdapterbankError):
        for version in bank.versions(config.task):
            if version <= newest:
                continue
            made = bank.get(f"{config.task}@{version}").manifest
            recipe = {name: getattr(config, name) for name in made.recipe}
            wanted = [resolved.data.about(), resolved.plan.to_json(), config.seed, recipe]
            if files.canonical_json([made.data, made.method, made.seed, made.recipe]) == files.canonical_json(wanted):
                return _ending(version, made.metrics)
    return None


def _can_go_on(folder: Path) -> bool:
    """Whether there is a finished epoch to go on after; one that cannot be read is as good as none."""
    try:
        return run_state.load(folder) is not None
    except InputError:
        run_state.forget(folder)
        return False


def _watcher(say: Say) -> Callable[[Progress], None]:
    """Tell of every epoch, and of steps now and then."""
    told, began = 0.0, time.monotonic()

    def watch(progress: Progress) -> None:
        nonlocal told, began
        now = time.monotonic()
        loss = progress.loss if math.isfinite(progress.loss) else None  # JSON has no other word for it
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
            say({"progress": shown, "epoch": row})
            told, began = now, now
        elif now - told >= _BETWEEN:
            say({"progress": shown})
            told = now

    return watch


def _shown(text: str, order: Mapping[str, Any]) -> str:
    """Call files what the sender of the data would: where they lie here is nobody's business."""
    file, bank = order["file"], order["bank"]
    told = text.replace(file, "the data file").replace(Path(file).name, "the data file").replace(f"{bank}/", "")
    return told[:1].upper() + told[1:]


def _line_writer() -> Say:
    """Give standard output to the reports alone; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return say


def _end_with_the_server() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)  # at once, as a kill would: the bank and the run's state bear that


def _give_way() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError):  # where the system lets one say so
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Wait until no other process has this run: one whose server was killed may need a moment to end."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:  # reading the data will say so better
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
