"""Claims about tokenizers: ids are those of `transformers`, cut as there, whatever the file or other threads say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.families import FAMILIES
from adapterbank.encoder.tokenizer import read_tokenizer, token_counts, tokenize, tokenizer_hash
from adapterbank.errors import BackboneError, InputError
from families import vocabulary

AWKWARD = [
    "",
    " ",
    "The cat SAT on the mats.",
    "Größe, naïve café, Ångström, İstanbul, ǅ",
    "e\u0301 and é are one letter",
    "我爱北京 and 東京タワー, 한국어",
    "(what?!) -- «who»… “it's” ¿no? a_b c-d $5 50% ~^`|",
    "a" * 99 + " " + "b" * 100 + " " + "c" * 101,
    "tab\tnew\nline\r\nnul\0bell\x07del\x7f zero\u200bwidth soft\u00adhyphen nbsp\u00a0end\ufeff\ufffd",
    "🙂 👩‍👩‍👧 🇫🇷 ❤️",
    "[CLS] a [SEP] [MASK] [PAD] [UNK] [cls] [NEW]",
    "ﬁne ½ ² Ⅷ １２３ ⅓",
    "مرحبا بالعالم שלום नमस्ते ไทย",
    "x\u2028y\u2029z\u0085w\x0bv\x0cu\x1cend",
]
FLAGS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
]


@pytest.fixture(scope="module")
def words() -> list[str]:
    """Return a vocabulary with something for every awkward text, a line separator among the tokens."""
    letters = sorted({c for text in AWKWARD for c in text.lower() + text if c.isprintable() and not c.isspace()})
    more = [
        "café",
        "cafe",
        "größe",
        "grosse",
        "große",
        "我",
        "爱",
        "京",
        "東京",
        "##京",
        "🙂",
        "\u2028",
        "\u0085",
        "fine",
    ]
    return list(dict.fromkeys([*vocabulary(), *more, *letters, *(f"##{c}" for c in letters)]))


@pytest.fixture
def folder(words: list[str], tmp_path: Path) -> Path:
    """Return a folder with nothing but vocab.txt."""
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return tmp_path


def oracle(words: list[str], **flags: Any) -> Any:
    """Return the tokenizer that `transformers` builds from a vocabulary."""
    from transformers import BertTokenizerFast

    return BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}, **flags)


@pytest.fixture(scope="module")
def both(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Return our tokenizer of vocab.txt, and that of `transformers`."""
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return read_tokenizer(folder, word_piece=True)[0], oracle(words)


def ids(tokens: list[Tokens]) -> list[list[int]]:
    """Return the token ids as lists."""
    return [row.ids.tolist() for row in tokens]


# --- vocab.txt


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_vocab_txt_alone_has_the_ids_of_transformers_on_awkward_texts(
    folder: Path, words: list[str], flags: dict[str, Any]
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(flags))
    tokenizer, _ = read_tokenizer(folder, word_piece=True)
    theirs = oracle(words, **flags)
    assert ids(tokenize(tokenizer, AWKWARD, None, 512)) == theirs(AWKWARD)["input_ids"]
    pairs = AWKWARD[::-1]
    found, expected = tokenize(tokenizer, AWKWARD, pairs, 512), theirs(AWKWARD, pairs)
    assert ids(found) == expected["input_ids"]
    assert [row.types.tolist() for row in found] == expected["token_type_ids"]


def test_vocab_txt_is_read_as_transformers_reads_it(folder: Path, words: list[str]) -> None:
    from transformers import BertTokenizerFast

    tokenizer, _ = read_tokenizer(folder, word_piece=True)
    assert tokenizer.get_vocab() == {word: i for i, word in enumerate(words)}
    assert ids(tokenize(tokenizer, AWKWARD, None, 512)) == BertTokenizerFast.from_pretrained(folder)(AWKWARD).input_ids


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_has_the_ids_of_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = both
    assert ids(tokenize(ours, [text], None, 512)) == [theirs(text).input_ids]


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_the_end_of_the_vocabulary_file_makes_no_token(folder: Path, words: list[str], end: str) -> None:
    newline = "\r\n" if end == "\r\n" else "\n"
    plain = [word for word in words if word not in ("\u2028", "\u0085")]
    (folder / "vocab.txt").write_bytes((newline.join(plain) + end).encode())
    assert read_tokenizer(folder, word_piece=True)[0].get_vocab() == {word: i for i, word in enumerate(plain)}


@pytest.mark.minilm
@pytest.mark.parametrize("vocab_only", [False, True])
def test_the_real_minilm_tokenizes_as_transformers_does(vocab_only: bool, minilm: Backbone, tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    for name in ("vocab.txt", "tokenizer_config.json") if vocab_only else ("tokenizer.json",):
        shutil.copy(minilm.folder / name, tmp_path)
    tokenizer, _ = read_tokenizer(tmp_path, word_piece=True)
    theirs = BertTokenizerFast.from_pretrained(minilm.folder)
    assert ids(tokenize(tokenizer, AWKWARD, None, 512)) == theirs(AWKWARD, truncation=True, max_length=512).input_ids


# --- tokenizer.json


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_the_truncation_and_padding_of_the_file_are_off(
    family: str, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder = checkpoint(family)[0]
    stored = json.loads((folder / "tokenizer.json").read_text())
    assert stored["truncation"]["max_length"] == 4
    assert stored["padding"]["strategy"] == {"Fixed": 8}
    tokenizer, description = read_tokenizer(folder, word_piece=FAMILIES[family].word_piece)
    assert tokenizer.truncation is None
    assert tokenizer.padding is None
    assert [len(tokenizer.encode(text).ids) for text in ("cat", "cat " * 50)] == [3, 52]
    assert [len(row) for row in tokenize(tokenizer, ["cat", "cat " * 50], None, 20)] == [3, 20]
    assert not {"truncation", "padding"} & description.keys()


@pytest.mark.minilm
def test_minilms_fixed_length_of_128_is_off(minilm: Backbone) -> None:
    assert '"Fixed":128' in (minilm.folder / "tokenizer.json").read_text().replace(" ", "").replace("\n", "")
    assert [len(row) for row in minilm.tokenize(["a", "a " * 300])] == [3, 302]


# --- cutting

CUTS = st.integers(4, 40)
TEXT = st.integers(0, 30).map(lambda n: "cat " * n)


@settings(max_examples=100, deadline=None)
@given(TEXT, TEXT, CUTS)
def test_pairs_are_cut_as_transformers_cuts_them(bert: Backbone, one: str, two: str, limit: int) -> None:
    theirs = oracle(vocabulary())
    pair = [one], [two.replace("cat", "dog")]
    expected = theirs(*pair, truncation="longest_first", max_length=limit)
    (found,) = tokenize(bert.tokenizer, *pair, limit)
    assert [found.ids.tolist()] == expected.input_ids
    assert [found.types.tolist()] == expected.token_type_ids
    assert found.cut == (one.count("cat") + two.count("cat") + 3 > limit)


@given(TEXT, st.integers(3, 40))
def test_single_texts_are_cut_at_the_end(bert: Backbone, text: str, limit: int) -> None:
    (whole,), (found,) = tokenize(bert.tokenizer, [text], None, 99), tokenize(bert.tokenizer, [text], None, limit)
    assert found.ids.tolist() == [*whole.ids[:-1][: limit - 1], whole.ids[-1]]
    assert found.cut == (len(whole) > limit)


def test_ids_are_int64_even_where_there_are_none(bert: Backbone) -> None:
    for row in tokenize(bert.tokenizer, ["", "cat"], ["", "dog"], 9):
        assert row.ids.dtype == row.types.dtype == np.int64
    bare = Tokenizer.from_str(bert.tokenizer.to_str())
    bare.post_processor = None
    assert tokenize(bare, [""], None, 9)[0].ids.dtype == np.int64


def test_threads_with_different_limits_do_not_interfere(bert: Backbone) -> None:
    def lengths(limit: int) -> set[int]:
        return {len(tokenize(bert.tokenizer, ["the cat sat " * 20], None, limit)[0]) for _ in range(200)}

    limits = [5, 9, 20, 33]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lengths, limits)) == [{limit} for limit in limits]


# --- what is refused


@pytest.mark.parametrize(("pairs", "limit"), [(None, 2), (None, 0), (None, -1), (["b"], 3)])
def test_a_limit_without_room_for_a_text_is_refused(bert: Backbone, pairs: list[str] | None, limit: int) -> None:
    with pytest.raises(InputError, match=f"max_length {limit} leaves no room for a text"):
        tokenize(bert.tokenizer, ["a"], pairs, limit)


@pytest.mark.parametrize("odd", [None, 3, b"bytes", "half a pair \ud83d"])
def test_a_value_that_is_not_a_text_is_named_with_its_row(bert: Backbone, odd: Any) -> None:
    for texts, pairs in ((["a", odd], None), (["a", "b"], ["c", odd])):
        with pytest.raises(InputError, match="Row 2 is not a text") as caught:
            tokenize(bert.tokenizer, texts, pairs, 9)
        assert repr(odd) in str(caught.value)
        with pytest.raises(InputError, match="Row 4098 is not a text"):
            tokenize(bert.tokenizer, texts, pairs, 9, start=4096)


def test_a_different_number_of_second_texts_is_refused(bert: Backbone) -> None:
    with pytest.raises(InputError, match="There are 2 first texts and 1 second"):
        tokenize(bert.tokenizer, ["a", "b"], ["c"], 9)


def refusal(folder: Path, family: str = "bert") -> str:
    """Return the message that refuses a folder's tokenizer."""
    with pytest.raises(BackboneError) as caught:
        read_tokenizer(folder, word_piece=FAMILIES[family].word_piece)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_folder_without_a_tokenizer_names_the_file_it_needs(tmp_path: Path) -> None:
    assert "has no tokenizer.json and no vocab.txt" in refusal(tmp_path)


def test_vocab_txt_is_not_enough_where_it_does_not_describe_the_tokenizer(folder: Path) -> None:
    assert "has no tokenizer.json." in refusal(folder, "roberta")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert "tokenizer.json cannot be read as a tokenizer" in refusal(tmp_path)


def test_a_vocabulary_that_is_not_berts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\ncat\n")
    assert "vocab.txt has no [SEP]: it is not a BERT vocabulary" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "data"), [("vocab.txt", b"\xff\xfe"), ("tokenizer_config.json", b"{")])
def test_damaged_files_beside_a_vocabulary_are_named(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    assert name in refusal(folder)


def test_tokens_are_counted_without_a_limit(bert: Backbone) -> None:
    texts, pairs, seen = ["the cat", "", "dog " * 300], ["a dog", "who", "why"], []
    counts = token_counts(bert.tokenizer, texts, pairs, lambda done, total: seen.append((done, total)))
    assert counts == [len(row) for row in tokenize(bert.tokenizer, texts, pairs, 1000)] == [7, 4, 304]
    assert seen == [(3, 3)]
    assert token_counts(bert.tokenizer, ["the cat"], None) == [4]


def test_equal_tokenizers_have_equal_hashes(bert: Backbone) -> None:
    twin = Tokenizer.from_str(bert.tokenizer.to_str())
    assert tokenizer_hash(twin) == tokenizer_hash(bert.tokenizer)
    twin.add_tokens(["brandnew"])
    assert tokenizer_hash(twin) != tokenizer_hash(bert.tokenizer)
