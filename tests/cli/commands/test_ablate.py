"""`adapterbank ablate`: a matrix of the changes by span of layers, also as CSV and JSON."""

from __future__ import annotations

import csv
import io

from cli.invoke import on_task


def test_ablate_prints_a_matrix_of_first_and_last_layers(one_task):
    found = on_task("ablate")
    assert found.code == 0
    assert found.out.startswith("s@1 on 24 rows, 6 spans")
    table = [line.split() for line in found.out.splitlines()[3:]]
    assert table[0] == ["first", "0", "1", "2"]
    assert [len(row) for row in table[1:]] == [4, 3, 2]


def test_ablate_as_csv_and_as_json_agree(one_task):
    rows = list(csv.DictReader(io.StringIO(on_task("ablate", "--csv").out)))
    spans = on_task("ablate", "--json").json["spans"]
    assert len(rows) == 1 + len(spans)
    assert [float(row["accuracy"]) for row in rows[1:]] == [span["scores"]["accuracy"] for span in spans]
    assert on_task("ablate", "--csv", "--json").code == 2
