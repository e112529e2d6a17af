"""Training over HTTP: the server is killed while a run is queued, starts, trains or ends; the next server goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

from adapterbank.storage.bank import Bank
from trials.faults import workers
from trials.frame import Case, Stage, Trial
from trials.http_attacks import TABLE
from trials.server import Server, TrialBank, until

EPOCHS = 40
VARIANTS = ({"seed": 0, "size": 4}, {"seed": 1, "rank": 4, "method": "lora"})
"""Options of the runs; each is also trained once in peace."""
MOMENTS = ("queued", "start", "early", "middle", "end", "done")
"""When the server is killed: at once, as the worker starts, or at an epoch of the run."""
DONE_WITHIN = 240.0
"""Seconds within which a run that goes on must be done, on however busy a machine."""


class Line:
    """A bank and the server that serves it now; each of them is killed sooner or later."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.known = TrialBank(stage.folder, texts=4)
        self.server = Server(self.known.bank.path)
        stage.closing.callback(lambda: self.server.kill())
        self.kills = 0

    def submit(self, task: str, variant: int) -> str:
        """Queue a run; return its id."""
        options = {"epochs": EPOCHS, "max_length": 16, "patience": 0, "batch": 8, **VARIANTS[variant]}
        query = "&".join(f"{name}={value}" for name, value in options.items())
        status, run = self.server.ask("POST", f"/v1/tasks/{task}/train?{query}", TABLE.encode())
        if status != 202:
            raise RuntimeError(f"training got {status}: {run}")
        return str(run["id"])

    def run(self, id: str) -> dict[str, Any]:
        """Return the state of a run."""
        found: dict[str, Any] = self.server.ask("GET", f"/v1/runs/{id}")[1]
        return found

    def wait(self, id: str, moment: str, draw: random.Random) -> None:
        """Wait for the moment at which the server is killed."""
        pid = self.server.process.pid
        epoch = {"early": 1, "middle": draw.randrange(2, EPOCHS - 2), "end": EPOCHS - 1}.get(moment)
        if moment == "start":
            until(lambda: bool(workers(pid)), 30, every=0.002)
        elif epoch is not None:
            until(lambda: (run := self.run(id))["state"] != "queued" and _epochs(run) >= epoch, 120, every=0.005)
        elif moment == "done":
            until(lambda: self.run(id)["state"] == "done", 120, every=0.002)
        time.sleep(draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.5))))

    def kill(self, draw: random.Random) -> None:
        """Kill the server, at times with its worker, and start the next one."""
        children = workers(self.server.process.pid) if draw.random() < 0.3 else []
        os.kill(self.server.process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.server.process.wait()
        self.kills += 1
        self.server = Server(self.known.bank.path)


def _epochs(run: dict[str, Any]) -> int:
    return max([0, *(row["epoch"] for row in run["history"])])


def weights(bank: Bank, task: str) -> str:
    """Return the sha256 of a task's weights."""
    return bank.get(task).manifest.weights_sha256


def problems(line: Line, task: str, id: str, wanted: str) -> list[str]:
    """Return what is wrong with a run that has ended."""
    bank, run, found = line.known.bank, line.run(id), []
    if run["state"] != "done":
        return [f"the run is {run['state']}: {run.get('failure')}"]
    if (versions := bank.versions(task)) != [1]:
        found.append(f"the task has the versions {versions}")
    if run["version"] != 1:
        found.append(f"the run says that it made version {run['version']}")
    if (made := weights(bank, task)) != wanted:
        found.append(f"the weights differ: {made[:12]} instead of {wanted[:12]}")
    if (epochs := [row["epoch"] for row in run["history"]]) != [*range(1, EPOCHS + 1)]:
        found.append(f"the history has the epochs {epochs}")
    found += bank.get(task).verify()
    served = until(lambda: line.server.ask("GET", f"/v1/tasks/{task}")[0] == 200, 30)
    found += [] if served else ["the task is not served"]
    gone = until(lambda: not [*(bank.path / "serving" / "data").iterdir(), *bank.runs_path.glob("*")], 10)
    found += [] if gone else ["data or states of ended runs are left"]
    return found


def disturb(line: Line, case: Case, expected: list[str]) -> None:
    """Queue a run, kill servers under it, and compare what comes of it."""
    draw = case.random
    variant, task = draw.randrange(len(VARIANTS)), f"task-{case.number}"
    moments = [draw.choice(MOMENTS) for _ in range(draw.choice((1, 1, 1, 2)))]
    id = line.submit(task, variant)
    for moment in moments:
        line.wait(id, moment, draw)
        line.kill(draw)
    over = until(lambda: line.run(id)["state"] not in ("queued", "running"), DONE_WITHIN)
    wrong = problems(line, task, id, expected[variant]) if over else [f"the run is not done: {line.run(id)}"]
    for what in wrong:
        line.stage.fail(case, what, moments=moments, run=line.run(id), log=list(line.server.tail))


def run(stage: Stage) -> None:
    """See the module's docstring."""
    line = Line(stage)
    ids = [line.submit(f"peace-{variant}", variant) for variant in range(len(VARIANTS))]
    for id in ids:
        if not until(lambda one=id: line.run(one)["state"] == "done", DONE_WITHIN):  # type: ignore[misc]
            raise RuntimeError(f"a run in peace is not done: {line.run(id)}")
    expected = [weights(line.known.bank, f"peace-{variant}") for variant in range(len(VARIANTS))]
    for case in stage.cases():
        disturb(line, case, expected)
    stage.note("servers killed", line.kills)


TRIAL = Trial(
    name="served_training",
    promise=(
        "A training run over HTTP whose server is killed goes on with the next one and ends with the same bytes of "
        "weights, in one version."
    ),
    full=40,
    run=run,
    weight=5.0,
)
