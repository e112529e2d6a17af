"""Training steps and mixed-task inference compared with the peers on one GPU: same weights and rows, taking turns.

    PYTHONPATH=src python bench/gpu.py --peers-path FOLDER --out bench/results/gpu.json
    PYTHONPATH=src python bench/gpu.py --peers .venv-bench/bin/python --out rehearsal.json --tiny

Every row has 128 tokens, so that padding does not matter. A training step has dropout 0.1, clipping at 1 and AdamW.
Peers run under autocast and with the whole model in bf16; the faster one counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import curves
import torch
from contest import Contestant, Field, Peers, print_table, start_own, write
from machine import machine, matrix_rate
from shapes import SHAPES, Shape, batches, save

OWN, EIGHT = "adapterbank", "adapterbank, 8 runs at once, a step of all"
PARTS = ("training", "inference", "curves")


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the peers' precisions: autocast and bf16 on a GPU, fp32 on a CPU."""
    return ("autocast", "bf16") if device.type == "cuda" else ("fp32",)


def training_field(setup: dict[str, Any], peers: Peers, device: torch.device) -> Field:
    """Start all contestants of training, one process each; they prepare in parallel."""
    own = {**setup, "options": {"size": setup["size"]}}
    found: list[Contestant] = [start_own(OWN, own), start_own(EIGHT, {**own, "always": {"runs": 8}})]
    kinds = {
        "adapters DoubleSeqBn": {"peer": "adapters"},
        "peft LoRA q,v r=8": {"peer": "peft"},
        "full, eager": {"peer": "full"},
        "full, torch.compile": {"peer": "full", "compile": "default"},
        "full, reduce-overhead": {"peer": "full", "compile": "reduce-overhead"},
    }
    if peers.there:
        for name, kind in kinds.items():
            for precision in precisions(device):
                found.append(peers.start(f"{name} [{precision}]", {**setup, **kind, "precision": precision}))
    return Field(found)


def fastest(found: dict[str, Any]) -> dict[str, Any]:
    """Return each peer's figures in its faster precision, which counts as its time."""
    best: dict[str, Any] = {}
    for name, result in found["contestants"].items():
        kind = name.partition(" [")[0]
        if " [" in name and (kind not in best or result["median_ms"] < best[kind]["median_ms"]):
            best[kind] = {"who": name, **result}
    return best


def full_rows(folder: str, shape: Shape, device: torch.device, options: Any) -> dict[str, Any]:
    """Return the setup that all contestants of both comparisons share."""
    cases = {"full rows": batches(options.rows, options.length, shape.vocabulary)}
    return {"backbone": folder, "device": device.type, "size": options.size, "cases": cases}


def training(folder: str, shape: Shape, peers: Peers, device: torch.device, options: Any) -> dict[str, Any]:
    """Compare training steps."""
    setup = full_rows(folder, shape, device, options)
    order = {"do": "train", "case": "full rows", "block": options.block}
    with training_field(setup, peers, device) as field:
        field.warm_up({**order, "blocks": 2}, one_by_one=options.one_by_one)
        field.take_turns({**order, "seconds": options.seconds}, options.rounds)
        found = field.results(OWN)
    found["peers"] = fastest(found)
    floor = 4 * shape.inner_parameters * options.rows * options.length / options.rate / 1e12
    found["floor_ms"] = 1000 * floor
    compare(found)
    return found


def compare(found: dict[str, Any]) -> None:
    """Compute the quantities that the goals name: multiples of the lower bound, time per run, memory ratios."""
    everyone, ratios = found["contestants"], {}
    if OWN in everyone:
        own = everyone[OWN]
        ratios["own / arithmetic floor"] = own["median_ms"] / found["floor_ms"]
        for kind, peer in found["peers"].items():
            ratios[f"{kind} / own"] = peer["median_ms"] / own["median_ms"]
            ratios[f"own memory / {kind}"] = own["peak_mb"] / peer["peak_mb"]
            if EIGHT in everyone:
                ratios[f"{kind} / own per run of eight"] = 8 * peer["median_ms"] / everyone[EIGHT]["median_ms"]
    found["ratios"] = ratios


def inference_field(setup: dict[str, Any], peers: Peers, device: torch.device, rows: int) -> Field:
    """Start all contestants of inference; each holds as many tasks as there are rows."""
    own = {**setup, "options": {"size": setup["size"]}, "always": {"slots": rows}}
    found = [start_own(f"{OWN}: {tasks}", {**own, "always": {"slots": rows, "tasks": tasks}}) for tasks in TASKS[:2]]
    if peers.there:
        for peer, tasks in [("adapters", t) for t in TASKS] + [("peft", t) for t in TASKS[:2]]:
            for precision in precisions(device):
                one = {**setup, "peer": peer, "precision": precision, "tasks": rows, "always": {"tasks": tasks}}
                found.append(peers.start(f"{peer}: {tasks} [{precision}]", one))
    return Field(found)


TASKS = ("mixed", "one", "switched")
"""Rows of different tasks in one batch; all of one task; of different tasks, one row at a time."""


def inference(folder: str, shape: Shape, peers: Peers, device: torch.device, options: Any) -> dict[str, Any]:
    """Compare inference, tokens on the host to logits on the host."""
    setup = full_rows(folder, shape, device, options)
    order = {"do": "infer", "case": "full rows"}
    with inference_field(setup, peers, device, options.rows) as field:
        field.warm_up({**order, "blocks": 5}, one_by_one=options.one_by_one)
        field.take_turns({**order, "blocks": 3, "seconds": options.seconds}, options.rounds)
        found = field.results(f"{OWN}: mixed")
    found["peers"] = fastest(found)
    everyone = found["contestants"]
    own = {tasks: everyone[f"{OWN}: {tasks}"]["median_ms"] for tasks in TASKS[:2] if f"{OWN}: {tasks}" in everyone}
    if len(own) == 2:
        ratios = {f"{kind} / own": p["median_ms"] / own["mixed"] for kind, p in found["peers"].items()}
        found["ratios"] = {"own mixed / own one": own["mixed"] / own["one"], **ratios}
    return found


def parse() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Peers.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the curves are written next to it")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; can be repeated")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: base and minilm")
    parser.add_argument("--tiny", action="store_true", help="a small test run of everything on the CPU")
    parser.add_argument("--one-by-one", action="store_true", help="warm up one after the other; slower to start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="least duration of a contestant's turn")
    options = parser.parse_args()
    options.rows, options.length, options.block, options.size = 32, 128, 10, 64
    if options.tiny:
        options.rows, options.length, options.block, options.size = 4, 16, 2, 16
        options.shape, options.rounds, options.seconds = ["tiny"], 2, 0.05
    return options


def main() -> None:
    """Measure every part, print the ratios, write JSON after each."""
    options = parse()
    device, peers = torch.device("cpu" if options.tiny else "cuda"), Peers(options)
    began = time.perf_counter()
    options.rate = matrix_rate(device)
    settings = {name: getattr(options, name) for name in ("rows", "length", "block", "size", "rounds", "seconds")}
    found: dict[str, Any] = {**machine(device), "settings": settings, "matrix_tflops": options.rate}
    measures = {"training": training, "inference": inference}
    with tempfile.TemporaryDirectory() as work:
        for part in options.only or PARTS:
            if part == "curves":
                out = options.out.with_name(f"curves_{device.type}{'_tiny' * options.tiny}.json")
                curves.measure(Path(work), device, peers, out, tiny=options.tiny)
                continue
            for name in options.shape or ["base", "minilm"]:
                folder = save(SHAPES[name], Path(work) / name)
                started = time.perf_counter()
                result = measures[part](folder, SHAPES[name], peers, device, options)
                result["took_s"] = time.perf_counter() - started
                found.setdefault(part, {})[name] = result
                print_table(f"{part}, {name} shape, {options.rows} rows x {options.length} tokens", result)
                for what, ratio in result.get("ratios", {}).items():
                    print(f"    {what:<52} {ratio:7.2f}", flush=True)
                write(options.out, found)
            print(f"  ({time.perf_counter() - began:.0f} s so far)", flush=True)


if __name__ == "__main__":
    main()
