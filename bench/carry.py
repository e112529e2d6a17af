"""Collect what `clock.py` needs on a machine without a network: rows of SST-2, and MiniLM in 24 MB instead of 91.

    PYTHONPATH=src python bench/carry.py --sst2 FOLDER --out FOLDER

Train rows are drawn from train.parquet with a fixed seed and stay in the order drawn, so that the first rows are a
sample, too. The dev rows are those of dev.parquet and as many of the labelled test.parquet as are missing.

The weights are rounded to 8 bits, with a scale for each row of a matrix; `unpack` makes them float32 again, for both
sides. Random weights would be smaller still, but a task is hardly learned on them, and `adapterbank train` begins a run
again that learns nothing: that is more steps than the peer takes.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from adapterbank.encoder.sources import locate

TRAIN, DEV = 8544, 1101
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
PACKED, SCALE = "model.int8.safetensors", " scale"
"""The rounded weights, and the end of the name of their scales."""


def cut(sst2: Path, out: Path, train: int = TRAIN, dev: int = DEV) -> None:
    """Write train.parquet and dev.parquet with that many rows."""
    whole = pq.read_table(sst2 / "train.parquet")
    drawn = np.random.RandomState(0).permutation(whole.num_rows)[:train]
    pq.write_table(whole.take(drawn), out / "train.parquet", compression="zstd")
    held = pa.concat_tables([pq.read_table(sst2 / f"{name}.parquet") for name in ("dev", "test")])
    pq.write_table(held.slice(0, dev), out / "dev.parquet", compression="zstd")


def copy_files(source: Path, out: Path) -> None:
    """Copy an encoder's files but for the weights."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).exists():
            shutil.copy(source / name, out / name)


def pack(source: Path, out: Path) -> None:
    """Write an encoder's files, and its weights in 8 bits: matrices rounded, vectors as they are."""
    copy_files(source, out)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            packed[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        packed[name], packed[name + SCALE] = (tensor / scale).round().to(torch.int8), scale
    save_file(packed, out / PACKED, metadata={"format": "pt"})


def unpack(source: Path, out: Path) -> str:
    """Write the encoder that `pack` packed, with float32 weights; return its folder."""
    copy_files(source, out)
    packed = load_file(source / PACKED)
    weights = {
        name: tensor * packed[name + SCALE] if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def main() -> None:
    """Write the folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", type=Path, required=True, help="folder with train, dev and test.parquet of SST-2")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pack(locate("minilm"), options.out / "encoder")
    cut(options.sst2, options.out)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
