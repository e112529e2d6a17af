"""`adapterbank sweep`: run a study, a YAML file that describes a grid of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapterbank.cli.console import format_count, print_json, print_message, print_table, print_text, rerun_command
from adapterbank.cli.options import AsJson, DataRoot, EngineName, RayAddress, Recomputed, bank_defaults, check_engine
from adapterbank.config import Config
from adapterbank.errors import ConfigError
from adapterbank.storage.record_store import open_store
from adapterbank.studies import grid

if TYPE_CHECKING:
    from adapterbank.studies.sweep import SweepContext, SweepOutcome

HELP = """Run a study: a YAML file that describes a grid of runs.

Lists of values in the file multiply. Runs on the same data train together. A run that has a record is not repeated, so
the same command continues a sweep that was stopped or killed. A run that fails is recorded with the reason while the
others continue, and the exit status is then 1. The folder configs/ has studies for the paper's tables and figures.

Example: adapterbank sweep configs/table1.yaml --bank bank --data-root data --dry-run

Example: adapterbank sweep configs/table1.yaml --records records --data-root data --engine ray

Python: adapterbank.open_bank("bank", backbone="minilm").sweep("study.yaml")
"""


def command(
    study: Annotated[str, typer.Argument(metavar="FILE", help="YAML file of the study.", show_default=False)],
    bank: Annotated[
        str | None, typer.Option("--bank", help="Bank folder; created if packages are kept.", show_default=False)
    ] = None,
    records: Annotated[
        str | None, typer.Option("--records", help="Folder or URL of the records (default: those of the bank).")
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="Packages to store in the bank: none, best (on dev, per task) or all.")
    ] = "none",
    data_root: DataRoot = None,
    backbone: Annotated[str | None, typer.Option("--backbone", help="Encoder of all runs.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device of all runs: auto, cpu, cuda or cuda:N.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Precision of all runs: auto, fp32, bf16 or int8.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and their states, and run nothing.")
    ] = False,
    limit_runs: Annotated[
        int | None, typer.Option("--limit-runs", help="Largest number of new runs to start.", min=0)
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Repeat runs that failed.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Largest number of runs that train together.", min=1, max=64)] = 8,
    recompute: Recomputed = "auto",
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    cpus_per_worker: Annotated[int, typer.Option("--cpus-per-worker", help="Ray: CPUs per worker.", min=1)] = 1,
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    given = {"data_root": data_root, "backbone": backbone, "device": device, "precision": precision}
    overrides = {name: value for name, value in given.items() if value is not None}
    made = grid.read(study, overrides, bank_defaults(bank))
    check_engine(engine)
    if bank is None and records is None:
        raise ConfigError(["bank is missing; give --bank, or --records for a sweep that stores no packages."])
    if dry_run:
        where = records if records is not None else str(Path(bank or "", "records"))
        _list(made, where, json)
        return
    from adapterbank.studies.sweep import make_context

    context = make_context(bank, records, keep=keep, at_once=jobs, recompute=recompute)
    runner = _on_ray(ray_address, cpus_per_worker) if engine == "ray" else None
    outcome = _run(made, context, quiet=json, engine=runner, limit=limit_runs, retry=retry_failed)
    if json:
        print_json(outcome.to_json())
    else:
        _summary(outcome, made)
    if outcome.progress.failures:
        raise typer.Exit(1)


def _run(study: grid.Study, context: SweepContext, *, quiet: bool, **options: Any) -> SweepOutcome:
    """Run the study with a live table; on Ctrl-C print the command that continues it."""
    from adapterbank.cli.live_table import LiveTable
    from adapterbank.studies.sweep import sweep

    table = LiveTable(study.runs, quiet=quiet)
    try:
        with table:
            return sweep(study, replace(context, stage=table.stage), watch=table.watch, **options)
    except KeyboardInterrupt:
        print_message(f"adapterbank: stopped; {table.counts()}. Every finished run has a record. To continue:")
        print_message(f"  {rerun_command(drop='--retry-failed')}")
        raise typer.Exit(130) from None


def _on_ray(address: str | None, cpus: int) -> Any:
    from adapterbank.studies.ray_sweep import ray_engine

    return ray_engine(address, cpus=cpus)


def _list(study: grid.Study, where: str, json: bool) -> None:
    """Print the runs and whether each has a record."""
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
    further = f"; then up to {study.further} more runs of the selected settings" if study.further else ""
    print_text(f"\n{format_count(len(rows), 'run')}: {', '.join(counts)}{further}")


def _summary(outcome: Any, study: grid.Study) -> None:
    progress, differs = outcome.progress, grid.differing(study.runs)
    for config, failure in progress.failures:
        print_message(f"failed: {grid.describe(config, differs)}: {failure}")
    for note, configs in progress.notes.items():
        more = f" and {len(configs) - 1} more" if len(configs) > 1 else ""
        print_message(f"note: {grid.describe(configs[0], differs)}{more}: {note}")
    rows = [
        [name, one.record["config"]["task"], grid.describe(grid.options(one.record) or Config(), differs),
         *(_shown(one, split) for split in ("dev", "test"))]
        for name, one in outcome.choices
    ]  # fmt: skip
    if rows:
        print_table(["block", "task", "selected", "dev", "test"], rows)
        print_text("")
    before = len(progress.failures) - progress.failed
    retry = f" ({before} of them failed; repeat with --retry-failed)" if before else ""
    print_text(
        f"{format_count(progress.total, 'run')}: {progress.known} had records{retry}, {progress.done} done, "
        f"{progress.failed} failed, {progress.left} left"
    )


def _shown(one: Any, split: str) -> str:
    mean, sem = one.mean(split), one.sem(split)
    if mean is None:
        return "-"
    return f"{mean:.4f}" + (f" ± {sem:.4f} ({len(one.runs)})" if sem is not None else "")
