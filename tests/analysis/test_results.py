"""Promise: results/ contains our own records, and its tables, figures and report are computed from them."""

from __future__ import annotations

import math
from collections import Counter
from html import escape
from pathlib import Path
from statistics import fmean

import pytest

from adapterbank.analysis import figures, run_table, tables
from adapterbank.analysis.ways import ways
from adapterbank.studies.selection import mean

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
TABLES, FEW = RESULTS / "held-out" / "tables", RESULTS / "held-out" / "few"
DRAWN = [RESULTS, TABLES, FEW]
"""Folders of records with the tables and figures that are computed from them."""


@pytest.fixture(scope="module")
def study():
    return run_table.load([RESULTS / "records"])


@pytest.fixture(scope="module")
def text():
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", [*DRAWN, *(RESULTS / "held-out" / name for name in ("auto", "few-labels"))])
def test_every_record_is_valid_and_named_after_its_config(folder):
    study = run_table.load([folder / "records"])
    assert not study.problems
    assert len(study.rows) == len({row.path.stem for row in study.rows}) > 0


@pytest.mark.parametrize("folder", DRAWN)
def test_tables_and_figures_are_those_of_the_records(folder):
    pytest.importorskip("matplotlib", reason="pip install 'adapterbank[plot]'")
    study = run_table.load([folder / "records"])
    found = {f"{one.name}.csv": one.csv() for one in figures.draw_all(study) if one.figure}
    for backbone in study.backbones:
        mine = tables.with_ours(study.of(backbone))
        found |= {f"{table.name}{study.suffix(backbone)}.csv": table.csv() for table in mine}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (folder / "figures").glob("*.csv")}
    assert kept == found
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert drawn == {name.removesuffix(".csv") for name in kept if not name.startswith(("table", "against"))}


def test_the_report_is_that_of_these_records(study):
    text = (RESULTS / "report.html").read_text(encoding="utf-8")
    assert f"<p>{len(study.rows)} runs, " in text
    assert all(f'id="record-{row.path.stem}"' in text for row in study.rows)
    for backbone in study.backbones:
        for table in tables.with_ours(study.of(backbone)):
            for line in table.rows:
                assert "".join(f"<td>{escape(cell)}</td>" for cell in line[1:]) in text


def _row(cells):
    """Return a line of a table; an empty cell is one space."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _chances(cells):
    return [cell if cell.startswith("<") else f"{float(cell):.2f}" for cell in cells]


ADAPTERS = ("adapters, best size", "adapters, best size up to 3.6 %", "adapters 64")
OTHERS = ("variable fine-tuning", "LoRA", "BitFit", "LayerNorm only", "feature", "AutoML, no encoder")


@pytest.mark.parametrize(
    ("backbone", "tested"),
    [("minilm", ("full fine-tuning", *ADAPTERS, *OTHERS)), ("mpnet", ("full fine-tuning", "adapters 64"))],
)
def test_the_documentation_has_table_1(study, text, backbone, tested):
    found = {row[0]: row for row in tables.glue(study.of(backbone)).rows}
    columns = [k for k, cell in enumerate(found["ours: full fine-tuning, dev"]) if cell != "–"][2:-1]
    for name in [f"{line}, {split}" for line in tested for split in ("dev", "test")]:
        row = found[f"ours: {name}"]
        cells = [row[k].replace("–", "") for k in columns]
        mean, count = row[-1].split()
        # A mean over fewer columns than the others cannot be compared with them: it stands with their number.
        cells.append(mean if count == ("(6)" if name.endswith("dev") else "(3)") else row[-1])
        share = [row[1].replace("–", "")] if backbone == "minilm" else []
        line = _row([*share, *cells])
        assert line in text, name


def test_the_documentation_has_the_difference_for_each_way_to_choose(study, text):
    found = tables.compared(study.of("minilm")).rows
    assert len(found) == 4
    for row in found:
        assert _row(cell.replace("-", "−") for cell in row[1:]) in text, row[0]


def test_the_documentation_has_the_number_of_records(study, text):
    held_out = [*(RESULTS / "held-out").glob("*/records/*.json")]
    assert f"{len(held_out)} records are in [results/held-out]" in text
    assert f"(../results/records), {len(study.rows)} runs" in text


def test_the_documentation_has_table_2(study, text):
    shown = [row for row in tables.further(study.of("minilm")).rows if row[7] != "–"]
    assert len(shown) == 12
    for row in shown:
        assert _row(cell.split(" (")[0] for cell in row[1:9:2]) in text.replace("*", ""), row[0]


def test_the_documentation_has_the_paired_tests(study, text):
    rows = {row[0]: row for row in tables.against_full(study.of("minilm")).rows}
    shown = {
        "adapters up to 3.6 %, dev": "GLUE, dev: adapters, best size up to 3.6 %",
        "variable, dev": "GLUE, dev: variable fine-tuning",
        "LoRA, dev": "GLUE, dev: LoRA",
        "LayerNorm only, dev": "GLUE, dev: LayerNorm only",
        "adapters up to 3.6 %, test": "GLUE, test: adapters, best size up to 3.6 %",
        "variable, test": "GLUE, test: variable fine-tuning",
        "adapters 64, test, table 2": "further tasks, test: adapters 64",
        "variable, test, table 2": "further tasks, test: variable fine-tuning",
    }
    for said, name in shown.items():
        _, tasks, _, difference, sem, *chances = rows[name]
        assert _row([said, tasks, difference.replace("-", "−"), sem, *_chances(chances)]) in text


# --- the equal protocol


HELD_OUT = {
    "full fine-tuning": "full fine-tuning",
    "full fine-tuning, average": "full, average",
    "adapters 64": "adapters 64",
    "adapters 64, average": "adapter 64, average",
    "adapters 64 narrowed to 32": "adapter 64to32",
    "adapters 64 from MNLI, average": "adapter 64, start from glue-mnli@1, average",
    "AutoML": "AutoML, no encoder",
}
"""How docs/results.md names the lines of the table."""
SHOWN = (2, 3, 4, 5, 7, 10)
"""Its columns: the six tasks."""


@pytest.fixture(scope="module")
def held_out():
    return run_table.load([TABLES / "records"])


@pytest.fixture(scope="module")
def lines(held_out):
    return {row[0]: row for row in tables.glue(held_out).rows}


@pytest.mark.parametrize("name", HELD_OUT)
def test_the_documentation_has_the_table_of_the_equal_protocol(name, lines, text):
    for split, count in (("dev", "(6)"), ("test", "(3)")):
        row = lines[f"ours: {HELD_OUT[name]}, {split}"]
        cells = [row[column].replace("–", "") for column in SHOWN]
        mean, tasks = row[-1].split()
        line = _row([f"{name}, {split}", row[1].replace("–", ""), *cells, mean if tasks == count else row[-1]])
        assert line in text


def mean_of(cells):
    return fmean(float(cell.split()[0]) for cell in cells)


def test_the_recipe_that_starts_from_mnli_is_fresh_on_mnli_and_its_mean_is_documented(lines, text):
    row, fresh = (
        lines["ours: adapter 64, start from glue-mnli@1, average, dev"],
        lines["ours: adapter 64, average, dev"],
    )
    cells = [fresh[column] if row[column] == "–" else row[column] for column in SHOWN]
    assert [row[column] == "–" for column in SHOWN].index(True) == SHOWN.index(7)  # MNLI
    full, plain = (lines[f"ours: {name}, dev"][-1].split()[0] for name in ("full fine-tuning", "adapters 64"))
    assert f"a mean of {mean_of(cells):.1f}" in text
    assert f"full fine-tuning's {full}" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"means of {plain} and {full} on dev" in readme
    assert f"start from MNLI's reach {mean_of(cells):.1f}" in readme


def test_the_documentation_has_the_paired_tests_of_the_equal_protocol(held_out, text):
    rows = {row[0]: row for row in tables.against_full(held_out).rows}
    for said, own in HELD_OUT.items():
        if said.startswith("adapters"):
            for split in ("dev", "test"):
                _, tasks, pairs, difference, sem, *chances = rows[f"GLUE, {split}: {own}"]
                cells = [f"{said}, {split}", tasks, pairs, difference.replace("-", "−"), sem, *_chances(chances)]
                assert _row(cells) in text


def test_the_documentation_has_the_starts_that_were_found_automatically(held_out, text):
    found = run_table.load([RESULTS / "held-out" / "auto" / "records"])
    for task, name in (("glue-rte", "RTE"), ("glue-mrpc", "MRPC"), ("glue-stsb", "STS-B")):
        started = [row for row in found.rows if row.task == task]
        assert {row.record["config"]["start_from"] for row in started} == {"glue-mnli@1"}
        like = started[0]
        fresh = [row for row in held_out.rows if row.task == task and row.lr == like.lr and row.method == "adapter"
                 and row.option == like.option and row.variant.keys() == {"average"}]  # fmt: skip
        assert {row.seed for row in fresh} == {row.seed for row in started} == set(range(5))
        both = [mean([100 * row.dev for row in rows]) for rows in (fresh, started)]
        error = math.hypot(*(one.sem for one in both))
        cells = [f"{one.mean:.1f} ± {one.sem:.1f}" for one in both]
        assert _row([name, *cells, f"{both[1].mean - both[0].mean:+.1f} ± {error:.1f}".replace("-", "−")]) in text


def test_the_documentation_has_the_ways_of_few_rows(text):
    for folder, rows in (("few", {"on": "on the base", "from": "from the base"}), ("few-labels", {"on": "few labels"})):
        study = run_table.load([RESULTS / "held-out" / folder / "records"])
        whole = {line["way"]: line for line in ways(study) if not line["task"]}
        tasks = Counter(line["way"] for line in ways(study) if line["task"])
        for way, line in whole.items():
            name = next(said for key, said in rows.items() if f"{key} shared" in way)
            gain = f"{line['difference']:.1f} ± {line['sem']:.1f}".replace("-", "−")
            assert f"| {name} | {tasks[way]} | {gain} |" in text.replace("few labels, on the base", "few labels")
