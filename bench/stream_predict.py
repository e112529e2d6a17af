"""Memory of `adapterbank predict` over a long CSV: makes a tiny bank and the file, runs the command, samples memory.

    python bench/stream_predict.py --rows 10000000 --folder /tmp/stream

Prints one JSON object: rows per second, resident memory after each twentieth of the rows, and by how much it grew from
the first quarter to the end. The encoder has two layers of width 32, so that reading and writing matter.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TASKS = ("sentiment", "score")
WORDS = ["the", "a", "cat", "dog", "film", "house", "was", "is", "good", "bad", "big", "small", "red", "lazy", "fox"]


def make_bank(folder: Path) -> None:
    """Train two tasks on a tiny random encoder."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    import adapterbank

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes))
    model.save_pretrained(folder / "encoder")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "encoder" / "tokenizer.json"))
    bank = adapterbank.open_bank(folder / "bank", str(folder / "encoder"), device="cpu")
    rows = [(f"the {WORDS[i % len(WORDS)]} was {'good' if i % 2 else 'bad'}", i % 2) for i in range(64)]
    options: dict[str, Any] = {"epochs": 1, "size": 4, "max_length": 32}
    bank.train("sentiment", [(text, ("negative", "positive")[label]) for text, label in rows], **options)
    bank.train("score", [(text, label + 0.5) for text, label in rows], **options)


def make_file(path: Path, rows: int) -> None:
    """Write rows of an id, a text of three to twelve words, and another column."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "source"])
        for i in range(rows):
            words = [WORDS[(i * 7 + place * (1 + i % 5)) % len(WORDS)] for place in range(3 + i % 10)]
            writer.writerow([i, " ".join(words), f"page {i % 97}, column {i % 3}"])


def resident(pid: int) -> int:
    """Return the bytes of a process in memory."""
    fields = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS:")), 0)


def watch(command: list[str], output: Path) -> tuple[list[tuple[int, int]], float]:
    """Run a command; return (bytes of the output written, memory) over time, and the seconds it took."""
    started, samples = time.monotonic(), []
    part = output.with_name(output.name + ".part")
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        while running.poll() is None:
            time.sleep(0.25)
            try:
                samples.append((part.stat().st_size, resident(running.pid)))
            except (FileNotFoundError, ProcessLookupError):
                continue  # not started yet, or just ended
        assert running.stderr is not None
        if running.returncode:
            raise SystemExit(running.stderr.read().decode())
    return samples, time.monotonic() - started


def check(given: Path, answered: Path) -> int:
    """Return the number of rows, after a check that each is there, in order, with all its columns and an answer."""
    rows = 0
    with given.open(encoding="utf-8", newline="") as first, answered.open(encoding="utf-8", newline="") as second:
        for old, new in zip(csv.DictReader(first), csv.DictReader(second), strict=True):
            assert all(new[name] == value for name, value in old.items()), new
            assert new["sentiment.label"] in ("positive", "negative"), new
            assert not new["error"], new
            rows += 1
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, required=True, help="Folder for the bank and the files; made if absent.")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "bank").exists():
        make_bank(options.folder)
    given, answered = options.folder / "rows.csv", options.folder / "answered.csv"
    make_file(given, options.rows)
    words = ["predict", "--bank", options.folder / "bank", "--task", ",".join(TASKS), given, "--output", answered]
    code = "from adapterbank.cli.main import main; main()"
    samples, seconds = watch([sys.executable, "-c", code, *map(str, words), "--device", "cpu"], answered)
    rows, size = check(given, answered), answered.stat().st_size
    by_share = [(done / size, memory) for done, memory in samples if done]
    steps = [max((m for share, m in by_share if share <= i / 20), default=0) for i in range(1, 21)]
    quarter = max((m for share, m in by_share if share <= 0.25), default=0)
    found = {
        "rows": rows,
        "tasks": len(TASKS),
        "bytes": given.stat().st_size,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        "peak_mb_by_twentieth": [round(memory / 1e6, 1) for memory in steps],
        "growth_after_first_quarter_mb": round((max(m for _, m in by_share) - quarter) / 1e6, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
