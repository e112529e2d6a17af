"""The commands about data and benchmarks: catalog, data, squad, glue-score, glue-submission, cache; and by name."""

from __future__ import annotations

import json
import zipfile

import pytest

import adapterbank
from adapterbank.benchmarks.squad import evaluate
from adapterbank.tasks.catalog import CATALOG
from small_data import FAST, NOUNS, answers, flags, reviews, shell, write

QUICK = [*flags(FAST), "--device", "cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Give a data root: SST-2 and CoLA in the official layout, SQuAD v2's JSON."""
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


@pytest.fixture(scope="module")
def bank(tmp_path_factory, checkpoint, root):
    """Give a bank with three tasks trained by name from the shell."""
    folder = tmp_path_factory.mktemp("named") / "bank"
    words = ["--bank", folder, "--backbone", checkpoint("bert")[0], "--data-root", root, *QUICK]
    for task in ("glue/sst2", "glue/cola", "squad/v2"):
        found = shell("train", "--task", task, *words)
        assert found.code == 0, found
    return folder


def test_a_task_is_trained_evaluated_shown_and_removed_by_its_catalog_name(bank, root, tmp_path, checkpoint):
    listed = shell("tasks", "--bank", bank, "--json").json
    assert [(task["name"], task["task"]["metric"]) for task in listed] == [
        ("glue-cola", "matthews"),
        ("glue-sst2", "accuracy"),
        ("squad-v2", "span_f1"),
    ]
    found = shell(
        "evaluate", "--bank", bank, "--task", "glue/sst2", "--data-root", root, "--device", "cpu", "--json"
    ).json
    assert (found["task"], found["rows"]) == ("glue-sst2@1", 24)
    assert (
        found["accuracy"] == next(task for task in listed if task["name"] == "glue-sst2")["metrics"]["dev"]["accuracy"]
    )
    assert shell("show", "--bank", bank, "--task", "glue/cola@1", "--json").json["name"] == "glue-cola"
    asked = shell("predict", "--bank", bank, "--task", "glue/sst2", "--text", "the cat was good", "--device", "cpu")
    assert asked.answers[0]["label"] in CATALOG["glue/sst2"].labels
    other = tmp_path / "bank"
    words = ["--backbone", checkpoint("bert")[0], "--data-root", root, *QUICK]
    assert shell("train", "--bank", other, "--task", "mine", "--train", "glue/sst2", *words).code == 0
    assert shell("train", "--bank", other, "--task", "glue/sst2", *words).code == 0
    assert shell("remove", "--bank", other, "--task", "glue/sst2", "--yes").code == 0
    assert [task["name"] for task in shell("tasks", "--bank", other, "--json").json] == ["mine"]


def test_the_same_from_python(bank, root, checkpoint, tmp_path):
    opened = adapterbank.open_bank(tmp_path / "bank", str(checkpoint("bert")[0]), device="cpu", data_root=root)
    seen = []
    result = opened.train("glue/sst2", stage=lambda *told: seen.append(told), **FAST)
    assert result.package.ref == "glue-sst2@1"
    assert result.record["config"]["train"] == "glue/sst2"
    assert ("tokenising train", 24, 24) in seen
    assert opened.evaluate("glue/sst2", split="dev")["rows"] == 24
    assert opened.rollback("glue/sst2", 1) == 1
    score = adapterbank.open_bank(bank, device="cpu").glue_score()
    assert set(score["tasks"]) == {"glue/sst2", "glue/cola"}


def test_the_catalog_lists_every_task_and_what_is_at_hand(root):
    found = shell("catalog", "--data-root", root, "--json").json
    assert [row["name"] for row in found] == list(CATALOG)
    here = {row["name"]: row for row in found if row["layout"]}
    assert set(here) == {"glue/sst2", "glue/cola", "squad/v2"}
    assert here["glue/cola"]["splits"] == ["dev", "test", "train"]
    assert (here["glue/cola"]["sizes"], here["glue/cola"]["classes"]) == ({"train": 8551, "dev": 1043, "test": 1063}, 2)
    text = shell("catalog", "--data-root", root).out
    assert all(name in text for name in CATALOG)
    assert f"3 of {len(CATALOG)} at hand. Data root: {root}" in text
    lines = text.splitlines()
    assert max(map(len, lines[: len(CATALOG) + 1])) <= 100
    assert next(line for line in lines if line.startswith("glue/cola ")).endswith(" files")
    assert next(line for line in lines if line.startswith("glue/rte ")).endswith(" hub")
    assert "glue/wnli: left out by the paper" in lines
    assert "Data root: none; name one" in shell("catalog").out


def test_the_catalog_says_which_splits_are_at_hand(tmp_path):
    (tmp_path / "dev-v1.1.json").write_text('{"data": []}')
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.parquet", [("a", 0), ("b", 1)], ("sentence", "label"))
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / f"{split}.parquet").rename(tmp_path / "sst2" / f"{split}.parquet")
    lines = shell("catalog", "--data-root", tmp_path).out.splitlines()
    assert next(line for line in lines if line.startswith("squad/v1 ")).endswith(" files: dev only")
    assert next(line for line in lines if line.startswith("glue/sst2 ")).endswith(" parquet: train dev")


def test_data_counts_by_the_length_that_training_would_have(root, checkpoint):
    words = ["--data-root", root, "--backbone", checkpoint("bert")[0], "--json"]
    assert shell("data", "squad/v2", *words).json["max_length"] == 384
    assert shell("data", "glue/sst2", *words).json["max_length"] == 128


def test_a_task_of_ones_own_may_have_a_name_of_the_catalog(tmp_path, checkpoint):
    data = write(tmp_path / "mine.csv", reviews(24))
    words = ["--bank", tmp_path / "bank", "--task", "mr"]
    assert shell("train", *words, "--train", data, "--backbone", checkpoint("bert")[0], *QUICK).code == 0
    found = shell("evaluate", *words, "--data", data, "--device", "cpu", "--json").json
    assert (found["task"], found["rows"], found["notes"]) == ("mr@1", 24, [])
    (tmp_path / "data").mkdir()
    refused = shell("evaluate", *words, "--data-root", tmp_path / "data", "--device", "cpu")
    assert refused.code == 2
    assert "No data was given, so 'mr' was to be scored on that of the catalog's 'mr':" in refused.err
    (tmp_path / "data" / "rt-polarity.neg").write_text("the cat was bad\n" * 20)
    (tmp_path / "data" / "rt-polarity.pos").write_text("the cat was good\n" * 20)
    told = shell("evaluate", *words, "--data-root", tmp_path / "data", "--device", "cpu")
    assert "note: No data was given: scored on the catalog's, " in told.err


def test_training_tells_of_every_split_that_was_scored(tmp_path, checkpoint):
    (tmp_path / "mnli").mkdir()
    rows = [("the cat sat", "the dog ran", i % 3) for i in range(24)]
    for split in ("train", "dev", "dev_mismatched"):
        write(tmp_path / "mnli" / f"{split}.parquet", rows, ("premise", "hypothesis", "label"))
    words = ["--bank", tmp_path / "bank", "--data-root", tmp_path, "--backbone", checkpoint("bert")[0], *QUICK]
    told = shell("train", "--task", "glue/mnli", *words)
    assert " on dev_mismatched\n" in told.out


def test_data_tells_of_a_task_of_the_catalog(root, checkpoint):
    words = ["--data-root", root, "--backbone", checkpoint("bert")[0], "--max-length", "7"]
    found = shell("data", "glue/sst2", *words, "--json").json
    train = found["splits"]["train"]
    assert (train["rows"], train["labels"]) == (24, {"negative": 12, "positive": 12})
    assert train["tokens"]["p100"] == 7
    assert (train["longer"], found["shared"][0]) == (0, {"of": "dev", "in": "train", "rows": 24})
    text = shell("data", "glue/sst2", *words).out
    assert "24 rows of dev also in train" in text
    assert "50.0 %" in text
    assert "6 questions without an answer" in shell("data", "squad/v2", *words).out


def test_data_tells_of_files_and_warns_of_a_slip_in_a_label(tmp_path, checkpoint):
    train = write(tmp_path / "train.csv", [*reviews(24), ("", "positive")])
    dev = write(tmp_path / "dev.csv", [(text, label.title()) for text, label in reviews(4)])
    words = ["--train", train, "--dev", dev, "--backbone", checkpoint("bert")[0]]
    found = shell("data", *words)
    assert found.code == 0
    assert "warning: dev has the label 'Positive' (2 rows); train spells it 'positive'." in found.out
    assert shell("data", *words, "--json").json["splits"]["train"]["empty"] == 1
    for odd in ([], ["glue/sst2", "--train", train], ["glue/sst2", "--text", "x"], ["glue/sst3"]):
        refused = shell("data", *odd)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)


def test_squad_answers_scores_and_files_agree_with_each_other(bank, root, tmp_path):
    out, best, odds = (tmp_path / name for name in ("p.json", "nbest.json", "odds.json"))
    words = ["squad", "--bank", bank, "--task", "squad/v2", "--data-root", root, "--device", "cpu", "--json"]
    found = shell(*words, "--output", out, "--nbest", best, "--null-odds", odds).json
    said, listed, told = (json.loads(file.read_text()) for file in (out, best, odds))
    assert set(said) == set(listed) == set(told) == {f"q{i}" for i in range(24)}
    gold = {f"q{i}": [] if i % 4 == 3 else [row["answer"]] * 2 for i, row in enumerate(answers(24))}
    official = evaluate(gold, said, version="2.0")
    assert {name: found[name] for name in official} == pytest.approx(official)
    assert found["f1"] <= found["best_f1"] + 1e-9
    # The threshold that training chose on this very dev set is the best one.
    assert found["f1"] == pytest.approx(found["best_f1"])
    again = shell("squad", "--predictions", out, "--data", root / "dev-v2.0.json", "--json").json
    assert again == pytest.approx(official)
    for key, answer in said.items():
        texts = [one["text"] for one in listed[key]]
        assert answer in texts
        assert "" in texts
        assert sum(one["probability"] for one in listed[key]) == pytest.approx(1)
    recorded = shell("show", "--bank", bank, "--task", "squad/v2", "--json").json["metrics"]["dev"]
    assert 100 * recorded["span_f1"] == pytest.approx(found["f1"])


def test_squad_says_which_words_do_not_go_together(bank, root, tmp_path):
    for words in (
        ["squad"],
        ["squad", "--bank", bank],
        ["squad", "--predictions", "p.json"],
        ["squad", "--predictions", tmp_path / "no.json", "--data", root / "dev-v2.0.json"],
        ["squad", "--bank", bank, "--task", "glue/cola", "--data", root / "dev-v2.0.json"],
    ):
        refused = shell(*words)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1), refused


def test_squad_takes_the_version_that_is_named(bank, root, tmp_path):
    out = tmp_path / "p.json"
    own = ["squad", "--bank", bank, "--task", "squad/v2", "--data-root", root, "--device", "cpu", "--json"]
    data = json.loads((root / "dev-v2.0.json").read_text())
    for article in data["data"]:
        article["paragraphs"] = [one for one in article["paragraphs"] if one["qas"][0]["answers"]]
    answered = tmp_path / "answered.json"
    answered.write_text(json.dumps(data))
    assert "exact_match" in shell(*own, "--data", answered, "--output", out).json
    assert "HasAns_f1" in shell(*own, "--data", answered, "--version", "2.0").json
    assert "HasAns_f1" in shell("squad", "--predictions", out, "--data", answered, "--version", "2.0").out
    assert "6 of 24 questions have no answer, which SQuAD 1.1 cannot score" in shell(*own, "--version", "1.1").err
    assert "'3' is not a version of SQuAD" in shell(*own, "--version", "3").err


def test_squad_explains_odds_that_cannot_be(bank, root, tmp_path, checkpoint):
    out, odds = tmp_path / "p.json", tmp_path / "odds.json"
    out.write_text(json.dumps({f"q{i}": "" for i in range(24)}))
    given = ["squad", "--predictions", out, "--data", root / "dev-v2.0.json", "--null-odds", odds]
    for value in ('"0.5"', "null", "true", "[1]"):
        odds.write_text(f'{{"q0": {value}}}')
        refused = shell(*given)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused
        assert "for 'q0', which is no number" in refused.err
    data = json.loads((root / "dev-v2.0.json").read_text())
    for article in data["data"]:
        article["paragraphs"] = [one for one in article["paragraphs"] if one["qas"][0]["answers"]]
    (tmp_path / "train-v1.1.json").write_text(json.dumps(data))
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(data))
    odds.write_text("{}")
    refused = shell("squad", "--predictions", out, "--data", tmp_path / "dev-v1.1.json", "--null-odds", odds)
    assert "SQuAD 1.1 knows no odds" in refused.err
    words = ["--bank", tmp_path / "bank", "--task", "squad/v1", "--data-root", tmp_path]
    assert shell("train", *words, "--backbone", checkpoint("bert")[0], *QUICK).code == 0
    refused = shell("squad", *words, "--device", "cpu", "--null-odds", tmp_path / "new.json")
    assert "'squad/v1' always answers, so it has no odds" in refused.err
    assert not (tmp_path / "new.json").exists()


def test_squad_says_of_another_kind_of_task_what_it_is(bank, root):
    for data in ([], ["--data-root", root], ["--data", root / "dev-v2.0.json"]):
        refused = shell("squad", "--bank", bank, "--task", "glue/cola", *data)
        assert (refused.code, refused.out) == (2, "")
        assert "glue-cola@1 is a task of classification; only span tasks" in refused.err


def test_predict_lists_the_best_answers_with_their_places_in_the_text(bank):
    context = answers(1)[0]["context"] + " and the fox sat on a mat" * 8
    words = ["--text", "what was it", "--text-pair", context, "--device", "cpu"]
    (found,) = shell("predict", "--bank", bank, "--task", "squad/v2", "--best", "3", *words).answers
    assert set(found) == {"answer", "start", "end", "null_odds", "best"}
    assert len(found["best"]) == 3
    for one in found["best"]:
        assert context[one["start"] : one["end"]] == one["text"]


def test_glue_score_is_over_the_tasks_at_hand(bank):
    found = shell("glue-score", "--bank", bank, "--json").json
    assert found["score"] == pytest.approx(sum(found["tasks"].values()) / 2)
    assert len(found["missing"]) == 7
    text = shell("glue-score", "--bank", bank).out
    assert "over 2 of 9 tasks (not the benchmark's: without" in text
    assert "2 not on the official dev set)" in text
    assert "not the official dev set: glue/cola (dev has 24 rows, the official one 1,043)\n" in text


def test_a_submission_in_part_has_the_servers_form(bank, root, tmp_path):
    out = tmp_path / "sub.zip"
    words = ["glue-submission", "--bank", bank, "--data-root", root, "--output", out, "--device", "cpu"]
    refused = shell(*words)
    assert refused.code == 2
    assert not out.exists()
    assert "adapterbank: MNLI-m.tsv needs the task 'glue-mnli' in the bank.\n" in refused.err
    assert "SST-2.tsv needs 1821 rows" in refused.err
    found = shell(*words, "--partial", "--json")
    assert found.json["files"] == {"CoLA.tsv": 2, "SST-2.tsv": 2, "WNLI.tsv": 146}
    assert "note: MNLI-m.tsv needs the task 'glue-mnli' in the bank.\n" in found.err
    assert "note: SST-2.tsv needs 1821 rows" in found.err
    assert "The server refuses" in found.err
    with zipfile.ZipFile(out) as archive:
        lines = archive.read("SST-2.tsv").decode().splitlines()
    assert lines[0] == "index\tprediction"
    assert {line.split("\t")[0] for line in lines[1:]} == {"0", "1"}
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    assert "glue/mnli=my-mnli" in shell(*words, "--use", "nothing").err


def test_the_cache_is_told_of_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path / "kept"))
    import numpy as np

    from adapterbank.storage import cache

    cache.put("tokens-x", {"a": np.arange(3)})
    told = shell("cache", "--json").json
    assert (told["folder"], told["entries"], told["removed"]) == (str(tmp_path / "kept"), 1, False)
    assert shell("cache", "--clear").out.startswith("Removed 1 tokenised data set, ")
    assert shell("cache").out.startswith("0 tokenised data sets, 0 B in ")
