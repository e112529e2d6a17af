"""CoNLL and CoNLL-U: what is a word, what is a comment, what is refused, and the published files word for word."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterbank.errors import DataError
from adapterbank.tasks.conll import CONLLU, read_conll, read_conllu
from adapterbank.tasks.limits import TableBudget, TableLimits
from adapterbank.tasks.tables import READERS, Table, read_table
from real_data import DATA, MISSING

TWO = {"tokens": [["Ann", "lives", "in", "Rome"], ["She", "left"]], "tags": [["B-PER", "O", "O", "B-LOC"], ["O", "O"]]}


def read(text: str, limits: TableLimits | None = None) -> dict[str, list[list[str]]]:
    return read_conll(text, TableBudget("a.conll", limits))[0]


def notes(text: str) -> list[str]:
    return read_conll(text, TableBudget("a.conll"))[1]


def lines(columns: dict[str, list[list[str]]], mark: str = "\t", end: str = "\n") -> str:
    """Return columns as the text of a file, with an empty line after each sentence."""
    sentences = zip(*columns.values(), strict=True)
    return "".join("".join(mark.join(word) + end for word in zip(*one, strict=True)) + end for one in sentences)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_bytes(text.encode())
    return folder / name


# --- CoNLL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["\t", " ", "   "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tabs_or_blanks_divide_a_line_and_an_empty_line_ends_a_sentence(mark: str, end: str) -> None:
    assert read(lines(TWO, mark, end)) == TWO
    assert read(lines(TWO, mark, end).rstrip()) == TWO  # the last sentence needs no empty line
    assert read(end * 3 + lines(TWO, mark, end).replace(end * 2, end * 4)) == TWO


@pytest.mark.parametrize("divider", ["\t", " ", "\t\t", " \t ", "\t\r"])
def test_a_line_of_blanks_and_tabs_divides_sentences(divider: str) -> None:
    assert read(lines(TWO).replace("\n\n", f"\n{divider}\n")) == TWO


def test_columns_between_the_word_and_the_last_are_numbered() -> None:
    found = read("EU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\n")
    assert list(found) == ["tokens", "column_2", "column_3", "tags"]
    assert found["column_2"] == [["NNP", "VBZ"], ["NNP"]]
    assert found["tags"] == [["B-ORG", "O"], ["B-PER"]]


def test_document_lines_are_no_words_and_no_sentences() -> None:
    start = "-DOCSTART- -X- -X- O\n\n"
    text = "EU NNP B-NP B-ORG\n\n"
    assert read(start + text + start + text)["tokens"] == [["EU"], ["EU"]]
    assert read("-DOCSTART-\n\n" + lines(TWO) + "-DOCSTART- O\n" + lines(TWO))["tokens"] == TWO["tokens"] * 2
    with pytest.raises(DataError, match=r"a\.conll has no words, only comments; write a word and its tag"):
        read(start)


def test_a_line_that_starts_with_a_hash_is_a_word_if_it_has_the_columns_of_one() -> None:
    text = "#\tO\n#photography\tO\n# \tO\n# 1\tB-X\n\n# a comment\n#\nx\tO\n"
    assert read(text) == {"tokens": [["#", "#photography", "#", "# 1"], ["x"]], "tags": [["O", "O", "O", "B-X"], ["O"]]}
    assert notes(text) == ["a.conll: skipped 2 lines (6, 7) that start with '#' and cannot be a word."]
    assert read("# O\nx O\n\n# a comment\n# B\n")["tokens"] == [["#", "x"], ["#"]]


def test_comments_with_as_many_blanks_as_the_words_are_comments() -> None:
    keyed = "# sent_id = 3\nthe DT B-NP O\n\n# sent_id = 4\nthe DT B-NP O\n"
    assert read(keyed)["tokens"] == [["the"], ["the"]]
    multiconer = "# id 5239d808-f300\tdomain=en\nthe _ _ O\n\n# id 5239d808-f301\tdomain=en\nsea _ _ B-X\n"
    assert read(multiconer)["tokens"] == [["the"], ["sea"]]


def test_a_note_names_the_first_few_lines_only() -> None:
    (note,) = notes("x\tO\n" + "# no\n" * 1200)
    assert note == "a.conll: skipped 1,200 lines (2, 3, 4, 5, 6, …) that start with '#' and cannot be a word."


def test_a_tag_without_a_word_keeps_its_place_and_is_noted() -> None:
    text = "a\tO\n\tB-X\n \tO\n\n\tO\n"
    assert read(text) == {"tokens": [["a", "", ""], [""]], "tags": [["O", "B-X", "O"], ["O"]]}
    assert notes(text) == ["a.conll: 3 lines (2, 3, 5) with a tag but no word; an empty word keeps the place."]


def test_where_tabs_divide_a_word_may_contain_blanks() -> None:
    assert read("New York\tB-LOC\n a \tO\n") == {"tokens": [["New York", "a"]], "tags": [["B-LOC", "O"]]}


def test_only_line_feeds_end_a_line() -> None:
    odd = ["a\u2028b", "c\x85d", "\xa0", "e\x0cf", "\u200b"]
    assert read(lines({"tokens": [odd], "tags": [["O"] * 5]}))["tokens"] == [odd]
    assert read(lines({"tokens": [odd], "tags": [["O"] * 5]}, " "))["tokens"] == [odd]


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "one column": ("Ann\nlives\n", r"a\.conll, line 1: 'Ann' is one column; write each word and its tag on a line"),
        "eleven": ("a b c d e f g h i j k\n", r"line 1: 'a b c d e f g h i j k' has 11 columns, .* at most 10; write"),
        "fewer": ("a\tO\nb\n", r"a\.conll, line 2: 'b' has 1 column, but line 1 has 2; write a word and its tag with"),
        "an empty tag": ("a\tO\nb\t\n", r"line 2: 'b' has 1 column, but line 1 has 2"),
        "more": (
            "# x\n\na b O\nc d e O\n",
            r"line 4: 'c d e O' has 4 columns, but line 3 has 3; .* 2 tags with blanks",
        ),
        "prose": ("I like it .\nYou do not .\nWe .\n", r"line 3: 'We \.' has 2 columns, but line 1 has 4"),
    }.values(),
)
def test_other_lines_are_refused_with_their_place(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(text)


WORD = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs"]), min_size=1, max_size=8).filter(
    lambda word: not word.startswith("-DOCSTART-")
)
SENTENCES = st.lists(st.lists(st.tuples(WORD, WORD, WORD), min_size=1, max_size=6), min_size=1, max_size=6)


@given(SENTENCES, st.sampled_from(["\t", " "]), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read(sentences: list[list[tuple[str, str, str]]], mark: str, end: str) -> None:
    names = ("tokens", "column_2", "tags")
    columns = {name: [[word[place] for word in one] for one in sentences] for place, name in enumerate(names)}
    if mark == " " and all(word[0] == "#" for one in sentences for word in one):
        return  # these would all be comments
    keyed = any(mark == " " and word[0] == "#" and word[2] == "=" for one in sentences for word in one)
    if not keyed:
        assert read(lines(columns, mark, end)) == columns


@given(st.text(st.sampled_from("a# \t\r\n-=O1.\u00e9"), max_size=60))
def test_any_text_is_read_or_refused_and_no_word_is_lost(text: str) -> None:
    for reader in (read_conll, read_conllu):
        try:
            columns, told = reader(text, TableBudget("a.conll"))
        except DataError:
            continue
        cells = list(zip(*columns.values(), strict=True))
        assert all(len({len(cell) for cell in row}) == 1 and row[0] for row in cells)
        full = [line for line in text.split("\n") if line.strip(" \t\r")]
        hashes = [line for line in full if line.startswith("#")]
        words = sum(len(row[0]) for row in cells)
        assert reader is read_conllu or len(full) - len(hashes) <= words <= len(full)
        assert reader is read_conllu or words == len(full) or told


# --- CoNLL-U ------------------------------------------------------------------------------------------------

EWT = """# sent_id = 1
# text = I don't.
1\tI\tI\tPRON\tPRP\tCase=Nom\t2\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t2:conj\tCopyOf=2
4\t.\t.\tPUNCT\t.\t_\t2\tpunct\t_\t_

# sent_id = 2
1\t#\t#\tSYM\tNFP\t_\t0\troot\t_\t_
"""


def test_the_tokens_of_conllu_are_its_syntactic_words() -> None:
    columns, told = read_conllu(EWT, TableBudget("a.conllu"))
    assert columns["tokens"] == [["I", "do", "n't", "."], ["#"]]
    assert columns["lemmas"] == [["I", "do", "not", "."], ["#"]]
    assert columns["upos"] == [["PRON", "AUX", "PART", "PUNCT"], ["SYM"]]
    assert columns["xpos"] == [["PRP", "VBP", "RB", "."], ["NFP"]]
    assert columns["feats"] == [["Case=Nom", "_", "_", "_"], ["_"]]
    assert columns["deprels"] == [["nsubj", "root", "advmod", "punct"], ["root"]]
    assert (list(columns), told) == ([*CONLLU], [])
    assert read_conllu(EWT.replace("\n", "\r\n"), TableBudget("a.conllu"))[0] == columns


@pytest.mark.parametrize("line", ["I\tO", "1 I I PRON PRP _ 2 nsubj _ _", "x" + "\t_" * 9, "1\tI\tI\tPRON"])
def test_a_line_that_is_not_conllu_is_refused(line: str) -> None:
    problem = rf"a\.conllu, line 12: {re.escape(repr(line)[:9])}.* is not a word of CoNLL-U; write its number and nine"
    with pytest.raises(DataError, match=problem):
        read_conllu(EWT + line, TableBudget("a.conllu"))


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.conll", "a.iob", "a.bio", "a.txt", "A.CONLL", "a.conll.gz", "a.txt.gz"])
def test_every_extension_is_read_with_a_byte_order_mark_and_compressed(tmp_path: Path, name: str) -> None:
    data = ("\ufeff" + lines(TWO, end="\r\n")).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    table = read_table(tmp_path / name)
    assert (table.columns, table.source) == (TWO, str(tmp_path / name))
    write(tmp_path, "b.conllu", EWT)
    assert read_table(tmp_path / "b.conllu").rows == 2


def test_a_text_file_without_empty_lines_is_no_table(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "good film\tpositive\nbad film\tnegative\n")
    with pytest.raises(DataError, match=r"a\.txt has no empty line, so it is not a table of .*, or save another table"):
        read_table(path)
    for name in ("a.conll", "a.conllu"):
        with pytest.raises(DataError, match=rf"{name} (has columns|has no words)"):
            read_table(write(tmp_path, name, "# only\n\n# comments\n"))


@pytest.mark.parametrize(
    ("text", "limits", "problem"),
    [
        ("a\tO\n\n" * 20, TableLimits(rows=19), "more than 19 rows"),
        ("a\tO\n" * 20, TableLimits(text=19), "a row of more than 76 characters"),
        ("a" * 30 + "\tO\n", TableLimits(text=20), "a text of more than 20 characters"),
        ("a\tO\n" + "# c\n" * 300, TableLimits(text=200), "a row of more than 800 characters"),
        ("a\tO\n" * 2000, TableLimits(memory=1 << 17), "more than 131,072 bytes once it is decoded"),
        ("a\tO\n\n" * 2000, TableLimits(memory=1 << 17), "more than 131,072 bytes once it is decoded"),
        ("a b\n", TableLimits(columns=1), "more than 1 columns"),
    ],
    ids=["rows", "sentence", "word", "comments", "memory of a sentence", "memory", "columns"],
)
def test_limits_hold(tmp_path: Path, text: str, limits: TableLimits, problem: str) -> None:
    with pytest.raises(DataError, match=rf"a\.conll has {problem}|a\.conll takes {problem}"):
        read_table(write(tmp_path, "a.conll", text), limits)


def test_a_file_within_its_limits_is_read_as_without_them(tmp_path: Path) -> None:
    draw = random.Random(0)
    made = [[draw.choice("abcdefg") * draw.randint(1, 9) for _ in range(draw.randint(1, 30))] for _ in range(500)]
    columns = {"tokens": made, "tags": [[draw.choice(("O", "B-X", "I-X")) for _ in one] for one in made]}
    path = write(tmp_path, "a.conll", lines(columns))
    assert read_table(path, TableLimits()).columns == read_table(path).columns == columns


# --- published files ----------------------------------------------------------------------------------------

SENTENCE_COUNTS = {
    "wnut17": {"train": (3394, 62730), "dev": (1009, 15733), "test": (1287, 23394)},
    "btc": {"a": (1000, 16612), "b": (2000, 30825), "e": (200, 3981), "f": (2000, 35427), "g": (2138, 34062),
            "h": (2001, 29480)},
    "ud_ewt": {"dev": (2001, 25147), "test": (2077, 25094)},
}  # fmt: skip


def published(folder: str, name: str) -> Table:
    path = next((path for path in (DATA / folder).glob(f"{name}.conll*")), None)
    if path is None:
        pytest.skip(MISSING)
    return read_table(path)


@pytest.mark.data
@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder, of in SENTENCE_COUNTS.items() for name in of])
def test_the_published_files_have_every_sentence_and_word(folder: str, name: str) -> None:
    table = published(folder, name)
    tokens = table.columns["tokens"]
    assert (table.rows, sum(map(len, tokens))) == SENTENCE_COUNTS[folder][name]
    for column in table.columns.values():
        assert [len(cell) for cell in column] == [len(cell) for cell in tokens]


@pytest.mark.data
def test_btc_has_tags_without_words_and_words_with_blanks() -> None:
    told = {name: published("btc", name).notes for name in SENTENCE_COUNTS["btc"]}
    assert [name for name, notes in told.items() if notes] == ["f", "h"]
    assert "4 lines (22918, 30879, 30881, 30888) with a tag but no word" in told["h"][0]
    assert "2 lines (16301, 16302)" in told["f"][0]
    words = {word for cell in published("btc", "h").columns["tokens"] for word in cell}
    assert {"ke s", "re y", "u R", "AD t", "#"} <= words


@pytest.mark.data
def test_the_tags_of_the_published_files_are_the_official_ones() -> None:
    kinds = ("corporation", "creative-work", "group", "location", "person", "product")
    wnut = {
        tag
        for split in SENTENCE_COUNTS["wnut17"]
        for cell in published("wnut17", split).columns["tags"]
        for tag in cell
    }
    assert wnut == {"O", *(f"{mark}-{kind}" for mark in "BI" for kind in kinds)}
    btc = {tag for part in SENTENCE_COUNTS["btc"] for cell in published("btc", part).columns["tags"] for tag in cell}
    assert btc == {"O", *(f"{mark}-{kind}" for mark in "BI" for kind in ("LOC", "ORG", "PER"))}
    for split in SENTENCE_COUNTS["ud_ewt"]:
        assert len({tag for cell in published("ud_ewt", split).columns["upos"] for tag in cell}) == 17


def test_every_table_of_sentences_has_its_reader() -> None:
    assert {".conll", ".conllu", ".iob", ".bio", ".txt"} <= {*READERS}
