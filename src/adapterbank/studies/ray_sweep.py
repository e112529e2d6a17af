"""A sweep's units on a Ray cluster, one worker a GPU or a share of the CPUs. Knows no runs: a unit is run as anywhere.

Records are all that workers leave behind. A unit whose worker or machine dies is run again elsewhere, and there finds
the records of the runs that had ended; two workers with the same unit leave one record a run (`store`).
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
from adapterbank.studies import selection
from adapterbank.studies.progress import RunEvent
from adapterbank.studies.sweep import UNIT, Engine, SweepContext, Unit, run_unit, standing, units, unread

_LISTEN_EVERY = 2.0
"""Seconds between two looks at the records."""
_TIMES = 8
"""How often a unit is begun at most: machines die, but a unit that always kills its worker must end."""


def ray_engine(address: str | None = None, *, cpus: int = 1) -> Engine:
    """Give an engine that runs units on a cluster; every machine must see the folder or URL of the records.

    Args:
        address: Of the cluster; without it that of RAY_ADDRESS, or one is started on this machine.
        cpus: How many CPUs a worker has, and as many threads.
    """
    try:
        import ray
    except ImportError:
        raise InputError("The engine ray needs Ray: pip install 'adapterbank[ray]'.") from None

    def run(found: Sequence[Unit], context: SweepContext) -> None:
        if context.keep == "best":
            raise ConfigError(["keep is 'best', which workers apart cannot tell; use none or all with the engine ray."])
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
    """Join the cluster of an address or of RAY_ADDRESS, or start one: never one that happens to run here, unasked."""
    chosen = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(address=chosen, log_to_driver=False, configure_logging=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # it differs with the way there
        where = chosen if chosen != "local" else "this machine"
        why = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"No Ray cluster can be used at {where}: {why}. Start one, or name another address."
        ) from error


def _run(ray: Any, runs: Sequence[Config], context: SweepContext, cpus: int) -> None:
    """Hand units out, hear of records as they come, and hand a dead worker's unit out again."""
    gpus = 1 if ray.cluster_resources().get("GPU") and all(run.device != "cpu" for run in runs) else 0
    workers = int(ray.cluster_resources()["GPU"] if gpus else ray.cluster_resources().get("CPU", 1) // cpus) or 1
    # The groups are those of one machine, but no larger than leaves each worker two of them.
    size = min(UNIT, max(1, -(-len(runs) // (2 * workers))))
    work = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_work)
    plain = replace(context, hear=_silent, stage=_silent, wanted=_always, states=None)
    waiting = {work.remote(unit, plain, os.getcwd(), cpus): (unit, 1) for unit in units(runs, size)}
    heard = _Heard(runs, context)
    try:
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_LISTEN_EVERY)
            for one in done:
                unit, times = waiting.pop(one)
                if _finished(ray, one):
                    continue
                if times == _TIMES:
                    heard.give_up(unit)
                else:
                    waiting[work.remote(unit, plain, os.getcwd(), cpus)] = unit, times + 1
            heard.listen()
        heard.close()
    finally:
        for one in waiting:
            ray.cancel(one, force=True)


def _finished(ray: Any, one: Any) -> bool:
    """Say whether a unit is done; False where its worker died, and what the unit itself raised is raised here."""
    try:
        ray.get(one)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None
    except ray.exceptions.RayError:
        return False
    return True


class _Heard:
    """Turns records that appear into news."""

    def __init__(self, runs: Sequence[Config], context: SweepContext) -> None:
        self._runs, self._means = set(runs), context
        found = standing(runs, context.store)
        self._refused = {run for run, record in found.items() if unread(record)}  # workers try these again
        for run, record in found.items():
            if run not in self._refused:
                self._tell(run, record, "known")

    def listen(self) -> None:
        """Tell of what is new."""
        for run, record in standing(self._runs, self._means.store).items():
            if run not in self._refused or not unread(record):
                self._tell(run, record, "done")

    def close(self) -> None:
        """Tell of runs that were refused again."""
        for run, record in standing(self._runs, self._means.store).items():
            self._tell(run, record, "known")

    def give_up(self, unit: Unit) -> None:
        """Tell that a unit's runs have failed; without records, as it may be no fault of theirs."""
        self.listen()
        for run in self._runs.intersection(unit):
            self._runs.discard(run)
            text = f"Its worker died {_TIMES} times. Give workers more memory, or lower --jobs, and run it again."
            self._means.hear(RunEvent(run, "failed", failure=text))

    def _tell(self, run: Config, record: dict[str, Any], kind: str) -> None:
        self._runs.discard(run)
        failure = str(record.get("failure", ""))
        kind = "failed" if failure and kind == "done" else kind
        self._means.hear(RunEvent(run, kind, score=selection.score(record), failure=failure))


def _silent(*_: Any) -> None:
    """Hear nothing: nobody listens on a worker."""


def _always(*_: Any) -> bool:
    return True


_BACKBONES: dict[str, Any] = {}
"""The encoder that this worker's process loaded last; Ray gives it unit after unit."""


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
        run_unit(unit, _BACKBONES[name], context)
