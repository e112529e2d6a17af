"""`adapterbank catalog`, and tasks that are trained, scored and removed by their catalog name."""

from __future__ import annotations

import adapterbank
from adapterbank.tasks.catalog import CATALOG
from small_data import FAST, flags, reviews, shell, write

QUICK = [*flags(FAST), "--device", "cpu"]


def test_a_catalog_task_is_trained_evaluated_shown_and_removed_by_name(catalog_bank, data_root, tmp_path, checkpoint):
    listed = shell("tasks", "--bank", catalog_bank, "--json").json
    assert [(task["name"], task["task"]["metric"]) for task in listed] == [
        ("glue-cola", "matthews"),
        ("glue-sst2", "accuracy"),
        ("squad-v2", "span_f1"),
    ]
    found = shell(
        "evaluate", "--bank", catalog_bank, "--task", "glue/sst2", "--data-root", data_root, "--device", "cpu", "--json"
    ).json
    assert (found["task"], found["rows"]) == ("glue-sst2@1", 24)
    assert (
        found["accuracy"] == next(task for task in listed if task["name"] == "glue-sst2")["metrics"]["dev"]["accuracy"]
    )
    assert shell("show", "--bank", catalog_bank, "--task", "glue/cola@1", "--json").json["name"] == "glue-cola"
    words = ["--task", "glue/sst2", "--text", "the cat was good", "--device", "cpu"]
    asked = shell("predict", "--bank", catalog_bank, *words)
    assert asked.answers[0]["label"] in CATALOG["glue/sst2"].labels
    other = tmp_path / "bank"
    words = ["--backbone", checkpoint("bert")[0], "--data-root", data_root, *QUICK]
    assert shell("train", "--bank", other, "--task", "mine", "--train", "glue/sst2", *words).code == 0
    assert shell("train", "--bank", other, "--task", "glue/sst2", *words).code == 0
    assert shell("remove", "--bank", other, "--task", "glue/sst2", "--yes").code == 0
    assert [task["name"] for task in shell("tasks", "--bank", other, "--json").json] == ["mine"]


def test_catalog_tasks_from_python(catalog_bank, data_root, checkpoint, tmp_path):
    opened = adapterbank.open_bank(tmp_path / "bank", str(checkpoint("bert")[0]), device="cpu", data_root=data_root)
    seen = []
    result = opened.train("glue/sst2", stage=lambda *args: seen.append(args), **FAST)
    assert result.package.ref == "glue-sst2@1"
    assert result.record["config"]["train"] == "glue/sst2"
    assert ("tokenising train", 24, 24) in seen
    assert opened.evaluate("glue/sst2", split="dev")["rows"] == 24
    assert opened.rollback("glue/sst2", 1) == 1
    score = adapterbank.open_bank(catalog_bank, device="cpu").glue_score()
    assert set(score["tasks"]) == {"glue/sst2", "glue/cola"}


def test_the_catalog_lists_every_task_and_what_is_available(data_root):
    found = shell("catalog", "--data-root", data_root, "--json").json
    assert [row["name"] for row in found] == list(CATALOG)
    here = {row["name"]: row for row in found if row["layout"]}
    assert set(here) == {"glue/sst2", "glue/cola", "squad/v2"}
    assert here["glue/cola"]["splits"] == ["dev", "test", "train"]
    assert (here["glue/cola"]["sizes"], here["glue/cola"]["classes"]) == ({"train": 8551, "dev": 1043, "test": 1063}, 2)
    text = shell("catalog", "--data-root", data_root).out
    assert all(name in text for name in CATALOG)
    assert f"3 of {len(CATALOG)} found locally. Data root: {data_root}" in text
    lines = text.splitlines()
    assert max(map(len, lines[: len(CATALOG) + 1])) <= 100
    assert next(line for line in lines if line.startswith("glue/cola ")).endswith(" files")
    assert next(line for line in lines if line.startswith("glue/rte ")).endswith(" hub")
    assert "glue/wnli: left out by the paper" in lines
    assert "Data root: none; set one" in shell("catalog").out


def test_the_catalog_lists_which_splits_are_available(tmp_path):
    (tmp_path / "dev-v1.1.json").write_text('{"data": []}')
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.parquet", [("a", 0), ("b", 1)], ("sentence", "label"))
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / f"{split}.parquet").rename(tmp_path / "sst2" / f"{split}.parquet")
    lines = shell("catalog", "--data-root", tmp_path).out.splitlines()
    assert next(line for line in lines if line.startswith("squad/v1 ")).endswith(" files: dev only")
    assert next(line for line in lines if line.startswith("glue/sst2 ")).endswith(" parquet: train dev")


def test_a_users_task_may_have_a_name_of_the_catalog(tmp_path, checkpoint):
    data = write(tmp_path / "mine.csv", reviews(24))
    words = ["--bank", tmp_path / "bank", "--task", "mr"]
    assert shell("train", *words, "--train", data, "--backbone", checkpoint("bert")[0], *QUICK).code == 0
    found = shell("evaluate", *words, "--data", data, "--device", "cpu", "--json").json
    assert (found["task"], found["rows"], found["notes"]) == ("mr@1", 24, [])
    (tmp_path / "data").mkdir()
    refused = shell("evaluate", *words, "--data-root", tmp_path / "data", "--device", "cpu")
    assert refused.code == 2
    assert "No data was given, and the catalog's data for 'mr' ('mr') cannot be read:" in refused.err
    (tmp_path / "data" / "rt-polarity.neg").write_text("the cat was bad\n" * 20)
    (tmp_path / "data" / "rt-polarity.pos").write_text("the cat was good\n" * 20)
    found = shell("evaluate", *words, "--data-root", tmp_path / "data", "--device", "cpu")
    assert "note: No data was given: scored on the data of the catalog, " in found.err


def test_training_prints_the_score_on_every_labelled_split(tmp_path, checkpoint):
    (tmp_path / "mnli").mkdir()
    rows = [("the cat sat", "the dog ran", i % 3) for i in range(24)]
    for split in ("train", "dev", "dev_mismatched"):
        write(tmp_path / "mnli" / f"{split}.parquet", rows, ("premise", "hypothesis", "label"))
    words = ["--bank", tmp_path / "bank", "--data-root", tmp_path, "--backbone", checkpoint("bert")[0], *QUICK]
    found = shell("train", "--task", "glue/mnli", *words)
    assert " on dev_mismatched\n" in found.out
