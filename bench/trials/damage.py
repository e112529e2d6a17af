"""Every sort of file that a bank has, damaged; then the library and the command line on it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adapterbank.analysis import run_table
from adapterbank.api.opened import open_bank
from adapterbank.errors import AdapterbankError
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.jobs.run_store import RunStore
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.storage import cache, records
from adapterbank.storage.bank import Bank
from small_data import FAST, reviews, write
from trials import spoil, tiny
from trials.children import in_child
from trials.frame import Case, Stage, Trial, remove

SECONDS = 30
MEGABYTES = 256
"""Memory that a case may take beyond what the process had; every file is a few kilobytes."""
TEXT = "the big red fox was good"
KEY = "0" * 64


@dataclass(frozen=True)
class Sort:
    """A sort of file: where it is, what reads it, and whether a checksum would show that it was changed."""

    files: tuple[str, ...]
    """Patterns in the case's folder; the first match is damaged, all are candidates for a swap."""
    asks: tuple[str, ...]
    sealed: bool = True
    """Whether another answer without a word is a failure; otherwise any answer is right that is no crash."""
    optional: bool = False
    """Whether a bank may also be without it, so that its absence cannot be noticed."""
    shared: bool = False
    """Whether all tasks need the file; otherwise the healthy task must answer as before."""


PACKAGE = ("tasks", "show", "predict", "audit", "gc", "remove", "rollback", "evaluate", "library", "mirror")
SORTS = {
    "bank.json": Sort(("bank/bank.json",), PACKAGE, shared=True),
    "task.json": Sort(("bank/tasks/hurt/task.json", "bank/tasks/*/task.json"), PACKAGE),
    "manifest": Sort(("bank/tasks/hurt/2/manifest.json", "bank/tasks/*/*/manifest.json"), PACKAGE),
    "old manifest": Sort(("bank/tasks/hurt/1/manifest.json", "bank/tasks/*/*/manifest.json"), PACKAGE),
    "weights": Sort(("bank/tasks/hurt/2/weights.safetensors", "bank/tasks/*/*/weights.safetensors"), PACKAGE),
    "record": Sort(("bank/records/*.json",), ("records", "table", "train", "tasks"), optional=True),
    "ablation": Sort(("bank/records/ablations/*.json", "bank/records/*.json"), ("table",), optional=True),
    "run state": Sort(("bank/runs/*/state.json", "bank/records/*.json"), ("resume", "gc runs")),
    "run weights": Sort(("bank/runs/*/epoch-*.safetensors", "bank/tasks/*/*/weights*"), ("resume", "gc runs")),
    "keys.json": Sort(("bank/keys.json", "bank/records/*.json"), ("keys",), optional=True),
    "runs.sqlite3": Sort(("bank/serving/runs.sqlite3", "bank/records/*.json"), ("runs",), sealed=False),
    "cache": Sort(("cache/*.npz",), ("cache",)),
}


# --- what is asked ----------------------------------------------------------------------------------------


def library(place: Path) -> Any:
    """List the bank and read a package with its tensors."""
    bank = Bank.open(place / "bank")
    packages, problems = bank.listing()
    if problems:
        raise AdapterbankError(problems[0])
    tensors = bank.get("hurt").tensors()
    return [package.ref for package in packages], {name: digest(array) for name, array in tensors.items()}


def mirror(place: Path) -> Any:
    """Copy the bank as a server does that reads it from a URL, and list the copy."""
    made = Mirror(f"local://{place / 'bank'}")
    try:
        made.refresh_all()
        return library_at(made.path)
    finally:
        made.close()


def library_at(path: Path) -> Any:
    """Return the packages of a bank and the checksums of their weights."""
    packages, problems = Bank.open(path).listing()
    if problems:
        raise AdapterbankError(problems[0])
    return {package.ref: {name: digest(array) for name, array in package.tensors().items()} for package in packages}


def resume(place: Path) -> Any:
    """Continue the unfinished run; return the weights that come of it."""
    result = unfinished(place, resume=True)
    return {name: digest(array) for name, array in result.package.tensors().items()}


def unfinished(place: Path, **options: Any) -> Any:
    """Train, or begin to train, the task whose run is left unfinished."""
    bank = open_bank(place / "bank", str(place.parent / "encoder"), device="cpu")
    return bank.train("begun", reviews(), **{**FAST, "epochs": 4}, **options)


def again(place: Path) -> Any:
    """Train the same task a second time, which writes a record beside the first."""
    return tiny.train(place / "bank", place.parent / "encoder", "hurt").package.manifest.weights_sha256


def table(place: Path) -> Any:
    """Load the records as the report does."""
    found = run_table.load([place / "bank"])
    if found.problems:
        raise AdapterbankError(found.problems[0])
    return [row.record for row in found.rows], found.ablations


def cached(place: Path) -> Any:
    """Return an entry of the cache; one that counts as absent is right."""
    os.environ[cache.FOLDER] = str(place / "cache")
    found = cache.get(KEY)
    return "absent or right" if found is None else {name: digest(array) for name, array in found.items()}


def digest(array: np.ndarray) -> str:
    """Return a checksum of an array."""
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def shell(*words: str) -> Callable[[Path], tiny.Printed]:
    """Return a function that runs a command on the case's bank."""
    return lambda place: tiny.command(*words, "--bank", place / "bank")


ASKS: dict[str, Callable[[Path], Any]] = {
    "tasks": shell("tasks"),
    "show": shell("show", "--task", "hurt"),
    "predict": shell("predict", "--task", "hurt", "--text", TEXT),
    "predict good": shell("predict", "--task", "good", "--text", TEXT),
    "audit": shell("audit"),
    "gc": shell("gc"),
    "gc runs": shell("gc", "--runs"),
    "remove": shell("remove", "--task", "hurt", "--yes"),
    "rollback": shell("rollback", "--task", "hurt"),
    "evaluate": lambda place: tiny.command(
        "evaluate", "--task", "hurt", "--data", place.parent / "data.csv", "--bank", place / "bank"
    ),
    "keys": shell("keys", "list"),
    "library": library,
    "mirror": mirror,
    "records": lambda place: records.read_all(place / "bank" / "records"),
    "table": table,
    "train": again,
    "resume": resume,
    "runs": lambda place: len(RunStore(place / "bank" / "serving" / "runs.sqlite3").list()),
    "cache": cached,
}


ABSENT = ("absent", "dangling link", "a file for its folder")
"""Damages after which there is no file."""
CHANGES = ("gc", "gc runs", "remove", "rollback", "train", "resume")
"""Questions that change the bank; a case asks one of them at most, and last."""
FREE = ("gc", "gc runs", "remove")
"""Commands that say what they removed, which depends on what there was."""


def ask(names: list[str], place: Path) -> dict[str, tuple[str, Any]]:
    """Ask a bank; each answer is `said` with its value, `refused` with a sentence, or `crashed` with a trace."""
    answers: dict[str, tuple[str, Any]] = {}
    for name in names:
        print(name, flush=True)  # the last one is the one that hangs
        try:
            answers[name] = ("said", ASKS[name](place))
        except AdapterbankError as error:
            answers[name] = ("refused", str(error))
        except BaseException:
            answers[name] = ("crashed", traceback.format_exc()[-3000:])
    return answers


# --- what is right ----------------------------------------------------------------------------------------


def verdict(name: str, answer: tuple[str, Any], right: Any, judged: bool) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    kind, value = answer
    if kind == "crashed":
        return f"{name} ended with a traceback: {value.strip().splitlines()[-1]}"
    if kind == "refused":
        if name == "cache":
            return f"A damaged entry of the cache failed the caller: {value}"
        return "" if value.strip() else f"{name} was refused without a word."
    if value == right or (name in FREE and value.status == 0) or (name == "cache" and value == "absent or right"):
        return ""
    if isinstance(value, tiny.Printed):
        said = (value.err + value.out).strip()
        if "Traceback" in said:
            return f"{name} printed a traceback."
        if value.status or value.err.strip():
            return "" if said and len(value.err.splitlines()) <= 3 else f"{name} explained itself badly: {said[:300]!r}"
    return f"{name} gave another answer in silence: {value!r} instead of {right!r}"[:600] if judged else ""


def make(stage: Stage) -> Path:
    """Create the folder that every case starts from: a bank with every sort of file, and a cache."""
    place = stage.folder / "case"
    encoder = tiny.encoder(stage.folder)
    write(stage.folder / "data.csv", reviews())
    for name, seed in (("good", 0), ("hurt", 0), ("hurt", 1)):
        tiny.train(place / "bank", encoder, name, seed=seed)
    bank = open_bank(place / "bank", str(encoder), device="cpu")
    bank.ablate("hurt", reviews())
    Keys(place / "bank" / "keys.json").add("mine", ["predict"], ["good"], 10)
    data = {"format": "csv", "bytes": 1, "sha256": "0" * 64}
    RunStore(place / "bank" / "serving" / "runs.sqlite3").add("good", {"epochs": 1}, data, "mine")
    os.environ[cache.FOLDER] = str(place / "cache")
    cache.put(KEY, {"tokens": np.arange(1000), "lengths": np.ones(10)})

    def stop(progress: Any) -> None:
        if list((place / "bank" / "runs").glob("*/state.json")):
            os._exit(0)

    in_child(partial(unfinished, place, watch=stop))
    template = stage.folder / "template"
    place.rename(template)
    return template


def fresh(template: Path, place: Path) -> None:
    """Copy the template to the case's place, which is always the same, as messages name it."""
    if place.is_symlink() or place.exists():
        remove(place)
    shutil.copytree(template, place)


def draw(case: Case) -> tuple[str, str, list[str]]:
    """Choose a sort of file, its damage and two or three questions."""
    name = case.random.choice([*SORTS])
    sort = SORTS[name]
    ways = [*spoil.CONTENT, *spoil.PLACE]
    if sort.files[0].count("/") == 1:
        ways.remove("a file for its folder")  # that folder is the whole bank
    way = case.random.choice(ways)
    asks = [one for one in sort.asks if one != "mirror" or way in spoil.CONTENT]  # a URL has neither pipes nor links
    asks = case.random.sample(asks, min(2, len(asks)))
    asks = [one for one in asks if one not in CHANGES] + [one for one in asks if one in CHANGES][:1]
    return name, way, ([] if sort.shared or case.random.random() < 0.7 else ["predict good"]) + asks


def hurt(place: Path, sort: Sort, way: str, draw: random.Random) -> Path:
    """Damage a file of a sort; return its path."""
    found = [sorted(place.glob(pattern)) for pattern in sort.files]
    path = found[0][0]
    others = found[-1] if len(found[-1]) > 1 else sorted((place / "bank").rglob("*.json"))
    (spoil.CONTENT | spoil.PLACE)[way](path, draw, others)
    return path


def run(stage: Stage) -> None:
    """Damage files and ask."""
    template, place = make(stage), stage.folder / "case"
    right = {}
    for name in ASKS:  # here, so that the children find everything imported
        fresh(template, place)
        with contextlib.redirect_stdout(io.StringIO()):
            (right[name],) = ask([name], place).values()
        if right[name][0] != "said":
            raise AssertionError(f"{name} fails on an intact bank: {right[name]}")
    if os.geteuid() == 0:
        stage.note("unreadable files", "not tried: root reads every file")
        spoil.PLACE.pop("unreadable", None)
    highest = 0.0
    for case in stage.cases():
        sort, way, asks = draw(case)
        fresh(template, place)
        path = hurt(place, SORTS[sort], way, case.random)
        content = path.read_bytes() if path.is_file() and path.stat().st_size < 20_000 else b""
        outcome = in_child(partial(ask, asks, place), seconds=SECONDS, megabytes=4 * MEGABYTES)
        highest = max(highest, outcome.megabytes)
        judged = SORTS[sort].sealed and not (SORTS[sort].optional and way in ABSENT)
        wrong = judge(outcome, asks, judged, right)
        if not healthy(template, place):
            wrong.append("A file of the healthy task was changed.")
        if wrong:
            evidence = {"sort": sort, "way": way, "asks": asks, "content": content, "answers": outcome.value}
            stage.fail(case, f"{sort}, {way}: {wrong[0]}", wrong=wrong, **evidence)
    stage.note("highest memory of a case above the start, MiB", round(highest))


def healthy(template: Path, place: Path) -> bool:
    """Return whether the files of the healthy task are what they were."""
    found = (template / "bank" / "tasks" / "good").rglob("*.*")
    return all(path.read_bytes() == (place / path.relative_to(template)).read_bytes() for path in found)


def judge(outcome: Any, asks: list[str], judged: bool, right: dict[str, tuple[str, Any]]) -> list[str]:
    """Return what is wrong with a case; a sentence each."""
    if outcome.unfinished:
        return outcome.unfinished
    wrong = []
    for name in asks:
        if name == "predict good" and outcome.value[name] != right[name]:
            wrong.append(f"The healthy task gave another answer: {outcome.value[name]}"[:400])
        elif problem := verdict(name, outcome.value[name], right[name][1], judged):
            wrong.append(problem)
    if outcome.megabytes > MEGABYTES:
        wrong.append(f"{', '.join(asks)} took {outcome.megabytes:.0f} MiB.")
    return wrong


TRIAL = Trial(
    "damage",
    "A damaged file of a bank gives the right answer or one clear error: never another answer, a crash or a hang.",
    full=10_000,
    run=run,
    weight=9,
)
