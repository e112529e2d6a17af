"""The sizes of our kernels' programs compared on one GPU: each worker runs other sizes of every kernel, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=src python bench/tune.py --shape base --out bench/results/tune_base.json

Kernels run one after the other, so their times add up and the sizes of each can be judged alone: the first worker has
those of the product. All workers compile at the same time, then they measure one after the other what
`kernel_times.py` measures. With more than one thread for each worker, their waiting threads stand in each other's way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contest import write
from kernel_times import of_batch, of_training
from machine import machine
from shapes import SHAPES, batches, save
from worker_own import Worker

PATIENCE = 40
"""The most seconds for one worker's measurement."""


class Sizes(NamedTuple):
    """The sizes of the programs of one worker."""

    site: tuple[int, int, int, int] | None
    """Tokens of a program, columns at once, warps, stages; of `site` and its gradient."""
    sums: tuple[int, int, int, int, int, int]
    """Columns, tokens at once, programs, warps, stages, numbers that are added at once; of `site_weights`."""
    attention: tuple[int, int, int]
    """Warps, stages, warps of a gradient in one block; of `attention`."""


ALL = (
    Sizes(None, (64, 32, 264, 4, 3, 512), (4, 2, 8)),
    Sizes((32, 256, 4, 2), (64, 64, 264, 4, 3, 256), (4, 1, 4)),
    Sizes((16, 256, 4, 2), (128, 32, 264, 8, 3, 1024), (8, 2, 16)),
    Sizes((16, 256, 8, 2), (64, 32, 132, 4, 3, 128), (4, 3, 8)),
    Sizes((32, 128, 8, 2), (64, 32, 528, 4, 4, 2048), (2, 2, 4)),
    Sizes((32, 128, 4, 2), (64, 64, 264, 8, 2, 512), (8, 1, 8)),
    Sizes((16, 128, 4, 2), (32, 32, 264, 4, 3, 512), (4, 4, 4)),
)


def use(sizes: Sizes) -> None:
    """Let the kernels have these sizes in this process."""
    from adapterbank.encoder.kernels import attention, site, site_gradient, site_weights

    names = ("_COLUMNS", "_TOKENS", "_PROGRAMS", "_WARPS", "_STAGES", "_SUMMED")
    others = ("_WARPS", "_STAGES", "_WHOLE_WARPS")
    for module, keys, values in ((site_weights, names, sizes.sums), (attention, others, sizes.attention)):
        for name, value in zip(keys, values, strict=True):
            assert hasattr(module, name), name
            setattr(module, name, value)
    if sizes.site is None:
        return
    own, (tokens, columns, warps, stages) = site.blocks, sizes.site

    def blocks(*arguments: Any) -> dict[str, int]:
        found = own(*arguments)
        step = min(columns, found["STEP"])
        return {**found, "BLOCK": tokens, "STEP": step, "num_warps": warps, "num_stages": stages}

    site.blocks = site_gradient.blocks = blocks


def work(number: int, shape: str, device: str) -> None:
    """Compile with the sizes of that number, wait for the driver, measure and answer."""
    if device == "cuda":
        use(ALL[number])
    with tempfile.TemporaryDirectory() as folder:
        rows = batches(32, 128 if device == "cuda" else 8, SHAPES[shape].vocabulary)
        setup = {"device": device, "cases": {"full rows": rows}, "options": {"size": 64}}
        worker = Worker({"backbone": save(SHAPES[shape], Path(folder)), **setup})
        several = [f"task{i}" for i in range(32)]
        of_training(worker)
        of_batch(worker, several)
        print(json.dumps({"ready": number}), flush=True)
        sys.stdin.readline()
        found = {"training step": of_training(worker), "batch of 32 tasks": of_batch(worker, several)}
    print(json.dumps(found), flush=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a worker's next answer; an empty one if it has ended."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("{")), "{}")
    return dict(json.loads(line))


def measured(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let a worker measure; return what it found, or how it failed."""
    try:
        out, errors = process.communicate("go\n", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"failure": " | ".join(errors.splitlines()[-3:])[-600:]}


def main() -> None:
    """Start the workers, let them measure in turns, print the kernels of our own, write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="base")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of two workers on the CPU")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape, device = ("tiny", "cpu") if options.tiny else (options.shape, "cuda")
    if options.work is not None:
        work(options.work, shape, device)
        return
    tiny = ["--tiny"] * options.tiny
    command = [sys.executable, __file__, "--shape", options.shape, *tiny, "--work"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    numbers = range(2 if options.tiny else len(ALL))
    workers = [subprocess.Popen([*command, str(i)], text=True, **pipes) for i in numbers]
    for process in workers:
        answer(process)
    found: dict[str, Any] = {**machine(torch.device(device)), "shape": shape, "workers": []}
    for sizes, process in zip(ALL, workers, strict=False):
        one = {**sizes._asdict(), **measured(process)}
        found["workers"].append(one)
        write(options.out, found)
        for what in ("training step", "batch of 32 tasks"):
            times = one.get(what, {"sum_ms": float("nan"), "kernels": {}})
            own = {name: round(ms, 3) for name, (ms, _) in times["kernels"].items() if name.startswith("_")}
            print(f"{what}, {sizes}: {times['sum_ms']:.3f} ms {own} {one.get('failure', '')}", flush=True)


if __name__ == "__main__":
    main()
