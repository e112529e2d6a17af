"""An unfinished run's state on disk, so that it can go on after Ctrl-C or a crash. Knows nothing of packages.

runs/<config hash>/epoch-3.safetensors     weights, best weights, the optimiser's moments
runs/<config hash>/state.json              which epoch counts, its file's sha256, steps, history; written last
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from adapterbank import __version__
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.storage import files
from adapterbank.training.job import RunState


@contextlib.contextmanager
def own_folder(runs: Path, name: str) -> Iterator[Path]:
    """Have the folder of a run for oneself; the same run started twice at once gets another for the second."""
    with files.claimed(runs / name) as mine:
        yield runs / (name if mine else f"{name}-{os.getpid()}")


def save(folder: Path, state: RunState) -> None:
    """Keep a state; the one before stays until this one is whole."""
    files.make_folder(folder)
    name = f"epoch-{state.epoch}.safetensors"
    flat = {
        f"{part}/{key}": tensor.contiguous() for part, held in state.tensors.items() for key, tensor in held.items()
    }
    # `best` may be the very tensors of `weights`; the format wants each to own its memory.
    flat = {key: tensor.clone() if key.startswith("best/") else tensor for key, tensor in flat.items()}
    data = safetensors.torch.save(flat)
    files.atomic_write(folder / name, data)
    about = {"library": __version__, "sha256": files.sha256_bytes(data), "epoch": state.epoch, "step": state.step}
    files.write_json(folder / "state.json", {**about, "best_epoch": state.best_epoch, "history": state.history})
    for old in folder.glob("epoch-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load(folder: Path) -> RunState | None:
    """Return the state that was kept last, or None when there is none."""
    if not (folder / "state.json").is_file():
        return None
    try:
        about = files.read_json(folder / "state.json")
        data = (folder / f"epoch-{about['epoch']:d}.safetensors").read_bytes()
        if about["library"] != __version__:
            raise InputError(f"it was written by adapterbank {about['library']}, this is {__version__}")
        if files.sha256_bytes(data) != about["sha256"]:
            raise InputError("the weights are not those that were written")
        flat = safetensors.torch.load(data)
        state = RunState(about["epoch"], about["step"], about["history"], about["best_epoch"])
    except (AdapterbankError, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise InputError(f"The state in {folder} cannot be read ({error}); run again without --resume.") from error
    for key, tensor in flat.items():
        part, name = key.split("/", 1)
        state.tensors.setdefault(part, {})[name] = tensor
    return state


def forget(folder: Path) -> None:
    """Remove a finished run's state."""
    files.discard(folder)
