"""Promise: each file of configs/ is run by the command in its first line and has the runs of the paper's grid."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapterbank.studies import grid
from adapterbank.tasks.catalog import CATALOG, bank_name
from small_data import shell

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
COUNTS = {
    "table1": (8 * 3 * 2 * 5 * (1 + 3), 0),
    "table1-minilm": (4 * 9 * 5 + 6 * 3 + 2 * 6 + 6 * 3 + 6 * 3 * 2 * 5 + 4 * 2 * 5 + 6, 6 * 4 + 2 * 2 * 4 + 6 * 4),
    "table1-mpnet": (6 * 3 * 2, 0),
    "glue-grid-minilm": (5 * 9 * 5, 0),
    "table2": (17 * 4 * 3 * (1 + 8 + 6), 17 * 3 * 2),
    "table2-minilm": (11 * (2 * 3 + 2 + 2 + 1), 11 * 2 * 2),
    "defaults-minilm": (17 * 5, 0),
    "fig1": (8 * 2 * 2 * (1 + 7 + 8), 0),
    "fig3": (17 * 4 * (1 + 8 + 6), 0),
    "fig4": (2 * 3 * (10 + 12 + 1 + 1), 0),
    "fig5": (9 + 4 * 4 * 3, 2 + 4 * 2),
    "fig6": (2 * 3 * 10, 0),
    # σ 1e-2 and learning rate 1e-3 are size 64 of figure 4; full fine-tuning at 1e-4 is there too.
    "figures-gte-small": (2 * 3 * (10 + 1 + 8 + 6) + 7 * 3 + 7 + 2 * (8 - 1), 0),
    "fig7": (2 * 3 * 6 * (1 + 3 + 1), 0),
    "tagging-minilm": (3 * (2 + 2) * 3, 0),
    "tagging-mpnet": (6 + 6 + 2 * (2 + 2) * 3, 2 + 2),
    "mix-minilm": (4 * 3 * 2 * 2, 4 * 2 * 3),
    "glue-minilm": (6 * 11 * 3 * 2 + 6, 6 * 11 * 3),
    "glue-start-minilm": ((5 + 4) * 3 * 2, (5 + 4) * 3),
    "glue-mpnet": (6 * 4 * 3, 6 * 4 * 4),
    "further-minilm": (11 * 6 * 3 + 11, 11 * 6 * 2),
    "few-further-minilm": (10 * 4 * 3 * 3, 0),
    "few-labels-further-minilm": (10 * 2 * 3, 0),
    "size-by-layer-minilm": (6 * 3 * 2, 6 * 3 * 4),
    "long-texts-minilm": (2 * (2 + 1 + 3), 2 * 3 * 2),
}
"""For each study: the runs of its grids, and the runs after the selection."""


def test_every_table_and_figure_of_the_paper_has_a_file():
    assert {path.stem for path in FILES} == set(COUNTS)
    assert {"table1", "table2", *(f"fig{n}" for n in (1, 3, 4, 5, 6, 7))} <= set(COUNTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_in_the_first_line_lists_as_many_runs_as_the_paper_has(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    first = path.read_text(encoding="utf-8").splitlines()[0]
    words = shlex.split(first.removeprefix("# "))
    assert words[:3] == ["adapterbank", "sweep", f"configs/{path.name}"]
    found = shell(*words[1:], "--dry-run", "--json")
    assert found.code == 0, found.err
    assert (len(found.json["runs"]), found.json["further"]) == COUNTS[path.stem]
    assert {run["state"] for run in found.json["runs"]} == {"to run"}
    assert not (tmp_path / "bank").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_tasks_are_in_the_catalog_and_no_two_runs_share_a_name(path):
    study = grid.read(path)
    own = {"imdb"}  # its files are written by bench/imdb_part.py
    assert {run.task for run in study.runs} <= {*map(bank_name, CATALOG), *own}
    assert len(set(study.runs)) == len(study.runs)
    differs = grid.differing(study.runs)
    named = [grid.describe(run, differs) for run in study.runs]
    assert len(set(named)) == len(named)


@pytest.fixture
def reproduce(monkeypatch):
    """Return the module of bench/reproduce.py."""
    place = importlib.util.spec_from_file_location("reproduce", ROOT / "bench" / "reproduce.py")
    found = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "reproduce", found)
    place.loader.exec_module(found)
    return found


def test_the_parts_of_a_reproduction_have_exactly_the_runs_of_the_studies(reproduce, tmp_path):
    for name in reproduce.STUDIES:
        whole = grid.read(ROOT / "configs" / f"{name}.yaml")
        parts = reproduce.parts(name, tmp_path)
        studies = [grid.read(part.path) for part in parts]
        first = [run for part, study in zip(parts, studies, strict=True) if not part.needs for run in study.runs]
        assert sorted(map(repr, whole.runs)) == sorted(map(repr, first))
        assert {*whole.runs} == {run for study in studies for run in study.runs}
        assert whole.further == sum(study.further for study in studies)
        assert {need for part in parts for need in part.needs} <= {part.name for part in parts if not part.needs}


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_a_study_needs_is_trained_first_but_not_in_a_dry_run(reproduce, tmp_path, dry_run):
    options = SimpleNamespace(bank=str(tmp_path), data_root="data", records="r", dry_run=dry_run, no_searches=False)
    found = reproduce.jobs(["glue-start-minilm"], options, tmp_path)
    packages = [job.name for job in found if job.words[0] != "sweep"]
    assert packages == ([] if dry_run else ["glue-mnli", "full-mnli"])
    assert all({*packages} <= {*job.needs} for job in found if job.words[0] == "sweep")
    assert all(("--dry-run" in job.words) == dry_run for job in found if job.words[0] == "sweep")


@pytest.mark.parametrize(("failing", "ran"), [("part", ["part", "after"]), ("shared", ["shared"])])
def test_a_part_goes_on_after_failed_runs_but_not_without_its_packages(reproduce, tmp_path, capsys, failing, ran):
    class Stub(reproduce.Job):
        command = property(lambda self: [sys.executable, "-c", f"raise SystemExit({int(self.name == failing)})"])

    jobs = [Stub(failing, ()), Stub("after", (), (failing,))]
    options = SimpleNamespace(at_once=2, searches=1, minutes=1)
    assert not reproduce.run(jobs, options, tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == sorted(ran)
    assert ("left out" in capsys.readouterr().out) == (failing == "shared")


def test_the_runs_of_figure_3_are_among_those_of_table_2():
    of_figure, of_table = (set(grid.read(ROOT / "configs" / name).runs) for name in ("fig3.yaml", "table2.yaml"))
    assert of_figure < of_table
