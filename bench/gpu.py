"""Training steps and mixed-task inference compared with the peers on one GPU: same weights and rows, taking turns.

    PYTHONPATH=src python bench/gpu.py --peers-path FOLDER --out bench/results/gpu.json
    PYTHONPATH=src python bench/gpu.py --peers-path FOLDER --only inference --who "adapterbank*" --who "lone*" --out OUT
    PYTHONPATH=src python bench/gpu.py --peers .venv-bench/bin/python --out rehearsal.json --tiny

Every row has 128 tokens, so that padding does not matter. A training step has dropout 0.1, clipping at 1 and AdamW.
Peers run under autocast and with the whole model in bf16; the faster one counts. `lone` is one fine-tuned copy of the
whole model in bf16, which answers one task and no other. The contestants of all shapes start and compile together.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import curves
import torch
from contest import Contestant, Field, Peers, print_table, start_own, write
from machine import machine, matrix_rate
from ratios import EIGHT, MIXED, ONE, OTHERS, OWN, fastest, inference_ratios, judge, training_ratios
from shapes import SHAPES, Shape, batches, save

Starters = dict[str, Callable[[], Contestant]]
"""How each contestant is started, by its name."""
PARTS = ("training", "inference", "curves")
TASKS = ("mixed", "one", "switched")
"""Rows of different tasks in one batch; all of one task; of different tasks, one row at a time."""
COMPILED = {"eager": "", "torch.compile": "default", "reduce-overhead": "reduce-overhead"}
"""How a full copy runs, and torch's mode for it."""


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the peers' precisions: autocast and bf16 on a GPU, fp32 on a CPU."""
    return ("autocast", "bf16") if device.type == "cuda" else ("fp32",)


def training_field(setup: dict[str, Any], peers: Peers, device: torch.device, options: Any) -> Starters:
    """Return all contestants of training, one process each."""
    own = {**setup, "options": {"size": setup["size"]}}
    found: Starters = {
        OWN: partial(start_own, OWN, own),
        EIGHT: partial(start_own, EIGHT, {**own, "always": {"runs": 8}}),
    }
    kinds = {"adapters DoubleSeqBn": {"peer": "adapters"}, "peft LoRA q,v r=8": {"peer": "peft"}}
    kinds |= {f"full, {how}": {"peer": "full", "compile": mode} for how, mode in COMPILED.items()}
    for (kind, about), precision in itertools.product(kinds.items(), precisions(device)):
        name = f"{kind} [{precision}]"
        found[name] = partial(peers.start, name, {**setup, **about, "precision": precision})
    return found


def inference_field(setup: dict[str, Any], peers: Peers, device: torch.device, options: Any) -> Starters:
    """Return all contestants of inference; each peer but a lone model holds as many tasks as there are rows."""
    own, rows = {**setup, "options": {"size": setup["size"]}}, options.rows
    slots = {MIXED: ("mixed", rows), ONE: ("one", rows), OTHERS: ("mixed", options.resident)}
    found: Starters = {
        name: partial(start_own, name, {**own, "always": {"slots": held, "tasks": tasks}})
        for name, (tasks, held) in slots.items()
    }
    whole = precisions(device)[-1]
    for how, mode in COMPILED.items():
        lone = {"peer": "full", "compile": mode, "precision": whole, "always": {"tasks": "one"}}
        found[f"lone, {how} [{whole}]"] = partial(peers.start, f"lone, {how} [{whole}]", {**setup, **lone})
    several = [("adapters", tasks) for tasks in TASKS] + [("peft", tasks) for tasks in TASKS[:2]]
    for (peer, tasks), precision in itertools.product(several, precisions(device)):
        one = {**setup, "peer": peer, "precision": precision, "tasks": rows, "always": {"tasks": tasks}}
        found[f"{peer}: {tasks} [{precision}]"] = partial(peers.start, f"{peer}: {tasks} [{precision}]", one)
    return found


def chosen(starters: Starters, peers: Peers, patterns: list[str]) -> list[Contestant]:
    """Start the contestants that match a pattern, or all if there is none; without the peers, adapterbank alone."""
    names = [name for name in starters if peers.there or name.startswith(OWN)]
    wanted = [name for name in names if not patterns or any(fnmatchcase(name, one) for one in patterns)]
    return [starters[name]() for name in wanted]


def full_rows(folder: str, shape: Shape, device: torch.device, options: Any) -> dict[str, Any]:
    """Return the setup that all contestants of both comparisons share."""
    cases = {"full rows": batches(options.rows, options.length, shape.vocabulary)}
    return {"backbone": folder, "device": device.type, "size": options.size, "cases": cases}


def floor(shape: Shape, options: Any) -> float:
    """Return the milliseconds that a training step's matrix products take at the machine's measured rate."""
    return 1000 * 4 * shape.inner_parameters * options.rows * options.length / options.rate / 1e12


def compare(part: str, work: Path, peers: Peers, device: torch.device, options: Any) -> dict[str, dict[str, Any]]:
    """Start the contestants of all shapes and warm them up together; then measure one shape after the other."""
    start, infers = {"training": (training_field, False), "inference": (inference_field, True)}[part]
    order: dict[str, Any] = {"do": "infer"} if infers else {"do": "train", "block": options.block}
    order |= {"case": "full rows"}
    began = time.perf_counter()
    started: dict[str, list[Contestant]] = {}
    for name in options.shape or ["base", "minilm"]:
        setup = full_rows(save(SHAPES[name], work / name), SHAPES[name], device, options)
        started[name] = chosen(start(setup, peers, device, options), peers, options.who)
    with Field(itertools.chain(*started.values())) as everyone:
        everyone.warm_up({**order, "blocks": 5 if infers else 2}, one_by_one=options.one_by_one)
        warm = time.perf_counter() - began
        print(f"  ({part}: started and compiled in {warm:.0f} s)", flush=True)
        found = {}
        for name, contestants in started.items():
            field = Field(contestants)
            field.take_turns({**order, "blocks": 3 if infers else 1, "seconds": options.seconds}, options.rounds)
            found[name] = summary(part, name, field.results(MIXED if infers else OWN), options)
            found[name]["warm_s"] = warm
    return found


def summary(part: str, shape: str, found: dict[str, Any], options: Any) -> dict[str, Any]:
    """Add the peers' faster precisions, the ratios and the goals to a comparison's figures."""
    found["peers"] = fastest(found["contestants"])
    if part == "training":
        found["floor_ms"] = floor(SHAPES[shape], options)
    found["ratios"] = training_ratios(found) if part == "training" else inference_ratios(found)
    found["goals"] = judge(part, shape, found["ratios"])
    return found


def print_ratios(result: dict[str, Any]) -> None:
    """Print a comparison's ratios and goals."""
    for what, ratio in result["ratios"].items():
        print(f"    {what:<52} {ratio:7.2f}", flush=True)
    for goal in result["goals"]:
        said = "met" if goal["met"] else "MISSED"
        print(f"    goal: {goal['ratio']:<46} {goal['value']:7.3f} {goal['goal']:>8} {said}", flush=True)


def parse() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the curves are written next to it")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; can be repeated")
    parser.add_argument(
        "--who",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only contestants whose name matches, such as 'lone*' or 'full, reduce-overhead*'; can be repeated",
    )
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: base and minilm")
    parser.add_argument("--tiny", action="store_true", help="a small test run of everything on the CPU")
    parser.add_argument("--one-by-one", action="store_true", help="warm up one after the other; slower to start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="least duration of a contestant's turn")
    options = parser.parse_args()
    options.rows, options.length, options.block, options.size, options.resident = 32, 128, 10, 64, 4096
    if options.tiny:
        options.rows, options.length, options.block, options.size, options.resident = 4, 16, 2, 16, 32
        options.shape, options.rounds, options.seconds = ["tiny"], 2, 0.05
    return options


SETTINGS = ("rows", "length", "block", "size", "resident", "rounds", "seconds")


def main() -> None:
    """Measure every part, print the ratios, write JSON after each."""
    options = parse()
    device, peers = torch.device("cpu" if options.tiny else "cuda"), Peers(options)
    began = time.perf_counter()
    options.rate = matrix_rate(device)
    settings = {name: getattr(options, name) for name in SETTINGS}
    found: dict[str, Any] = {**machine(device), "settings": settings, "matrix_tflops": options.rate}
    with tempfile.TemporaryDirectory() as work:
        for part in options.only or PARTS:
            if part == "curves":
                out = options.out.with_name(f"curves_{device.type}{'_tiny' * options.tiny}.json")
                curves.measure(Path(work), device, peers, out, tiny=options.tiny)
                continue
            found[part] = compare(part, Path(work), peers, device, options)
            write(options.out, found)
            for name, result in found[part].items():
                print_table(f"{part}, {name} shape, {options.rows} rows x {options.length} tokens", result)
                print_ratios(result)
            print(f"  ({time.perf_counter() - began:.0f} s so far)", flush=True)


if __name__ == "__main__":
    main()
