"""The catalog: public tasks by name, one row each. It knows where their files are found, and contains no data.

A row has the columns, labels, metric and official sizes of a task, the layouts of its published files, and its
location on the hub. `load` looks in the data root first (Parquet, then the original files), then on the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapterbank.errors import DataError, UnknownName
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import is_missing, listed
from adapterbank.tasks.hub import Hub, read_hub
from adapterbank.tasks.layouts import (
    WHOLE,
    ClassFiles,
    DataLayout,
    Delimited,
    Files,
    Folders,
    Lines,
    PairsJson,
    Parquet,
    SquadJson,
    cut,
    joined,
)
from adapterbank.tasks.sentence_files import ConllFiles
from adapterbank.tasks.spec import Task
from adapterbank.tasks.tables import Table

ROOT = "ADAPTERBANK_DATA"
"""The environment variable that names the data root."""
_ORDER = ("train", "dev", "test")


@dataclass(frozen=True)
class Entry:
    """One task of the catalog."""

    name: str
    sizes: tuple[int, int, int]
    """Rows of the official train, dev and test; of the paper's if the data set has no official splits."""
    folder: str
    """Its folder in a data root."""
    text: tuple[str, ...] = ("text",)
    labels: tuple[str, ...] = ()
    """In order; none for kinds without labels, or if there are too many to list."""
    metric: str = "accuracy"
    kind: str = "classification"
    classes: int = 0
    """How many labels there are, if they are not listed."""
    numbered: bool = False
    """Whether public copies number the labels in the order they have here."""
    layouts: tuple[DataLayout, ...] = ()
    """Besides Parquet, which every data set may have."""
    hub: Hub | None = None
    recut: bool = False
    """Whether the published splits are joined and split again."""
    also: str = ""
    """Prefix of the names of further splits that are scored beside dev."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run that have other defaults for this task."""
    note: str = ""


@dataclass(frozen=True)
class Loaded:
    """A task of the catalog with its rows."""

    entry: Entry
    task: Task
    tables: Mapping[str, Table]
    """Every split that was found, labelled or not."""
    source: str
    """The folder or hub name it was read from."""

    def labelled(self) -> dict[str, Table]:
        """Return the splits that a run trains on and scores: train, dev, test and those scored beside dev."""
        used = [name for name in self.tables if name in ("train", "dev", "test") or self._beside(name)]
        return {name: self.tables[name] for name in used if has_labels(self.tables[name])}

    def _beside(self, split: str) -> bool:
        return bool(self.entry.also) and split.startswith(self.entry.also)


def find(name: str) -> Entry:
    """Return the row of this name."""
    if name not in CATALOG:
        raise UnknownName(name, "a task of the catalog", CATALOG, see="adapterbank catalog")
    return CATALOG[name]


def is_named(data: str) -> bool:
    """Return whether a source of data is a name of the catalog; a file of that name takes precedence."""
    return data in CATALOG and not os.path.isfile(data)


def bank_name(name: str) -> str:
    """Return the name of a task in a bank: that of the catalog with a dash for the slash."""
    return name.replace("/", "-") if name in CATALOG else name


def data_root(given: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the data root: the folder given, or that of the environment, or None."""
    named = os.fspath(given) if given else os.environ.get(ROOT, "")
    root = Path(named).expanduser()
    if named and not root.is_dir():
        where = "--data-root" if given else ROOT
        raise DataError(f"{where} is {named!r}, which is not a folder; give the folder of the data sets.")
    return root if named else None


def locate(entry: Entry, root: Path | None) -> tuple[DataLayout, Files] | None:
    """Return the layout and files of a task in the data root; None if it is not there."""
    if root is None:
        return None
    every: tuple[DataLayout, ...] = (Parquet(entry.labels if entry.numbered else ()), *entry.layouts)
    return next(((layout, files) for layout in every if (files := layout.find(root, entry.folder))), None)


def load(name: str, root: str | os.PathLike[str] | None = None) -> Loaded:
    """Read a task from the data root, or else from the hub."""
    entry, folder = find(name), data_root(root)
    place = locate(entry, folder)
    if place is not None:
        layout, files = place
        tables, source = layout.read(files, entry.text), str(next(iter(files.values()))[0].parent)
    elif entry.hub is not None:
        tables, source = read_hub(entry.hub, entry.text), f"{entry.hub.path} on the hub"
    else:
        raise DataError(_nowhere(entry, folder))
    if WHOLE in tables or entry.recut:
        tables = cut(_filled(joined(tables)))
    order = sorted(tables, key=lambda split: _ORDER.index(split) if split in _ORDER else len(_ORDER))
    tables = {split: _clean(entry, tables[split]) for split in order}
    labels = entry.labels or _label_names(entry, tables)
    values = [label for table in tables.values() for label in table.columns.get("label", [])]
    threshold = KINDS[entry.kind].initial_threshold(values)
    task = Task(bank_name(name), entry.kind, entry.text, "label", labels, entry.metric, threshold)
    return Loaded(entry, task, tables, source)


def train_splits(name: str, root: str | os.PathLike[str] | None = None) -> Loaded:
    """Read a task to train; raise if it has no training rows."""
    found = load(name, root)
    if "train" not in found.labelled():
        here = listed(f"{split} ({table.rows} rows)" for split, table in found.tables.items())
        wanted = f" its {found.entry.sizes[0]:,} training rows" if found.entry.sizes[0] else " training rows"
        raise DataError(f"{name!r} has no labelled train split in {found.source}, only {here}; put{wanted} there.")
    return found


def has_labels(table: Table) -> bool:
    """Return whether any row has a label; test sets of benchmarks have none."""
    return any(label is not None for label in table.columns.get("label", []))


def _filled(table: Table) -> Table:
    """Return the rows that have every text and a label: most complaints have no narrative."""
    keep = [row for row in range(table.rows) if not any(is_missing(column[row]) for column in table.columns.values())]
    return Table({name: [column[row] for row in keep] for name, column in table.columns.items()}, table.source)


def _clean(entry: Entry, table: Table) -> Table:
    labels = table.columns.get("label")
    if labels is None:
        return table
    clean = KINDS[entry.kind].clean
    return replace(table, columns={**table.columns, "label": [clean(label) for label in labels]})


def _label_names(entry: Entry, tables: Mapping[str, Table]) -> tuple[str, ...]:
    kind = KINDS[entry.kind]
    if not kind.fewest_labels:
        return ()
    main = next((tables[split] for split in _ORDER if split in tables and has_labels(tables[split])), None)
    if main is None:
        raise DataError(f"{entry.name!r} has no labelled train, dev or test split, only {listed(tables)}; add one.")
    rows = [row for row, label in enumerate(main.columns["label"]) if label is not None]
    if not kind.single_label:
        return kind.infer_labels(main, "label", rows)
    return tuple(sorted({str(main.columns["label"][row]) for row in rows}))


def _nowhere(entry: Entry, root: Path | None) -> str:
    names = [name for layout in entry.layouts for name in _file_names(layout)]
    files = f" or {listed(names, 3)}" if names else ""
    where = f"in {root}" if root else f"because no data root is given (--data-root or {ROOT})"
    return f"{entry.name!r} was not found {where}; it is read from {entry.folder}/train.parquet{files}."


def _file_names(layout: Any) -> list[str]:
    files: Mapping[str, Any] = getattr(layout, "files", {})
    firsts = [choices[0] for choices in files.values()]
    return [name if isinstance(name, str) else " + ".join(name) for name in firsts] or [layout.file]


# --- the table ----------------------------------------------------------------------------------------------

_ONE, _TWO, _SPAN = ("sentence",), ("sentence1", "sentence2"), ("question", "context")
_ENTAILED = ("entailment", "not_entailment")
_MNLI_HUB = {"train": "train", "dev": "validation_matched", "dev_mismatched": "validation_mismatched",
             "test": "test_matched", "test_mismatched": "test_mismatched"}  # fmt: skip


def _tsv(
    folder: str, *text: str | int, label: str | int = "label", labels: tuple[str, ...] = (), **more: Any
) -> Delimited:
    """Describe a folder of the official GLUE download; its numbers are indices into `labels`."""
    files = {split: (f"{folder}/{split}.tsv",) for split in ("train", "dev", "test")}
    names = {str(place): name for place, name in enumerate(labels)}
    return Delimited(files | more.pop("files", {}), text, label, mark="\t", names=names, **more)


def _glue(name: str, sizes: tuple[int, int, int], text: tuple[str, ...], labels: tuple[str, ...], tsv: Delimited,
          *, metric: str = "accuracy", hub_text: tuple[str, ...] = (), **more: Any) -> Entry:  # fmt: skip
    hub = Hub("nyu-mll/glue", name, hub_text or text, splits=_MNLI_HUB if name == "mnli" else
              {"train": "train", "dev": "validation", "test": "test"})  # fmt: skip
    return Entry(f"glue/{name}", sizes, name, text, labels, metric, layouts=(tsv,), hub=hub, numbered=True, **more)


_ACCEPTABLE = ("unacceptable", "acceptable")
_FEELING, _SAME = ("negative", "positive"), ("not_equivalent", "equivalent")
_DUPLICATE, _WNLI = ("not_duplicate", "duplicate"), ("not_entailment", "entailment")
_MNLI = ("entailment", "neutral", "contradiction")

_GLUE = (
    _glue("cola", (8551, 1043, 1063), _ONE, _ACCEPTABLE,
          _tsv("CoLA", 3, label=1, labels=_ACCEPTABLE, header=False, headed={"test": ("sentence",)}),
          metric="matthews"),
    _glue("sst2", (67349, 872, 1821), _ONE, _FEELING, _tsv("SST-2", "sentence", labels=_FEELING)),
    _glue("mrpc", (3668, 408, 1725), _TWO, _SAME,
          _tsv("MRPC", "#1 string", "#2 string", label="quality", labels=_SAME), metric="accuracy_f1"),
    _glue("stsb", (5749, 1500, 1379), _TWO, (), _tsv("STS-B", *_TWO, label="score"),
          metric="pearson_spearman", kind="regression"),
    _glue("qqp", (363846, 40430, 390965), _TWO, _DUPLICATE,
          _tsv("QQP", "question1", "question2", label="is_duplicate", labels=_DUPLICATE),
          metric="accuracy_f1", hub_text=("question1", "question2")),
    _glue("mnli", (392702, 9815, 9796), _TWO, _MNLI,
          _tsv("MNLI", *_TWO, label="gold_label", files={
              "dev": ("MNLI/dev_matched.tsv",), "dev_mismatched": ("MNLI/dev_mismatched.tsv",),
              "test": ("MNLI/test_matched.tsv",), "test_mismatched": ("MNLI/test_mismatched.tsv",)}),
          hub_text=("premise", "hypothesis"), also="dev_mismatched"),
    _glue("qnli", (104743, 5463, 5463), _TWO, _ENTAILED, _tsv("QNLI", "question", "sentence"),
          hub_text=("question", "sentence")),
    _glue("rte", (2490, 277, 3000), _TWO, _ENTAILED, _tsv("RTE", *_TWO)),
    _glue("wnli", (635, 71, 146), _TWO, _WNLI, _tsv("WNLI", *_TWO, labels=_WNLI), note="left out by the paper"),
    _glue("ax", (0, 0, 1104), _TWO, _MNLI,
          Delimited({"test": ("diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/test.tsv")}, _TWO, None, mark="\t"),
          hub_text=("premise", "hypothesis"), note="answered by the MNLI task"),
)  # fmt: skip


def _squad(name: str, sizes: tuple[int, int, int], layout: SquadJson, hub: str = "", note: str = "") -> Entry:
    place = Hub(hub, text=_SPAN, label="answers") if hub else None
    return Entry(f"squad/{name}", sizes, "", _SPAN, metric="span_f1", kind="span", layouts=(layout,), hub=place,
                 options={"max_length": 384}, note=note)  # fmt: skip


_SQUAD = (
    _squad("v1", (87599, 10570, 0), SquadJson({"train": ("train-v1.1.json",), "dev": ("dev-v1.1.json",)}),
           "rajpurkar/squad"),
    _squad("v2", (130319, 11873, 0), SquadJson({"train": ("train-v2.0.json",), "dev": ("dev-v2.0.json",)}),
           "rajpurkar/squad_v2"),
    _squad("v1-articles", (8613, 1957, 0),
           SquadJson({"train": ("dev-v1.1.json",), "dev": ("dev-v1.1.json",)}, "dev_as_train_dev_split.json"),
           note="the dev set divided by article; never report it as SQuAD dev"),
)  # fmt: skip


def _paper(name: str, rows: int, labels: tuple[str, ...], *layouts: DataLayout, **more: Any) -> Entry:
    """Describe one of the seventeen; they have no official splits, and the paper split them 80/10/10."""
    sizes = (8 * rows // 10, round(rows / 10), rows - 8 * rows // 10 - round(rows / 10))
    folder = more.pop("folder", f"cf_{name}")
    return Entry(f"paper/{name}", sizes, folder, labels=labels, layouts=layouts, **more)


def _csv(text: str, label: str, *files: str, **names: Any) -> Delimited:
    return Delimited({WHOLE: files}, (text,), label, **names)


def _political(name: str, *labels: str) -> Entry:
    return _paper(
        f"political_{name}", 5000, labels, _csv("text", name, "political_media.csv", "Political-media-DFE.csv")
    )


_BYDATE = Folders({"train": ("20news-bydate-train",), "test": ("20news-bydate-test",)})
_TWEETS, _STANCES = "progressive-tweet-sentiment.csv", ("against", "for", "neutral", "none")
_NEWS = {"b": "business", "t": "science_technology", "e": "entertainment", "m": "health"}
_YES_NO = {"not sure": None, "yes": "yes", "no": "no"}

_PAPER = (
    _paper("20newsgroups", 18846, (), _BYDATE, folder="newsgroups20", classes=20, recut=True,
           hub=Hub("SetFit/20_newsgroups", label="label_text", splits={"train": "train", "test": "test"})),
    Entry("paper/20newsgroups-bydate", (11314, 0, 7532), "newsgroups20", classes=20, layouts=(_BYDATE,),
          hub=Hub("SetFit/20_newsgroups", label="label_text", splits={"train": "train", "test": "test"}),
          note="the official cut by date"),
    _paper("airline", 14640, ("negative", "neutral", "positive"),
           _csv("text", "airline_sentiment", "Tweets.csv", "Airline-Sentiment-2-w-AA.csv")),
    _paper("corporate_messaging", 3118, ("Action", "Dialogue", "Exclude", "Information"),
           _csv("text", "category", "corporate_messaging.csv", "Corporate-messaging-DFE.csv")),
    _paper("disasters", 10860, ("Not Relevant", "Relevant"),
           _csv("text", "choose_one", "socialmedia-disaster-tweets-DFE.csv",
                names={"Relevant": "Relevant", "Not Relevant": "Not Relevant"})),
    _paper("economic_news", 7991, ("no", "yes"),
           _csv("text", "relevance", "Full-Economic-News-DFE-839861.csv", names=_YES_NO)),
    _paper("emotion", 40000, (), _csv("content", "sentiment", "text_emotion.csv"), classes=13),
    _paper("global_warming", 4225, ("No", "Yes"),
           _csv("tweet", "existence", "1377884570_tweet_global_warming.csv",
                names={"Y": "Yes", "N/A": None, "N": "No"})),
    _political("audience", "constituency", "national"),
    _political("bias", "neutral", "partisan"),
    _political("message", "attack", "constituency", "information", "media", "mobilization", "other", "personal",
               "policy", "support"),
    _paper("primary_emotions", 2524, (), _csv("sentence", "emotion", "primary-plutchik-wheel-DFE.csv"), classes=18),
    _paper("progressive_opinion", 1159, ("about_other", "about_target", "no_opinion"),
           _csv("tweet", "q2_which", _TWEETS, names={"1": "about_target", "2": "about_other", "3": "no_opinion"})),
    _paper("progressive_stance", 1159, _STANCES,
           _csv("tweet", "q1_from", _TWEETS, names={name.upper(): name for name in _STANCES})),
    _paper("us_economy", 4952, ("no", "yes"), _csv("text", "relevance", "us-economic-newspaper.csv", names=_YES_NO)),
    _paper("customer_complaints", 183334, (),
           _csv("consumer complaint narrative", "issue", "complaints.csv", "Consumer_Complaints.csv"),
           _csv("consumer_complaint_narrative", "issue", "consumer_complaints.csv"),
           folder="customer_complaints", classes=157, note="rows with a narrative; the public file grows"),
    _paper("news_aggregator", 422937, ("business", "entertainment", "health", "science_technology"),
           _csv("title", "category", "uci-news-aggregator.csv", names=_NEWS),
           Delimited({WHOLE: ("newsCorpora.csv",)}, (1,), 4, "\t", header=False, names=_NEWS),
           folder="news_aggregator"),
    _paper("sms_spam", 5574, ("ham", "spam"),
           Delimited({WHOLE: ("SMSSpamCollection",)}, (1,), 0, "\t", header=False, names={"ham": "ham", "spam": "spam",
                 "Ham": "ham", "Spam": "spam"}),
           _csv("v2", "v1", "spam.csv"), folder="sms_spam"),
)  # fmt: skip

_STARS = ("very negative", "negative", "neutral", "positive", "very positive")
_TREC = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
_AG = ("World", "Sports", "Business", "Sci/Tech")
_CLINC = {"train": "train", "val": "dev", "test": "test", "oos_train": "oos_train", "oos_val": "oos_dev",
          "oos_test": "oos_test"}  # fmt: skip
_NO_DEV = {"train": "train", "test": "test"}

_OTHERS = (
    Entry("agnews", (120000, 0, 7600), "agnews", labels=_AG, hub=Hub("fancyzhx/ag_news", splits=_NO_DEV),
          layouts=(Delimited({"train": ("ag_news_csv/train.csv",), "test": ("ag_news_csv/test.csv",)}, (1, 2), 0,
                         header=False, names={str(i): name for i, name in enumerate(_AG, 1)}, joined=True),)),
    Entry("trec", (5452, 0, 500), "trec", labels=_TREC,
          hub=Hub("CogComp/trec", label="coarse_label", splits=_NO_DEV),
          layouts=(Lines({"train": ("train_5500.label",), "test": ("TREC_10.label",)}, {k: k for k in _TREC}),)),
    Entry("mr", (8529, 1066, 1067), "mr", labels=_FEELING, hub=Hub("cornell-movie-review-data/rotten_tomatoes",
          names={"neg": "negative", "pos": "positive"}),
          layouts=(ClassFiles({"negative": ("rt-polarity.neg",), "positive": ("rt-polarity.pos",)}),)),
    Entry("subj", (8000, 1000, 1000), "subj", labels=("objective", "subjective"),
          hub=Hub("SetFit/subj", label="label_text", splits=_NO_DEV),
          layouts=(ClassFiles({"objective": ("subj.objective", "plot.tok.gt9.5000"),
                               "subjective": ("subj.subjective", "quote.tok.gt9.5000")}),)),
    Entry("cr", (3020, 378, 377), "cr", labels=_FEELING, hub=Hub("SetFit/CR", label="label_text", splits=_NO_DEV),
          layouts=(ClassFiles({"negative": ("custrev.neg",), "positive": ("custrev.pos",)}),)),
    Entry("sst5", (8544, 1101, 2210), "sst5", labels=_STARS, hub=Hub("SetFit/sst5", label="label_text"),
          layouts=(Lines({split: (f"stsa.fine.{split}",) for split in ("train", "dev", "test")},
                         {str(place): name for place, name in enumerate(_STARS)}),)),
    Entry("emotion", (16000, 2000, 2000), "emotion", labels=("anger", "fear", "joy", "love", "sadness", "surprise"),
          hub=Hub("dair-ai/emotion")),
    Entry("banking77", (10003, 0, 3080), "banking77", classes=77, hub=Hub("PolyAI/banking77", splits=_NO_DEV),
          layouts=(Delimited({"train": ("banking_data/train.csv",), "test": ("banking_data/test.csv",)}, ("text",),
                         "category"),)),
    Entry("clinc150", (15000, 3000, 4500), "clinc150", classes=150, layouts=(PairsJson("data_full.json", _CLINC),),
          hub=Hub("clinc/clinc_oos", "plus", label="intent", names={"oos": None}),
          note="out-of-scope rows are splits of their own"),
    Entry("imdb", (25000, 0, 25000), "imdb", labels=_FEELING,
          hub=Hub("stanfordnlp/imdb", splits=_NO_DEV, names={"neg": "negative", "pos": "positive"}),
          layouts=(Folders({"train": ("aclImdb/train",), "test": ("aclImdb/test",)},
                           {"neg": "negative", "pos": "positive"}),
                   _csv("review", "sentiment", "IMDB Dataset.csv", "a1_IMDB_Dataset.csv"))),
)  # fmt: skip

_EWT = {split: (f"en_ewt-ud-{split}.conllu", f"UD_English-EWT/en_ewt-ud-{split}.conllu", f"ud_ewt/{split}.conllu")
        for split in _ORDER}  # fmt: skip
_TAGGED = (
    Entry("tag/wnut17", (3394, 1009, 1287), "wnut17", ("tokens",), metric="tag_f1", kind="tagging", classes=13,
          layouts=(ConllFiles({"train": ("wnut17train.conll", "wnut17/train.conll"),
                               "dev": ("emerging.dev.conll", "wnut17/dev.conll"),
                               "test": ("emerging.test.annotated", "wnut17/test.conll")}),)),
    Entry("tag/btc", (5338, 2001, 2000), "btc", ("tokens",), metric="tag_f1", kind="tagging", classes=7,
          layouts=(ConllFiles({"train": (tuple(f"btc/{part}.conll" for part in "abeg"),), "dev": ("btc/h.conll",),
                               "test": ("btc/f.conll",)}),)),
    Entry("tag/ud-ewt-pos", (12544, 2001, 2077), "ud_ewt", ("tokens",), metric="tag_accuracy", kind="tagging",
          classes=17, layouts=(ConllFiles(_EWT, tags="upos"),)),
)  # fmt: skip

CATALOG: dict[str, Entry] = {entry.name: entry for entry in (*_GLUE, *_SQUAD, *_PAPER, *_OTHERS, *_TAGGED)}
"""Every task, by name."""
