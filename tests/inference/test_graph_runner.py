"""`inference.graph_runner` on the CPU: the outputs of the eager path, whatever was computed before."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapterbank.encoder.backbone import load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.kernels.launch import Compilation, CompilerError
from adapterbank.encoder.placed import place
from adapterbank.errors import SlowerWarning
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
from plain_kernels import PLAIN

CPU = torch.device("cpu")

METHODS = {
    "adapter": {"method": "adapter"},
    "adapter without norms": {"train_norms": False, "activation": "silu"},
    "adapter with all variants": {"placement": "parallel", "combine": "multiply", "depth": 3, "inner_norm": True},
    "adapter at one site": {"sites": "feedforward", "activation": "relu"},
    "adapter in some layers": {"layers": "0,2"},
    "layernorm": {"method": "layernorm"},
    "layernorm in upper layers": {"method": "layernorm", "layers": "1-2"},
    "lora": {"method": "lora"},
    "lora in some layers": {"method": "lora", "layers": "0,2", "targets": "query,up,down", "alpha": 3.0},
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
    """Return random rows whose lengths are near the limits of the padded lengths."""
    numbers = np.random.default_rng(seed)
    sizes = numbers.choice(lengths, count)
    return [Tokens(numbers.integers(5, 100, n), np.sort(numbers.integers(0, types, n))) for n in sizes]


class Bench:
    """The slots of one encoder, and both ways to run rows through them: eager and as graphs."""

    def __init__(self, backbone, new_slot, dtype=torch.float32):
        self.backbone, self._new_slot, self._made = backbone, new_slot, itertools.count()
        self.stacks = Stacks(place(backbone, CPU, dtype).tensors, dtype=dtype)
        self.compiler = GraphCompiler(CPU)
        self.runner = GraphRunner(backbone.config, self.stacks, self.compiler, PLAIN)

    def put(self, head, on=(), **options):
        """Add a slot with numbers of its own, which stands on the slot `on`."""
        config = self.backbone.config
        shared = {"depth": config.layers, "shared_layers": config.shared_layers}
        plan = make_plan(Options(**options), head=head, **shared)
        return self.stacks.put(plan, self._new_slot(self.backbone, plan, seed=next(self._made)), *on)

    def eager(self, tokens, slots):
        return outputs(self.backbone.config, self.stacks, tokens, slots)

    def check(self, tokens, slots):
        """Run rows of one family as one batch, and compare with the eager path."""
        with torch.inference_mode():
            found = self.runner.launch(tokens, slots)()
        self.compare(found, tokens, slots)

    def check_any(self, tokens, slots):
        """Run rows of any slots."""
        self.compare(outputs(self.backbone.config, self.stacks, tokens, slots, graph_runner=self.runner), tokens, slots)

    def compare(self, found, tokens, slots):
        assert len(found) == len(tokens)
        for output, expected, slot in zip(found, self.eager(tokens, slots), slots, strict=True):
            assert output.shape == expected.shape
            assert output.dtype == np.float32
            scale = 1.0 if slot is None else max(1.0, self.stacks.plan(slot).head.scale)
            np.testing.assert_allclose(output, expected, atol=1e-5 * scale, rtol=1e-5)


@pytest.fixture
def bench(bert, new_slot):
    return Bench(bert, new_slot)


def family_of_slots(bench, options, reads):
    """Add slots that differ in all that slots of one family may differ in: size, kind, labels, scale."""
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
def test_spans_and_tags_share_a_batch_and_each_row_has_its_outputs_per_token(method, hidden, bench):
    heads = [Head("span", 2, hidden=hidden), Head("tagging", 5, hidden=hidden), Head("span", 2, hidden=hidden)]
    slots = [bench.put(head, **METHODS[method], size=size) for head, size in zip(heads, SIZES, strict=True)]
    bench.check(rows_of(32, seed=4), [slots[i % 4 % 3] for i in range(32)])
    tokens = rows_of(7, seed=3)
    chosen = [slots[i % 3] for i in range(7)]
    bench.check(tokens, chosen)
    with torch.inference_mode():
        found = bench.runner.launch(tokens, chosen)()
    assert [out.shape for out in found] == [(len(row), (2, 5, 2)[i % 3]) for i, row in enumerate(tokens)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["adapter", "layernorm", "feature"])
def test_a_batch_can_have_one_slot(method, kind, bench):
    slots = [bench.put(Head(**kind), method=method, size=size) for size in (SIZES if method == "adapter" else (64, 64))]
    for count, slot in itertools.product((1, 5), slots):
        bench.check(rows_of(count, seed=count), [slot] * count)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_rows_may_have_one_slot(method, reads, bench):
    slots = family_of_slots(bench, METHODS[method], READS[reads])[:4]
    for seed, counts in enumerate([(8, 8), (1, 9), (9, 8, 5), (16, 1, 1, 8)]):
        chosen = [slot for slot, count in zip(slots, counts, strict=False) for _ in range(count)]
        random.Random(seed).shuffle(chosen)
        bench.check(rows_of(len(chosen), seed=seed), chosen)


def test_slots_are_read_where_they_are(bench):
    """What a slot has now counts, not what it had at an earlier call: nothing of it is copied."""
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(3)]
    tokens = rows_of(6, seed=1)
    bench.check(tokens, slots * 2)
    for slot in slots:
        bench.stacks.write(slot, {"head.bias": torch.full((3,), float(slot))})
        bench.check(tokens, slots * 2)


def test_rows_without_a_slot_return_their_mean_hidden_state(bench):
    for count in (1, 3, 8):
        tokens = rows_of(count, seed=count)
        bench.check(tokens, [None] * count)
        with torch.inference_mode():
            found = bench.runner.launch(tokens, [None] * count)()
        assert {out.shape for out in found} == {(bench.backbone.config.hidden,)}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 9, 12, 13, 31])
def test_a_batch_can_have_any_number_of_rows(count, bench):
    slots = [bench.put(Head("classification", labels), size=size) for labels, size in ((2, 3), (5, 8))]
    bench.check(rows_of(count, seed=count), [slots[i % 2] for i in range(count)])


@pytest.fixture
def captured(bench, monkeypatch):
    """Record what is captured."""
    bodies, capture = [], bench.compiler.capture
    monkeypatch.setattr(bench.compiler, "capture", lambda body, **how: bodies.append(body) or capture(body, **how))
    return bodies


def test_batches_with_the_same_rounded_rows_and_length_share_a_graph(bench, captured):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(6)]
    chance = random.Random(0)
    for count, length in itertools.product((5, 6, 7, 8), (17, 20, 24)):
        tokens = [*rows_of(count - 1, seed=length, lengths=range(1, 9)), *rows_of(1, lengths=[length])]
        bench.check(tokens, chance.choices(slots, k=count))
    assert len(captured) == 1
    assert len(bench.runner.graphs) == 1
    bench.check(rows_of(8, lengths=[25]), [slots[0], slots[1]] * 4)
    assert len(bench.runner.graphs) == 2


def test_a_shape_is_captured_once_it_recurs(bench, captured):
    slot, tokens = bench.put(Head("classification", 3), size=3), rows_of(3, seed=1)
    for count in range(1, 3 * graph_runner.USES_WORTH_A_GRAPH):
        bench.check(tokens, [slot] * 3)
        assert len(captured) == (count > graph_runner.USES_WORTH_A_GRAPH)


def test_without_a_compiler_rows_are_computed_without_the_kernels_and_that_is_said_once(bench, monkeypatch):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(2)]

    def fail(compilation):
        raise CompilerError("OSError: no compiler here")

    monkeypatch.setattr(Compilation, "wait", fail)
    config, stacks, tokens = bench.backbone.config, bench.stacks, rows_of(4, seed=1)
    expected = outputs(config, stacks, tokens, slots * 2)
    with pytest.warns(SlowerWarning, match="no compiler here"):
        found = [outputs(config, stacks, tokens, slots * 2, graph_runner=bench.runner)]
    found.append(outputs(config, stacks, tokens, slots * 2, graph_runner=bench.runner))  # a warning is an error
    for mine, wanted in zip(itertools.chain(*found), expected * 2, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


def test_rows_can_have_any_length_up_to_the_last_position(tmp_path, new_slot):
    """The last position of this backbone is not one of the usual padded lengths."""
    save_random("bert", tmp_path, max_position_embeddings=300)
    bench = Bench(load(str(tmp_path)), new_slot)
    slots = [bench.put(Head("classification", 3), size=3), bench.put(Head("multilabel", 4), size=8)]
    for length in (65, 80, 81, 129, 160, 161, 257, 299, 300):
        tokens = rows_of(2, seed=length, lengths=[3]) + rows_of(1, seed=length, lengths=[length])
        bench.check(tokens, [slots[0], slots[1], slots[length % 2]])


def test_slots_have_the_dtype_of_the_pass_and_heads_float32(bert, new_slot):
    """On a GPU the dtype is lower; here it is a higher one, which every CPU supports."""
    bench = Bench(bert, new_slot, torch.float64)
    slots = [bench.put(Head(**kind), size=size) for kind, size in zip(KINDS[:3], SIZES, strict=True)]
    bench.check(rows_of(6, seed=1), slots * 2)
    bench.check(rows_of(4, seed=2), slots[1:2] * 4)


# --- independence from earlier calls


def test_a_slot_that_follows_another_uses_its_own_numbers(bench):
    slots = [bench.put(Head("classification", 3), size=size) for size in (3, 3, 4, 8)]
    tokens = rows_of(2, seed=1)
    for pair in [*itertools.permutations(slots, 2), *((slot, slot) for slot in slots)]:
        bench.check(tokens, list(pair))


def test_narrow_and_wide_slots_follow_one_another(bench):
    wide = [bench.put(Head("classification", 11), size=64, depth=2) for _ in range(2)]
    narrow = [bench.put(Head("classification", 2), size=3, depth=2) for _ in range(2)]
    tokens = rows_of(3, seed=2)
    bench.check(tokens, [wide[0], wide[1], wide[0]])
    bench.check(tokens, [narrow[0], narrow[1], wide[0]])
    bench.check(tokens, [wide[0], narrow[1], narrow[0]])
    bench.check(tokens, [narrow[0], narrow[1], narrow[0]])


@pytest.mark.parametrize(("size", "depth"), [(300, 1), (200, 2)])
def test_slots_that_are_too_wide_for_the_kernels_run_without_them(bench, size, depth):
    head = Head("classification", 3)
    slots = [bench.put(head, size=size, depth=depth), bench.put(head, size=100, depth=depth)]
    assert [bench.runner.covers(slot) for slot in slots] == [False, True]
    bench.check_any(rows_of(4, seed=3), slots * 2)


def test_a_slot_in_the_row_of_a_removed_one_uses_its_own_numbers(bench):
    head, tokens = Head("classification", 3), rows_of(2, seed=1)
    kept, first = (bench.put(head, size=3) for _ in range(2))
    for _ in range(3):
        bench.check(tokens, [first, kept])
        bench.check(tokens, [first, first])
        (block, row), *_ = bench.stacks.slot(first).rows
        bench.stacks.remove(first)
        first = bench.put(head, size=3)
        assert bench.stacks.slot(first).rows[0] == (block, row)


def test_growing_and_freed_blocks_change_no_outputs(bench):
    head, tokens = Head("classification", 3), rows_of(3, seed=1)
    slots = [bench.put(head, size=3) for _ in range(2)]
    for _ in range(7):
        bench.check(tokens, [slots[0], slots[-1], slots[1]])
        slots += [bench.put(head, size=3) for _ in range(len(slots))]
    assert len(bench.stacks.blocks) > 4  # more than one for each part
    for slot in slots[:100]:
        bench.stacks.remove(slot)
    bench.stacks.trim()
    bench.check(tokens, [slots[100], slots[-1], slots[101]])


def test_families_with_one_layout_share_no_graph(bench):
    slots = [
        bench.put(Head("classification", 3), size=3, activation=activation)
        for activation in ("relu", "tanh", "relu", "tanh")
    ]
    tokens = rows_of(2, seed=4)
    for _ in range(2):
        bench.check(tokens, slots[::2])
        bench.check(tokens, slots[1::2])
    assert len(bench.runner.graphs) == 2


OFFERED = [
    *((kind, {"size": size}) for kind, size in itertools.product(KINDS[:4], SIZES)),
    ({"kind": "span", "outputs": 2}, {"size": 3}),
    ({"kind": "span", "outputs": 2}, {"size": 64}),
    ({"kind": "tagging", "outputs": 5}, {"size": 64}),
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
)
def test_outputs_are_right_after_any_sequence_of_calls_puts_and_removals(bert, new_slot, first, steps):
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


def test_the_next_call_does_not_change_earlier_outputs(bench):
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(2)]
    tokens = rows_of(2, seed=1)
    found = bench.runner.launch(tokens, slots)()
    kept = [out.copy() for out in found]
    bench.runner.launch(rows_of(2, seed=1), slots[::-1])()
    assert all(np.array_equal(output, copy) for output, copy in zip(found, kept, strict=True))


def test_more_rows_than_fit_into_one_batch_are_split(bench, monkeypatch):
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 100)
    launched, launch = [], bench.runner.launch
    monkeypatch.setattr(bench.runner, "launch", lambda rows, *rest: launched.append(len(rows)) or launch(rows, *rest))
    slots = [bench.put(Head("classification", 3), size=3) for _ in range(3)]
    bench.check_any(rows_of(20, seed=1), [slots[i % 3] for i in range(20)])
    assert len(launched) > 2
    assert sum(launched) == 20


# --- slots of many families


def many_slots(bench):
    """Add slots of many families, including some that change whole layers."""
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


def test_warm_captures_every_form_of_batch(bench):
    slots = family_of_slots(bench, METHODS["adapter"], READS["mean"])[:2]
    slots += [bench.put(Head("span", 2), **METHODS["lora"]), bench.put(Head("classification", 2), method="full")]
    with torch.inference_mode():
        bench.runner.warm()
    families = {bench.stacks.slot(slot).family for slot in slots[:3]}
    assert {shape.family for shape in bench.runner.graphs} == {None, *families}
    assert all(graph.run for graph in bench.runner.graphs.values())
    bench.check_any(rows_of(40, seed=3), [slots[i % 4] for i in range(40)])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_batches_in_flight_do_not_affect_each_other(order, bench):
    slots = family_of_slots(bench, METHODS["adapter"], READS["mean"])
    batches = [(rows_of(8, seed=seed), random.Random(seed).choices(slots, k=8)) for seed in range(3)]
    for _ in range(2):  # the second time with reused host buffers
        with torch.inference_mode():
            waits = [bench.runner.launch(*batch) for batch in batches]
        found = {k: waits[k]() for k in order}
        for k, batch in enumerate(batches):
            bench.compare(found[k], *batch)
    assert sum(len(graph.idle) for graph in bench.runner.graphs.values()) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_family_runs_rows_of_any_slots(family, tiny, new_slot):
    bench = Bench(tiny(family), new_slot)
    slots = many_slots(bench)
    for seed in range(2):
        chosen = slots * 2
        random.Random(seed).shuffle(chosen)
        bench.check_any(rows_of(len(chosen), seed=seed), chosen)


def test_slots_that_change_whole_layers_run_without_graphs(bench, monkeypatch):
    slots, seen = many_slots(bench), []
    original = bench.runner.launch
    monkeypatch.setattr(bench.runner, "launch", lambda tokens, chosen: seen.append(chosen) or original(tokens, chosen))
    bench.check_any(rows_of(len(slots)), slots)
    ran = {slot for chosen in seen for slot in chosen}
    assert ran == {slot for slot in slots if slot is None or not bench.stacks.plan(slot).alone}
    assert all(len({bench.stacks.slot(slot).family for slot in chosen if slot is not None}) <= 1 for chosen in seen)
    assert len(seen) == 10


def test_an_engine_with_graphs_predicts_as_one_without(bert, new_slot, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_runner, "find_kernels", lambda device: PLAIN)
    engine = Engine(bert, device="cpu", precision="fp32")
    names = []
    for k, (kind, options) in enumerate(OFFERED):
        if kind["kind"] not in ("span", "tagging"):
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
    plain, predictions = engine.outputs(tokens, asked), engine.predict(requests)
    engine.use_graphs()
    for _ in range(2):
        for output, expected in zip(engine.outputs(tokens, asked), plain, strict=True):
            np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-5)
    for found, expected in zip(engine.predict(requests), predictions, strict=True):
        assert [p.label for p in found] == [p.label for p in expected]
        assert [p.labels for p in found] == [p.labels for p in expected]
        assert [p.value for p in found] == pytest.approx([p.value for p in expected], abs=1e-4)
    assert engine.graph_runner.graphs


def test_on_the_cpu_an_engine_never_runs_graphs(bert):
    engine = Engine(bert, device="cpu", precision="fp32")
    engine.use_graphs()
    for _ in range(40):
        engine.outputs(rows_of(1, lengths=[3]), [None])
    assert engine.graph_runner is None


def test_a_launch_that_runs_out_of_memory_leaves_later_ones_right(bench, monkeypatch):
    slots = family_of_slots(bench, METHODS["adapter"], READS[next(iter(READS))])
    tokens, body = rows_of(len(slots), seed=1), bench.runner._body

    def fail(*arguments):
        monkeypatch.setattr(bench.runner, "_body", body)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(bench.runner, "_body", fail)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        bench.runner.launch(tokens, slots)()
    bench.check(tokens, slots)


BELOW = [
    {"size": 16},
    {"method": "lora", "rank": 4},
    {"method": "ia3"},
    {"method": "bitfit"},
    {"size": 3, "layers": "1"},
]
ABOVE = [{"size": 4}, {"size": 8, "train_norms": False}, {"method": "lora", "rank": 2}, {"method": "feature"}]


@pytest.mark.parametrize("below", BELOW, ids=str)
@pytest.mark.parametrize("family", ["bert", "albert"])
def test_rows_of_stacked_slots_run_in_the_same_graphs_as_others(tiny, new_slot, family, below):
    if family == "albert" and (below.get("method") == "bitfit" or "layers" in below):
        pytest.skip("its layers share their weights")
    bench = Bench(tiny(family), new_slot)
    head = Head("classification", 3)
    base = bench.put(head, **below)
    slots = [base, None]
    for options in ABOVE:
        slots += [bench.put(head, on=(base,), **options), bench.put(Head("regression", 1), on=(base,), **options)]
        slots.append(bench.put(head, **options))
    top = bench.put(head, on=(slots[2],), size=2)
    slots.append(top)
    assert all(bench.runner.covers(slot) for slot in slots)
    tokens = rows_of(3 * len(slots), seed=4)
    bench.check_any(tokens, slots * 3)
    bench.check(tokens[:6], [top] * 6)


def test_stacked_slots_of_one_form_share_a_graph_whatever_they_stand_on(bench):
    bases = [bench.put(Head("classification", 2), size=size) for size in (3, 16)]
    slots = [bench.put(Head("classification", k), on=(base,), size=4) for base in bases for k in (2, 5)]
    assert len({bench.stacks.slot(slot).family for slot in slots}) == 1
    assert len({bench.stacks.slot(slot).family for slot in (*slots, *bases)}) == 2
    bench.check(rows_of(12, seed=5), slots * 3)
