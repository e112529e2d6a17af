"""The catalog: its table, its lookups, and the real data sets if available, row for row."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from adapterbank.errors import DataError, UnknownName
from adapterbank.tasks import catalog
from adapterbank.tasks.catalog import CATALOG, bank_name, data_root, find, is_named, load, locate, train_splits
from adapterbank.tasks.examples import read_examples
from real_data import DATA, MISSING
from small_data import write

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
PAPER = {  # Table 2 of the paper: sizes and classes
    "20newsgroups": ((15076, 1885, 1885), 20),
    "airline": ((11712, 1464, 1464), 3),
    "corporate_messaging": ((2494, 312, 312), 4),
    "disasters": ((8688, 1086, 1086), 2),
    "economic_news": ((6392, 799, 800), 2),
    "emotion": ((32000, 4000, 4000), 13),
    "global_warming": ((3380, 422, 423), 2),
    "political_audience": ((4000, 500, 500), 2),
    "political_bias": ((4000, 500, 500), 2),
    "political_message": ((4000, 500, 500), 9),
    "primary_emotions": ((2019, 252, 253), 18),
    "progressive_opinion": ((927, 116, 116), 3),
    "progressive_stance": ((927, 116, 116), 4),
    "us_economy": ((3961, 495, 496), 2),
    "customer_complaints": ((146667, 18333, 18334), 157),
    "news_aggregator": ((338349, 42294, 42294), 4),
    "sms_spam": ((4459, 557, 558), 2),
}


def test_the_table_has_glue_squad_the_seventeen_and_the_others() -> None:
    assert {name for name in CATALOG if name.startswith("glue/")} == {f"glue/{name}" for name in GLUE}
    assert {name for name in CATALOG if name.startswith("squad/")} == {"squad/v1", "squad/v2", "squad/v1-articles"}
    paper = {name.removeprefix("paper/") for name in CATALOG if name.startswith("paper/")}
    assert paper == {*PAPER, "20newsgroups-bydate"}
    others = {"agnews", "trec", "mr", "subj", "cr", "sst5", "emotion", "banking77", "clinc150", "imdb"}
    assert {name for name in CATALOG if "/" not in name} == others


@pytest.mark.parametrize("name", PAPER)
def test_the_seventeen_have_the_papers_sizes_and_classes(name: str) -> None:
    entry = CATALOG[f"paper/{name}"]
    assert (entry.sizes, entry.classes or len(entry.labels)) == PAPER[name]
    assert entry.metric == "accuracy"


def test_glue_has_the_benchmarks_metrics() -> None:
    metrics = {name: CATALOG[f"glue/{name}"].metric for name in GLUE}
    assert metrics == {
        **dict.fromkeys(GLUE, "accuracy"),
        **{"cola": "matthews", "mrpc": "accuracy_f1", "qqp": "accuracy_f1", "stsb": "pearson_spearman"},
    }
    assert CATALOG["glue/wnli"].note == "left out by the paper"


def test_names_in_a_bank_are_the_catalogs_with_a_dash_and_all_differ() -> None:
    assert bank_name("glue/mrpc") == "glue-mrpc"
    assert bank_name("my/task") == "my/task"  # only the catalog's names are changed
    assert len({bank_name(name) for name in CATALOG}) == len(CATALOG)


def test_a_row_of_the_table_is_a_few_lines() -> None:
    source = inspect.getsource(catalog)
    table = source[source.index("# --- the table") :]
    rows = re.split(r"\n    (?=_glue\(|_squad\(|_paper\(|_political\(|Entry\()", table)[1:]
    assert len(rows) == len(CATALOG)
    assert max(len(row.splitlines()) for row in rows) < 30


def test_a_similar_name_is_suggested() -> None:
    with pytest.raises(UnknownName, match=r"'glue/mprc' is not a task of the catalog\. Did you mean 'glue/mrpc'\?"):
        find("glue/mprc")


def test_a_file_takes_precedence_over_a_task_of_that_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_named("emotion")
    (tmp_path / "emotion").write_text("mine")
    assert not is_named("emotion")
    assert not is_named("reviews.csv")


def test_the_data_root_is_the_one_given_or_that_of_the_environment(tmp_path, monkeypatch) -> None:
    assert data_root() is None
    monkeypatch.setenv("ADAPTERBANK_DATA", str(tmp_path))
    assert data_root() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_root(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(DataError, match=r"--data-root is .*nowhere', which is not a folder"):
        data_root(tmp_path / "nowhere")
    monkeypatch.setenv("ADAPTERBANK_DATA", "nowhere")
    with pytest.raises(DataError, match="ADAPTERBANK_DATA is 'nowhere'"):
        data_root()


def test_the_error_for_a_task_without_training_rows_lists_its_splits(tmp_path) -> None:
    (tmp_path / "qnli").mkdir()
    write(tmp_path / "qnli" / "dev.parquet", [("a", "b", 0)], ("sentence1", "sentence2", "label"))
    (tmp_path / "qnli" / "labels.json").write_text(json.dumps(["entailment", "not_entailment"]))
    with pytest.raises(DataError, match=r"'glue/qnli' has no labelled train split in .*qnli, only dev \(1 rows\)"):
        train_splits("glue/qnli", tmp_path)


def test_labels_that_the_catalog_does_not_list_come_from_the_labelled_rows(tmp_path) -> None:
    (tmp_path / "clinc150").mkdir()
    write(tmp_path / "clinc150" / "train.parquet", [("a", None), ("b", None)], ("text", "label"))
    with pytest.raises(DataError, match="'clinc150' has no labelled train, dev or test split, only train; add one"):
        load("clinc150", tmp_path)
    write(tmp_path / "clinc150" / "dev.parquet", [("a", "x"), ("b", "y"), ("c", None)], ("text", "label"))
    assert load("clinc150", tmp_path).task.labels == ("x", "y")


# --- real data ----------------------------------------------------------------------------------------------


def provenance() -> dict[str, dict[str, int]]:
    """Return the rows of every split from the data folder's own list."""
    file = DATA / "PROVENANCE.md"
    if not file.exists():
        return {}
    found = re.findall(r"^### (\w+)\n- rows: (.*?);", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        name: {split: int(count) for split, count in re.findall(r"(\w+) (\d+)", rows)}
        for name, rows in found
        if name != "squad"
    }


TOLD = provenance()


@pytest.mark.data
def test_every_data_set_of_the_folder_is_in_the_catalog() -> None:
    if not TOLD:
        pytest.skip(MISSING)
    assert set(TOLD) <= {entry.folder for entry in CATALOG.values()}
    assert len(TOLD) >= 25


@pytest.mark.data
@pytest.mark.parametrize("folder", TOLD or [pytest.param("", marks=pytest.mark.skip(MISSING))])
def test_every_data_set_has_the_number_of_rows_of_its_folder(folder: str) -> None:
    entries = [entry for entry in CATALOG.values() if entry.folder == folder and not entry.recut]
    (entry,) = entries
    found = load(entry.name, DATA)
    assert {split: table.rows for split, table in found.tables.items()} == TOLD[folder]
    labels = DATA / folder / "labels.json"
    if labels.exists():
        assert set(found.task.labels) == set(json.loads(labels.read_text(encoding="utf-8")))
    for split, table in found.labelled().items():
        examples, report = read_examples(table, found.task)
        assert len(examples) + report.empty == TOLD[folder][split]
        assert report.notes == []


@pytest.mark.data
def test_the_papers_split_of_20_newsgroups_has_the_papers_sizes() -> None:
    if locate(CATALOG["paper/20newsgroups"], DATA if DATA.exists() else None) is None:
        pytest.skip(MISSING)
    found = load("paper/20newsgroups", DATA)
    assert tuple(table.rows for table in found.tables.values()) == PAPER["20newsgroups"][0]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "rows", "silent"),
    [("squad/v1", {"dev": 10570}, 0), ("squad/v2", {"dev": 11873}, 5945),
     ("squad/v1-articles", {"train": 8613, "dev": 1957}, 0)],
)  # fmt: skip
def test_squad_has_its_official_counts(name: str, rows: dict[str, int], silent: int) -> None:
    if locate(CATALOG[name], DATA if DATA.exists() else None) is None:
        pytest.skip(MISSING)
    found = load(name, DATA)
    assert {split: table.rows for split, table in found.tables.items()} == rows
    targets = [
        target for table in found.tables.values() for target in read_examples(table, found.task)[0].targets or []
    ]
    assert sum(target[0] < 0 for target in targets) == silent
    assert found.task.threshold == (0.0 if silent else None)


TAGGED = {
    "tag/wnut17": {"train": 3394, "dev": 1009, "test": 1287},
    "tag/btc": {"train": 5338, "dev": 2001, "test": 2000},
    "tag/ud-ewt-pos": {"train": 12544, "dev": 2001, "test": 2077},
}


@pytest.mark.parametrize("name", TAGGED)
def test_tagged_sentences_have_their_official_sizes(name: str) -> None:
    assert CATALOG[name].sizes == tuple(TAGGED[name].values())
    assert (CATALOG[name].kind, CATALOG[name].text) == ("tagging", ("tokens",))


@pytest.mark.data
@pytest.mark.parametrize("name", TAGGED)
def test_tagged_sentences_are_read_from_the_published_files(name: str) -> None:
    if locate(find(name), DATA) is None:
        pytest.skip(MISSING)
    found = load(name, DATA)
    assert {split: table.rows for split, table in found.tables.items()}.items() <= TAGGED[name].items()
    assert all({*table.columns} == {"tokens", "label"} for table in found.tables.values())
    assert found.task.labels
