"""The layout of tagged sentences: alternatives, splits of several files, and the published files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from adapterbank.errors import DataError
from adapterbank.tasks import catalog
from adapterbank.tasks.sentence_files import ConllFiles
from adapterbank.tasks.tables import Table
from real_data import DATA, MISSING

UD = "1\t{0}\t{0}\tNOUN\tNN\t_\t0\troot\t_\t_\n\n"
PARTS = ConllFiles({"train": (("x/a.conll", "x/b.conll"), "whole.conll"), "test": ("x/c.annotated", "c.conll")})


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = f"{path.name}\tB-X\nleft\tO\n\nyes\tO\n".encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def test_a_split_of_several_files_is_their_sentences_in_order(tmp_path: Path) -> None:
    put(tmp_path, "x/b.conll", "x/a.conll.gz", "x/c.annotated")
    found = PARTS.read(PARTS.find(tmp_path, "x"), ("tokens",))
    assert found["train"].columns == {
        "tokens": [["a.conll.gz", "left"], ["yes"], ["b.conll", "left"], ["yes"]],
        "label": [["B-X", "O"], ["O"]] * 2,
    }
    assert found["train"].at(2) == f"{tmp_path / 'x/a.conll.gz'} + b.conll, row 3"
    assert found["test"].columns["tokens"] == [["c.annotated", "left"], ["yes"]]


def test_a_split_of_several_files_needs_all_of_them(tmp_path: Path) -> None:
    put(tmp_path, "x/a.conll")
    assert PARTS.find(tmp_path, "x") == {}
    put(tmp_path, "x/whole.conll", "c.conll")
    assert PARTS.find(tmp_path, "x") == {"train": [tmp_path / "x/whole.conll"], "test": [tmp_path / "c.conll"]}
    put(tmp_path, "x/b.conll")
    assert PARTS.find(tmp_path, "x")["train"] == [tmp_path / "x/a.conll", tmp_path / "x/b.conll"]


def test_the_column_of_tags_is_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "dev.conllu").write_text(UD.format("cat") + UD.format("dog"))
    layout = ConllFiles({"dev": ("dev.conllu",)}, tags="upos")
    found = layout.read(layout.find(tmp_path, ""), ("words",))
    assert found["dev"].columns == {"words": [["cat"], ["dog"]], "label": [["NOUN"], ["NOUN"]]}
    with pytest.raises(DataError, match=r"has 2 sentences with the columns tokens, .*, but this data set needs 'tags'"):
        ConllFiles({"dev": ("dev.conllu",)}).read({"dev": [tmp_path / "dev.conllu"]}, ("tokens",))


def test_notes_of_all_files_stay(tmp_path: Path) -> None:
    put(tmp_path, "a.conll", "b.conll")
    for name in ("a.conll", "b.conll"):
        (tmp_path / name).write_text("\tO\nx\tO\n")
    notes = (
        ConllFiles({"train": (("a.conll", "b.conll"),)})
        .read({"train": [tmp_path / "a.conll", tmp_path / "b.conll"]}, ("tokens",))["train"]
        .notes
    )
    assert [note.partition(":")[0] for note in notes] == [str(tmp_path / "a.conll"), str(tmp_path / "b.conll")]


def test_the_catalog_asks_a_kind_of_several_labels_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "x/a.conll", "x/b.conll")
    entry = catalog.Entry("x", (4, 0, 0), "x", ("tokens",), metric="micro_f1", kind="multilabel", layouts=(PARTS,))
    monkeypatch.setitem(catalog.CATALOG, "x", entry)
    found = catalog.load("x", tmp_path)
    assert {*found.task.labels} == {"B-X", "O"}
    (tmp_path / "x/a.conll").unlink()
    with pytest.raises(
        DataError, match=r"it is read from x/train\.parquet or x/a\.conll \+ x/b\.conll, x/c\.annotated"
    ):
        catalog.load("x", tmp_path)


def test_what_a_file_of_the_catalog_tells_is_kept() -> None:
    table = Table({"tokens": [["a"]], "label": ["x"]}, "a", ("a note",))
    assert catalog._clean(catalog.CATALOG["trec"], table).notes == ("a note",)


@pytest.mark.data
def test_the_parts_of_the_broad_twitter_corpus_become_its_splits() -> None:
    layout = ConllFiles({"train": (tuple(f"btc/{part}.conll" for part in "abeg"),), "dev": ("btc/h.conll",)})
    files = layout.find(DATA, "btc")
    if not files:
        pytest.skip(MISSING)
    assert {split: table.rows for split, table in layout.read(files, ("tokens",)).items()} == {
        "train": 5338,
        "dev": 2001,
    }
