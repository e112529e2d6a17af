"""Writers of a bank, killed: at a random moment, and before or after every call of the operating system."""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from adapterbank.errors import AdapterbankError
from adapterbank.storage.bank import Bank
from packages import BACKBONE, draft
from trials.children import in_child
from trials.frame import Case, Stage, Trial

Calls = Sequence[tuple[ModuleType, str]]
CALLS: Calls = (
    *((os, name) for name in ("open", "close", "write", "fsync", "mkdir", "rmdir", "unlink", "remove", "replace")),
    *((os, name) for name in ("rename", "link", "listdir", "scandir", "stat", "lstat", "chmod", "fchmod")),
    *((builtins, "open"), (io, "open"), (fcntl, "flock")),
)
"""The calls before and after which a writer is killed."""
OPERATIONS: dict[str, Callable[[Bank], Any]] = {
    "put": lambda bank: put(bank, "many"),
    "put of a new task": lambda bank: put(bank, "new"),
    "put of a removed task": lambda bank: put(bank, "gone"),
    "rollback": lambda bank: bank.rollback("many"),
    "rollback to a version": lambda bank: bank.rollback("many", 1),
    "set_default": lambda bank: bank.set_default("many", 2),
    "remove of a version": lambda bank: bank.remove("many@3"),
    "remove of a task": lambda bank: bank.remove("many"),
    "remove of the only version": lambda bank: bank.remove("single@1"),
    "gc": lambda bank: bank.gc(older_than_seconds=0),
}


def put(bank: Bank, name: str, seed: int = 9) -> int:
    """Put a package with weights drawn from a seed; return its version."""
    weights = np.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32)
    return bank.put(draft(name), {"head.weight": weights}).manifest.version


def make(folder: Path) -> Bank:
    """Create the bank that every case starts from: a task of three versions, one of one, and a removed one."""
    bank = Bank.open(folder, BACKBONE, create=True)
    for seed, name in enumerate(("many", "many", "many", "single", "gone")):
        put(bank, name, seed)
    bank.remove("gone")
    return bank


@dataclass(frozen=True)
class Seen:
    """What a bank holds."""

    pointers: dict[str, tuple[int | None, list[int]]]
    """Default and versions of each task that has any."""
    packages: dict[str, dict[str, bytes]]
    """The files of each version."""
    paths: frozenset[str]
    """Every file and folder but the lock and the pointers, whose meaning is in `pointers`."""


def look(bank: Bank) -> Seen:
    """Read a bank as a user does, and check every package in it."""
    pointers, packages = {}, {}
    for name in bank.names():
        versions = bank.versions(name)
        pointers[name] = (bank.default(name), versions)
        for version in versions:
            package = bank.get(f"{name}@{version}")
            if problems := package.verify():
                raise AssertionError(f"{package.ref} is damaged: {problems}")
            packages[package.ref] = {path.name: path.read_bytes() for path in package.path.iterdir()}
    paths = (str(path.relative_to(bank.path)) for path in bank.path.rglob("*"))
    return Seen(pointers, packages, frozenset(path for path in paths if not path.endswith((".lock", "task.json"))))


@dataclass(frozen=True)
class Expected:
    """An operation that nobody disturbed: the bank before and after it, both after `gc`, and its calls."""

    before: Seen
    after: Seen
    clean_before: Seen
    clean_after: Seen
    calls: int
    seconds: float


@contextmanager
def counted(stop_at: int = -1, calls: Calls = CALLS) -> Iterator[Callable[[], int]]:
    """Count calls, and kill this process at one of them: `stop_at` is twice its number, plus one for after it."""
    number = itertools.count()
    last = -1

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal last
            last = here = next(number)
            if 2 * here == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **options)
            finally:
                if 2 * here + 1 == stop_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    patches = [mock.patch.object(module, name, wrap(getattr(module, name))) for module, name in calls]
    supported = {getattr(os, name) for module, name in calls if module is os}
    with (
        mock.patch.object(os, "supports_dir_fd", os.supports_dir_fd | supported),
        mock.patch.object(os, "supports_follow_symlinks", os.supports_follow_symlinks | supported),
    ):
        for patch in patches:
            patch.start()
        try:
            yield lambda: last + 1
        finally:
            for patch in patches:
                patch.stop()


def undisturbed(name: str, template: Path, folder: Path) -> Expected:
    """Run an operation in peace."""

    def after(gc: bool, operate: bool) -> Seen:
        bank = fresh(template, folder)
        if operate:
            OPERATIONS[name](bank)
        if gc:
            bank.gc(older_than_seconds=0)
        return look(bank)

    def count() -> int:
        with counted() as calls:
            OPERATIONS[name](Bank.open(folder))
            return calls()

    def measure() -> float:
        bank, began = Bank.open(folder), time.perf_counter()
        OPERATIONS[name](bank)
        return time.perf_counter() - began

    found = []
    for function in (count, measure):
        fresh(template, folder)
        outcome = in_child(function)
        if outcome.ended != "returned":
            raise AssertionError(f"{name}: {outcome.summary} {outcome.trace}")
        found.append(outcome.value)
    seen = [after(gc, operate) for gc, operate in itertools.product((False, True), (False, True))]
    return Expected(*seen, *found)


def fresh(template: Path, folder: Path) -> Bank:
    """Copy the template to the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return Bank.open(folder)


def judge(expected: Expected, folder: Path, returned: bool) -> list[str]:
    """Return what is wrong with a bank whose writer was killed; a sentence each."""
    bank = Bank.open(folder)
    wrong = []
    try:
        seen = look(bank)
    except (AdapterbankError, AssertionError, OSError) as error:
        return [f"The bank cannot be read: {type(error).__name__}: {error}"]
    kept = expected.before.packages.keys() & expected.after.packages.keys()
    for ref in sorted(expected.before.packages):
        if ref in seen.packages and seen.packages[ref] != expected.before.packages[ref]:
            wrong.append(f"{ref} has other content.")
        if ref not in seen.packages and ref in kept:
            wrong.append(f"{ref} is lost.")
    for task in {*seen.pointers, *expected.before.pointers, *expected.after.pointers}:
        nothing: tuple[int | None, list[int]] = (None, [])
        default, versions = seen.pointers.get(task, nothing)
        allowed = {side.pointers.get(task, nothing)[0] for side in (expected.before, expected.after)}
        if returned:
            allowed = {expected.after.pointers.get(task, nothing)[0]}
        if default not in allowed or (default is not None and default not in versions):
            wrong.append(f"The default of {task} is {default} among {versions}; allowed: {allowed}.")
    try:
        bank.gc(older_than_seconds=0)
        clean = look(bank)
        for side in (expected.clean_after,) if returned else (expected.clean_before, expected.clean_after):
            if clean.paths == side.paths and clean.pointers == side.pointers:
                break
        else:
            less, more = (sorted(clean.paths - side.paths) for side in (expected.clean_after, expected.clean_before))
            wrong.append(f"Left over after gc: {less} (done) or {more} (not done); pointers {clean.pointers}.")
        version = put(bank, "many", 77)
        if bank.default("many") != version or bank.get("many").verify():
            wrong.append("The next put is not served.")
    except (AdapterbankError, AssertionError, OSError) as error:
        wrong.append(f"gc or the next put failed: {type(error).__name__}: {error}")
    return wrong


def disturb(folder: Path, name: str, moment: float, step: int) -> None:
    """Run an operation that is killed at a call, or with a step below zero after as many seconds.

    The timer is the kernel's. Its signal ends the process as SIGKILL does: no handler, no clean-up.
    """
    if step >= 0:
        with counted(step):
            OPERATIONS[name](Bank.open(folder))
        return
    bank = Bank.open(folder)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(moment, 1e-6))
    OPERATIONS[name](bank)
    signal.setitimer(signal.ITIMER_REAL, 0)


def draw(case: Case, expected: dict[str, Expected], steps: list[tuple[str, int]]) -> tuple[str, float, int]:
    """Choose an operation and when it is killed: in turns at the next step of all, and at a random moment."""
    if case.number % 2:
        name, step = steps[case.number // 2 % len(steps)]
        return name, 0.0, step
    name = case.random.choice([*OPERATIONS])
    return name, case.random.uniform(0, 1.2 * expected[name].seconds), -1


def run(stage: Stage) -> None:
    """Kill writers and judge what they leave."""
    template, folder = stage.folder / "template", stage.folder / "bank"
    make(template)
    expected = {name: undisturbed(name, template, folder) for name in OPERATIONS}
    steps = [(name, step) for name, one in expected.items() for step in range(2 * one.calls)]
    random.Random(stage.seed).shuffle(steps)
    stage.note("steps of all writers at which one is killed", len(steps))
    killed = 0
    for case in stage.cases():
        name, moment, step = how = tuple(stage.repeated.get("how", draw(case, expected, steps)))
        fresh(template, folder)
        outcome = in_child(partial(disturb, folder, *how))
        killed += outcome.ended == "died"
        if outcome.ended not in ("returned", "died"):
            stage.fail(case, f"{name}: {outcome.summary}", how=how, trace=outcome.trace)
            continue
        judged = in_child(partial(judge, expected[name], folder, outcome.ended == "returned"))
        wrong = judged.value if judged.ended == "returned" else [f"The check {judged.summary}", judged.trace]
        if wrong:
            place = f"at {moment:.6f} s" if step < 0 else f"{('before', 'after')[step % 2]} call {step // 2}"
            stage.fail(case, f"{name}, killed {place}: {' '.join(wrong)}", how=how, ended=outcome.summary)
    stage.note("writers that were killed before they were done", killed)


TRIAL = Trial(
    "bank_kills",
    "A writer of a bank that is killed at any moment damages and loses nothing, and leaves nothing that `gc` keeps.",
    full=2000,
    run=run,
    weight=4,
)
