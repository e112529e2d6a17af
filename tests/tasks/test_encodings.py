"""Texts of every usual encoding are recognised, and bytes that are none of them are refused."""

from __future__ import annotations

import pytest

from adapterbank.errors import DataError
from adapterbank.tasks.encodings import encoding_note, find_encoding

WESTERN = "text,label\nDas war schön, aber nicht groß,1\nC'était très bien,0\n"
CHINESE = "text,label\n很好的电影,1\n不好看,0\n"


@pytest.mark.parametrize("text", [WESTERN, CHINESE, "text,label\nplain,1\n"], ids=["western", "chinese", "ascii"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_unicode_is_recognised(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    assert data.decode(find_encoding(data, "a.csv")).removeprefix("\ufeff") == text


def test_windows_1252_is_the_last_resort_and_told() -> None:
    data = WESTERN.encode("cp1252")
    assert find_encoding(data, "a.csv") == "cp1252"
    assert "was read as Windows-1252" in (encoding_note("a.csv", "cp1252") or "")
    assert encoding_note("a.csv", "utf-8-sig") is None


@pytest.mark.parametrize(
    "data",
    [
        "text,label\nочень хорошо,1\n".encode("cp1251"),
        "text,label\n很好的电影,1\n".encode("gb18030"),
        "text,label\nとても良い映画,1\n".encode("shift-jis"),
        "naïve café, thé\n".encode() + b"\xe9",
        b"a\x01\xe9",
        bytes(range(1, 256)),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"a.csv is not UTF-8: byte \d+ \(line \d+\) is 0x.*iconv"):
        find_encoding(data, "a.csv")


def test_the_beginning_of_a_file_may_end_within_a_character() -> None:
    data = "text\ncafé".encode()[:-1]
    assert find_encoding(data, "a.csv", whole=False) == "utf-8"
    with pytest.raises(DataError):
        find_encoding(data * 2 + "é".encode(), "a.csv")
