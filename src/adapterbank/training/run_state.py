"""The state of an unfinished run on disk, to resume it after Ctrl-C or a crash. Knows nothing of packages.

runs/<config hash>/epoch-3.safetensors     weights, best weights, the optimiser's moments
runs/<config hash>/state.json              the last epoch, its file's sha256, steps, history; written last
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import safetensors.torch
from safetensors import SafetensorError

from adapterbank import __version__, schema
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.storage import files, reading
from adapterbank.training.job import RunState, TrainingJob
from adapterbank.training.narrowing import fits, narrow_job, wide_job


class EpochScores(TypedDict):
    """One epoch of a run's history."""

    loss: float
    score: float
    seconds: NotRequired[float]
    average: NotRequired[float]


class Restart(TypedDict):
    """A start of a run that collapsed."""

    lr: float
    epochs: float
    loss: float
    score: float


class NarrowedFields(TypedDict):
    """How the adapters of a run were narrowed."""

    epoch: int
    before: float
    after: float
    units: dict[str, list[int]]


class StateFields(TypedDict):
    """The fields of a state.json."""

    library: str
    sha256: str
    epoch: Annotated[int, {"low": 1, "high": 10**6}]
    step: Annotated[int, {"low": 0}]
    best_epoch: Annotated[int, {"low": 0}]
    history: list[EpochScores]
    restarts: NotRequired[list[Restart]]
    narrowed: NotRequired[NarrowedFields]
    newest: NotRequired[int | None]
    bytes: NotRequired[Annotated[int, {"low": 0}]]


_LARGEST_STATE = 64 << 20
"""The most bytes of a state.json, which has a line for each epoch."""
_BEFORE = ("library", "sha256", "epoch", "step", "best_epoch", "history")
"""The fields of a state.json before it had a checksum."""


@contextlib.contextmanager
def own_folder(runs: Path, name: str) -> Iterator[Path]:
    """Claim the folder of a run; a second process with the same run gets a folder of its own."""
    with files.claimed(runs / name) as claimed:
        if claimed:
            yield runs / name
            return
        own = runs / f"{name}-{os.getpid()}"
        with files.claimed(own):
            yield own


def save(folder: Path, state: RunState, newest: int | None = None) -> None:
    """Save a state; the previous one stays until this one is complete.

    `newest` is the task's newest version when the run began: a later one may be that of the run itself.
    """
    files.make_folder(folder)
    name = _weights_name(state.epoch, len(state.restarts), bool(state.narrowed))
    flat = {
        f"{part}/{key}": tensor.contiguous() for part, values in state.tensors.items() for key, tensor in values.items()
    }
    # `best` may share its tensors with `weights`; the format requires that each owns its memory.
    flat = {key: tensor.clone() if key.startswith("best/") else tensor for key, tensor in flat.items()}
    data = safetensors.torch.save(flat)
    files.atomic_write(folder / name, data)
    about = {"library": __version__, "sha256": files.sha256_bytes(data), "epoch": state.epoch, "step": state.step}
    about |= {"best_epoch": state.best_epoch, "history": state.history, "newest": newest, "bytes": len(data)}
    about |= {"restarts": state.restarts} if state.restarts else {}
    about |= {"narrowed": state.narrowed} if state.narrowed else {}
    files.write_json(folder / "state.json", reading.seal(about))
    for old in folder.glob("epoch-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load(folder: Path, job: TrainingJob | None = None) -> RunState | None:
    """Return the last saved state, or None if there is none; with its `job`, refuse a state that is not the job's."""
    if not os.path.lexists(folder / "state.json"):
        return None
    try:
        about = reading.read_checked(folder / "state.json", _LARGEST_STATE, before=_BEFORE)
        if problem := schema.problem(StateFields, about):
            raise InputError(problem)
        if about["library"] != __version__:
            raise InputError(f"adapterbank {about['library']} wrote it, this is {__version__}")
        name = _weights_name(about["epoch"], len(about.get("restarts", ())), "narrowed" in about)
        data = _read_weights(folder / name, about.get("bytes"))
        if files.sha256_bytes(data) != about["sha256"]:
            raise InputError("the checksum of the weights does not match")
        state = RunState(about["epoch"], about["step"], about["history"], about["best_epoch"])
        state.restarts, state.narrowed = about.get("restarts", []), about.get("narrowed", {})
        for key, tensor in safetensors.torch.load(data).items():
            part, _, name = key.partition("/")
            state.tensors.setdefault(part, {})[name] = tensor
        _check_state(state, job)
    except (AdapterbankError, OSError, SafetensorError) as error:
        raise InputError(f"The state in {folder} cannot be read ({error}); run again without --resume.") from error
    return state


def _weights_name(epoch: int, restarts: int, narrowed: bool) -> str:
    """Return the name of a state's weights; after a restart another one, as the epochs are counted again."""
    return f"epoch-{epoch}{f'-start-{restarts + 1}' if restarts else ''}{'-narrowed' if narrowed else ''}.safetensors"


def _check_state(state: RunState, job: TrainingJob | None) -> None:
    """Refuse a state that no run has saved, or none of this job; a checksum does not exclude it."""
    if len(state.history) != state.epoch or state.best_epoch > state.epoch or (job and state.epoch > job.epochs):
        raise InputError("its epochs contradict each other")
    if job:
        job = _part_of(job, state)
    weights = job.initial if job else state.tensors.get("weights", {})
    merged = job.mixture.names(job.initial) if job else state.tensors.get("best", {})
    expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    kept = {name: expected[name] for name in merged if name in expected}
    averaged = ["average"] if job and job.averages else []
    parts = dict.fromkeys(("weights", "first", "second"), expected)
    parts |= dict.fromkeys((*(["best"] if state.best_epoch else []), *averaged), kept)
    found = {
        part: {name: tuple(tensor.shape) for name, tensor in state.tensors.get(part, {}).items()} for part in parts
    }
    if not expected or found != parts:
        raise InputError("its tensors are not those of the run")
    for part in state.tensors.values():
        for name, tensor in part.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise InputError(f"{name} holds something else than finite floating-point numbers")


def _part_of(job: TrainingJob, state: RunState) -> TrainingJob:
    """Return the part of a job that a state belongs to, before or after its adapters are narrowed."""
    if not state.narrowed:
        return wide_job(job) if job.narrowing else job
    if not job.narrowing or not fits(job.plan, state.narrowed["units"]):
        raise InputError("its units are not those of the run")
    return narrow_job(job, state.narrowed["units"])


def _read_weights(path: Path, size: int | None) -> bytes:
    """Read the weights of a state, unless their size alone shows that they have changed; older states have no size."""
    with reading.open_file(path) as (file, found):
        if size is not None and found != size:
            raise InputError(f"{path.name} has {found:,} bytes instead of {size:,}")
        return file.read(found)


def newest_before(folder: Path, otherwise: int) -> int:
    """Return the task's newest version when the run of a saved state began, or `otherwise` if no state notes it."""
    with contextlib.suppress(AdapterbankError, OSError):
        about = reading.read_checked(folder / "state.json", _LARGEST_STATE, before=_BEFORE)
        if schema.problem(StateFields, about) is None and about.get("newest") is not None:
            return int(about["newest"])
    return otherwise


def forget(folder: Path) -> None:
    """Remove a finished run's state."""
    files.discard(folder)
