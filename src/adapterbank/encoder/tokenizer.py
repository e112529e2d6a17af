"""A backbone's tokenizer: read from its folder, and texts to token ids. Knows nothing of the encoder's tensors."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors

from adapterbank.encoder.batch import Tokens
from adapterbank.errors import BackboneError, InputError

_AT_ONCE = 4096
"""Texts that are encoded at a time to count their tokens; encodings are large."""

_TRUNCATING = threading.Lock()
"""Truncation is a setting of the tokenizer itself, so threads with different limits must take turns."""


def read_tokenizer(folder: Path, *, word_piece: bool) -> tuple[Tokenizer, Any]:
    """Read the tokenizer of a folder; also return the JSON value that represents it in the backbone's identity.

    `word_piece` is whether vocab.txt describes the whole tokenizer (`families.Family`). Truncation and padding that the
    file sets (MiniLM: fixed 128) are switched off.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
            tokenizer, description = Tokenizer.from_str(text), json.loads(text)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise BackboneError(f"{path} cannot be read as a tokenizer ({str(error).splitlines()[0]}).") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer, {k: v for k, v in description.items() if k not in ("truncation", "padding", "version")}
    if word_piece and (folder / "vocab.txt").is_file():
        return _word_piece(folder)
    raise BackboneError(f"{folder} has no tokenizer.json" + (" and no vocab.txt." if word_piece else "."))


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, *, start: int = 0
) -> list[Tokens]:
    """Turn texts or pairs into token ids; the longer text of a pair is cut first. `start` is the first row's number."""
    inputs = _inputs(texts, pairs)
    check_room(tokenizer, max_length, paired=pairs is not None)
    with _TRUNCATING:
        tokenizer.enable_truncation(max_length, strategy="longest_first")
        try:
            found = tokenizer.encode_batch_fast(inputs)
        except TypeError as error:
            raise InputError(_odd_text(inputs, start)) from error
        finally:
            tokenizer.no_truncation()
    return _tokens(found)


def check_room(tokenizer: Tokenizer, max_length: int, *, paired: bool) -> None:
    """Refuse a limit that leaves no room for a text."""
    taken = tokenizer.num_special_tokens_to_add(paired)
    if max_length <= taken:
        raise InputError(f"max_length {max_length} leaves no room for a text beside {taken} special tokens. Raise it.")


def encode_whole(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, start: int = 0
) -> list[Encoding]:
    """Encode texts or pairs of any length, each token with its character offsets."""
    inputs = _inputs(texts, pairs)
    with _TRUNCATING:
        try:
            return tokenizer.encode_batch(inputs)
        except TypeError as error:
            raise InputError(_odd_text(inputs, start)) from error


def token_counts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[int]:
    """Return the number of tokens of each row, special tokens included, without any limit."""
    found: list[int] = []
    for start in range(0, len(texts), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        inputs = _inputs(texts[part], None if pairs is None else pairs[part])
        with _TRUNCATING:
            found += [len(encoding) for encoding in tokenizer.encode_batch_fast(inputs)]
        watch(len(found), len(texts))
    return found


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a sha256 over everything that determines the tokenizer's output."""
    with _TRUNCATING:
        return hashlib.sha256(f"{tokenizers.__version__} {tokenizer.to_str()}".encode()).hexdigest()


def _inputs(texts: Sequence[str], pairs: Sequence[str] | None) -> list[Any]:
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"There are {len(texts)} first texts and {len(pairs)} second ones. Give a pair for each.")
    return list(texts) if pairs is None else list(zip(texts, pairs, strict=True))


def _tokens(found: Sequence[Encoding]) -> list[Tokens]:
    """Return the rows as views of two arrays: allocating an array for each takes longer than tokenising its text."""
    ids = np.fromiter(chain.from_iterable([encoding.ids for encoding in found]), np.int64)
    types = np.fromiter(chain.from_iterable([encoding.type_ids for encoding in found]), np.int64)
    borders = pairwise(accumulate(map(len, found), initial=0))
    return [
        Tokens(ids[start:end], types[start:end], cut=bool(encoding.overflowing))
        for encoding, (start, end) in zip(found, borders, strict=True)
    ]


def _odd_text(inputs: Sequence[Any], start: int) -> str:
    """Name the input that is not a string, or not one that can be encoded as UTF-8."""
    for row, item in enumerate(inputs, start + 1):
        for text in item if isinstance(item, tuple) else (item,):
            try:
                text.encode()
            except (AttributeError, UnicodeError):
                return f"Row {row} is not a text that can be tokenised: {text!r}."
    return "The texts cannot be tokenised."


def _word_piece(folder: Path) -> tuple[Tokenizer, Any]:
    """Build BERT's tokenizer from vocab.txt: basic splitting, then WordPiece (Devlin et al. 2018)."""
    flags_path = folder / "tokenizer_config.json"
    try:
        # Not splitlines: it also splits at separators that a vocabulary may contain as tokens.
        words = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        flags = json.loads(flags_path.read_text(encoding="utf-8")) if flags_path.is_file() else {}
    except ValueError as error:
        raise BackboneError(f"{folder}: vocab.txt or tokenizer_config.json cannot be read ({error}).") from error
    vocabulary = {word: i for i, word in enumerate(words)}
    lower, strip = bool(flags.get("do_lower_case", True)), flags.get("strip_accents")
    chinese = bool(flags.get("tokenize_chinese_chars", True))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if missing := [token for token in special[:4] if token not in vocabulary]:
        raise BackboneError(f"{folder / 'vocab.txt'} has no {missing[0]}: it is not a BERT vocabulary.")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip, lowercase=lower
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.add_special_tokens([token for token in special if token in vocabulary])
    return tokenizer, {"wordpiece": words, "lower": lower, "strip_accents": strip, "chinese": chinese}
