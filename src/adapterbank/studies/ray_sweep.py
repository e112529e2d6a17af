"""A sweep's units on a Ray cluster: one worker per GPU, or per share of the CPUs. Units run as on one machine.

Workers leave nothing but records. If a worker or its machine dies, its unit is run again elsewhere and finds the
records of the runs that had ended; two workers with the same unit leave one record per run (`RecordStore.add`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterbank.config import Config
from adapterbank.errors import ConfigError, InputError
from adapterbank.install import extra_command
from adapterbank.storage.record_store import RecordStore
from adapterbank.studies import selection
from adapterbank.studies.progress import RunEvent
from adapterbank.studies.sweep import SweepContext, UnitRunner, find_records, lacks_data, run_unit
from adapterbank.studies.units import UNIT, Unit, units

_POLL_EVERY = 2.0
"""Seconds between two checks for new records."""
_MAX_STARTS = 8
"""How often a unit is started at most: machines die, but a unit that always kills its worker must end."""


def find_unit_runner(ray: str | bool = False, cpus_per_worker: int = 1) -> UnitRunner | None:
    """Return what runs the units of a sweep on a Ray cluster; None without `ray`, for this process."""
    if ray is False:
        return None
    return ray_engine(None if ray is True else ray, cpus=cpus_per_worker)


def ray_engine(address: str | None = None, *, cpus: int = 1) -> UnitRunner:
    """Return a function that runs units on a cluster; every machine must have access to the records.

    Args:
        address: The cluster's address; by default RAY_ADDRESS, or a new cluster on this machine.
        cpus: The number of CPUs of a worker, and of its threads.
    """
    try:
        import ray
    except ImportError:
        raise InputError(f"The engine ray needs Ray: {extra_command('ray')}") from None

    def run(found: Sequence[Unit], context: SweepContext) -> None:
        if context.keep == "best":
            text = "keep is 'best', but separate workers cannot compare scores; use none or all with the engine ray."
            raise ConfigError([text])
        began = not ray.is_initialized()
        if began:
            join(ray, address)
        try:
            _run(ray, [run for unit in found for run in unit], context, cpus)
        finally:
            if began:
                ray.shutdown()

    return run


def join(ray: Any, address: str | None) -> None:
    """Join the cluster at an address or RAY_ADDRESS, or start one; never join a local cluster unasked."""
    chosen = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(address=chosen, log_to_driver=False, configure_logging=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # the type depends on the kind of address
        where = chosen if chosen != "local" else "this machine"
        why = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"No Ray cluster can be used at {where}: {why}. Start one, or give another address."
        ) from error


def _run(ray: Any, runs: Sequence[Config], context: SweepContext, cpus: int) -> None:
    """Distribute units, report records as they appear, and start the unit of a dead worker again."""
    gpus = 1 if ray.cluster_resources().get("GPU") and all(run.device != "cpu" for run in runs) else 0
    workers = int(ray.cluster_resources()["GPU"] if gpus else ray.cluster_resources().get("CPU", 1) // cpus) or 1
    # The units are those of one machine, but small enough for each worker to have two.
    size = min(UNIT, max(1, -(-len(runs) // (2 * workers))))
    work = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_work)
    plain = replace(context, notify=_ignore, stage=_ignore, is_best=_always, states=None)
    waiting = {work.remote(unit, plain, os.getcwd(), cpus): (unit, 1) for unit in units(runs, size)}
    watcher = RecordWatcher(runs, context)
    try:
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_EVERY)
            for one in done:
                unit, starts = waiting.pop(one)
                if _finished(ray, one):
                    continue
                if starts == _MAX_STARTS:
                    watcher.give_up(unit)
                else:
                    waiting[work.remote(unit, plain, os.getcwd(), cpus)] = unit, starts + 1
            watcher.poll()
        watcher.close()
    finally:
        for one in waiting:
            ray.cancel(one, force=True)


def _finished(ray: Any, one: Any) -> bool:
    """Return whether a unit is done, or False if its worker died; raise the unit's own exception."""
    try:
        ray.get(one)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None
    except ray.exceptions.RayError:
        return False
    return True


class RecordWatcher:
    """Reports each run of a sweep when its record appears, since workers send no events."""

    def __init__(self, runs: Sequence[Config], context: SweepContext) -> None:
        """Report the runs that already have a record."""
        self._runs, self._context = set(runs), context
        found = find_records(runs, context.store)
        self._refused = {run for run, record in found.items() if lacks_data(record)}  # workers try these again
        for run, record in found.items():
            if run not in self._refused:
                self._report(run, record, "known")

    def poll(self) -> None:
        """Report the runs with a new record."""
        for run, record in find_records(self._runs, self._context.store).items():
            if run not in self._refused or not lacks_data(record):
                self._report(run, record, "done")

    def close(self) -> None:
        """Report the runs that were refused again."""
        for run, record in find_records(self._runs, self._context.store).items():
            self._report(run, record, "known")

    def give_up(self, unit: Unit) -> None:
        """Report a unit's runs as failed; without records, because the runs may not be the cause."""
        self.poll()
        for run in self._runs.intersection(unit):
            self._runs.discard(run)
            text = f"Its worker died {_MAX_STARTS} times. Give workers more memory, or lower --jobs, and run it again."
            self._context.notify(RunEvent(run, "failed", failure=text))

    def _report(self, run: Config, record: dict[str, Any], kind: str) -> None:
        self._runs.discard(run)
        failure = str(record.get("failure", ""))
        kind = "failed" if failure and kind == "done" else kind
        notes = tuple(record.get("notes", ()))
        self._context.notify(RunEvent(run, kind, score=selection.score(record), failure=failure, notes=notes))


def _ignore(*_: Any) -> None:
    """Ignore an event: a worker's events are not sent to the driver."""


def _always(*_: Any) -> bool:
    return True


_BACKBONES: dict[str, Any] = {}
"""The encoder that this worker process loaded last; Ray sends it one unit after another."""
_STORES: dict[str, RecordStore] = {}
"""The stores that this worker process has opened, so that it parses each record once."""


def _work(unit: Unit, context: SweepContext, folder: str, threads: int) -> None:
    """Run a unit on a worker."""
    import torch

    from adapterbank.encoder.backbone import load

    torch.set_num_threads(threads)
    with contextlib.chdir(folder) if Path(folder).is_dir() else contextlib.nullcontext():
        name = unit[0].backbone
        if name not in _BACKBONES:
            _BACKBONES.clear()
            _BACKBONES[name] = load(name)
        store = _STORES.setdefault(context.store.location, context.store)
        run_unit(unit, _BACKBONES[name], replace(context, store=store))
