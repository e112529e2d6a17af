"""`training.dataset`: data from files, Python values, or the catalog."""

from __future__ import annotations

import json

import pytest

from adapterbank.config import parse, resolve
from adapterbank.errors import ConfigError, InputError, UnknownName
from adapterbank.training.dataset import canonical, catalog_name, defaults, read_data, scored_table
from small_data import reviews, write

SENTENCES = [(text, int(label == "positive")) for text, label in reviews(20)]


@pytest.fixture
def root(tmp_path):
    """Return a data root with SST-2 as Parquet and MNLI as TSV."""
    (tmp_path / "sst2").mkdir()
    for split, rows in (("train", SENTENCES), ("dev", SENTENCES[:6]), ("test", SENTENCES[:4])):
        write(tmp_path / "sst2" / f"{split}.parquet", rows, ("sentence", "label"))
    (tmp_path / "sst2" / "labels.json").write_text(json.dumps(["negative", "positive"]))
    (tmp_path / "MNLI").mkdir()
    labels = ("entailment", "neutral", "contradiction")
    for split, count in (("train", 12), ("dev_matched", 6), ("dev_mismatched", 3), ("test_matched", 2)):
        rows = [f"{i}\tthe cat\tit was {i}\t{labels[i % 3]}" for i in range(count)]
        head = "index\tsentence1\tsentence2\tgold_label"
        if split == "test_matched":
            head, rows = "index\tsentence1\tsentence2", [row.rsplit("\t", 1)[0] for row in rows]
        (tmp_path / "MNLI" / f"{split}.tsv").write_text("\n".join([head, *rows]) + "\n")
    return tmp_path


def test_a_catalog_task_provides_columns_labels_metric_and_splits(root):
    data = read_data(parse({"task": "glue/sst2", "data_root": str(root)}))
    assert (data.task.name, data.task.text, data.task.labels) == ("glue-sst2", ("sentence",), ("negative", "positive"))
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 20, "dev": 6, "test": 4}
    assert data.splits["train"].targets == [label for _, label in SENTENCES]
    assert data.notes == ()


def test_further_labelled_splits_are_included_and_unlabelled_ones_are_not(root):
    data = read_data(parse({"task": "glue/mnli", "data_root": str(root)}))
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 12, "dev": 6, "dev_mismatched": 3}


def test_name_metric_dev_and_limit_can_be_overridden(root, tmp_path):
    own = write(tmp_path / "own.csv", [(text, ("negative", "positive")[label]) for text, label in SENTENCES[:8]],
                ("sentence", "label"))  # fmt: skip
    options = {"task": "mine", "train": "glue/sst2", "metric": "matthews", "dev": str(own), "limit": 10}
    data = read_data(parse({**options, "data_root": str(root)}))
    assert (data.task.name, data.task.metric) == ("mine", "matthews")
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 10, "dev": 8, "test": 4}


def test_all_options_that_the_catalog_decides_are_refused_in_one_error(root):
    with pytest.raises(ConfigError) as caught:
        read_data(parse({"task": "glue/sst2", "text": "sentence", "kind": "regression", "data_root": str(root)}))
    assert len(caught.value.mistakes) == 2


def test_named_fills_in_the_bank_name_and_the_data_of_a_catalog_task():
    config = canonical(parse({"task": "glue/sst2"}))
    assert (config.task, config.train) == ("glue-sst2", "glue/sst2")
    config = canonical(parse({"task": "glue/sst2", "train": "mine.csv"}))
    assert (config.task, config.train) == ("glue-sst2", "mine.csv")
    assert canonical(parse({"task": "s", "train": "a.csv"})) == resolve(parse({"task": "s", "train": "a.csv"}))


def test_python_data_replaces_the_data_of_the_catalog():
    config = canonical(parse({"task": "glue/sst2"}), {"train": SENTENCES})
    assert (config.task, config.train) == ("glue-sst2", "")


def test_squad_has_longer_windows_unless_other_data_is_named():
    assert defaults("squad/v1") == defaults("mine", "squad/v2") == {"max_length": 384}
    assert defaults("squad/v1", "mine.csv") == defaults("squad/v1", [("a", "b")]) == defaults("glue/sst2") == {}


def test_catalog_name_finds_the_catalog_task_of_a_bank_task():
    assert catalog_name("glue-sst2@3") == catalog_name("glue/sst2") == "glue/sst2"
    assert catalog_name("sentiment") is None


def test_scored_rows_come_from_the_caller_or_the_catalog(root, tmp_path):
    own = write(tmp_path / "own.csv", [("a", "b")], ("sentence", "label"))
    assert scored_table("glue-sst2", str(own), "dev", str(root)).rows == 1
    assert scored_table("glue-sst2", None, "test", str(root)).rows == 4
    assert scored_table("mine", "glue/sst2", "dev", str(root)).rows == 6
    with pytest.raises(InputError, match=r"'mine' is not in the catalog.*--data"):
        scored_table("mine", None, "dev", str(root))
    with pytest.raises(UnknownName, match=r"'tset' is not a labelled split of 'glue/sst2'.* Did you mean 'test'"):
        scored_table("glue-sst2", None, "tset", str(root))
