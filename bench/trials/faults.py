"""Faults while serving: each is made, must be named, and heals; all the while the healthy tasks answer.

The table's notes say how each fault was made: a small file system of the server's own where the system allows one
(`unshare`), else the error injected into the server's calls.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from adapterbank.storage.bank import Bank
from trials import inject
from trials.frame import Stage, Trial
from trials.http_attacks import TABLE
from trials.scene import HEALED_WITHIN, Fault, Scene, Watcher
from trials.server import KINDS, Server, TrialBank, until

DISK = 24
"""Megabytes of the small file system."""
HANDLES = 4
"""File handles that are left."""
MEMORY = 40 << 20
"""Bytes of address space that are left."""


# --- a FIFO in place of a file


def fifo(path_of: Callable[[Scene], Path]) -> Callable[[Scene], None]:
    """Return a fault that puts a FIFO in place of a file of the victim."""

    def happen(scene: Scene) -> None:
        path = path_of(scene)
        aside = scene.known.folder / "aside"
        os.rename(path, aside)
        os.mkfifo(path)
        scene.check(lambda: scene.listed("victim"), "the task is listed as a problem")
        version = scene.known.put("other", 0)
        scene.check(lambda: scene.serves("other", version), "a change of another task is served meanwhile")
        os.replace(aside, path)
        scene.check(lambda: scene.serves("victim"), "the task is served again", HEALED_WITHIN)

    return happen


def stall(scene: Scene) -> None:
    """Make every call on the victim's files wait, as a network disk does that is gone."""
    flag = scene.known.folder / "stalled"
    flag.touch()
    version = scene.known.put("victim", 0)
    scene.check(scene.stalled, "readiness, metrics and log name what stands still")
    other = scene.known.put("other", 0)
    scene.check(lambda: scene.serves("other", other), "a change of another task is served meanwhile")
    flag.unlink()
    scene.check(lambda: scene.serves("victim", version), "the task is served again", HEALED_WITHIN)


def stop_stalled(scene: Scene) -> None:
    """Stop the server while a disk stands still."""
    flag = scene.known.folder / "stalled"
    flag.touch()
    scene.known.put("victim", 0)
    scene.check(scene.stalled, "readiness, metrics and log name what stands still")
    scene.watcher.end()
    stop(scene)


# --- a disk that is full or read-only


@cache
def own_disk() -> bool:
    """Whether this user may give a process a small file system of its own."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(words, capture_output=True).returncode == 0


def disk_way() -> str:
    """Return how a disk is filled or protected here."""
    return f"a file system of {DISK} MB (unshare, tmpfs)" if own_disk() else INJECTED


def on_disk(known: TrialBank, how: str, *, read_only: bool = False) -> Mapping[str, Any]:
    """Start the server with its bank on a file system of its own, or with an injected error."""
    if not own_disk():
        if read_only:
            (known.folder / "fault").write_text("EROFS")
        return injected(known, how)
    (known.folder / "disk").mkdir()
    protected = ' && mount -o remount,ro "$0/disk"' if read_only else ""
    steps = f'mount -t tmpfs -o size={DISK}m none "$0/disk" && cp -a "$0/bank" "$0/disk/"{protected} && exec "$@"'
    return {"wrap": ["unshare", "-rm", "sh", "-c", steps, str(known.folder)], "bank": known.folder / "disk" / "bank"}


def injected(known: TrialBank, how: str) -> Mapping[str, Any]:
    """Start the server so that an error can be injected."""
    return {"prelude": inject.errors(known.folder / "fault")}


def bank_on_disk(known: TrialBank, server: Server, how: str) -> Path:
    """Return the bank on the server's own file system, as this process reaches it."""
    return Path(f"/proc/{server.process.pid}/root{known.folder}/disk/bank") if own_disk() else known.bank.path


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Fill the disk for a `with`."""
    flag, filler = scene.known.folder / "fault", scene.bank.parent / "filler"
    if not own_disk():
        flag.write_text("ENOSPC")
        yield
        flag.unlink()
        return
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    yield
    filler.unlink()


def full_disk(scene: Scene) -> None:
    """Fill the disk; remove a task, which must work there."""
    with full(scene):
        refused = scene.status("POST", "/v1/tasks/new/train?epochs=1", TABLE.encode())
        if refused not in (429, 503):
            scene.fail(f"training on a full disk got {refused}, not 429 or 503")
        if own_disk() and (status := scene.status("DELETE", "/v1/tasks/spare")) != 200:
            scene.fail(f"removing a task, which frees space, got {status} on a full disk")
        scene.check(lambda: scene.serves("victim"), "a task of the full disk answers")
    version = scene.known.put_into(Bank.open(scene.bank), "victim", 0)
    scene.check(lambda: scene.serves("victim", version), "a new version is served", HEALED_WITHIN)


def refuses_changes(scene: Scene) -> None:
    """Check what a server answers that cannot write to its bank."""
    for method, path, body in (
        ("DELETE", "/v1/tasks/spare", None),
        ("POST", "/v1/tasks/spare/rollback", None),
        ("POST", "/v1/tasks/new/train?epochs=1", TABLE.encode()),
    ):
        status = scene.status(method, path, body)
        if status not in (409, 503):
            scene.fail(f"{method} {path} got {status}, not 409 or 503")
    scene.check(lambda: scene.serves("victim"), "a task of the read-only disk answers")


def read_only(scene: Scene) -> None:
    """Start on a disk that is read-only, and make it writable."""
    refuses_changes(scene)
    if own_disk():
        pid, where = str(scene.server.process.pid), f"{scene.known.folder}/disk"
        enter = ["nsenter", "-t", pid, "-U", "-m", "--preserve-credentials"]
        subprocess.run([*enter, "mount", "-o", "remount,rw", where], check=True)
    else:
        (scene.known.folder / "fault").unlink()
    scene.check(lambda: scene.status("DELETE", "/v1/tasks/spare") == 200, "a task can be removed", HEALED_WITHIN)


def turns_read_only(scene: Scene) -> None:
    """Make the disk read-only under the server."""
    flag = scene.known.folder / "fault"
    flag.write_text("EROFS")
    refuses_changes(scene)
    flag.unlink()
    scene.check(lambda: scene.status("DELETE", "/v1/tasks/spare") == 200, "a task can be removed", HEALED_WITHIN)
    status = scene.status("POST", "/v1/tasks/new/train?epochs=1", TABLE.encode())
    if status != 202:
        scene.fail(f"training got {status} on the healed disk, not 202")


# --- few handles, little memory, a killed worker


def few_handles(scene: Scene) -> None:
    """Leave the server a few file handles, and take them."""
    pid = scene.server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (int(scene.server.figures()["files"]) + HANDLES, before[1]))
    taken = [socket.create_connection(("127.0.0.1", scene.server.port)) for _ in range(20)]
    time.sleep(0.5)
    errors = len(scene.server.errors)
    version = scene.known.put("victim", 0)
    time.sleep(2)
    scene.check(lambda: len(scene.server.errors) > errors, "the log names what cannot be opened")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for one in taken:
        one.close()
    scene.check(lambda: scene.serves("victim", version), "the task's new version is served", HEALED_WITHIN)


def little_memory(scene: Scene) -> None:
    """Leave the server less memory than a new task needs."""
    pid = scene.server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    version = scene.known.put("victim", 0, size=2048, depth=2)
    scene.check(lambda: scene.listed("victim"), "the task is listed as a problem")
    resource.prlimit(pid, resource.RLIMIT_AS, before)
    scene.check(lambda: scene.serves("victim", version), "the task is served", HEALED_WITHIN)


def killed_worker(scene: Scene) -> None:
    """Kill the process of a training run; the run goes on."""
    status, run = scene.server.ask("POST", "/v1/tasks/new/train?epochs=60&max_length=16&patience=0", TABLE.encode())
    if status != 202:
        scene.fail(f"training got {status}: {run}")
        return
    state = lambda: scene.server.ask("GET", f"/v1/runs/{run['id']}")[1]  # noqa: E731
    scene.check(lambda: len(state()["history"]) > 3, "the run trains", 120)
    killed = [os.kill(pid, signal.SIGKILL) for pid in workers(scene.server.process.pid)]
    if not killed:
        scene.fail("there was no worker to kill")
    scene.check(lambda: state()["state"] == "done", "the run ends as done", 180)
    found = state()
    if found["version"] != 1 or len(found["history"]) != 60 or not found["notes"]:
        scene.fail(f"version {found['version']}, {len(found['history'])} epochs, notes {found['notes']}")


def workers(pid: int) -> list[int]:
    """Return the processes of training runs that a server has started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                if b"serving.jobs.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def stallable(known: TrialBank, how: str) -> Mapping[str, Any]:
    """Start the server so that the victim's files can stand still."""
    return {"prelude": inject.stall("/tasks/victim", known.folder / "stalled")}


INJECTED = "errors injected into the server's calls"
WAITING = "calls on the task's files wait in the server"
FAULTS = (
    Fault("a full disk", full_disk, disk_way, on_disk, bank_on_disk),
    Fault("a FIFO as manifest.json", fifo(lambda scene: scene.victim / "1" / "manifest.json")),
    Fault("a killed training worker", killed_worker, lambda: "SIGKILL"),
    Fault("little memory", little_memory, lambda: f"prlimit: {MEMORY >> 20} MB more address space than is in use"),
    Fault("a stalled disk", stall, lambda: WAITING, stallable),
    Fault("few file handles", few_handles, lambda: f"prlimit: {HANDLES} more than are open"),
    Fault("a read-only disk", read_only, disk_way, partial(on_disk, read_only=True), bank_on_disk),
    Fault("a disk that turns read-only", turns_read_only, lambda: INJECTED, injected),
    Fault("a FIFO as the weights", fifo(lambda scene: scene.victim / "1" / "weights.safetensors")),
    Fault("a FIFO as task.json", fifo(lambda scene: scene.victim / "task.json")),
    Fault("a stalled disk at the end", stop_stalled, lambda: WAITING, stallable),
)


def stop(scene: Scene) -> None:
    """Ask the server to stop, unless it has."""
    if scene.server.process.poll() is None and not scene.server.stop():
        scene.fail("the server did not stop within its time")


def run(stage: Stage) -> None:
    """See the module's docstring."""
    for case in stage.cases():
        fault = FAULTS[case.number % len(FAULTS)]
        folder = stage.folder / str(case.number)
        known = TrialBank(folder, seed=stage.seed, texts=8)
        for kind in KINDS:
            known.put(f"healthy-{kind}", 0, kind)
        for name in ("victim", "spare", "spare", "other"):
            known.put(name, 0)
        how = fault.way()
        options = {"bank": known.bank.path, **fault.start(known, how)}
        with contextlib.closing(Server(**options)) as server:
            watcher = Watcher(known, server)
            scene = Scene(stage, case, fault, known, server, watcher, how)
            watcher.start()
            until(lambda w=watcher: w.asked > 8, 30)  # type: ignore[misc]
            try:
                fault.happen(scene)
            finally:
                watcher.end()
            for what in watcher.problems[:3]:
                scene.fail(f"a healthy task did not answer: {what}")
            if server.process.poll() not in (None, 0):
                scene.fail(f"the server ended with {server.process.returncode}")
            stop(scene)
            told = {"asked": watcher.asked, "slowest, s": round(watcher.slowest, 2), **scene.seconds}
            stage.note(fault.name, f"made by: {how}; {told}")


TRIAL = Trial(
    name="faults",
    promise=(
        "While a disk is full, read-only or stands still, handles or memory are few, a FIFO stands in place of a file "
        "or a worker is killed, the healthy tasks answer, the fault is named, and it heals."
    ),
    full=len(FAULTS),
    run=run,
    weight=2.0,
)
