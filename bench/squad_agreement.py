"""Compare our SQuAD scores with the official scripts' on random and corrupted prediction files over both dev sets.

The official scripts are not bundled: fetch evaluate-v1.1.py and evaluate-v2.0.py from the SQuAD site.

Example: python bench/squad_agreement.py evaluate-v1.1.py evaluate-v2.0.py --data-root data --files 20
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapterbank.benchmarks import squad
from adapterbank.tasks.catalog import load

THRESHOLD = 0.25
_HARM = (
    lambda text: f"The {text}",
    lambda text: f"{text}.",
    lambda text: text.upper(),
    lambda text: text.replace(" ", "  "),
    lambda text: " ".join(text.split()[1:]),
    lambda text: f"{text} a {text}",
    lambda text: f"\u201c{text}\u201d",
    lambda text: text[::-1],
)
"""Ways to alter an answer: some results are still right, some partly, some wrong."""


def predictions(columns: dict[str, list[Any]], gold: dict[str, list[str]], draw: random.Random) -> dict[str, str]:
    """Answer each question with a gold answer, an altered one, a part of the text, "The", or nothing."""
    said = {}
    for key, context in zip(columns["id"], columns["context"], strict=True):
        right = draw.choice(gold[key] or [""])
        start = draw.randrange(len(context))
        stretch = context[start : start + draw.randrange(60)]
        said[key] = draw.choice((right, draw.choice(_HARM)(right), draw.choice(_HARM)(stretch), "The", ""))
    return said


def official(script: str, *words: Any) -> dict[str, float]:
    """Run an official script and return what it prints."""
    done = subprocess.run([sys.executable, script, *map(str, words)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def written(folder: Path, name: str, value: Any) -> Path:
    """Write JSON for a script to read."""
    path = folder / name
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def data_file(columns: dict[str, list[Any]], version: str) -> dict[str, Any]:
    """Return the rows in the official format, one paragraph each."""
    rows = zip(columns["id"], columns["context"], columns["label"], strict=True)
    paragraphs = [
        {"context": context, "qas": [{"id": key, "answers": [{"text": text} for text in cell["text"]]}]}
        for key, context, cell in rows
    ]
    return {"version": version, "data": [{"title": "all", "paragraphs": paragraphs}]}


def differences(scripts: Sequence[str], name: str, root: str | None, files: int, folder: Path) -> list[float]:
    """Score prediction files of one dev set with both, and return the largest difference of each."""
    table = load(name, root).tables["dev"]
    gold = squad.gold_answers(table, "label")
    first = name == "squad/v1"
    data = written(folder, "data.json", data_file(table.columns, "1.1" if first else "v2.0"))
    found = []
    for seed in range(files):
        draw = random.Random(seed)
        said = predictions(table.columns, gold, draw)
        if first:
            said = {
                key: text for key, text in said.items() if draw.random() < 0.9
            }  # the script scores the rest as wrong
        path = written(folder, "said.json", said)
        pairs = [
            (squad.evaluate(gold, said, version="1.1" if first else "2.0"), official(scripts[not first], data, path))
        ]
        if not first:
            odds = {key: round(draw.gauss(0, 1), draw.choice((1, 9))) for key in said}  # some of them equal
            words = ("--na-prob-file", written(folder, "odds.json", odds), "--na-prob-thresh", THRESHOLD)
            ours = squad.evaluate(gold, said, version="2.0", null_odds=odds, threshold=THRESHOLD)
            pairs.append((ours, official(scripts[1], data, path, *words)))
        for ours, theirs in pairs:
            assert ours.keys() == theirs.keys(), set(ours) ^ set(theirs)
            found.append(max(abs(ours[key] - theirs[key]) for key in theirs))
    return found


def main() -> None:
    """Compare, and print the number of scorings and the largest difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs=2, metavar="SCRIPT", help="evaluate-v1.1.py and evaluate-v2.0.py")
    parser.add_argument("--data-root")
    parser.add_argument("--files", type=int, default=20, help="Prediction files for each dev set.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("squad/v1", "squad/v2"):
            found = differences(asked.scripts, name, asked.data_root, asked.files, Path(folder))
            print(f"{name}: {len(found)} scorings, largest difference {max(found):.1e}")


if __name__ == "__main__":
    main()
