"""GLUE: the score of published leaderboard rows, and files as the server reads them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from adapterbank.benchmarks.glue import SHEETS, TASKS, glue_score, sheet_text, task_score, write_zip
from adapterbank.errors import DataError
from adapterbank.tasks.catalog import CATALOG

# Rows of the public leaderboard: the score it shows, and the tasks' results in its own columns.
LEADERBOARD = {
    "BERT-large": (80.5, 60.5, 94.9, (89.3, 85.4), (87.6, 86.5), (72.1, 89.3), (86.7, 85.9), 92.7, 70.1, 65.1),
    "human": (87.1, 66.4, 97.8, (86.3, 80.8), (92.7, 92.6), (59.5, 80.4), (92.0, 92.8), 91.2, 93.6, 95.9),
}
ORDER = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")


@pytest.mark.parametrize("row", LEADERBOARD)
def test_the_score_is_the_leaderboards(row: str) -> None:
    shown, *results = LEADERBOARD[row]
    scores = {}
    for name, result in zip(ORDER, results, strict=True):
        entry = CATALOG[f"glue/{name}"]
        splits = ("dev", "dev_mismatched") if name == "mnli" else ("dev",)
        values = result if isinstance(result, tuple) else (result,)
        if name == "mnli":
            metrics = {split: {entry.metric: value / 100} for split, value in zip(splits, values, strict=True)}
        else:
            metrics = {"dev": {entry.metric: sum(values) / len(values) / 100}, "test": {entry.metric: 0.0}}
        scores[entry.name] = task_score(entry.name, metrics)
    score, missing = glue_score(scores)
    assert missing == ()
    assert round(100 * score + 1e-9, 1) == shown


def test_a_score_over_some_tasks_lists_the_missing_ones() -> None:
    assert glue_score({"glue/cola": 0.5, "glue/rte": 0.7}) == (
        pytest.approx(0.6),
        tuple(name for name in TASKS if name not in ("glue/cola", "glue/rte")),
    )
    for odd in ({}, {"glue/cola": 0.5, "glue/ax": 0.1}):
        with pytest.raises(DataError, match="The GLUE score is the mean of glue/cola"):
            glue_score(odd)


def test_the_files_are_those_that_the_server_expects() -> None:
    assert [sheet.file for sheet in SHEETS] == [
        *("AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "MRPC.tsv", "QNLI.tsv", "QQP.tsv", "RTE.tsv"),
        *("SST-2.tsv", "STS-B.tsv", "WNLI.tsv"),
    ]
    for sheet in SHEETS:
        if sheet.split == "test":
            assert sheet.rows == CATALOG[sheet.task].sizes[2]


SAID = {
    "CoLA.tsv": (["acceptable", "unacceptable"], ["1", "0"]),
    "SST-2.tsv": (["negative", "positive"], ["0", "1"]),
    "MRPC.tsv": (["equivalent", "not_equivalent"], ["1", "0"]),
    "QQP.tsv": (["duplicate", "not_duplicate"], ["1", "0"]),
    "WNLI.tsv": (["not_entailment", "entailment"], ["0", "1"]),
    "STS-B.tsv": ([3.14159, -0.2, 7, 5.0], ["3.142", "0.000", "5.000", "5.000"]),
    "MNLI-m.tsv": (["entailment", "neutral", "contradiction"], ["entailment", "neutral", "contradiction"]),
    "MNLI-mm.tsv": (["neutral"], ["neutral"]),
    "AX.tsv": (["contradiction"], ["contradiction"]),
    "QNLI.tsv": (["entailment", "not_entailment"], ["entailment", "not_entailment"]),
    "RTE.tsv": (["not_entailment"], ["not_entailment"]),
}


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.file)
def test_a_file_has_a_header_numbers_and_the_servers_words(sheet) -> None:
    answers, words = SAID[sheet.file]
    text = sheet_text(sheet, answers)
    assert text == "index\tprediction\n" + "".join(f"{i}\t{word}\n" for i, word in enumerate(words))
    assert sheet_text(sheet, answers, [10 + i for i in range(len(answers))]).splitlines()[1] == f"10\t{words[0]}"


def test_unknown_labels_and_wrong_row_numbers_are_refused() -> None:
    mnli = SHEETS[2]
    with pytest.raises(DataError, match=r"MNLI-m\.tsv: 'maybe' is not one of its labels: entailment, neutral"):
        sheet_text(mnli, ["maybe"])
    with pytest.raises(DataError, match=r"2 predictions for 1 different rows"):
        sheet_text(mnli, ["neutral", "neutral"], [3, 3])


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_prediction_that_is_not_a_number_is_refused(odd: float) -> None:
    with pytest.raises(DataError, match=r"STS-B\.tsv: a prediction is (nan|inf), not a number from 0 to 5"):
        sheet_text(next(sheet for sheet in SHEETS if sheet.file == "STS-B.tsv"), [1.0, odd])


def test_the_zip_is_complete_and_reproducible(tmp_path: Path) -> None:
    files = {"B.tsv": "index\tprediction\n0\té\n", "A.tsv": "index\tprediction\n"}
    for name in ("one.zip", "two.zip"):
        write_zip(tmp_path / name, files)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["A.tsv", "B.tsv"]  # at the top, in no folder
        assert archive.read("B.tsv").decode() == files["B.tsv"]
