"""`adapterbank glue-submission`: the zip file in the server's format, whole or partial."""

from __future__ import annotations

import zipfile

from small_data import shell


def test_a_partial_submission_has_the_servers_format(catalog_bank, data_root, tmp_path):
    out = tmp_path / "sub.zip"
    words = ["glue-submission", "--bank", catalog_bank, "--data-root", data_root, "--output", out, "--device", "cpu"]
    rejected = shell(*words)
    assert rejected.code == 2
    assert not out.exists()
    assert "adapterbank: MNLI-m.tsv needs the task 'glue-mnli' in the bank.\n" in rejected.err
    assert "SST-2.tsv needs 1821 rows" in rejected.err
    found = shell(*words, "--partial", "--json")
    assert found.json["files"] == {"CoLA.tsv": 2, "SST-2.tsv": 2, "WNLI.tsv": 146}
    assert "note: MNLI-m.tsv needs the task 'glue-mnli' in the bank.\n" in found.err
    assert "note: SST-2.tsv needs 1821 rows" in found.err
    assert "The server will reject this zip file" in found.err
    with zipfile.ZipFile(out) as archive:
        lines = archive.read("SST-2.tsv").decode().splitlines()
    assert lines[0] == "index\tprediction"
    assert {line.split("\t")[0] for line in lines[1:]} == {"0", "1"}
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    assert "glue/mnli=my-mnli" in shell(*words, "--use", "nothing").err
