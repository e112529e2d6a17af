"""The saved states of a unit's unfinished runs, so that a stopped sweep can resume them. Knows no records.

A state is saved only if that is cheap compared with the training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from adapterbank.errors import InputError
from adapterbank.training import run_state
from adapterbank.training.builder import PreparedRun
from adapterbank.training.job import RunState

SAVE_EVERY = 20.0
"""Seconds between two saved states of a run."""
_MAX_SAVED = 8_000_000
"""A state is saved up to this many trained parameters; it has four numbers for each."""


class SavedStates:
    """The folders in which a unit's runs save their states; a context manager that releases them."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is that of all states; None saves nothing."""
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._own: dict[str, Path] = {}
        self._saved: dict[str, float] = {}

    def __enter__(self) -> SavedStates:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folders of the runs."""
        self._stack.close()

    def load(self, prepared: Sequence[PreparedRun]) -> dict[int, RunState]:
        """Return the saved states of runs by their index; ignore a damaged one."""
        found: dict[int, RunState] = {}
        for number, one in enumerate(prepared):
            folder = self._folder / one.resolved.hash if self._folder else None
            if folder is not None and (folder / "state.json").is_file():
                with contextlib.suppress(InputError):
                    state = run_state.load(folder, one.job)
                    if state is not None:
                        found[number] = state
        return found

    def save(self, one: PreparedRun, state: RunState) -> None:
        """Save a state, unless it is large or the last one is recent."""
        numbers = sum(tensor.numel() for tensor in state.tensors["weights"].values())
        hash, now = one.resolved.hash, time.monotonic()
        if self._folder is None or numbers > _MAX_SAVED or now - self._saved.setdefault(hash, now) < SAVE_EVERY:
            return
        if hash not in self._own:
            self._own[hash] = self._stack.enter_context(run_state.own_folder(self._folder, hash))
        run_state.save(self._own[hash], state)
        self._saved[hash] = now

    def forget(self, one: PreparedRun) -> None:
        """Delete the saved state of a run that has ended."""
        hash = one.resolved.hash
        if self._folder is not None:
            run_state.forget(self._own.pop(hash, self._folder / hash))
