"""Fixtures that several test files of commands share: banks and data made once a session, and copies to work on."""

from __future__ import annotations

import json
import shutil

import pytest

from adapterbank.api.opened import open_bank
from small_data import FAST, NOUNS, answers, flags, pairs, reviews, scores, shell, tags, write


@pytest.fixture(scope="session")
def bank_of_all_kinds(tmp_path_factory, checkpoint):
    """Return a bank with a task of every kind, `sentiment` with three versions; tests must not change it."""
    folder = tmp_path_factory.mktemp("kinds")
    bank = open_bank(folder / "bank", str(checkpoint("bert")[0]), device="cpu")
    for seed in range(3):
        bank.train("sentiment", reviews(), reviews(), **{**FAST, "epochs": 4}, seed=seed)
    bank.train("score", scores(), scores(), **FAST)
    bank.train("tags", tags(), tags(), **FAST)
    bank.train("pair", pairs(), pairs(), **FAST)
    bank.train("span", answers(), answers(), **FAST)
    return folder / "bank"


@pytest.fixture
def here(bank_of_all_kinds, tmp_path, monkeypatch):
    """Work in a folder with a copy of the bank of all kinds, as `bank`, and labelled data, as `test.csv`."""
    shutil.copytree(bank_of_all_kinds, tmp_path / "bank")
    write(tmp_path / "test.csv", reviews())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_task(tmp_path, monkeypatch, bert):
    """Work in a folder with a bank of one task, `s`, and its data, as `train.csv`."""
    write(tmp_path / "train.csv", reviews())
    monkeypatch.chdir(tmp_path)
    open_bank("bank", bert).train("s", "train.csv", "train.csv", **FAST)
    return tmp_path


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """Return a data root with SST-2 and CoLA in the official layout and SQuAD v2's JSON."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "SST-2").mkdir()
    (folder / "CoLA").mkdir()
    for split in ("train", "dev"):
        sentences = [(text, int(label == "positive")) for text, label in reviews(24)]
        (folder / "SST-2" / f"{split}.tsv").write_text(
            "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in sentences)
        )
        (folder / "CoLA" / f"{split}.tsv").write_text("".join(f"x\t{label}\t\t{text}\n" for text, label in sentences))
    for name in ("SST-2", "CoLA"):
        (folder / name / "test.tsv").write_text("index\tsentence\n0\tthe cat was good\n1\tthe dog was bad\n")
    paragraphs = []
    for i, row in enumerate(answers(24)):
        start = row["context"].index(row["answer"])
        known = [] if i % 4 == 3 else [{"text": row["answer"], "answer_start": start}] * 2
        long = row["context"] + " " + " ".join(NOUNS * 8) if i % 6 == 0 else row["context"]
        paragraphs.append({"context": long, "qas": [{"id": f"q{i}", "question": row["question"], "answers": known}]})
    for split in ("train", "dev"):
        data = {"version": "v2.0", "data": [{"title": "T", "paragraphs": paragraphs}]}
        (folder / f"{split}-v2.0.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="session")
def catalog_bank(tmp_path_factory, checkpoint, data_root):
    """Return a bank with three catalog tasks, trained by their names; tests must not change it."""
    folder = tmp_path_factory.mktemp("named") / "bank"
    words = ["--bank", folder, "--backbone", checkpoint("bert")[0], "--data-root", data_root, *flags(FAST)]
    for task in ("glue/sst2", "glue/cola", "squad/v2"):
        found = shell("train", "--task", task, "--device", "cpu", *words)
        assert found.code == 0, found
    return folder
