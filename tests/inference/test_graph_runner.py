"""Rows of any slots as one program, on the CPU: what the eager path gives, whatever was asked before."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapterbank.encoder.backbone import load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.placed import place
from adapterbank.inference import graph_runner, graphs, runner
from adapterbank.inference.engine import Engine
from adapterbank.inference.graph_runner import GraphRunner
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.runner import outputs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import Stacks
from adapterbank.tasks.spec import Examples, Task
from families import FAMILIES, save_random

CPU = torch.device("cpu")

METHODS = {
    "adapter": {"method": "adapter"},
    "adapter without norms": {"train_norms": False, "activation": "silu"},
    "adapter of all sorts": {"placement": "parallel", "combine": "multiply", "depth": 3, "inner_norm": True},
    "adapter at one site": {"sites": "feedforward", "activation": "relu"},
    "adapter here and there": {"layers": "0,2"},
    "layernorm": {"method": "layernorm"},
    "layernorm above": {"method": "layernorm", "layers": "1-2"},
    "lora": {"method": "lora"},
    "lora here and there": {"method": "lora", "layers": "0,2", "targets": "query,up,down", "alpha": 3.0},
    "bitfit": {"method": "bitfit"},
    "feature": {"method": "feature"},
}
READS = {
    "mean": {"pooling": "mean"},
    "first token": {"pooling": "first"},
    "pooler": {"pooling": "pooler"},
    "hidden layer": {"pooling": "mean", "hidden": 7},
}
KINDS = [
    {"kind": "classification", "outputs": 2},
    {"kind": "classification", "outputs": 11},
    {"kind": "multilabel", "outputs": 4},
    {"kind": "regression", "outputs": 1, "shift": 3.0, "scale": 2.5},
    {"kind": "regression", "outputs": 1, "shift": -40.0, "scale": 0.1},
]
SIZES = (3, 8, 64)
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 30, 33, 63, 64)


def rows_of(count, seed=0, lengths=LENGTHS, types=2):
    """Give rows of any words, whose lengths are near where the room for them changes."""
    numbers = np.random.default_rng(seed)
    sizes = numbers.choice(lengths, count)
    return [Tokens(numbers.integers(5, 100, n), np.sort(numbers.integers(0, types, n))) for n in sizes]


class Bench:
    """The slots of one encoder, and both ways to run rows through them."""

    def __init__(self, backbone, new_slot, dtype=torch.float32):
        self.backbone, self._new_slot, self._made = backbone, new_slot, itertools.count()
        self.stacks = Stacks(place(backbone, CPU, dtype).tensors, dtype=dtype)
        self.programs = GraphCompiler(CPU)
        self.mixed = GraphRunner(backbone.config, self.stacks, self.programs)

    def put(self, head, **options):
        """Put a new slot in, with numbers that no other has."""
        config = self.backbone.config
        shared = {"depth": config.layers, "shared_layers": config.shared_layers}
        plan = make_plan(Options(**options), head=head, **shared)
        return self.stacks.put(plan, self._new_slot(self.backbone, plan, seed=next(self._made)))

    def eager(self, tokens, slots):
        return outputs(self.backbone.config, self.stacks, tokens, slots)

    def check(self, tokens, slots):
        """Run rows of one family as one batch, and compare with the eager path."""
        with torch.inference_mode():
            found = self.mixed.launch(tokens, slots)()
        self.compare(found, tokens, slots)

    def check_any(self, tokens, slots):
        """Run rows of any slots."""
        self.compare(outputs(self.backbone.config, self.stacks, tokens, slots, mixed=self.mixed), tokens, slots)

    def compare(self, found, tokens, slots):
        assert len(found) == len(tokens)
        for mine, wanted, slot in zip(found, self.eager(tokens, slots), slots, strict=True):
            assert mine.shape == wanted.shape
            assert mine.dtype == np.float32
            scale = 1.0 if slot is None else max(1.0, self.stacks.plan(slot).head.scale)
            np.testing.assert_allclose(mine, wanted, atol=1e-5 * scale, rtol=1e-5)


@pytest.fixture
def bench(bert, new_slot):
    return Bench(bert, new_slot)


def family_of_slots(bench, options, reads):
    """Put slots that differ in all that slots of one family may differ in: size, kind, labels, scale."""
    found = []
    for k, size in enumerate(SIZES if options.get("method", "adapter") == "adapter" else (64,) * 3):
        for kind in KINDS[k % 2 :: 2] + KINDS[2 * k % 3 :: 3]:
            found.append(bench.put(Head(**kind, **reads), **options, size=size))
    assert len({bench.stacks.slot(slot).family for slot in found}) == 1
    return found


# --- one family at a time


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("method", METHODS)
def test_slots_of_any_size_kind_and_number_of_labels_share_a_batch(method, reads, bench):
    slots = family_of_slots(bench, METHODS[method], READS[reads])
    chance = random.Random(f"{method} {reads}")
    for count in (len(slots), 6):
        tokens = rows_of(count, seed=count)
        bench.check(tokens, [chance.choice(slots) for _ in tokens] if count == 6 else slots)


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("method", METHODS)
def test_spans_share_a_batch_and_each_row_has_as_many_outputs_as_tokens(method, hidden, bench):
    slots = [bench.put(Head("span", 2, hidden=hidden), **METHODS[method], size=size) for size in SIZES]
    bench.check(rows_of(32, seed=4), [slots[i % 4 % 3] for i in range(32)])  # by eights
    tokens = rows_of(7, seed=3)
    chosen = [slots[i % 3] for i in range(7)]
    bench.check(tokens, chosen)
    with torch.inference_mode():
        found = bench.mixed.launch(tokens, chosen)()
    assert [out.shape for out in found] == [(len(row), 2) for row in tokens]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["adapter", "layernorm", "feature"])
def test_one_slot_for_all_rows_is_staged_once(method, kind, bench):
    slots = [bench.put(Head(**kind), method=method, size=size) for size in (SIZES if method == "adapter" else (64, 64))]
    for count, slot in itertools.product((1, 5), slots):
        bench.check(rows_of(count, seed=count), [slot] * count)
    assert {places for _, places in bench.mixed.stages} == {1}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_few_slots_share_their_places(method, reads, bench):
    slots = family_of_slots(bench, METHODS[method], READS[reads])[:4]
    for seed, (counts, places) in enumerate(
        [
            ((8, 8), 2),
            ((1, 9), 16),  # three places of eight would be more rows than there are
            ((9, 8, 5), 4),
            ((16, 1, 1, 8), 32),  # 26 rows are filled up to 32, but five places of eight are more
            ((24, 1, 1, 24), 8),
        ]
    ):
        chosen = [slot for slot, count in zip(slots, counts, strict=False) for _ in range(count)]
        random.Random(seed).shuffle(chosen)
        for _ in range(2):
            bench.check(rows_of(len(chosen), seed=seed), chosen)
        assert next(reversed(bench.mixed.stages))[1] == places


def test_a_slot_that_lies_in_a_shared_place_is_not_copied_again(bench, monkeypatch):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(5)]
    copied, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, rows: copied.append(len(rows)) or copy(into, rows))
    tokens = rows_of(32, seed=1)
    bench.check(tokens, [slots[i % 4] for i in range(32)])
    each = sum(copied) // 4
    bench.check(tokens, [slots[i % 4] for i in reversed(range(32))])
    assert sum(copied) == 4 * each
    bench.check(tokens, [slots[1 + i % 4] for i in range(32)])
    assert sum(copied) == 5 * each


def test_rows_of_no_slot_give_their_mean_hidden_state(bench):
    for count in (1, 3, 8):
        tokens = rows_of(count, seed=count)
        bench.check(tokens, [None] * count)
        with torch.inference_mode():
            found = bench.mixed.launch(tokens, [None] * count)()
        assert {out.shape for out in found} == {(bench.backbone.config.hidden,)}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 9, 12, 13, 31])
def test_any_number_of_rows(count, bench):
    slots = [bench.put(Head("classification", labels), size=size) for labels, size in ((2, 3), (5, 8))]
    bench.check(rows_of(count, seed=count), [slots[i % 2] for i in range(count)])


def test_counts_and_lengths_that_are_rounded_up_to_the_same_share_a_program(bench):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(6)]
    chance = random.Random(0)
    made, capture = [], bench.programs.capture
    bench.programs.capture = lambda body: made.append(body) or capture(body)
    for count, length in itertools.product((5, 6, 7, 8), (17, 20, 24)):
        tokens = [*rows_of(count - 1, seed=length, lengths=range(1, 9)), *rows_of(1, lengths=[length])]
        bench.check(tokens, [slots[0], slots[1], *chance.choices(slots, k=count - 2)])
    assert len(made) == 1
    bench.check(rows_of(8, lengths=[25]), [slots[0], slots[1]] * 4)
    assert len(made) == 2


def test_rows_of_every_length_up_to_the_last_position(tmp_path, new_slot):
    """A backbone whose last position is at none of the lengths that rows are filled up to."""
    save_random("bert", tmp_path, max_position_embeddings=300)
    bench = Bench(load(str(tmp_path)), new_slot)
    slots = [bench.put(Head("classification", 3), size=3), bench.put(Head("multilabel", 4), size=8)]
    for length in (65, 80, 81, 129, 160, 161, 257, 299, 300):
        tokens = rows_of(2, seed=length, lengths=[3]) + rows_of(1, seed=length, lengths=[length])
        bench.check(tokens, [slots[0], slots[1], slots[length % 2]])


def test_slots_are_staged_in_the_type_the_pass_computes_in_and_heads_are_not(bert, new_slot):
    """On a GPU it is a lower one; here a higher one, which every CPU has."""
    bench = Bench(bert, new_slot, torch.float64)
    slots = [bench.put(Head(**kind), size=size) for kind, size in zip(KINDS[:3], SIZES, strict=True)]
    bench.check(rows_of(6, seed=1), slots * 2)
    bench.check(rows_of(4, seed=2), slots[1:2] * 4)
    for stage in bench.mixed.stages.values():
        for name, tensor in stage.own.items():
            assert tensor.dtype == (torch.float32 if name.startswith("head.") else torch.float64)


# --- what was asked before must not matter


def test_a_slot_in_the_place_of_another_is_not_answered_with_the_others_numbers(bench):
    slots = [bench.put(Head("classification", 3), size=size) for size in (3, 3, 4, 8)]
    tokens = rows_of(2, seed=1)
    for pair in [*itertools.permutations(slots, 2), *((slot, slot) for slot in slots)]:
        bench.check(tokens, list(pair))


def test_a_narrow_slot_where_a_wide_one_lay_is_widened_with_zeros(bench):
    """The wide one's numbers beyond the narrow one's must go."""
    wide = [bench.put(Head("classification", 11), size=64, depth=2) for _ in range(2)]
    narrow = [bench.put(Head("classification", 2), size=3, depth=2) for _ in range(2)]
    tokens = rows_of(3, seed=2)
    bench.check(tokens, [wide[0], wide[1], wide[0]])
    bench.check(tokens, [narrow[0], narrow[1], wide[0]])
    bench.check(tokens, [wide[0], narrow[1], narrow[0]])
    bench.check(tokens, [narrow[0], narrow[1], narrow[0]])


def test_a_slot_put_where_a_removed_one_lay_is_answered_with_its_own_numbers(bench):
    head, tokens = Head("classification", 3), rows_of(2, seed=1)
    kept, first = (bench.put(head, size=3) for _ in range(2))
    for _ in range(3):
        bench.check(tokens, [first, kept])
        bench.check(tokens, [first, first])
        (block, row), *_ = bench.stacks.slot(first).rows
        bench.stacks.remove(first)
        first = bench.put(head, size=3)
        assert bench.stacks.slot(first).rows[0] == (block, row)


def test_blocks_that_grow_or_go_away_change_no_answer(bench):
    head, tokens = Head("classification", 3), rows_of(3, seed=1)
    slots = [bench.put(head, size=3) for _ in range(2)]
    for _ in range(7):
        bench.check(tokens, [slots[0], slots[-1], slots[1]])
        slots += [bench.put(head, size=3) for _ in range(len(slots))]
    assert len(bench.stacks.blocks) > 4  # more than one of each part
    for slot in slots[:100]:
        bench.stacks.remove(slot)
    bench.stacks.trim()
    bench.check(tokens, [slots[100], slots[-1], slots[101]])


def test_families_of_one_layout_share_a_stage_and_not_a_program(bench):
    slots = [
        bench.put(Head("classification", 3), size=3, activation=activation)
        for activation in ("relu", "tanh", "relu", "tanh")
    ]
    tokens = rows_of(2, seed=4)
    for _ in range(2):
        bench.check(tokens, slots[::2])
        bench.check(tokens, slots[1::2])
    assert len(bench.mixed.stages) == 1


OFFERED = [
    *((kind, {"size": size}) for kind, size in itertools.product(KINDS[:4], SIZES)),
    ({"kind": "span", "outputs": 2}, {"size": 3}),
    ({"kind": "span", "outputs": 2}, {"size": 64}),
    (KINDS[0], {"size": 8, "depth": 2, "inner_norm": True}),
    (KINDS[2], {"size": 3, "placement": "parallel", "combine": "multiply"}),
    (KINDS[0], {"method": "layernorm"}),
    (KINDS[3], {"method": "feature"}),
    (KINDS[0], {"method": "lora", "rank": 3, "alpha": 6.0}),
    (KINDS[1], {"method": "lora", "rank": 9, "alpha": 18.0}),
    (KINDS[2], {"method": "bitfit"}),
    (KINDS[1], {"method": "full"}),
]
CALL = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20)), min_size=1, max_size=7)
STEPS = st.one_of(
    st.tuples(st.just("call"), CALL),
    st.tuples(st.just("put"), st.sampled_from(OFFERED)),
    st.tuples(st.just("remove"), st.integers(0, 99)),
    st.tuples(st.just("trim"), st.none()),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    first=st.lists(st.sampled_from(OFFERED), max_size=4),
    steps=st.lists(STEPS, min_size=2, max_size=8),
    together=st.sampled_from([1, 2, 4]),
)
def test_any_sequence_of_calls_puts_and_removals(bert, new_slot, first, steps, together):
    with mock.patch.object(graph_runner, "ROWS_PER_PLACE", together):
        run_steps(Bench(bert, new_slot), first, steps)


def run_steps(bench, first, steps):
    slots = [None, *(bench.put(Head(**kind), **options) for kind, options in first)]
    for step, what in steps:
        if step == "put":
            slots.append(bench.put(Head(**what[0]), **what[1]))
        elif step == "remove" and len(slots) > 1:
            bench.stacks.remove(slots.pop(1 + what % (len(slots) - 1)))
        elif step == "trim":
            bench.stacks.trim()
        elif step == "call":
            tokens = [rows_of(1, seed=which, lengths=[length])[0] for which, length in what]
            bench.check_any(tokens, [slots[which % len(slots)] for which, _ in what])


def test_what_was_given_stays_as_it_is_when_the_next_call_comes(bench):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(2)]
    tokens = rows_of(2, seed=1)
    found = bench.mixed.launch(tokens, slots)()
    kept = [out.copy() for out in found]
    bench.mixed.launch(rows_of(2, seed=1), slots[::-1])()
    assert all(np.array_equal(mine, wanted) for mine, wanted in zip(found, kept, strict=True))


def test_more_rows_than_one_batch_holds(bench, monkeypatch):
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 100)
    launched, launch = [], bench.mixed.launch
    monkeypatch.setattr(bench.mixed, "launch", lambda rows, *rest: launched.append(len(rows)) or launch(rows, *rest))
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(3)]
    bench.check_any(rows_of(20, seed=1), [slots[i % 3] for i in range(20)])
    assert len(launched) > 2
    assert sum(launched) == 20


# --- all together


def crowd(bench):
    """Put slots of many families in, some that change most of the encoder among them."""
    backbone = bench.backbone
    pooler = "pooler" if backbone.has_pooler else "first"
    found = [
        *(bench.put(Head(**kind), size=size) for kind, size in zip(KINDS, (3, 8, 64, 3, 8), strict=True)),
        bench.put(Head("classification", 3, pooler), size=8, train_norms=False),
        bench.put(Head("classification", 9, pooler), size=3, train_norms=False),
        bench.put(Head("span", 2), size=5, sites="attention"),
        bench.put(Head("span", 2, hidden=4), method="layernorm"),
        bench.put(Head("multilabel", 4, "first"), method="layernorm"),
        bench.put(Head("classification", 4), method="lora", rank=3, alpha=6.0),
        bench.put(Head("classification", 2), method="lora", rank=8, alpha=16.0),
        bench.put(Head("regression", 1), method="lora", rank=8, targets="key,output,up,down"),
        bench.put(Head("multilabel", 4), method="bitfit"),
        bench.put(Head("classification", 3), method="bitfit"),
        bench.put(Head("regression", 1, "first", shift=1.0, scale=3.0), method="layernorm"),
        bench.put(Head("classification", 3, pooler, hidden=6), method="feature"),
        bench.put(Head("classification", 2, pooler), method="full"),
        bench.put(Head("regression", 1, "mean", scale=2.0), method="full"),
    ]
    if not backbone.config.shared_layers:
        found.append(bench.put(Head("classification", 2, pooler), method="top"))
    return [*found, None]


def test_once_it_is_warm_no_kind_of_batch_is_new(bench):
    slots = family_of_slots(bench, METHODS["adapter"], READS["mean"])[:2]
    slots += [bench.put(Head("span", 2), **METHODS["lora"]), bench.put(Head("classification", 2), method="full")]
    with torch.inference_mode():
        bench.mixed.warm()
    kinds = {(shape.family, shape.rows // shape.places) for shape in shapes_of(bench.mixed)}
    families = {bench.stacks.slot(slot).family for slot in slots[:3]}
    assert kinds == {(family, share) for family in families for share in (16, 8, 1)}  # all rows, eight, one to a place
    bench.check_any(rows_of(40, seed=3), [slots[i % 4] for i in range(40)])


def shapes_of(graph_runner):
    return {shape for stage in graph_runner.stages.values() for shape in stage.programs}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_batches_that_are_launched_before_the_last_was_waited_for_keep_apart(order, bench):
    slots = family_of_slots(bench, METHODS["adapter"], READS["mean"])
    batches = [(rows_of(8, seed=seed), random.Random(seed).choices(slots, k=8)) for seed in range(3)]
    for _ in range(2):  # then with what the first ones have left
        with torch.inference_mode():
            waits = [bench.mixed.launch(*batch) for batch in batches]
        found = {k: waits[k]() for k in order}
        for k, batch in enumerate(batches):
            bench.compare(found[k], *batch)
    programs = [program for stage in bench.mixed.stages.values() for program in stage.programs.values()]
    assert sum(len(program.free) for program in programs) == 3  # and no more


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_slots_of_every_family(family, tiny, new_slot):
    bench = Bench(tiny(family), new_slot)
    slots = crowd(bench)
    for seed in range(2):
        mine = slots * 2
        random.Random(seed).shuffle(mine)
        bench.check_any(rows_of(len(mine), seed=seed), mine)


def test_slots_that_change_most_of_the_encoder_go_the_eager_way(bench, monkeypatch):
    slots, seen = crowd(bench), []
    original = bench.mixed.launch
    monkeypatch.setattr(bench.mixed, "launch", lambda tokens, mine: seen.append(mine) or original(tokens, mine))
    bench.check_any(rows_of(len(slots)), slots)
    ran = {slot for mine in seen for slot in mine}
    assert ran == {slot for slot in slots if slot is None or not bench.stacks.plan(slot).alone}
    assert all(len({bench.stacks.slot(slot).family for slot in mine if slot is not None}) <= 1 for mine in seen)
    assert len(seen) == 10


def test_an_engine_with_graphs_predicts_as_one_without(bert, new_slot, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    engine = Engine(bert, device="cpu", precision="fp32")
    names = []
    for k, (kind, options) in enumerate(OFFERED):
        if kind["kind"] != "span":
            plan = make_plan(Options(**options), depth=3, head=Head(**kind))
            labels = tuple("abcdefghijk"[: kind["outputs"]]) if kind["kind"] != "regression" else ()
            metric = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "spearman"}[kind["kind"]]
            task = Task(f"t{k}", kind["kind"], ("text",), "label", labels, metric)
            tensors = {name: t.numpy() for name, t in new_slot(bert, plan, seed=k).items()}
            engine.put(task.name, task, plan, tensors, 64)
            names.append(task.name)
    tokens = rows_of(40, seed=1)
    asked = random.Random(1).choices([*names, None], k=40)
    requests = [(name, Examples(["the cat sat", "why was it a big dog"])) for name in names]
    plain, said = engine.outputs(tokens, asked), engine.predict(requests)
    engine.run_programs()
    for _ in range(2):
        for mine, wanted in zip(engine.outputs(tokens, asked), plain, strict=True):
            np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)
    for mine, wanted in zip(engine.predict(requests), said, strict=True):
        assert [p.label for p in mine] == [p.label for p in wanted]
        assert [p.labels for p in mine] == [p.labels for p in wanted]
        assert [p.value for p in mine] == pytest.approx([p.value for p in wanted], abs=1e-4)
    assert any(stage.programs for stage in engine.graph_runner.stages.values())


def test_on_the_cpu_an_engine_never_runs_graphs(bert):
    engine = Engine(bert, device="cpu", precision="fp32")
    engine.run_programs()
    for _ in range(40):
        engine.outputs(rows_of(1, lengths=[3]), [None])
    assert engine.graph_runner is None


def test_a_copy_that_fails_for_lack_of_memory_leaves_nothing_half_staged(bench, monkeypatch):
    slots = family_of_slots(bench, METHODS["adapter"], READS[next(iter(READS))])
    tokens = rows_of(len(slots), seed=1)
    whole = torch.index_select

    def fail(*given, **more):
        monkeypatch.setattr(torch, "index_select", whole)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "index_select", fail)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        bench.mixed.launch(tokens, slots)()
    bench.check(tokens, slots)
