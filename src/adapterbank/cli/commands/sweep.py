"""`adapterbank sweep`: run a study, a YAML file of options whose lists multiply."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from adapterbank.cli.commands.catalog import DataRoot
from adapterbank.cli.console import AsJson, counted, print_json, print_table, say
from adapterbank.config import Config
from adapterbank.errors import ConfigError
from adapterbank.storage.bank import Bank
from adapterbank.storage.record_store import open_store
from adapterbank.studies import grid

HELP = """Run a study: a YAML file of options in which lists multiply. What has a record is not run again.

Runs on the same data train together. A run that fails is recorded with the reason, and the others go on; the exit
status is 1 then. Stopped or killed, the same command goes on where it was. Files for the tables and figures of the
paper lie in configs/.

Example: adapterbank sweep configs/table1.yaml --bank bank --data-root data --dry-run

Example: adapterbank sweep configs/table1.yaml --records records --data-root data --engine ray

Python: adapterbank.open_bank("bank", backbone="minilm").sweep("study.yaml")
"""

_ENGINES = ("local", "ray")


def command(
    study: Annotated[str, typer.Argument(metavar="FILE", help="The study, a YAML file.", show_default=False)],
    bank: Annotated[
        str | None, typer.Option("--bank", help="The bank's folder; made if packages are kept.", show_default=False)
    ] = None,
    records: Annotated[
        str | None, typer.Option("--records", help="Folder or URL of the records (default: the bank's).")
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="Which packages go into the bank: none, best (on dev, by task), all.")
    ] = "none",
    data_root: DataRoot = None,
    backbone: Annotated[str | None, typer.Option("--backbone", help="The encoder, for all runs.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N, for all runs.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="auto, fp32 or bf16, for all runs.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and which have records; run none.")] = False,
    limit_runs: Annotated[int | None, typer.Option("--limit-runs", help="New runs to begin at most.", min=0)] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs that share a batch at most.", min=1, max=64)] = 8,
    engine: Annotated[str, typer.Option("--engine", help="Where runs are run: local or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="The cluster (default: as RAY_ADDRESS says, or one made here).")
    ] = None,
    cpus_per_worker: Annotated[int, typer.Option("--cpus-per-worker", help="Ray: CPUs of a worker.", min=1)] = 1,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    given = {"data_root": data_root, "backbone": backbone, "device": device, "precision": precision}
    overrides = {name: value for name, value in given.items() if value is not None}
    known = bank is not None and Path(bank, "bank.json").exists()
    base = {"backbone": Bank.open(bank).backbone["name"]} if bank is not None and known else {}
    made = grid.read(study, overrides, base)
    if engine not in _ENGINES:
        raise ConfigError([f"engine is {engine!r}; it must be one of {', '.join(_ENGINES)}."])
    if bank is None and records is None:
        raise ConfigError(["Give --bank, or --records for a sweep that keeps no packages."])
    if dry_run:
        where = records if records is not None else str(Path(bank or "", "records"))
        _list(made, where, json)
        return
    from adapterbank.cli.live_table import LiveTable
    from adapterbank.studies.sweep import make_context, sweep

    context = make_context(bank, records, keep=keep, at_once=jobs)
    runner = _on_ray(ray_address, cpus_per_worker) if engine == "ray" else None
    board = LiveTable(made.runs, quiet=json)
    context = replace(context, stage=board.stage)
    try:
        with board:
            outcome = sweep(made, context, engine=runner, watch=board.watch, limit=limit_runs, retry=retry_failed)
    except KeyboardInterrupt:
        say(f"adapterbank: stopped; {board.standing()}. What has ended has its record. To go on:\n  {_again()}")
        raise typer.Exit(130) from None
    if json:
        print_json(outcome.to_json())
    else:
        _summary(outcome, made)
    if outcome.progress.failures:
        raise typer.Exit(1)


def _on_ray(address: str | None, cpus: int) -> Any:
    from adapterbank.studies.ray_sweep import ray_engine

    return ray_engine(address, cpus=cpus)


def _again() -> str:
    words = [word for word in sys.argv[1:] if word != "--retry-failed"]
    return shlex.join(["adapterbank", *words])


def _list(study: grid.Study, where: str, json: bool) -> None:
    """List the runs, by what their records say of their options."""
    known = grid.latest(open_store(where).all().values())
    marks = {run: "failed" if "failure" in record else "done" for run, record in known.items()}
    differs = grid.differing(study.runs)
    rows = [(marks.get(run, "to run"), grid.describe(run, differs), run) for run in study.runs]
    if json:
        listed = [{"state": mark, "config": run.to_json()} for mark, _, run in rows]
        print_json({"runs": listed, "further": study.further})
        return
    print_table(["state", "run"], [[mark, text] for mark, text, _ in rows])
    counts = [f"{sum(mark == kind for mark, _, _ in rows)} {kind}" for kind in ("done", "failed", "to run")]
    further = f"; then up to {study.further} more of what is chosen" if study.further else ""
    typer.echo(f"\n{counted(len(rows), 'run')}: {', '.join(counts)}{further}")


def _summary(outcome: Any, study: grid.Study) -> None:
    progress, differs = outcome.progress, grid.differing(study.runs)
    for config, failure in progress.failures:
        say(f"failed: {grid.describe(config, differs)}: {failure}")
    rows = [
        [name, one.record["config"]["task"], grid.describe(grid.options(one.record) or Config(), differs),
         *(_shown(one, split) for split in ("dev", "test"))]
        for name, one in outcome.choices
    ]  # fmt: skip
    if rows:
        print_table(["block", "task", "chosen", "dev", "test"], rows)
        typer.echo("")
    before = len(progress.failures) - progress.failed
    again = f" ({before} of a failure; --retry-failed runs those again)" if before else ""
    typer.echo(
        f"{counted(progress.total, 'run')}: {progress.known} had records{again}, {progress.done} done, "
        f"{progress.failed} failed, {progress.left} left"
    )


def _shown(one: Any, split: str) -> str:
    mean, sem = one.mean(split), one.sem(split)
    if mean is None:
        return "-"
    return f"{mean:.4f}" + (f" ± {sem:.4f} ({len(one.runs)})" if sem is not None else "")
