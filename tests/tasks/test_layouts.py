"""Layouts: files written by hand in the published form, read back row for row."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from adapterbank.errors import DataError
from adapterbank.tasks.catalog import CATALOG, find, load, locate
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.layouts import ClassFiles, Delimited, Folders, Lines, Parquet, cut, joined
from adapterbank.tasks.tables import Table
from small_data import write


def put(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))


# --- the official GLUE download -----------------------------------------------------------------------------

# For each task: its folder, the files, and for each file the rows that must come out.
GLUE = {
    "glue/cola": (
        {
            "CoLA/train.tsv": "gj04\t1\t\tOur friends won't buy this.\ngj04\t0\t*\tA \"stray quote sat.\n",
            "CoLA/dev.tsv": "gj04\t0\t*\tThe the.\n",
            "CoLA/test.tsv": "index\tsentence\n0\tBill whistled.\n1\tBill.\n",
        },
        {
            "train": [("Our friends won't buy this.", "acceptable"), ('A "stray quote sat.', "unacceptable")],
            "dev": [("The the.", "unacceptable")],
            "test": [("Bill whistled.",), ("Bill.",)],
        },
    ),
    "glue/sst2": (
        {
            "SST-2/train.tsv": "sentence\tlabel\nhide new secretions \t0\nfine \t1\n",
            "SST-2/test.tsv": "index\tsentence\n0\tuneasy .\n",
        },
        {"train": [("hide new secretions ", "negative"), ("fine ", "positive")], "test": [("uneasy .",)]},
    ),
    "glue/mrpc": (
        {
            "MRPC/train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA b.\tC d.\n0\t9\t10\tE.\tF.\n",
            "MRPC/test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tA b.\tC d.\n",
        },
        {"train": [("A b.", "C d.", "equivalent"), ("E.", "F.", "not_equivalent")], "test": [("A b.", "C d.")]},
    ),
    "glue/stsb": (
        {
            "STS-B/dev.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
            "0\tmain\tMSR\t2012\t1\tnone\tnone\tA plane.\tA jet.\t4.600\n",
            "STS-B/test.tsv": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
            "0\tmain\tMSR\t2012\t1\tnone\tnone\tA girl.\tA boy.\n",
        },
        {"dev": [("A plane.", "A jet.", "4.600")], "test": [("A girl.", "A boy.")]},
    ),
    "glue/qqp": (
        {
            "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
            "1\t2\t3\tHow?\tWhy?\t0\n4\t5\tbroken\n"
            "6\t7\t8\tWho?\tWho is it?\t1\n",
            "QQP/test.tsv": "id\tquestion1\tquestion2\n0\tWhere?\tWhen?\n",
        },
        {
            "train": [("How?", "Why?", "not_duplicate"), ("Who?", "Who is it?", "duplicate")],
            "test": [("Where?", "When?")],
        },
    ),
    "glue/mnli": (
        {
            "MNLI/train.tsv": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
            "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
            "0\t1\t1n\tfiction\t( p )\t( h )\t(p)\t(h)\tP.\tH.\tentailment\tneutral\n",
            "MNLI/dev_matched.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tneutral\tentailment\n",
            "MNLI/dev_mismatched.tsv": "index\tsentence1\tsentence2\tgold_label\n0\tC\tD\tcontradiction\n",
            "MNLI/test_matched.tsv": "index\tsentence1\tsentence2\n0\tE\tF\n",
            "MNLI/test_mismatched.tsv": "index\tsentence1\tsentence2\n0\tG\tH\n",
        },
        {
            "train": [("P.", "H.", "neutral")],
            "dev": [("A", "B", "entailment")],
            "dev_mismatched": [("C", "D", "contradiction")],
            "test": [("E", "F")],
            "test_mismatched": [("G", "H")],
        },
    ),
    "glue/qnli": (
        {"QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tAnn.\tentailment\n1\tWhy?\tNo.\tnot_entailment\n"},
        {"dev": [("Who?", "Ann.", "entailment"), ("Why?", "No.", "not_entailment")]},
    ),
    "glue/rte": (
        {"RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tX.\tY.\tnot_entailment\n"},
        {"train": [("X.", "Y.", "not_entailment")]},
    ),
    "glue/wnli": (
        {"WNLI/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tX.\tY.\t1\n1\tX.\tZ.\t0\n"},
        {"train": [("X.", "Y.", "entailment"), ("X.", "Z.", "not_entailment")]},
    ),
    "glue/ax": (
        {"diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n0\tThe cat sat.\tThe cat did not sit.\n"},
        {"test": [("The cat sat.", "The cat did not sit.")]},
    ),
}


@pytest.mark.parametrize("parent", ["", "glue_data"])
@pytest.mark.parametrize("name", GLUE)
def test_the_official_glue_files_are_read_without_quoting(name: str, parent: str, tmp_path: Path) -> None:
    files, expected = GLUE[name]
    for file, text in files.items():
        put(tmp_path / parent / file, text)
    found = load(name, tmp_path)
    assert set(found.tables) == set(expected)
    for split, rows in expected.items():
        columns = found.tables[split].columns
        wanted = [*found.entry.text, "label"][: len(rows[0])]
        assert list(zip(*(columns[column] for column in wanted), strict=True)) == rows, split
        if split.startswith("test"):
            assert columns["index"] == [str(i) for i in range(len(rows))]
            assert split not in found.labelled()
        else:
            read_examples(found.tables[split], found.task)
    assert set(GLUE) == {name for name in CATALOG if name.startswith("glue/")}


def test_a_broken_test_row_is_an_error_because_later_rows_would_shift(tmp_path: Path) -> None:
    put(tmp_path / "QQP/test.tsv", "id\tquestion1\tquestion2\n0\tWhere?\tWhen?\n1\tWhat?\n")
    with pytest.raises(DataError, match="row with too few fields"):
        load("glue/qqp", tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    put(tmp_path / "RTE/train.tsv", "index\tpremise\thypothesis\tlabel\n0\tX.\tY.\tentailment\n")
    with pytest.raises(DataError, match=r"no column 'sentence1'; its columns: index, premise, hypothesis, label"):
        load("glue/rte", tmp_path)


# --- Parquet ------------------------------------------------------------------------------------------------


def test_parquet_labels_are_indices_into_the_names_beside_them(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    write(tmp_path / "sst2" / "train.parquet", [("a", 1), ("b", 0)], ("sentence", "label"))
    write(tmp_path / "sst2" / "validation.parquet", [("c", 1)], ("sentence", "label"))
    write(tmp_path / "sst2" / "test.parquet", [("d", -1)], ("sentence", "label"))
    (tmp_path / "sst2" / "labels.json").write_text('["negative", "positive"]')
    found = load("glue/sst2", tmp_path)
    assert [found.tables[split].columns["label"] for split in ("train", "dev", "test")] == [
        ["positive", "negative"],
        ["positive"],
        [None],
    ]
    assert list(found.labelled()) == ["train", "dev"]
    # the official files are there too, and Parquet goes first
    put(tmp_path / "SST-2/train.tsv", "sentence\tlabel\nother\t0\n")
    assert load("glue/sst2", tmp_path).tables["train"].columns["sentence"] == ["a", "b"]
    assert isinstance(locate(find("glue/sst2"), tmp_path)[0], Parquet)


def test_parquet_files_of_the_hub_need_no_names_beside_them(tmp_path: Path) -> None:
    names = ("premise", "hypothesis", "label", "idx")
    (tmp_path / "mnli").mkdir()
    for file, rows in {
        "train-00000-of-00001": [("a", "b", 2, 0), ("c", "d", 0, 1)],
        "validation_matched": [("e", "f", 1, 0)],
        "validation_mismatched": [("g", "h", 0, 0)],
        "test_matched": [("i", "j", -1, 7), ("k", "l", -1, 5)],
        "test_mismatched": [("m", "n", -1, 3)],
    }.items():
        write(tmp_path / "mnli" / f"{file}.parquet", rows, names)
    found = load("glue/mnli", tmp_path)
    assert {split: table.columns["label"] for split, table in found.tables.items()} == {
        "train": ["contradiction", "entailment"],
        "dev": ["neutral"],
        "dev_mismatched": ["entailment"],
        "test": [None, None],
        "test_mismatched": [None],
    }
    assert found.tables["test"].columns["index"] == [7, 5]
    assert list(found.labelled()) == ["train", "dev", "dev_mismatched"]


@pytest.mark.parametrize("names", ['["negative", "positive"]', None])
@pytest.mark.parametrize("gap", [None, float("nan"), -1])
@pytest.mark.parametrize("whole", [int, float])
def test_parquet_numbers_with_missing_values_are_indices_too(tmp_path: Path, names, gap, whole) -> None:
    (tmp_path / "sst2").mkdir()
    rows = [("a", whole(1)), ("b", gap), ("c", whole(0))]
    write(tmp_path / "sst2" / "test.parquet", rows, ("sentence", "label"))
    if names:
        (tmp_path / "sst2" / "labels.json").write_text(names)
    assert load("glue/sst2", tmp_path).tables["test"].columns["label"] == ["positive", None, "negative"]


def test_parquet_labels_that_only_the_server_knows_are_missing(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    write(tmp_path / "banking77" / "train.parquet", [("a", "x"), ("b", "y")], ("text", "label"))
    write(tmp_path / "banking77" / "test.parquet", [("c", -1)], ("text", "label"))
    found = load("banking77", tmp_path)
    assert (found.task.labels, list(found.labelled())) == (("x", "y"), ["train"])


def test_the_error_for_a_number_without_a_name_has_its_file(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    write(tmp_path / "sst2" / "train.parquet", [("a", 1), ("b", 0)], ("sentence", "label"))
    (tmp_path / "sst2" / "labels.json").write_text('["negative"]')
    with pytest.raises(DataError, match=r"train\.parquet has the label 1, but .*labels\.json names 1 \(negative\)"):
        load("glue/sst2", tmp_path)


def test_the_error_for_other_parquet_columns_lists_them(tmp_path: Path) -> None:
    (tmp_path / "mrpc").mkdir()
    write(tmp_path / "mrpc" / "train.parquet", [("a", 1)], ("sentence", "label"))
    with pytest.raises(DataError, match="has the text columns sentence; this data set needs sentence1, sentence2"):
        load("glue/mrpc", tmp_path)


# --- SQuAD --------------------------------------------------------------------------------------------------


def squad(*titles: str) -> str:
    qas = [
        {"id": f"{{}}{i}", "question": f"q{i}", "answers": [{"text": "Ann", "answer_start": 0}] if i else []}
        for i in (0, 1)
    ]
    articles = [
        {
            "title": title,
            "paragraphs": [{"context": "Ann ran.", "qas": [{**qa, "id": title + str(i)} for i, qa in enumerate(qas)]}],
        }
        for title in titles
    ]
    return json.dumps({"version": "2.0", "data": articles})


@pytest.mark.parametrize("place", ["dev-v2.0.json", "squad/dev-v2.0.json", "SQuAD/dev-v2.0.json.gz"])
def test_squads_own_files_are_read_compressed_or_not(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    data = squad("A", "B").encode()
    file.write_bytes(gzip.compress(data) if place.endswith(".gz") else data)
    found = load("squad/v2", tmp_path)
    columns = found.tables["dev"].columns
    assert columns["id"] == ["A0", "A1", "B0", "B1"]
    assert columns["label"][:2] == [{"text": [], "answer_start": []}, {"text": ["Ann"], "answer_start": [0]}]
    assert (found.task.kind, found.task.text, found.task.threshold) == ("span", ("question", "context"), 0.0)


def test_a_division_by_article_makes_two_splits_of_one_file(tmp_path: Path) -> None:
    put(tmp_path / "squad/dev-v1.1.json", squad("A", "B", "C"))
    assert locate(find("squad/v1-articles"), tmp_path) is None
    put(tmp_path / "squad/dev_as_train_dev_split.json", json.dumps({"train": ["C", "A"], "dev": ["B"]}))
    found = load("squad/v1-articles", tmp_path)
    assert {split: table.columns["id"] for split, table in found.tables.items()} == {
        "train": ["A0", "A1", "C0", "C1"],
        "dev": ["B0", "B1"],
    }


# --- the public files of the other sets ---------------------------------------------------------------------


# For each set: a file it is handed out as, the header, a row, and the labels that rows have in turn.
RAW = {
    "paper/airline": ("Tweets.csv", "tweet_id,airline_sentiment,text", '{i},{label},"a, {i}"',
                      ("negative", "neutral", "positive")),
    "paper/corporate_messaging": ("corporate_messaging.csv", "category,text", "{label},t{i}",
                                  ("Action", "Dialogue", "Exclude", "Information")),
    "paper/disasters": ("socialmedia-disaster-tweets-DFE.csv", "choose_one,choose_one:confidence,text",
                        "{label},1,t{i}", ("Relevant", "Not Relevant", "Can't Decide")),
    "paper/economic_news": ("Full-Economic-News-DFE-839861.csv", "relevance,relevance:confidence,text",
                            "{label},1,t{i}", ("yes", "no", "not sure")),
    "paper/emotion": ("text_emotion.csv", "tweet_id,sentiment,author,content", "{i},{label},x,t{i}", ("worry", "fun")),
    "paper/global_warming": ("1377884570_tweet_global_warming.csv", "tweet,existence,existence.confidence",
                             "t{i},{label},1", ("Yes", "Y", "No", "N", "N/A")),
    "paper/political_audience": ("political_media.csv", "audience,bias,message,text", "{label},partisan,attack,t{i}",
                                 ("national", "constituency")),
    "paper/political_bias": ("Political-media-DFE.csv", "audience,bias,message,text", "national,{label},attack,t{i}",
                             ("partisan", "neutral")),
    "paper/political_message": ("political_media.csv", "audience,bias,message,text", "national,partisan,{label},t{i}",
                                ("attack", "media")),
    "paper/primary_emotions": ("primary-plutchik-wheel-DFE.csv", "emotion,emotion:confidence,sentence",
                               "{label},1,t{i}", ("Joy", "Fear")),
    "paper/progressive_opinion": ("progressive-tweet-sentiment.csv", "q1_from,q2_which_of,q2_which_of:confidence,tweet",
                                  '"FOR: x, y","{label}",1,t{i}', ("1. The, …", "2. The", "3.  The", "other")),
    "paper/progressive_stance": ("progressive-tweet-sentiment.csv", "q1_from_x,q1_from_x:confidence,q2_which,tweet",
                                 '"{label}",1,3,t{i}', ("FOR: a, b", "AGAINST: c", "NEUTRAL: d", "NONE OF: e")),
    "paper/us_economy": ("us-economic-newspaper.csv", "positivity,relevance,text", "5,{label},t{i}",
                         ("yes", "no", "not sure")),
    "paper/news_aggregator": ("newsCorpora.csv", "", '{i}\t"Title {i}\thttp\tP\t{label}\tS\tH\t1', tuple("btem")),
    "paper/sms_spam": ("SMSSpamCollection", "", '{label}\tIt\'s "{i}', ("ham", "spam")),
    "agnews": ("ag_news_csv/train.csv", "", '"{label}","Title {i}","Text, {i}"', tuple("1234")),
    "trec": ("train_5500.label", "", "{label} How {i} ?", ("DESC:manner", "ENTY:cremat", "HUM:ind")),
    "sst5": ("stsa.fine.train", "", "{label} a text {i}", tuple("01234")),
    "banking77": ("banking_data/train.csv", "text,category", '"t, {i}",{label}', ("a", "b")),
}  # fmt: skip
LEFT_OUT = {"Can't Decide", "not sure", "N/A", "other"}


@pytest.mark.parametrize("name", RAW)
def test_the_public_files_are_read_as_published(name: str, tmp_path: Path) -> None:
    file, header, row, labels = RAW[name]
    rows = [row.format(i=i, label=labels[i % len(labels)]) for i in range(60)]
    text = "\n".join([*([header] if header else []), *rows]) + "\n"
    put(tmp_path / file, text)
    found = load(name, tmp_path)
    kept = sum(labels[i % len(labels)] not in LEFT_OUT for i in range(60))
    assert sum(table.rows for table in found.tables.values()) == kept
    if name.startswith("paper/"):
        assert [found.tables[split].rows for split in ("train", "dev", "test")] == [
            *(8 * kept // 10, round(kept / 10), kept - 8 * kept // 10 - round(kept / 10))
        ]
    for table in found.tables.values():
        examples, report = read_examples(table, found.task)
        assert (report.empty, len(examples)) == (0, table.rows)
    counts = Counter(label for table in found.tables.values() for label in table.columns["label"])
    assert set(counts) <= set(found.task.labels)
    assert len(set(counts.values())) == 1  # labels came in turn
    other = tmp_path / "other"
    put(other / found.entry.folder / file, text)  # the data set's own folder will do as well
    assert locate(found.entry, other) is not None


def test_old_files_that_are_not_utf_8_are_read_as_latin_1(tmp_path: Path) -> None:
    rows = "".join(f"{('ham', 'spam')[i % 2]}\t\xa3{i} caf\xe9\n" for i in range(10))
    for encoding in ("latin-1", "utf-8"):
        put(tmp_path / "SMSSpamCollection", rows, encoding)
        texts = {text for table in load("paper/sms_spam", tmp_path).tables.values() for text in table.columns["text"]}
        assert texts == {f"\xa3{i} caf\xe9" for i in range(10)}


def test_complaints_without_a_narrative_are_left_out_before_the_split(tmp_path: Path) -> None:
    told = [f"1,{('Fees', 'Loans')[i % 2]},{'' if i % 5 == 0 else f't{i}'}" for i in range(25)]
    put(tmp_path / "complaints.csv", "\n".join(["Date received,Issue,Consumer complaint narrative", *told]))
    assert [table.rows for table in load("paper/customer_complaints", tmp_path).tables.values()] == [16, 2, 2]


def test_every_one_of_the_seventeen_has_a_public_file() -> None:
    named = {name for name in CATALOG if name.startswith("paper/")}
    assert named - set(RAW) == {
        *("paper/20newsgroups", "paper/20newsgroups-bydate", "paper/customer_complaints"),  # tests of their own
    }
    assert len(named) == 18  # the seventeen, one of them with two cuts


def test_20_newsgroups_has_the_official_split_and_the_papers(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("test", 8)):
        for i in range(count):
            put(
                tmp_path / f"20news-bydate-{split}" / ("sci.med", "rec.autos")[i % 2] / str(1000 + i),
                f"caf\xe9 {split} {i}",
                "latin-1",
            )
    official, paper = load("paper/20newsgroups-bydate", tmp_path), load("paper/20newsgroups", tmp_path)
    assert {split: table.rows for split, table in official.tables.items()} == {"train": 12, "test": 8}
    assert {split: table.rows for split, table in paper.tables.items()} == {"train": 16, "dev": 2, "test": 2}
    assert official.task.labels == paper.task.labels == ("rec.autos", "sci.med")
    texts = [text for found in (official, paper) for table in found.tables.values() for text in table.columns["text"]]
    assert Counter(Counter(texts).values()) == {2: 20}
    assert all(text.startswith("caf\xe9 ") for text in texts)


def test_a_file_or_a_folder_for_each_class_is_read(tmp_path: Path) -> None:
    put(tmp_path / "rt-polarity.neg", "bad\x85 film\ndull\n" * 10, "latin-1")
    put(tmp_path / "rt-polarity.pos", "good film\r\nfine\r\n" * 10)
    found = load("mr", tmp_path)
    assert Counter(label for table in found.tables.values() for label in table.columns["label"]) == {
        "negative": 20,
        "positive": 20,
    }
    assert "bad\x85 film" in {text for table in found.tables.values() for text in table.columns["text"]}
    put(tmp_path / "aclImdb/train/pos/0_9.txt", "Great.")
    put(tmp_path / "aclImdb/train/neg/0_1.txt", "Bad.")
    put(tmp_path / "aclImdb/train/unsup/0_0.txt", "Who knows.")
    assert load("imdb", tmp_path).tables["train"].columns == {
        "text": ["Bad.", "Great."],
        "label": ["negative", "positive"],
    }


def test_clinc_has_separate_splits_for_out_of_scope_rows(tmp_path: Path) -> None:
    splits = {name: [[f"{name} text", "balance"], ["b", "apr"]] for name in ("train", "val", "test")}
    put(tmp_path / "data_full.json", json.dumps(splits | {"oos_val": [["what", "oos"]]}))
    found = load("clinc150", tmp_path)
    assert {split: table.rows for split, table in found.tables.items()} == {
        "train": 2,
        "dev": 2,
        "test": 2,
        "oos_dev": 1,
    }
    assert found.task.labels == ("apr", "balance")
    assert set(found.labelled()) == {"train", "dev", "test"}


def test_every_other_data_set_has_files_or_a_location_on_the_hub() -> None:
    for entry in CATALOG.values():
        assert entry.layouts or entry.hub
    assert {Delimited, Lines, ClassFiles, Folders} <= {
        type(layout) for entry in CATALOG.values() for layout in entry.layouts
    }


@pytest.mark.parametrize(
    ("name", "file", "text", "said"),
    [
        ("glue/cola", "CoLA/train.tsv", "only\ttwo\n", "has no row with 4 fields or more"),
        ("glue/sst2", "SST-2/train.tsv", "sentence\tlabel\na\tgood\n", "no label is one of 0, 1; it has good"),
        ("paper/airline", "Tweets.csv", "", "Tweets.csv is empty; download it again"),
        ("paper/airline", "Tweets.csv", "text,mood\na,b\n", "no column 'airline_sentiment'; its columns: text, mood"),
        ("clinc150", "data_full.json", "{", "cannot be read as JSON"),
        ("clinc150", "data_full.json", '{"train": ["a"]}', r"does not contain lists of \[text, label\]"),
        ("squad/v2", "dev-v2.0.json", "{", "not valid JSON"),
    ],
)
def test_an_unexpected_file_is_one_clear_sentence(name, file, text, said, tmp_path: Path) -> None:
    put(tmp_path / file, text)
    with pytest.raises(DataError, match=said) as caught:
        load(name, tmp_path)
    assert "\n" not in str(caught.value)
    assert file.rsplit("/", 1)[-1] in str(caught.value)


# --- the cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(18846, (15076, 1885, 1885)), (14640, (11712, 1464, 1464)), (3118, (2494, 312, 312)), (10860, (8688, 1086, 1086)),
     (7991, (6392, 799, 800)), (4225, (3380, 422, 423)), (2524, (2019, 252, 253)), (1159, (927, 116, 116)),
     (4952, (3961, 495, 496)), (183334, (146667, 18333, 18334)), (422937, (338349, 42294, 42294)),
     (5574, (4459, 557, 558))],
)  # fmt: skip
def test_the_split_has_the_papers_sizes_and_every_row_once(rows: int, sizes: tuple[int, ...]) -> None:
    whole = Table({"text": list(range(rows)), "label": ["abbcccc"[i % 7] for i in range(rows)]})
    found = cut(whole)
    assert tuple(table.rows for table in found.values()) == sizes
    assert sorted(joined(found).columns["text"]) == list(range(rows))
    shares = Counter(whole.columns["label"])
    for table in found.values():
        mine = Counter(table.columns["label"])
        assert all(abs(mine[label] - count * table.rows / rows) <= 2 for label, count in shares.items())
    assert cut(whole) == found
    assert cut(whole, seed=1) != found
