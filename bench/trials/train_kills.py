"""Trainings and sweeps, killed up to three times and continued; the result is that of a run that nobody disturbed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adapterbank.api.opened import open_bank
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from small_data import FAST, reviews, write
from trials import tiny
from trials.bank_kills import Calls, counted
from trials.children import Outcome, in_child
from trials.frame import Case, Stage, Trial

WRITES: Calls = tuple((os, name) for name in ("mkdir", "rmdir", "unlink", "replace", "rename", "link", "fsync"))
"""The calls before and after which a run is killed."""
TIMES = ("created", "seconds", "examples_per_second", "notes")
"""Fields of a record that differ between two equal runs; the notes say that a run was resumed."""
TEXTS = ["the big cat was good", "a lazy dog", "why"]


@dataclass(frozen=True)
class Files:
    """Where a run finds its encoder and data, and its bank."""

    encoder: Path
    data: Path
    bank: Path


def train(files: Files, again: bool) -> None:
    """Train one task of four epochs."""
    options = {**FAST, "epochs": 4}
    open_bank(files.bank, str(files.encoder), device="cpu").train("one", str(files.data), resume=again, **options)


def sweep(files: Files, again: bool, *, at_once: int = 1) -> None:
    """Run a study of eight runs on two tasks and keep the best of each; a second call is the same call."""
    tasks = [{"task": name, "train": str(files.data), "dev": str(files.data)} for name in ("one", "two")]
    study = {**FAST, "task": tasks, "size": [4, 8], "seeds": 2}
    open_bank(files.bank, str(files.encoder), device="cpu").sweep(study, keep="best", jobs=at_once)


GROUPED = "sweep, three at once"
RUNS: dict[str, Callable[[Files, bool], None]] = {"train": train, "sweep": sweep, GROUPED: partial(sweep, at_once=3)}
ROUNDING = 1e-4
"""Runs that train together are grouped otherwise after a kill, which changes the last digits; see docs/studies.md."""


def look(bank: Path) -> dict[str, Any]:
    """Return what a run made: the weights of every version, the defaults, the records but for times."""
    found = Bank.open(bank)
    packages = [found.get(f"{name}@{version}") for name in found.names() for version in found.versions(name)]
    weights = {package.ref: package.manifest.weights_sha256 for package in packages}
    tensors = {package.ref: package.tensors() for package in packages}
    problems = [problem for name in found.names() for problem in found.get(name).verify()]
    rows = []
    for record in records.read_all(found.records_path):
        history = [{key: value for key, value in epoch.items() if key != "seconds"} for epoch in record["history"]]
        rows.append({key: value for key, value in record.items() if key not in TIMES} | {"history": history})
    rows.sort(key=lambda row: json.dumps(row["config"], sort_keys=True))
    left = sorted(str(path.relative_to(bank)) for path in (bank / "runs").rglob("*"))
    return {"weights": weights, "tensors": tensors, "problems": problems, "records": rows, "unfinished": left}


@dataclass(frozen=True)
class Expected:
    """A run that nobody disturbed."""

    result: dict[str, Any]
    calls: int
    seconds: float


def undisturbed(name: str, files: Files) -> Expected:
    """Run in peace, twice: to count the calls, and to measure the time."""

    def count() -> int:
        with counted(calls=WRITES) as calls:
            RUNS[name](files, False)
            return calls()

    def measure() -> float:
        began = time.perf_counter()
        RUNS[name](files, False)
        return time.perf_counter() - began

    found = []
    for function in (count, measure):
        shutil.rmtree(files.bank, ignore_errors=True)
        found.append(value_of(in_child(function)))
    return Expected(value_of(in_child(partial(look, files.bank))), *found)


def value_of(outcome: Outcome) -> Any:
    """Return what a child returned; raise if it did not."""
    if outcome.ended != "returned":
        raise AssertionError(f"{outcome.summary}\n{outcome.trace}\n{outcome.output}")
    return outcome.value


def disturb(name: str, files: Files, again: bool, moment: float, step: int) -> None:
    """Run and be killed at a call, or with a step below zero after as many seconds."""
    if step >= 0:
        with counted(step, WRITES):
            RUNS[name](files, again)
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(moment, 1e-6))
    RUNS[name](files, again)
    signal.setitimer(signal.ITIMER_REAL, 0)


def draw(case: Case, expected: dict[str, Expected]) -> tuple[str, list[tuple[float, int]]]:
    """Choose a run and when it is killed: one to three times, half of them at a call."""
    name = case.random.choice([*RUNS])
    kills = []
    for _ in range(case.random.choice((1, 1, 1, 2, 3))):
        if case.random.random() < 0.5:
            kills.append((0.0, case.random.randrange(2 * expected[name].calls)))
        else:
            kills.append((case.random.uniform(0, 1.1 * expected[name].seconds), -1))
    return name, kills


def equal(ours: Any, theirs: Any) -> bool:
    """Return whether two values of a record are equal up to rounding."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=ROUNDING, abs_tol=ROUNDING)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether two banks have the same versions, with weights that are equal up to rounding."""
    return ours.keys() == theirs.keys() and all(
        ours[ref].keys() == theirs[ref].keys()
        and all(np.allclose(ours[ref][name], theirs[ref][name], atol=ROUNDING) for name in ours[ref])
        for ref in ours
    )


def compare(expected: dict[str, Any], found: dict[str, Any], *, exact: bool) -> list[str]:
    """Return what differs, to the byte or else up to rounding; a sentence each."""
    same = found["weights"] == expected["weights"] if exact else close(found["tensors"], expected["tensors"])
    wrong = [] if same else [f"The weights are {found['weights']} instead of {expected['weights']}."]
    wrong += [f"{problem}." for problem in found["problems"]]
    if len(found["records"]) != len(expected["records"]):
        wrong.append(f"There are {len(found['records'])} records instead of {len(expected['records'])}.")
    for ours, theirs in zip(found["records"], expected["records"], strict=False):
        for key in ours.keys() | theirs.keys():
            if not (ours.get(key) == theirs.get(key) if exact else equal(ours.get(key), theirs.get(key))):
                wrong.append(f"A record differs in {key}: {ours.get(key)} instead of {theirs.get(key)}.")
    if found["unfinished"] != expected["unfinished"]:
        wrong.append(f"States of unfinished runs are left: {found['unfinished']}.")
    return wrong


def run(stage: Stage) -> None:
    """Kill runs, continue them, and compare."""
    data = write(stage.folder / "data.csv", reviews())
    files = Files(tiny.encoder(stage.folder), data, stage.folder / "bank")
    for begin in RUNS.values():  # here, so that the children find everything imported
        begin(files, False)
    expected = {name: undisturbed(name, files) for name in RUNS}
    for name, one in expected.items():
        stage.note(f"{name}: writes at which it is killed", one.calls)
    killed = 0
    for case in stage.cases():
        name, kills = stage.repeated.get("how", draw(case, expected))
        shutil.rmtree(files.bank, ignore_errors=True)
        for number, (moment, step) in enumerate(kills):
            outcome = in_child(partial(disturb, name, files, number > 0, moment, step), seconds=60)
            killed += outcome.ended == "died"
            if outcome.ended not in ("returned", "died"):
                break
        if outcome.ended == "died":
            outcome = in_child(partial(RUNS[name], files, True), seconds=60)
        if outcome.ended != "returned":
            stage.fail(case, f"{name}: {outcome.summary}", how=(name, kills), trace=outcome.trace)
            continue
        looked = in_child(partial(look, files.bank))
        exact = name != GROUPED
        wrong = compare(expected[name].result, looked.value, exact=exact) if looked.value else [looked.summary]
        if wrong:
            stage.fail(case, f"{name}: {wrong[0]}", how=(name, kills), wrong=wrong)
    stage.note("runs that were killed", killed)


TRIAL = Trial(
    "train_kills",
    "A training or sweep that is killed and continued ends with the same bytes of weights (runs that train together: "
    "equal up to rounding), one version and one record.",
    full=300,
    run=run,
    weight=3,
)
