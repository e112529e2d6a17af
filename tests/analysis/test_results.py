"""Claims about results/: what is kept there are our own records, and every table is computed from them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapterbank.analysis import rows, tables

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    return rows.load([ROOT / "results" / "records"])


def test_every_record_can_be_used_and_stands_under_the_hash_of_its_config(study):
    assert not study.problems
    assert len(study.rows) == len({row.path.stem for row in study.rows}) > 0


@pytest.mark.parametrize(("name", "make"), [("table1", tables.glue), ("table2", tables.further)])
def test_the_tables_are_what_the_records_give(study, name, make):
    kept = sorted((ROOT / "results" / "tables").glob(f"{name}-*.csv"))
    assert kept
    for path in kept:
        backbone = path.stem.removeprefix(f"{name}-")
        assert path.read_text(encoding="utf-8") == make(study.of(backbone)).csv()


def test_the_documentation_has_the_means_of_table_1(study):
    told = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for line in tables.glue(study.of("minilm")).rows:
        if line[0].removeprefix("ours: ") in ("full fine-tuning, dev", "adapters, best size, dev", "adapters 64, dev"):
            cells = [cell for cell in line[2:-1] if cell != "–"]
            assert f"| {' | '.join(cells)} | {line[-1].split()[0]} |" in told
