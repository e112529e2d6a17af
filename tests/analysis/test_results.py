"""Promise: results/ contains our own records, and its tables, figures and report are computed from them."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

from adapterbank.analysis import figures, run_table, tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def study():
    return run_table.load([RESULTS / "records"])


def test_every_record_is_valid_and_named_after_its_config(study):
    assert not study.problems
    assert len(study.rows) == len({row.path.stem for row in study.rows}) > 0


def test_tables_and_figures_are_those_of_the_records(study):
    pytest.importorskip("matplotlib", reason="pip install 'adapterbank[plot]'")
    found = {f"{one.name}.csv": one.csv() for one in figures.draw_all(study) if one.figure}
    for backbone in study.backbones:
        mine = tables.with_ours(study.of(backbone))
        found |= {f"{table.name}{study.suffix(backbone)}.csv": table.csv() for table in mine}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (RESULTS / "figures").glob("*.csv")}
    assert kept == found
    drawn = {path.stem for path in (RESULTS / "figures").glob("*.png")}
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
    return f"| {' | '.join(cells)} |"


ADAPTERS = ("adapters, best size", "adapters, best size up to 3.6 %", "adapters 64")
OTHERS = ("variable fine-tuning", "LoRA", "BitFit", "LayerNorm only", "feature", "AutoML, no encoder")


@pytest.mark.parametrize(
    ("backbone", "tested"),
    [("minilm", ("full fine-tuning", *ADAPTERS, *OTHERS)), ("mpnet", ("full fine-tuning", "adapters 64"))],
)
def test_the_documentation_has_table_1(study, backbone, tested):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    found = {row[0]: row for row in tables.glue(study.of(backbone)).rows}
    columns = [k for k, cell in enumerate(found["ours: full fine-tuning, dev"]) if cell != "–"][2:-1]
    for name in [f"{line}, {split}" for line in tested for split in ("dev", "test")]:
        row = found[f"ours: {name}"]
        cells = [row[k].replace("–", "") for k in columns]
        mean, count = row[-1].split()
        # A mean over fewer columns than the others cannot be compared with them: it stands with their number.
        cells.append(mean if count == ("(6)" if name.endswith("dev") else "(3)") else row[-1])
        share = [row[1].replace("–", "")] if backbone == "minilm" else []
        line = _row([*share, *cells]).replace("|  |", "| |").replace("|  |", "| |")
        assert line in text, name


def test_the_documentation_has_the_difference_for_each_way_to_choose(study):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    found = tables.compared(study.of("minilm")).rows
    assert len(found) == 4
    for row in found:
        assert _row(cell.replace("-", "−") for cell in row[1:]) in text, row[0]


def test_the_documentation_has_the_number_of_records(study):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"(../results/records), {len(study.rows)} runs" in text


def test_the_documentation_has_table_2(study):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    shown = [row for row in tables.further(study.of("minilm")).rows if row[7] != "–"]
    assert len(shown) == 12
    for row in shown:
        assert _row(cell.split(" (")[0] for cell in row[1:9:2]) in text.replace("*", ""), row[0]


def test_the_documentation_has_the_paired_tests(study):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
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
        found = [chance if chance.startswith("<") else f"{float(chance):.2f}" for chance in chances]
        assert _row([said, tasks, difference.replace("-", "−"), sem, *found]) in text
