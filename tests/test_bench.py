"""Promise: the comparisons of bench/ compute what they print, and run on a machine without a GPU and without peers."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from benches import carry, clock, clock_peer, contest, fp8, gpu, memory, ratios, rehearse, shapes

OWN, EIGHT, MIXED, ONE, OTHERS = ratios.OWN, ratios.EIGHT, ratios.MIXED, ratios.ONE, ratios.OTHERS
WAYS = fp8.BF16, fp8.FP8, fp8.ALONE
TRAINING = {
    OWN: {"median_ms": 4.0, "peak_mb": 1000},
    EIGHT: {"median_ms": 16.0, "peak_mb": 5000},
    "adapters DoubleSeqBn [autocast]": {"median_ms": 50.0, "peak_mb": 2000},
    "adapters DoubleSeqBn [bf16]": {"median_ms": 40.0, "peak_mb": 1250},
    "full, reduce-overhead [autocast]": {"median_ms": 8.0, "peak_mb": 4000},
    "full, reduce-overhead [bf16]": {"median_ms": 9.0, "peak_mb": 2500},
}
INFERENCE = {
    MIXED: {"median_ms": 2.2},
    ONE: {"median_ms": 2.0},
    OTHERS: {"median_ms": 2.1},
    "lone, reduce-overhead [bf16]": {"median_ms": 1.6},
    "adapters: mixed [bf16]": {"median_ms": 220.0},
}


def compared(everyone, floor=2.0):
    return {"contestants": everyone, "peers": ratios.fastest(everyone), "floor_ms": floor}


# --- statistics ----------------------------------------------------------------------------------------------------


def test_times_are_given_by_their_median_and_quartiles_in_milliseconds():
    found = contest.spread([0.004, 0.001, 0.003, 0.002])
    assert found.pop("quartiles_ms") == pytest.approx([1.75, 3.25])
    assert found == {"median_ms": 2.5, "samples": 4}
    assert contest.spread([0.5]) == {"median_ms": 500, "quartiles_ms": [500, 500], "samples": 1}


def test_each_peer_counts_with_its_faster_precision():
    best = ratios.fastest(TRAINING)
    assert {kind: peer["who"] for kind, peer in best.items()} == {
        "adapters DoubleSeqBn": "adapters DoubleSeqBn [bf16]",
        "full, reduce-overhead": "full, reduce-overhead [autocast]",
    }


def test_training_is_compared_by_step_run_and_memory():
    assert ratios.training_ratios(compared(TRAINING)) == {
        "own step, ms": 4.0,
        "own / arithmetic floor": 2.0,
        "adapters DoubleSeqBn / own": 10.0,
        "adapters DoubleSeqBn / own per run of eight": 20.0,
        "full, reduce-overhead / own": 2.0,
        "full, reduce-overhead / own per run of eight": 4.0,
        "own memory / adapters DoubleSeqBn [autocast]": 0.5,
        "own memory / adapters DoubleSeqBn [bf16]": 0.8,
        "own memory / full, reduce-overhead [autocast]": 0.25,
        "own memory / full, reduce-overhead [bf16]": 0.4,
    }


def test_inference_is_compared_by_mixing_and_with_a_lone_copy():
    found = ratios.inference_ratios(compared(INFERENCE))
    assert found == pytest.approx(
        {
            "own mixed / own one": 1.1,
            "own others / own one": 1.05,
            "own one / lone, reduce-overhead": 1.25,
            "adapters: mixed / own": 100.0,
        }
    )


def test_nothing_is_compared_with_a_contestant_that_is_missing():
    assert ratios.training_ratios(compared({EIGHT: TRAINING[EIGHT]})) == {}
    assert ratios.inference_ratios(compared({MIXED: INFERENCE[MIXED]})) == {}


def test_goals_are_judged_at_their_bound_and_for_their_shapes():
    measured = {"own step, ms": 4.6, "full, reduce-overhead / own": 1.79, "something else": 1.0}
    assert [(goal["ratio"], goal["met"]) for goal in ratios.judge("training", "base", measured)] == [
        ("own step, ms", True),
        ("full, reduce-overhead / own", False),
    ]
    assert ratios.judge("training", "minilm", measured) == []
    (one,) = ratios.judge("inference", "minilm", {"own others / own one": 1.051})
    assert one == {"ratio": "own others / own one", "goal": "<= 1.05", "value": 1.051, "met": False}


@pytest.mark.parametrize("part", ["training", "inference"])
def test_every_goal_names_a_ratio_that_is_computed(part):
    everyone, compute = {"training": (TRAINING, ratios.training_ratios), "inference": (INFERENCE, None)}[part]
    computed = (compute or ratios.inference_ratios)(compared(everyone))
    assert {goal.ratio for goal in ratios.GOALS[part]} <= computed.keys()


# --- contestants ---------------------------------------------------------------------------------------------------


def contestant(name, *seconds):
    return SimpleNamespace(name=name, seconds=list(seconds), failure="", about={"trained": 1}, last={"peak_mb": 2})


def test_times_are_multiples_of_our_first_contestant_where_the_usual_one_does_not_take_part():
    field = contest.Field([contestant("lone", 0.001), contestant(ONE, 0.002), contestant(OTHERS, 0.006)])
    multiples = {name: one["times_adapterbank"] for name, one in field.results(MIXED)["contestants"].items()}
    assert multiples == pytest.approx({"lone": 0.5, ONE: 1.0, OTHERS: 3.0})


def starters(part, there=True):
    """Return the names that would start, and a function that returns those that match patterns."""
    options = argparse.Namespace(peers="python" if there else None, peers_path=None, rows=32, resident=4096)
    peers = contest.Peers(options)
    make = {"training": gpu.training_field, "inference": gpu.inference_field}[part]
    names = make({"size": 64}, peers, torch.device("cuda"), options)
    return lambda *patterns: gpu.chosen({name: lambda name=name: name for name in names}, peers, patterns)


def test_contestants_are_chosen_by_pattern():
    training, inference = starters("training"), starters("inference")
    assert training(OWN, "adapters*", "full, reduce*") == [
        OWN,
        "adapters DoubleSeqBn [autocast]",
        "adapters DoubleSeqBn [bf16]",
        "full, reduce-overhead [autocast]",
        "full, reduce-overhead [bf16]",
    ]
    lone = [f"lone, {how} [bf16]" for how in ("eager", "torch.compile", "reduce-overhead")]
    assert inference("adapterbank*", "lone*") == [MIXED, ONE, OTHERS, *lone]


def test_without_the_peers_adapterbank_takes_part_alone():
    assert starters("training", there=False)() == [OWN, EIGHT]
    assert starters("inference", there=False)() == [MIXED, ONE, OTHERS]


# --- whole processes -----------------------------------------------------------------------------------------------


def test_what_is_fixed_is_the_process_less_its_epochs_at_their_median():
    record = {"history": [{"seconds": s, "score": s / 10} for s in (9.0, 2.0, 3.0)]}
    found = clock.reported(f"said {{}}\n{json.dumps(record, indent=1)}\n", 20.0, 3)
    assert found == {"epochs_s": [9.0, 2.0, 3.0], "fixed_s": 11.0, "score": 0.9}


def test_a_run_that_began_again_is_marked():
    record = {"history": [{"seconds": 1.0, "score": 0.5}] * 4, "restarts": [{}]}
    assert clock.reported(json.dumps(record), 9.0, 3)["warning"] == "4 epochs of 3, 1 new beginnings"


def test_rounds_are_summed_up_by_medians_without_those_that_failed():
    rounds = [{"seconds": 3.0, "fixed_s": 2.0}, {"failure": "exit 1"}, {"seconds": 5.0, "fixed_s": 3.0}]
    assert clock.summary(rounds) == {"median_seconds": 4.0, "median_fixed_s": 2.5, "rounds": rounds}
    assert clock.summary(rounds[1:2]) == {"rounds": rounds[1:2]}


def test_processes_are_compared_with_adapters_on_the_same_load():
    own = {"median_seconds": 4.0, "median_fixed_s": 2.0}
    found = clock.ratios(
        {
            "adapterbank train all, warm cache": own,
            "adapters train all": {"median_seconds": 20.0, "median_fixed_s": 5.0},
            "adapterbank train few, warm cache": own,
            "adapterbank predict": {"median_seconds": 1.0},
        }
    )
    assert found == {
        "adapters train all / adapterbank train all, warm cache": 5.0,
        "adapters train all / adapterbank train all, warm cache (fixed)": 2.5,
    }


def test_the_clock_stops_at_a_line_or_at_the_end():
    code = "import time; print('answered', flush=True); time.sleep(0.5)"
    early, late = (
        clock.timed(clock.Process([sys.executable, "-c", code], {}, until=until))["seconds"]
        for until in ("answered", "")
    )
    assert early < late


def test_a_process_that_fails_is_reported_with_its_last_words():
    failed = clock.timed(clock.Process([sys.executable, "-c", "raise SystemExit('no such file')"], {}))
    assert failed == {"failure": "exit 1: no such file"}
    silent = clock.timed(clock.Process([sys.executable, "-c", "print('other')"], {}, until="answered"))
    assert silent == {"failure": "exit 0: "}


def test_packed_weights_are_within_half_a_step_of_their_row(tmp_path):
    source = tmp_path / "source"
    shapes.save(shapes.SHAPES["tiny"], source)
    carry.pack(source, tmp_path / "packed")
    carry.unpack(tmp_path / "packed", tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        steps = tensor.abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 2 else torch.zeros(1)
        assert ((tensor - after[name]).abs() <= 0.501 * steps).all(), name
    assert (tmp_path / "again" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "packed" / carry.PACKED).stat().st_size < 0.35 * (source / "model.safetensors").stat().st_size


def test_the_rows_that_travel_are_a_fixed_draw(tmp_path):
    for name, count in (("train", 50), ("dev", 4), ("test", 9)):
        rows = {"sentence": [f"{name} {i}" for i in range(count)], "label": [i % 2 for i in range(count)]}
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        carry.cut(tmp_path, tmp_path / name, train=20, dev=6)
    one, two = (pq.read_table(tmp_path / name / "train.parquet").to_pylist() for name in ("one", "two"))
    assert one == two
    assert len({row["sentence"] for row in one}) == 20
    dev = pq.read_table(tmp_path / "one" / "dev.parquet").to_pylist()
    assert [row["sentence"] for row in dev] == ["dev 0", "dev 1", "dev 2", "dev 3", "test 0", "test 1"]


class Counting(torch.nn.Module):
    """Answers 1 to rows of more than two tokens, with a weight that trains."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, attention_mask):
        logits = torch.stack([torch.full((len(input_ids),), 2.5), attention_mask.sum(1).float()], 1)
        return SimpleNamespace(logits=logits * self.scale)


def test_the_peers_loop_scores_all_rows_and_takes_every_step():
    loop = clock_peer.Loop(Counting(), torch.device("cpu"), steps=6)
    data = {"rows": [[1] * (1 + i % 4) for i in range(300)], "labels": [int(i % 4 > 1) for i in range(300)]}
    assert loop.score(data) == 1.0
    assert loop.score({**data, "labels": [1] * 300}) == 0.5
    loss = loop.epoch(data, np.arange(300), 100)
    assert loop.schedule.last_epoch == 3
    assert 0 < loss < 1
    assert loop.model.scale.item() != 1.0


# --- memory and FP8 ------------------------------------------------------------------------------------------------


def test_the_largest_batch_is_found_within_a_sixteenth():
    for most in (40, 64, 127, 500):
        asked = []
        found = memory.largest(lambda rows, most=most, asked=asked: asked.append(rows) or rows <= most, 32)
        assert most - most // 16 - 1 <= found <= most
        assert len(asked) < 12


def test_fp8_is_summed_over_the_products_that_it_makes_faster():
    times = {"a": (2.0, 1.5, None), "b": (1.0, 1.5, 0.5)}
    found = {
        name: {way: {"ms": ms} if ms else {"raised": "refused"} for way, ms in zip(WAYS, each, strict=True)}
        for name, each in times.items()
    }
    assert fp8.sums(found).items() >= {"bf16_ms": 3.0, "fp8_ms": 3.0, "saved_ms": 0.5, "saved_at_most_ms": 0.5}.items()
    assert fp8.sums({"a": {way: {} for way in WAYS}}) == {}


def test_the_products_of_a_step_take_the_arithmetic_of_its_lower_bound():
    shape = shapes.SHAPES["base"]
    weights = [one.inputs * one.outputs for one in fp8.products(shape)]
    matrices = shape.inner_parameters // shape.layers
    assert sum(weights) == 24 * shape.hidden**2
    assert 0.99 < sum(weights) / 2 / matrices <= 1


# --- rehearsals ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_compares_own_contestants_of_both_parts(tmp_path):
    found, printed = rehearse(
        "gpu.py", tmp_path / "gpu.json", "--only", "training", "--only", "inference", "--who", OWN, "--who", f"{OWN}: *"
    )
    training, inference = found["training"]["tiny"], found["inference"]["tiny"]
    assert training["contestants"].keys() == {OWN}
    assert training["ratios"].keys() == {"own step, ms", "own / arithmetic floor"}
    assert inference["contestants"].keys() == {MIXED, ONE, OTHERS}
    assert inference["ratios"].keys() == {"own mixed / own one", "own others / own one"}
    assert training["failed"] == inference["failed"] == {}
    assert "own others / own one" in printed


@pytest.mark.slow
def test_a_rehearsal_times_whole_processes(tmp_path):
    only = ("--only", "*train few, *", "--only", "*engine, empty*", "--only", "*predict", "--rounds", "1")
    found, printed = rehearse("clock.py", tmp_path / "clock.json", *only)
    train = [f"adapterbank train few, {state} cache" for state in ("empty", "warm")]
    assert list(found["processes"]) == [*train, "adapterbank engine, empty cache", "adapterbank predict"]
    assert all(one["median_seconds"] > 0 for one in found["processes"].values())
    for name in train:
        (one,) = found["processes"][name]["rounds"]
        assert len(one["epochs_s"]) == 2
        assert one["fixed_s"] < one["seconds"]
        assert "warning" not in one
    assert found["ratios"] == {}
    assert "failed" not in printed


@pytest.mark.slow
def test_a_rehearsal_counts_what_a_step_keeps(tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with CUDA builds of torch")
    found, _ = rehearse("memory.py", tmp_path / "memory.json")
    settings, shape, numbers = found["settings"], shapes.SHAPES["tiny"], 4 / 1e6
    tokens, d, m = settings["rows"] * settings["length"], shape.hidden, settings["size"]
    sites, wide = 4 * d + 2 * m, 3 * d + shape.feedforward
    kept = {
        "never": shape.layers * (sites + wide) + d,  # and what the LayerNorm of the embeddings reads
        "always": shape.layers * sites + 2 * d,  # and what the first attention reads, which no LayerNorm gives
    }
    for when, vectors in kept.items():
        floats = sum(mb for name, mb in found[when]["kept"]["by_shape_mb"].items() if name.endswith("float32"))
        statistics = 2 * tokens * (2 * shape.layers + 1)
        assert floats / numbers == pytest.approx(tokens * vectors + statistics)


@pytest.mark.slow
def test_kernels_are_counted_by_step_and_batch(tmp_path):
    found, printed = rehearse("kernel_times.py", tmp_path / "kernels.json")
    assert "training step: 0.000 ms of kernels" in printed
    assert found["batch of one task"]["wall_ms"] > 0
    assert found["batch of 32 tasks"]["wall_ms"] > 0


@pytest.mark.slow
def test_a_rehearsal_runs_mixed_batches_of_tasks_that_stand_on_others(tmp_path):
    found, printed = rehearse("helped.py", tmp_path / "helped.json")
    (batches,) = found["tokens"].values()
    assert [*batches] == ["plain", "stacked", "fused", "fused, others"]
    assert all(one["ms"] > 0 for one in batches.values())
    assert batches["plain"]["of plain"] == 1.0
    assert "x plain" in printed


def test_a_rehearsal_emulates_fp8(tmp_path):
    found, _ = rehearse("fp8.py", tmp_path / "fp8.json")
    for each in found["shapes"]["tiny"]["products"].values():
        assert not any("raised" in one for one in each.values())
        assert each[fp8.BF16]["errors"]["norm"] < 1e-5 < each[fp8.FP8]["errors"]["norm"] < 0.05


@pytest.mark.slow
def test_texts_are_answered_without_the_peers(tmp_path, checkpoint):
    found, printed = rehearse("texts.py", tmp_path / "texts.json", "--backbone", str(checkpoint("bert")[0]))
    assert set(found["texts"]) == {"1", "64"}
    assert all("adapterbank fp32" in one["contestants"] for one in found["texts"].values())
    assert "64 a call" in printed
