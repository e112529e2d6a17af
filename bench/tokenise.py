"""Time to tokenise and pack a catalog task, and peak memory: uncached and from the cache.

Example: python bench/tokenise.py glue/sst2 --data-root data
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from unittest import mock

from adapterbank.encoder.backbone import load as load_backbone
from adapterbank.encoder.batch import pack
from adapterbank.inference.rows import epoch_order, make_rows
from adapterbank.storage import cache
from adapterbank.tasks.catalog import train_splits
from adapterbank.tasks.examples import read_examples


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--max-length", type=int, default=128)
    asked = parser.parse_args()
    found = train_splits(asked.task, asked.data_root)
    examples, _ = read_examples(found.tables["train"], found.task)
    backbone = load_backbone(asked.backbone)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {cache.FOLDER: folder}):
        for way, keep in (("new", False), ("new, kept", True), ("from the cache", True)):
            began = time.perf_counter()
            rows = make_rows(backbone, examples, kind=found.task.kind, max_length=asked.max_length, keep=keep)
            tokenised = time.perf_counter() - began
            batches = epoch_order([len(row) for row in rows.tokens], 32, seed=0, epoch=0)
            tokens = sum(len(pack([rows.tokens[i] for i in batch]).ids) for batch in batches)
            whole = time.perf_counter() - began
            print(f"{way}: {len(rows):,} rows, {tokens:,} tokens: {tokenised:.2f} s, {whole:.2f} s with packing")
    unit = 1 if sys.platform == "darwin" else 1024
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB peak memory, with the encoder")


if __name__ == "__main__":
    main()
