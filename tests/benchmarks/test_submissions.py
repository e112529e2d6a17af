"""Benchmarks: a GLUE zip of hand-made predictions, the score of a bank, SQuAD files with their scores."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from adapterbank.benchmarks import glue, submissions
from adapterbank.errors import BankError, InputError, UnknownName
from adapterbank.kinds import span as spans
from adapterbank.tasks.catalog import CATALOG, bank_name
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table

ROWS = 3
TESTS = {
    "CoLA/test.tsv": "index\tsentence\n{0}",
    "SST-2/test.tsv": "index\tsentence\n{0}",
    "MRPC/test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n{3}",
    "STS-B/test.tsv": "index\tsentence1\tsentence2\n{1}",
    "QQP/test.tsv": "id\tquestion1\tquestion2\n{1}",
    "MNLI/test_matched.tsv": "index\tsentence1\tsentence2\n{1}",
    "MNLI/test_mismatched.tsv": "index\tsentence1\tsentence2\n{1}",
    "QNLI/test.tsv": "index\tquestion\tsentence\n{1}",
    "RTE/test.tsv": "index\tsentence1\tsentence2\n{1}",
    "diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n{1}",
}
HELD = {bank_name(name) for name in CATALOG if name.startswith("glue/")} - {"glue-wnli", "glue-ax"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return the test sets of GLUE with a few rows each, and set the expected numbers of rows accordingly."""
    monkeypatch.setattr(glue, "SHEETS", tuple(replace(sheet, rows=ROWS) for sheet in glue.SHEETS))
    for file, form in TESTS.items():
        one = "".join(f"{i}\ttext {i}\n" for i in range(ROWS))
        two = "".join(f"{i}\ttext {i}\tother\n" for i in range(ROWS))
        four = "".join(f"{i}\t7\t8\ttext {i}\tother\n" for i in range(ROWS))
        path = tmp_path / "glue_data" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(form.format(one, two, "", four))
    return tmp_path / "glue_data"


def by_hand(seen):
    """Return a function that predicts the labels in turn, and records its calls in `seen`."""

    def answer(task, examples):
        seen.append((task, list(examples.texts), examples.pairs))
        name = next(name for name in CATALOG if bank_name(name) == task.partition("@")[0])
        labels = CATALOG[name].labels
        return [labels[i % len(labels)] if labels else 1.25 * i for i in range(len(examples))]

    return answer


def submit(path, root, seen=None, held=frozenset(HELD), **options):
    given = {"use": {}, "partial": False, "stage": lambda *told: None, "note": lambda gap: None, **options}
    return submissions.submit(path, held, by_hand([] if seen is None else seen), root=str(root), **given)


def test_the_zip_has_every_file_the_server_wants(root, tmp_path):
    seen, told = [], []
    rows = submit(tmp_path / "out.zip", root, seen, stage=lambda *stage: told.append(stage))
    assert rows == {sheet.file: ROWS for sheet in glue.SHEETS}
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    head = "index\tprediction\n"
    assert files == {
        "AX.tsv": f"{head}0\tentailment\n1\tneutral\n2\tcontradiction\n",
        "CoLA.tsv": f"{head}0\t0\n1\t1\n2\t0\n",
        "MNLI-m.tsv": f"{head}0\tentailment\n1\tneutral\n2\tcontradiction\n",
        "MNLI-mm.tsv": f"{head}0\tentailment\n1\tneutral\n2\tcontradiction\n",
        "MRPC.tsv": f"{head}0\t0\n1\t1\n2\t0\n",
        "QNLI.tsv": f"{head}0\tentailment\n1\tnot_entailment\n2\tentailment\n",
        "QQP.tsv": f"{head}0\t0\n1\t1\n2\t0\n",
        "RTE.tsv": f"{head}0\tentailment\n1\tnot_entailment\n2\tentailment\n",
        "SST-2.tsv": f"{head}0\t0\n1\t1\n2\t0\n",
        "STS-B.tsv": f"{head}0\t0.000\n1\t1.250\n2\t2.500\n",
        "WNLI.tsv": f"{head}0\t0\n1\t0\n2\t0\n",
    }
    texts = [f"text {i}" for i in range(ROWS)]
    assert ("glue-cola", texts, None) in seen
    assert [task for task, _, _ in seen].count("glue-mnli") == 3  # matched, mismatched and the diagnostic set
    assert all(mine == texts for _, mine, _ in seen)
    assert (told[0], len(told)) == (("AX.tsv", 3, 3), 10)


def test_everything_missing_is_reported_at_once_and_nothing_is_written(root, tmp_path):
    (root / "RTE/test.tsv").unlink()
    (root / "QNLI/test.tsv").write_text("index\tquestion\tsentence\n0\tq\ts\n")
    with pytest.raises(InputError) as caught:
        submit(tmp_path / "out.zip", root, held=HELD - {"glue-cola"})
    said = str(caught.value)
    assert "CoLA.tsv needs the task 'glue-cola' in the bank." in said
    assert "RTE.tsv: " in said
    assert "QNLI.tsv needs 3 rows, and" in said
    assert not (tmp_path / "out.zip").exists()


def test_a_partial_zip_is_written_on_request(root, tmp_path):
    gaps = []
    rows = submit(tmp_path / "out.zip", root, held={"glue-cola"}, partial=True, note=gaps.append)
    assert rows == {"CoLA.tsv": ROWS, "WNLI.tsv": ROWS}
    assert len(gaps) == len(glue.SHEETS) - 2
    assert "RTE.tsv needs the task 'glue-rte' in the bank." in gaps


def test_a_missing_folder_is_not_created(root, tmp_path):
    with pytest.raises(InputError, match=r"There is no folder .*new to write"):
        submit(tmp_path / "new" / "out.zip", root)
    assert not (tmp_path / "new").exists()


def test_nothing_is_written_if_no_task_can_predict(root, tmp_path):
    with pytest.raises(InputError, match="There is nothing to write"):
        submit(tmp_path / "out.zip", root, held=set(), partial=True)


def test_another_task_can_replace_one_of_the_catalog(root, tmp_path):
    seen = []
    held = (HELD - {"glue-rte"}) | {"mine"}

    def answer(task, examples):
        seen.append(task)
        return by_hand([])("glue-rte" if task.startswith("mine") else task, examples)

    given = {"root": str(root), "partial": False, "stage": lambda *told: None, "note": lambda gap: None}
    submissions.submit(tmp_path / "out.zip", held, answer, use={"glue/rte": "mine@2"}, **given)
    assert "mine@2" in seen
    with pytest.raises(UnknownName, match=r"'glue/rtee' is not a task of GLUE\. Did you mean 'glue/rte'"):
        submissions.submit(tmp_path / "out.zip", held, answer, use={"glue/rtee": "mine"}, **given)


def dev_score(metrics, rows=None):
    """Score manifests of these metrics; with the official numbers of rows unless others are given."""
    rows = {"glue-cola": {"dev": 1043}, **(rows or {})}
    manifests = []
    for name, mine in metrics.items():
        data = {split: {"rows": count} for split, count in rows.get(name, {}).items()}
        manifests.append(SimpleNamespace(name=name, metrics=mine, data=data))
    return submissions.dev_score(manifests)


def test_the_dev_score_is_the_benchmarks_mean_over_what_the_bank_has():
    found = dev_score(
        {
            "glue-cola": {"dev": {"matthews": 0.5, "accuracy": 0.9}},
            "glue-mrpc": {"dev": {"accuracy_f1": 0.8}, "test": {"accuracy_f1": 0.1}},
            "glue-mnli": {"dev": {"accuracy": 0.7}, "dev_mismatched": {"accuracy": 0.6}},
            "sentiment": {"dev": {"accuracy": 1.0}},
        },
        {"glue-mrpc": {"dev": 408, "test": 1725}, "glue-mnli": {"dev": 9815, "dev_mismatched": 9832}},
    )
    assert found["tasks"] == pytest.approx({"glue/cola": 0.5, "glue/mrpc": 0.8, "glue/mnli": 0.65})
    assert found["score"] == pytest.approx((0.5 + 0.8 + 0.65) / 3)
    assert len(found["missing"]) == 6
    assert found["unofficial"] == {}
    with pytest.raises(BankError, match="The bank has none of glue-cola"):
        dev_score({"sentiment": {}})
    with pytest.raises(BankError, match="'glue-cola' was not scored by 'matthews'"):
        dev_score({"glue-cola": {"dev": {"accuracy": 0.9}}})


def test_a_task_scored_on_other_rows_than_the_official_ones_is_named():
    scores = {"dev": {"accuracy": 0.7}, "dev_mismatched": {"accuracy": 0.5}}
    found = dev_score(
        {"glue-qqp": {"dev": {"accuracy_f1": 0.9}}, "glue-mnli": scores, "glue-cola": {"dev": {"matthews": 0.5}}},
        {"glue-qqp": {"train": 9, "dev": 1000}, "glue-mnli": {"dev": 9815, "dev_mismatched": 50}},
    )
    assert found["unofficial"] == {
        "glue/qqp": "dev has 1,000 rows, the official one 40,430",
        "glue/mnli": "dev_mismatched has 50 rows, the official one 9,832",
    }


def test_a_sample_of_mnli_mismatched_is_not_averaged_in():
    scores = {"dev": {"accuracy": 0.7}, "dev_mismatched_1k": {"accuracy": 0.1}}
    found = dev_score({"glue-mnli": scores}, {"glue-mnli": {"dev": 9815, "dev_mismatched_1k": 1000}})
    assert found["tasks"] == {"glue/mnli": 0.7}
    assert found["unofficial"] == {"glue/mnli": "matched only"}
    scores["dev_mismatched"] = {"accuracy": 0.5}
    found = dev_score({"glue-mnli": scores}, {"glue-mnli": {"dev": 9815, "dev_mismatched": 9832}})
    assert found["tasks"] == pytest.approx({"glue/mnli": 0.6})


def squad_table(answers):
    columns = {"id": [f"q{i}" for i in range(len(answers))], "question": ["?"] * len(answers)}
    cells = [{"text": texts, "answer_start": [0] * len(texts)} for texts in answers]
    return Table({**columns, "context": ["Ann ran home."] * len(answers), "answers": cells}, "dev.json")


def reading(*answers, null=0.0):
    return spans.Reading(tuple(spans.SpanAnswer(text, 0, len(text), score) for text, score in answers), null)


def test_squad_answers_come_with_official_scores_of_the_first_version():
    task = Task("qa", "span", ("question", "context"), "answers", (), "span_f1")
    readings = [reading(("Ann", 2.0), ("ran", 1.0)), reading(("home", 1.0), null=9.0)]
    found = submissions.answer_squad(squad_table([["Ann"], ["Ann ran"]]), task, lambda examples: readings)
    assert found.predictions == {"q0": "Ann", "q1": "home"}
    assert found.scores == {"exact_match": 50.0, "f1": 50.0}
    assert (found.version, found.null_odds) == ("1.1", {})
    assert [one["text"] for one in found.best["q0"]] == ["Ann", "ran"]


def test_squad_2_answers_have_null_odds_and_the_best_threshold():
    task = Task("qa", "span", ("question", "context"), "answers", (), "span_f1", 0.5)
    readings = [reading(("Ann", 2.0), null=2.4), reading(("ran", 1.0), null=2.0), reading(("home", 0.0), null=-3.0)]
    found = submissions.answer_squad(squad_table([["Ann"], [], []]), task, lambda examples: readings)
    assert found.predictions == {"q0": "Ann", "q1": "", "q2": "home"}
    assert found.null_odds == pytest.approx({"q0": 0.4, "q1": 1.0, "q2": -3.0})
    assert found.version == "2.0"
    assert found.scores["exact"] == found.scores["f1"] == pytest.approx(200 / 3)
    assert (found.scores["HasAns_f1"], found.scores["NoAns_f1"]) == (100.0, 50.0)
    # Silence everywhere is right twice; answering from -3 on loses one, and from 0.4 on wins it back.
    assert found.scores["best_f1"] == pytest.approx(200 / 3)
    assert [one["text"] for one in found.best["q1"]] == ["", "ran"]
