"""The separator of a file is the one that alone fits the header and every row."""

from __future__ import annotations

import contextlib
import csv
import io

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapterbank.errors import DataError
from adapterbank.tasks.dialects import SEPARATORS, FileForm, find_dialect, is_quoted, separator_of

FOUND = FileForm()


def written(rows: list[list[str]], separator: str) -> str:
    """Return rows as the standard library writes them."""
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=separator).writerows(rows)
    return out.getvalue()


texts = st.text(st.sampled_from('ab ,;|\t"\n'), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6), st.sampled_from(SEPARATORS))
def test_what_the_standard_library_wrote_is_read_back_or_refused(rows: list[tuple[str, str]], mark: str) -> None:
    whole = [["text", "label"], *map(list, rows)]
    text = written(whole, mark)
    dialect = None
    with contextlib.suppress(DataError):
        dialect = find_dialect(text, ",", FOUND, "a.csv")
    if dialect is None:
        with pytest.raises(DataError, match="state which with --separator"):
            find_dialect(text, ",", FOUND, "a.csv")
        return
    assume(all(any(row) for row in whole))
    assert [row for row in csv.reader(io.StringIO(text, newline=""), **dialect.options) if row] == whole


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("text,label\na; b,x\nc; d,y\n", ","),
        ("text;label\n1,5;x\n2,5;y\n", ";"),
        ("text\nplain; words\n", ","),
        ("one, two;label\na, b;x\nc;y\n", ";"),
        ("sep=|\ntext|label\n", "|"),
        ("text,tags\na,x|y\nb,z\n", ","),
        ("text,label\n" + "x" * 70_000 + ",y\n", ","),
    ],
)
def test_separators_are_found(text: str, mark: str) -> None:
    assert find_dialect(text, ",", FOUND, "a.csv").separator == mark


def test_a_stated_separator_is_used() -> None:
    assert find_dialect("a,b;c\n", ",", FileForm(";"), "a.csv").separator == ";"
    assert separator_of("tab") == separator_of("\t") == "\t"
    for odd in ("", ",,", "a", '"', "\n"):
        with pytest.raises(ValueError, match=r"one of , ; . : or tab"):
            separator_of(odd)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ('text\tlabel\n"a ""b"" c"\tx\n', True),
        ('text\tlabel\n"a\tb"\tx\n', True),
        ('text\tlabel\n"a\nb"\tx\nc\ty\n', True),
        ('text\tlabel\n"just quoted"\tx\n', False),
        ('text\tlabel\n"a ""b"" c"\tx\nso "it" is\ty\n', False),
        ('text\tlabel\n"open\tx\n', False),
        ("text\tlabel\na\tx\n", False),
    ],
)
def test_tab_separated_texts_are_quoted_only_if_nothing_speaks_against_it(text: str, quoted: bool) -> None:
    assert is_quoted(text) is quoted
