"""`adapterbank squad`: official prediction files and scores, and the options that exclude each other."""

from __future__ import annotations

import json

import pytest

from adapterbank.benchmarks.squad import evaluate
from small_data import FAST, answers, flags, shell


def test_squad_answers_scores_and_files_agree_with_each_other(catalog_bank, data_root, tmp_path):
    out, best, odds = (tmp_path / name for name in ("p.json", "nbest.json", "odds.json"))
    words = ["--bank", catalog_bank, "--task", "squad/v2", "--data-root", data_root, "--device", "cpu", "--json"]
    found = shell("squad", *words, "--output", out, "--nbest", best, "--null-odds", odds).json
    predicted, listed, null_odds = (json.loads(file.read_text()) for file in (out, best, odds))
    assert set(predicted) == set(listed) == set(null_odds) == {f"q{i}" for i in range(24)}
    gold = {f"q{i}": [] if i % 4 == 3 else [row["answer"]] * 2 for i, row in enumerate(answers(24))}
    official = evaluate(gold, predicted, version="2.0")
    assert {name: found[name] for name in official} == pytest.approx(official)
    assert found["f1"] <= found["best_f1"] + 1e-9
    # The threshold that training chose on this very dev set is the best one.
    assert found["f1"] == pytest.approx(found["best_f1"])
    again = shell("squad", "--predictions", out, "--data", data_root / "dev-v2.0.json", "--json").json
    assert again == pytest.approx(official)
    for key, answer in predicted.items():
        texts = [one["text"] for one in listed[key]]
        assert answer in texts
        assert "" in texts
        assert sum(one["probability"] for one in listed[key]) == pytest.approx(1)
    recorded = shell("show", "--bank", catalog_bank, "--task", "squad/v2", "--json").json["metrics"]["dev"]
    assert 100 * recorded["span_f1"] == pytest.approx(found["f1"])


def test_squad_rejects_options_that_exclude_each_other(catalog_bank, data_root, tmp_path):
    for words in (
        ["squad"],
        ["squad", "--bank", catalog_bank],
        ["squad", "--predictions", "p.json"],
        ["squad", "--predictions", tmp_path / "no.json", "--data", data_root / "dev-v2.0.json"],
        ["squad", "--bank", catalog_bank, "--task", "glue/cola", "--data", data_root / "dev-v2.0.json"],
    ):
        refused = shell(*words)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1), refused


def test_squad_uses_the_version_that_is_named(catalog_bank, data_root, tmp_path):
    out = tmp_path / "p.json"
    own = ["squad", "--bank", catalog_bank, "--task", "squad/v2", "--data-root", data_root, "--device", "cpu", "--json"]
    data = json.loads((data_root / "dev-v2.0.json").read_text())
    for article in data["data"]:
        article["paragraphs"] = [one for one in article["paragraphs"] if one["qas"][0]["answers"]]
    answered = tmp_path / "answered.json"
    answered.write_text(json.dumps(data))
    assert "exact_match" in shell(*own, "--data", answered, "--output", out).json
    assert "HasAns_f1" in shell(*own, "--data", answered, "--version", "2.0").json
    assert "HasAns_f1" in shell("squad", "--predictions", out, "--data", answered, "--version", "2.0").out
    assert "6 of 24 questions have no answer, which SQuAD 1.1 cannot score" in shell(*own, "--version", "1.1").err
    assert "'3' is not a version of SQuAD" in shell(*own, "--version", "3").err


def test_squad_explains_invalid_odds(catalog_bank, data_root, tmp_path, checkpoint):
    out, odds = tmp_path / "p.json", tmp_path / "odds.json"
    out.write_text(json.dumps({f"q{i}": "" for i in range(24)}))
    given = ["squad", "--predictions", out, "--data", data_root / "dev-v2.0.json", "--null-odds", odds]
    for value in ('"0.5"', "null", "true", "[1]"):
        odds.write_text(f'{{"q0": {value}}}')
        refused = shell(*given)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused
        assert "for 'q0', which is not a number" in refused.err
    data = json.loads((data_root / "dev-v2.0.json").read_text())
    for article in data["data"]:
        article["paragraphs"] = [one for one in article["paragraphs"] if one["qas"][0]["answers"]]
    (tmp_path / "train-v1.1.json").write_text(json.dumps(data))
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(data))
    odds.write_text("{}")
    refused = shell("squad", "--predictions", out, "--data", tmp_path / "dev-v1.1.json", "--null-odds", odds)
    assert "SQuAD 1.1 has no odds" in refused.err
    words = ["--bank", tmp_path / "bank", "--task", "squad/v1", "--data-root", tmp_path]
    assert shell("train", *words, "--backbone", checkpoint("bert")[0], *flags(FAST), "--device", "cpu").code == 0
    refused = shell("squad", *words, "--device", "cpu", "--null-odds", tmp_path / "new.json")
    assert "'squad/v1' always answers, so it has no odds" in refused.err
    assert not (tmp_path / "new.json").exists()


def test_squad_rejects_a_task_of_another_kind(catalog_bank, data_root):
    for data in ([], ["--data-root", data_root], ["--data", data_root / "dev-v2.0.json"]):
        refused = shell("squad", "--bank", catalog_bank, "--task", "glue/cola", *data)
        assert (refused.code, refused.out) == (2, "")
        assert "glue-cola@1 is a task of classification; only span tasks" in refused.err
