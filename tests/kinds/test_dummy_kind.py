"""Promise: a new kind of task is one file and one row; dummies are trained, stored, predicted and served."""

from __future__ import annotations

import time

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError
from adapterbank.inference.engine import Engine
from adapterbank.kinds.table import KINDS
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from kinds.dummy import ORDINAL
from kinds.dummy_tokens import MARKS
from small_data import FAST, NOUNS, shell, write

WORDS = ("bad", "small", "good")
ROWS = [(f"the {noun} was {word}", str(grade)) for noun in NOUNS for grade, word in enumerate(WORDS, 1)]
TEXTS = [text for text, _ in ROWS]


@pytest.fixture
def ordinal(monkeypatch):
    """Put the row into the table."""
    monkeypatch.setitem(KINDS, ORDINAL.name, ORDINAL)


@pytest.fixture
def trained(tmp_path, bert, ordinal):
    """Train a task of the kind and return its bank."""
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    bank.train("grade", ROWS, ROWS, kind="ordinal", **{**FAST, "epochs": 6})
    return bank


def test_without_its_row_the_kind_is_unknown(tmp_path, bert):
    with pytest.raises(ConfigError, match="kind is 'ordinal'; it must be one of classification"):
        open_bank(tmp_path / "bank", bert, device="cpu").train("grade", ROWS, ROWS, kind="ordinal")


def test_a_task_of_the_kind_is_trained_stored_and_audited(trained):
    manifest = trained.show("grade")
    assert (manifest.task["kind"], manifest.task["labels"]) == ("ordinal", ["1", "2", "3"])
    assert manifest.method["head"]["outputs"] == 1
    (record,) = records.read_all(trained.bank.records_path)
    assert record["history"][-1]["loss"] < record["history"][0]["loss"]
    assert [(one.ok, one.how) for one in trained.audit()] == [(True, "to the bit")]


def test_it_predicts_and_is_evaluated(trained):
    found = trained.predict("grade", TEXTS)
    assert all(one.label == ("1", "2", "3")[min(2, max(0, round(one.value)))] for one in found)
    assert [one.step for one in found] == [("1", "2", "3").index(one.label) for one in found]  # a field of its own
    assert found[0].to_json().keys() == {"label", "value", "step"}
    right = sum(one.label == label for one, (_, label) in zip(found, ROWS, strict=True))
    report = trained.evaluate("grade", ROWS)
    assert report["accuracy"] == right / len(ROWS)
    assert report["rows"] == len(ROWS)


def test_rows_of_the_kind_share_a_batch_with_other_kinds(trained):
    trained.train("review", ROWS, ROWS, **FAST)
    alone = trained.predict("grade", TEXTS[:2]) + trained.predict("review", TEXTS[2:4])
    together = trained.predict(["grade", "grade", "review", "review"], TEXTS[:4])
    assert [one.label for one in together] == [one.label for one in alone]


def test_the_commands_take_the_kind(trained, tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.csv", ROWS)
    encoder = checkpoint("bert")[0]
    shown = shell("data", "--train", "rows.csv", "--kind", "ordinal", "--backbone", encoder)
    assert shown.out.startswith("rows.csv: ordinal, from rows.csv")
    scored = shell("evaluate", "--bank", "bank", "--task", "grade", "--data", "rows.csv", "--backbone", encoder)
    assert scored.out.startswith("grade@1 on 18 rows\n  accuracy ")
    said = shell("predict", "--bank", "bank", "--task", "grade", "--text", TEXTS[0], "--backbone", encoder)
    assert said.answers[0].keys() == {"label", "value", "step"}


def test_a_search_without_an_encoder_learns_it(tmp_path, bert, ordinal):
    pytest.importorskip("optuna", reason="pip install 'adapterbank[automl]'")
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    record = bank.train("grade", ROWS, ROWS, kind="ordinal", method="automl", trials=3).record
    assert record["metrics"]["dev"]["accuracy"] > 0.5


def test_it_is_served(trained, bert):
    pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
    from starlette.testclient import TestClient

    from adapterbank.serving.http.app import create_app
    from adapterbank.serving.service.service import BankService

    service = BankService(Bank.open(trained.path), Engine(bert, device="cpu"))
    with TestClient(create_app(service)) as client:
        for _ in range(6000):  # loading the bank takes milliseconds, unless the machine is busy
            if client.get("/readyz").status_code == 200:
                break
            time.sleep(0.01)
        (line,) = client.get("/v1/tasks").json()["tasks"]
        assert (line["kind"], line["labels"]) == ("ordinal", ["1", "2", "3"])
        found = client.post("/v1/tasks/grade/predict", json={"texts": TEXTS}).json()["predictions"]
    expected = trained.predict("grade", TEXTS)
    assert [one["label"] for one in found] == [one.label for one in expected]
    assert [one["step"] for one in found] == [one.step for one in expected]
    assert [one["value"] for one in found] == pytest.approx([one.value for one in expected], abs=1e-5)


def test_a_kind_with_an_output_for_each_token_reads_a_long_text_in_windows(tmp_path, bert, monkeypatch):
    monkeypatch.setitem(KINDS, MARKS.name, MARKS)
    rows = [{"text": f"the {noun} was {word}", "label": [noun]} for noun in NOUNS for word in ("bad", "good")]
    rows.append({"text": " ".join(["the red fox was big"] * 20), "label": ["red"]})
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    result = bank.train("words", rows, rows, kind="marks", **{**FAST, "epochs": 10})
    assert "18 rows in all" in result.notes[0]
    losses = [epoch["loss"] for epoch in result.record["history"]]
    assert losses[-1] < losses[0] / 2
    found = bank.predict("words", [row["text"] for row in rows])
    right = [one.labels == tuple(row["label"]) for one, row in zip(found, rows, strict=True)]
    assert bank.evaluate("words", rows)["subset_accuracy"] == sum(right) / len(rows)
    assert all(one.ok for one in bank.audit())
