"""The trial campaign: kills, damage, forgery, hostile uploads and HTTP, faults and a soak, from a seed.

    python bench/trial.py --minutes 2                    # a short one, as in `make test`
    python bench/trial.py --minutes 60 --out trial.json  # every trial with its full count
    python bench/trial.py --repeat trial-failures/damage-0-17.json

Prints a table of tries and failures, exits with 1 after any failure, and writes a file for each that repeats it.
Needs Linux and the development environment; no network, no GPU, no root. Ctrl-C prints the table so far.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # a fork of a process with one thread is safe
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from trials.frame import Stage, Trial, run_all  # noqa: E402

NAMES = (
    *("bank_kills", "train_kills", "damage", "forgery", "uploads"),
    *("hostile_http", "served_training", "faults", "soak"),
)
"""The modules of trials/, in the order in which they run; each has a `TRIAL`."""
EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def find(names: list[str]) -> list[Trial]:
    """Return the trials with these names, in their order; all of them without a name."""
    unknown = set(names) - {*NAMES}
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no such trial. Choose from: {', '.join(NAMES)}")
    return [importlib.import_module(f"trials.{name}").TRIAL for name in NAMES if not names or name in names]


class Progress:
    """One line on the trial that runs: in place on a terminal, every ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, time.monotonic()

    def __call__(self, stage: Stage) -> None:
        """Show where a stage stands, unless that was done just now."""
        now = time.monotonic()
        if now - self.last < (0.2 if self.console.is_terminal else EVERY):
            return
        self.last = now
        of = f" of {stage.trial.full:,}" if stage.trial.full else ""
        line = f"{stage.trial.name}: {stage.tries:,}{of} tries, {len(stage.failures)} failures, {stage.left:.0f} s left"
        if self.console.is_terminal:
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def table(stages: list[Stage]) -> Table:
    """Return the table of tries and failures."""
    made = Table("trial", "promise", "tries", "failures", "seconds")
    for stage in stages:
        tries = f"{stage.tries:,}" + (f" of {stage.trial.full:,}" if stage.trial.full else "")
        seconds = stage.took or time.monotonic() - stage.began
        made.add_row(stage.trial.name, stage.trial.promise, tries, str(len(stage.failures)), f"{seconds:.0f}")
    return made


def told(stages: list[Stage], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the campaign's result as JSON holds it."""
    import torch

    from adapterbank.runtime import stamp

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "cores": len(os.sched_getaffinity(0)),
        "stamp": stamp(torch.device("cpu"), torch.float32),
        "trials": [
            {
                "trial": stage.trial.name,
                "promise": stage.trial.promise,
                "tries": stage.tries,
                "full": stage.trial.full,
                "failures": stage.failures,
                "seconds": round(stage.took, 1),
                "notes": stage.notes,
            }
            for stage in stages
        ],
    }


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="time for all cases, divided among the trials (default 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="every case follows from it (default 0)")
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"these trials alone: {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the result here")
    parser.add_argument("--failures", type=Path, default=Path("trial-failures"), help="folder for what failed")
    parser.add_argument("--repeat", type=Path, metavar="FAILURE.json", help="run the case of this failure alone")
    parser.add_argument("--list", action="store_true", help="print the trials and their promises, and run nothing")
    return parser.parse_args()


def main() -> int:
    """Run the campaign; return its exit status."""
    arguments = options()
    if arguments.list:
        print("\n".join(f"{trial.name}: {trial.promise}" for trial in find([])))
        return 0
    names, repeat = [name for name in arguments.only.split(",") if name], None
    if arguments.repeat:
        repeat = json.loads(arguments.repeat.read_text(encoding="utf-8"))
        names, arguments.seed = [repeat["trial"]], int(repeat["seed"])
    signals: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        signals.append(number)  # noted, because code that is interrupted may raise another error in its place
        raise KeyboardInterrupt

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)
    console, stages = Console(), []
    try:
        for stage in run_all(
            find(names),
            minutes=arguments.minutes,
            seed=arguments.seed,
            failures_to=arguments.failures.resolve(),
            repeat=repeat,
            show=Progress(Console(stderr=True)),
        ):
            stages.append(stage)
    except KeyboardInterrupt:
        pass
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    console.print(table(stages))
    for stage in stages:
        for name, value in stage.notes.items():
            console.print(f"{stage.trial.name}: {name}: {value}", highlight=False, markup=False)
        for failure in stage.failures[:20]:
            console.print(
                f"{arguments.failures / failure['file']}: {failure['what']}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        if len(stage.failures) > 20:
            console.print(f"… and {len(stage.failures) - 20} more of {stage.trial.name}")
    if arguments.out:
        arguments.out.write_text(json.dumps(told(stages, arguments), indent=1) + "\n", encoding="utf-8")
    return 130 if signals else int(any(stage.failures for stage in stages))


if __name__ == "__main__":
    sys.exit(main())
