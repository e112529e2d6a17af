"""Promise: data as people have it is read right or refused in one sentence with the way out, by every way in.

Each form is read as a file, as a frame (what pandas reads from the same bytes, or Python data of the same content), and
as an upload to the server.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas
import pytest

from adapterbank import config as configs
from adapterbank.errors import InputError
from adapterbank.serving.jobs import options as requests
from adapterbank.serving.jobs.uploads import Upload
from adapterbank.serving.jobs.worker import read_data as read_upload
from adapterbank.tasks.limits import DEFAULT_TABLE_LIMITS
from adapterbank.tasks.tables import table_from
from adapterbank.training.dataset import Dataset, DatasetReader, canonical

ROWS = [
    ("a good film, really", "pos"),
    ("bad; very bad", "neg"),
    ("café crème", "pos"),
    ('he said "no"', "neg"),
    ("line one\nline two", "pos"),
    ("plain words", "neg"),
]
FRAME = pandas.DataFrame(ROWS, columns=["text", "label"])
TAGS = [("red house", ("a", "b")), ("blue house", ("a",)), ("green house", ("b",)), ("grey house", ("b", "c"))]
PLAIN = [("one word", "pos"), ("two words", "neg"), ("three words", "pos"), ("four words", "neg")]


@dataclass(frozen=True)
class Form:
    """A form of data, and how it must be read, or why it is refused."""

    ending: str
    content: bytes
    rows: Sequence[tuple[str, Any]] = ()
    """The texts with their labels."""
    refused: str = ""
    """What the refusal says."""
    frame: Callable[[], Any] | None = None
    """The same as Python data; by default what pandas reads from the content."""
    pandas: Mapping[str, Any] | None = field(default_factory=dict)
    """Options with which pandas reads it; None for what no frame can be: damaged bytes, a missing header."""
    note: str = ""
    """A note that the file and the upload must have."""
    frame_note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def table(rows: Sequence[tuple[str, Any]], **options: Any) -> bytes:
    """Return rows as pandas writes CSV."""
    encoding = options.pop("encoding", "utf-8")
    text = pandas.DataFrame(list(rows), columns=["text", "label"]).to_csv(index=False, **options)
    return str(text).encode(encoding)


def lines(*rows: str, encoding: str = "utf-8") -> bytes:
    """Return lines as bytes."""
    return ("\n".join(rows) + "\n").encode(encoding)


def parquet(frame: pandas.DataFrame) -> bytes:
    """Return a frame as a Parquet file."""
    out = io.BytesIO()
    frame.to_parquet(out, index=False)
    return out.getvalue()


def tagged(write: Callable[[tuple[str, ...]], Any]) -> list[tuple[str, Any]]:
    """Return the rows of several labels with their cells written so."""
    return [(text, write(labels)) for text, labels in TAGS]


ONE_HOT = pandas.DataFrame([{"text": text, **{name: int(name in labels) for name in "abc"}} for text, labels in TAGS])
MARKED = ONE_HOT.replace({0: "", 1: "x"})
PAGES = [("Fine", "a good one", "pos"), ("", "a bad one", "neg"), ("Great", "good", "pos"), ("Poor", "bad", "neg")]
ARTICLES = pandas.DataFrame(PAGES, columns=["title", "body", "label"])
JOINED = [("Fine\na good one", "pos"), ("a bad one", "neg"), ("Great\ngood", "pos"), ("Poor\nbad", "neg")]
HEADLESS = lines("one word,pos", "two words,neg", "three words,pos", "four words,neg")
GAPS = lines("text,label", "one,pos", "two,", "three,neg", "four,", "five,neg", "six,pos")
FILLED = [("one", "pos"), ("three", "neg"), ("five", "neg"), ("six", "pos")]
TEXT_LABEL = {"text": "1", "label": "2"}

FORMS: dict[str, Form] = {
    # --- separators, line ends, quotes
    "comma": Form("csv", table(ROWS), ROWS),
    "comma, CRLF": Form("csv", table(ROWS, lineterminator="\r\n"), ROWS),
    "comma, CR": Form("csv", table(PLAIN, lineterminator="\r"), PLAIN),
    "semicolon": Form("csv", table(ROWS, sep=";"), ROWS, pandas={"sep": ";"}, note="separates its fields with ';'"),
    "tab in .csv": Form("csv", table(ROWS, sep="\t"), ROWS, pandas={"sep": "\t"}, note="fields with a tab"),
    "bar": Form("csv", table(ROWS, sep="|"), ROWS, pandas={"sep": "|"}, note=r"fields with '\|'"),
    "sep= of Excel": Form(
        "csv", b"sep=;\n" + table(ROWS, sep=";"), ROWS, pandas={"sep": ";", "skiprows": 1}, note="fields with ';'"
    ),
    "comma with semicolons in every text": Form(
        "csv", table([(f"so; {text}", label) for text, label in ROWS]), [(f"so; {text}", label) for text, label in ROWS]
    ),
    "comma, all quoted": Form("csv", table(ROWS, quoting=1), ROWS),
    "semicolon, decimals with commas": Form(
        "csv",
        lines("text;label", "one;1,5", "two;2,0", "three;0,5", "four;1,0"),
        refused="number with a decimal comma, or several labels; write a point",
        pandas={"sep": ";"},
    ),
    "two separators fit": Form(
        "csv",
        lines("a;b,c", "x;y,pos", "z;u,neg"),
        refused="with ',' or ';'; state which with --separator",
        pandas=None,
    ),
    "two separators fit, one stated": Form(
        "csv",
        lines("text;x,label", *(f"{text};y,{label}" for text, label in PLAIN)),
        [(f"{text};y", label) for text, label in PLAIN],
        options={"separator": ",", "text": "1", "label": "label"},
    ),
    "TSV that pandas wrote": Form(
        "tsv", table(ROWS, sep="\t"), ROWS, pandas={"sep": "\t"}, note="has its texts in quotes, which are removed"
    ),
    "TSV with stray quotes": Form(
        "tsv",
        lines("text\tlabel", '"so it is\tpos', 'he said "no"\tneg', "fine\tpos", 'a "" b\tneg'),
        [('"so it is', "pos"), ('he said "no"', "neg"), ("fine", "pos"), ('a "" b', "neg")],
        pandas={"sep": "\t", "quoting": 3},
    ),
    "commas in .tsv": Form("tsv", table(ROWS), ROWS, note="separates its fields with a comma", frame=lambda: FRAME),
    "a comma without quotes": Form(
        "csv",
        lines("text,label", "good, really,pos", "bad,neg"),
        refused="line 2: 3 fields, but the header has 2",
        pandas=None,
    ),
    "an open quote": Form("csv", lines("text,label", '"good,pos', "bad,neg"), refused="close every quote", pandas=None),
    "quotes with a backslash": Form(
        "csv",
        lines("text,label", '"he said \\"no\\", twice",pos', "bad,neg"),
        refused="double the quotes inside",
        pandas=None,
    ),
    "empty columns at the end": Form(
        "csv",
        lines("text,label,,", *(f"{text},{label},," for text, label in PLAIN), ",,,"),
        PLAIN,
        note="dropped 1 row",
        frame_note="dropped 1 row",
    ),
    "empty fields after the header": Form(
        "csv",
        lines("text,label", *(f"{text},{label},," for text, label in PLAIN)),
        PLAIN,
        pandas={"usecols": [0, 1], "index_col": False},
    ),
    "the header again": Form(
        "csv", table(PLAIN) + table(PLAIN), refused="line 6 repeats the header; remove that line", pandas=None
    ),
    "two columns of a name": Form(
        "csv",
        lines("text,label,label", "a,pos,x", "b,neg,y"),
        refused="two columns named 'label'",
        frame=lambda: pandas.DataFrame([["a", "pos", "x"]], columns=["text", "label", "label"]),
    ),
    # --- encodings
    "UTF-8 with a mark": Form("csv", table(ROWS, encoding="utf-8-sig"), ROWS),
    "UTF-16": Form("csv", table(ROWS, encoding="utf-16"), ROWS, pandas={"encoding": "utf-16"}, note="read as UTF-16"),
    "UTF-16 of Excel, tabs": Form(
        "csv",
        table(ROWS, sep="\t", encoding="utf-16"),
        ROWS,
        pandas={"sep": "\t", "encoding": "utf-16"},
        note="as UTF-16",
    ),
    "UTF-16 without a mark": Form(
        "csv", table(ROWS, encoding="utf-16-le"), ROWS, pandas={"encoding": "utf-16-le"}, note="as UTF-16"
    ),
    "UTF-16, big-endian, without a mark, Chinese": Form(
        "csv",
        table([("很好的电影", "pos"), ("不好看", "neg"), ("非常好", "pos"), ("太差了", "neg")], encoding="utf-16-be"),
        [("很好的电影", "pos"), ("不好看", "neg"), ("非常好", "pos"), ("太差了", "neg")],
        pandas={"encoding": "utf-16-be"},
        note="as UTF-16",
    ),
    "Windows-1252": Form(
        "csv", table(ROWS, encoding="cp1252"), ROWS, pandas={"encoding": "cp1252"}, note="as Windows-1252"
    ),
    "German Excel": Form(
        "csv",
        table(ROWS, sep=";", encoding="cp1252", lineterminator="\r\n"),
        ROWS,
        pandas={"sep": ";", "encoding": "cp1252"},
        note="as Windows-1252",
    ),
    "Windows-1251": Form(
        "csv",
        table([("очень хорошо", "pos"), ("плохо", "neg")] * 2, encoding="cp1251"),
        refused="is not UTF-8: byte",
        pandas=None,
    ),
    "UTF-8 with a damaged byte": Form(
        "csv",
        table([("café crème brûlée", "pos"), ("thé", "neg")]) + b"\xe9t,pos\n",
        refused=r"not UTF-8: byte \d+ \(line 4\)",
        pandas=None,
    ),
    "a spreadsheet named .csv": Form(
        "csv", b"PK\x03\x04" + bytes(range(256)) * 4, refused="is not|has a NUL", pandas=None
    ),
    # --- headers and columns
    "no header, stated": Form(
        "csv",
        HEADLESS,
        PLAIN,
        options={**TEXT_LABEL, "header": False},
        frame=lambda: pandas.DataFrame(PLAIN, columns=["1", "2"]),
    ),
    "no header, not stated": Form("csv", HEADLESS, refused="If the first line is a row, add --no-header", pandas=None),
    "no header, columns by number": Form(
        "csv",
        HEADLESS,
        refused="Add --header if it is, and --no-header if it is a row",
        options=TEXT_LABEL,
        pandas=None,
    ),
    "no header, and a label that looks like one": Form(
        "csv",
        lines("question,who is it", "question,why", "order,do it"),
        refused="add --no-header if the first line is a row",
        pandas=None,
    ),
    "columns by number": Form(
        "csv",
        lines("id,what they wrote,label", *(f"7,{text},{label}" for text, label in PLAIN)),
        PLAIN,
        options={"text": "2", "label": "3"},
    ),
    "an index without a name": Form("csv", FRAME.to_csv().encode(), ROWS),
    "a comma in the name of a column": Form(
        "csv",
        FRAME.rename(columns={"text": "text, as sent"}).to_csv(index=False).encode(),
        ROWS,
        options={"text": "text, as sent"},
    ),
    "title and body": Form("csv", ARTICLES.to_csv(index=False).encode(), JOINED, options={"text": "title,body"}),
    "title and body, by number": Form(
        "csv", ARTICLES.to_csv(index=False).encode(), JOINED, options={"text": "1, 2", "label": "3"}
    ),
    "title and body, quoted": Form(
        "csv",
        ARTICLES.rename(columns={"body": "body, plain"}).to_csv(index=False).encode(),
        JOINED,
        options={"text": 'title,"body, plain"'},
    ),
    "a part that is not there": Form(
        "csv",
        ARTICLES.to_csv(index=False).encode(),
        refused="has no column 'boddy'. Did you mean 'body'",
        options={"text": "title,boddy"},
    ),
    # --- labels
    "no label in some rows": Form(
        "csv", GAPS, refused="row 2: column 'label' is empty, as in 1 more of 6 rows; .*--drop-unlabelled"
    ),
    "no label in some rows, dropped": Form(
        "csv",
        GAPS,
        FILLED,
        options={"drop_unlabelled": True},
        note="dropped 2 rows of 6 with no label",
        frame_note="dropped 2 rows",
    ),
    "labels in two spellings": Form(
        "csv",
        table([*PLAIN, ("five", "Pos"), ("six", " pos ")]),
        [*PLAIN, ("five", "Pos"), ("six", "pos")],
        note=r"the labels 'pos' \(3\) and 'Pos' \(1\) differ only in case",
        frame_note="differ only in case",
    ),
    "rows that repeat": Form(
        "csv",
        table([*PLAIN, *PLAIN[:2]]),
        [*PLAIN, *PLAIN[:2]],
        note="2 rows repeat the text and the label",
        frame_note="2 rows repeat",
    ),
    "texts with two labels": Form(
        "csv",
        table([*PLAIN, ("one word", "neg")]),
        [*PLAIN, ("one word", "neg")],
        note=r"1 text occurs with different labels \(first: rows 1 and 5\)",
        frame_note="different labels",
    ),
    "nan as a word": Form(
        "jsonl",
        b"".join(json.dumps({"text": t, "label": w}).encode() + b"\n" for t, w in [*PLAIN, ("five", "nan")]),
        [*PLAIN, ("five", "nan")],
        note="'nan' counts as a label",
        frame=lambda: [*PLAIN, ("five", "nan")],
        frame_note="'nan' counts",
    ),
    "labels with commas in their names": Form(
        "csv",
        table([("a", "Food, drink"), ("b", "Home, garden"), ("c", "Food, drink"), ("d", "Home, garden")]),
        [("a", "Food, drink"), ("b", "Home, garden"), ("c", "Food, drink"), ("d", "Home, garden")],
    ),
    "true and false": Form(
        "csv",
        table([("a", True), ("b", False), ("c", True), ("d", False)]),
        [("a", "true"), ("b", "false"), ("c", "true"), ("d", "false")],
    ),
    "several labels as JSON": Form("csv", table(tagged(lambda names: json.dumps(names))), TAGS),
    "several labels as Python prints them": Form("csv", table(tagged(lambda names: str(list(names)))), TAGS),
    "several labels as NumPy prints them": Form(
        "csv",
        table(tagged(lambda names: str(list(names)).replace(",", ""))),
        refused="row 1: .*is not a list of labels",
    ),
    "several labels with bars": Form("csv", table(tagged("|".join)), TAGS),
    "several labels with commas": Form("csv", table(tagged(", ".join)), TAGS, options={"label_separator": ","}),
    "several labels with semicolons": Form("csv", table(tagged(";".join)), TAGS, options={"label_separator": ";"}),
    "several labels with commas, not stated": Form(
        "csv",
        table(tagged(",".join)),
        refused="'a,b' in column 'label' may be one label or several; .*--label-separator ','",
    ),
    "several labels, as it is one": Form(
        "csv",
        table(tagged(",".join)),
        [(text, ",".join(names)) for text, names in TAGS],
        options={"kind": "classification"},
    ),
    "0 and 1 in a list": Form(
        "csv",
        table([("a", "[1, 0]"), ("b", "[0, 1]"), ("c", "[1, 0]")]),
        refused="seems to have a 0 or 1 for each of 2 labels",
    ),
    "a column for each label": Form("csv", ONE_HOT.to_csv(index=False).encode(), TAGS, options={"label": "a,b,c"}),
    "a column for each label, true or false": Form(
        "csv", ONE_HOT.replace({0: False, 1: True}).to_csv(index=False).encode(), TAGS, options={"label": "a,b,c"}
    ),
    "a column for each label, marked": Form(
        "csv", MARKED.to_csv(index=False).encode(), TAGS, options={"label": "a,b,c"}
    ),
    "a column for each label, with a gap": Form(
        "csv",
        lines("text,a,b", "x,1,0", "y,,1", "z,0,1"),
        refused="row 2: column 'a' is empty; write 0 or 1",
        options={"label": "a,b"},
    ),
    "a column for each label, with a 2": Form(
        "csv",
        lines("text,a,b", "x,1,0", "y,2,1", "z,0,1"),
        refused="row 2: '?2(.0)?'? in column 'a' is neither 0 nor 1",
        options={"label": "a,b"},
    ),
    "a column for each class": Form(
        "csv",
        lines("text,a,b", "x,1,0", "y,0,1", "z,0,1", "u,1,0"),
        [("x", "a"), ("y", "b"), ("z", "b"), ("u", "a")],
        options={"label": "a,b", "kind": "classification"},
    ),
    "a class with one row": Form("csv", table([*PLAIN, ("five", "odd")]), [*PLAIN, ("five", "odd")]),
    # --- other formats
    "JSON lines": Form(
        "jsonl", FRAME.to_json(orient="records", lines=True).encode(), ROWS, pandas=None, frame=lambda: ROWS
    ),
    "JSON lines, UTF-16": Form(
        "jsonl",
        FRAME.to_json(orient="records", lines=True, force_ascii=False).encode("utf-16"),
        ROWS,
        frame=lambda: FRAME,
        note="UTF-16",
    ),
    "JSON lines named .json": Form(
        "json", FRAME.to_json(orient="records", lines=True).encode(), ROWS, frame=lambda: FRAME.to_dict("records")
    ),
    "JSON, a list": Form("json", FRAME.to_json(orient="records").encode(), ROWS, frame=lambda: FRAME.to_dict("list")),
    "JSON, columns as pandas writes them": Form("json", FRAME.to_json().encode(), ROWS, frame=lambda: FRAME.to_numpy()),
    "JSON, columns of lists": Form(
        "json",
        json.dumps(FRAME.to_dict("list")).encode(),
        ROWS,
        frame=lambda: (FRAME["text"].to_numpy(), FRAME["label"].to_numpy()),
    ),
    "Parquet": Form("parquet", parquet(FRAME), ROWS, frame=lambda: FRAME.to_records(index=False)),
    "Parquet of categories": Form(
        "parquet", parquet(FRAME.astype({"label": "category"})), ROWS, frame=lambda: FRAME.astype({"label": "category"})
    ),
    "Parquet of lists": Form(
        "parquet", parquet(pandas.DataFrame(tagged(list), columns=["text", "label"])), TAGS, frame=lambda: tagged(list)
    ),
}


def options_of(form: Form) -> dict[str, Any]:
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in form.options.items()}


def read_file(form: Form, folder: Path) -> Dataset:
    """Read the form as `adapterbank train --train FILE` does."""
    path = folder / f"data.{form.ending}"
    path.write_bytes(form.content)
    return DatasetReader().read(
        canonical(configs.parse({"task": "t", "train": str(path), "few": "never", **form.options}))
    )


def read_sent(form: Form, folder: Path) -> Dataset:
    """Read the form as the server and its worker do."""
    _, checked = requests.check("t", {"few": "never", **options_of(form)}, form.ending)
    with Upload(folder, form.ending, 1 << 20) as upload:
        upload.write(form.content)
        upload.finish()
    job = {"file": str(upload.path), "limits": {"table": asdict(DEFAULT_TABLE_LIMITS)}}
    config = configs.parse({"task": "t", "train": job["file"], **checked})
    return read_upload(job, config).read(canonical(config))


def read_frame(form: Form, folder: Path) -> Dataset:
    """Read the same as Python data."""
    data = form.frame() if form.frame else pandas.read_csv(io.BytesIO(form.content), **form.pandas or {})
    return DatasetReader({"train": table_from(data, "train")}).read(
        canonical(configs.parse({"task": "t", "few": "never", **form.options}))
    )


DOORS = {"file": read_file, "upload": read_sent, "frame": read_frame}


def rows_of(data: Dataset) -> list[tuple[str, Any]]:
    """Return the texts and the names of their labels, sorted."""
    labels = data.task.labels
    found = []
    for examples in data.splits.values():
        for text, target in zip(examples.texts, examples.targets or [], strict=True):
            names = tuple(sorted(labels[i] for i in target)) if isinstance(target, tuple) else labels[target]
            found.append((text, names))
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "door"),
    [
        (name, door)
        for name, form in FORMS.items()
        for door in DOORS
        if door != "frame" or form.frame is not None or form.pandas is not None
    ],
)
def test_a_messy_form_is_read_right_or_refused(tmp_path: Path, name: str, door: str) -> None:
    form = FORMS[name]
    if form.refused:
        with pytest.raises(InputError) as caught:
            DOORS[door](form, tmp_path)
        assert re.search(form.refused, str(caught.value))
        assert "\n" not in str(caught.value)
        return
    data = DOORS[door](form, tmp_path)
    assert rows_of(data) == sorted(form.rows)
    assert not set(data.splits["train"].texts) & set(data.splits["dev"].texts)
    note = form.frame_note if door == "frame" else form.note
    assert re.search(note, " ".join(data.notes))


def test_there_are_forty_forms() -> None:
    assert len(FORMS) >= 40
    assert {form.ending for form in FORMS.values()} == {"csv", "tsv", "jsonl", "json", "parquet"}
