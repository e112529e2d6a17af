"""Promise: on a GPU, batches of any tasks as captured graphs give what eager ones give."""

from __future__ import annotations

import itertools
import random
import warnings

import numpy as np
import pytest
import torch

from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.kernels.launch import Compilation, CompilerError
from adapterbank.errors import SlowerWarning
from adapterbank.inference import engine as engines
from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    # Compilers warn about other things (TF32, for example); only a fall back to slower code is an error here.
    pytest.mark.filterwarnings("ignore", "error::adapterbank.errors.SlowerWarning"),
]

KINDS = [
    Head("classification", 2),
    Head("multilabel", 9),
    Head("regression", 1, shift=3.0, scale=2.5),
    Head("span", 2),
    Head("tagging", 5),
]
METRICS = {
    **{"classification": "accuracy", "multilabel": "micro_f1", "regression": "spearman", "span": "span_f1"},
    "tagging": "tag_f1",
}
FORMS = [
    *({"size": size} for size in (3, 64)),
    {"size": 8, "depth": 2, "inner_norm": True, "placement": "parallel", "combine": "multiply"},
    {"method": "layernorm"},
    {"method": "feature"},
    {"method": "lora", "rank": 3, "alpha": 6.0},
    {"method": "lora", "targets": "key,output,up,down"},
    {"method": "ia3"},
    {"method": "bitfit"},
    {"method": "full"},
]
FEW_FORMS = [FORMS[1], FORMS[5]]
"""Adapter and LoRA. Every form is tested in fp32 with the attention kernel; compiling them all takes minutes."""


def tasks_on(backbone, new_slot, forms=FORMS):
    """Yield a random task of every kind and form: name, task, plan and tensors of each."""
    for seed, (head, form) in enumerate(itertools.product(KINDS, FORMS)):
        if form not in forms:
            continue
        plan = make_plan(Options(**form), depth=backbone.config.layers, head=head)
        labels = tuple("abcdefghi"[: head.outputs]) if head.kind in ("classification", "multilabel", "tagging") else ()
        columns = ("text", "other") if head.kind == "span" else ("text",)
        task = Task(f"t{seed}", head.kind, columns, "label", labels, METRICS[head.kind])
        tensors = {name: t.numpy() for name, t in new_slot(backbone, plan, seed=seed, sigma=0.1).items()}
        yield task.name, task, plan, tensors


def engine_on(backbone, tasks, **options):
    """Return an engine with these tasks."""
    engine = Engine(backbone, device="cuda", **options)
    for drawn in tasks:
        engine.put(*drawn, 64)
    return engine


def rows_of(count, seed):
    numbers = np.random.default_rng(seed)
    sizes = numbers.choice([1, 3, 8, 9, 17, 40, 64], count)
    return [Tokens(numbers.integers(5, 100, n), np.sort(numbers.integers(0, 2, n))) for n in sizes]


def assert_same_outputs(engine, plain, seed, tolerance):
    """Compare two engines on rows of all tasks, of a few, of a few with many rows each, and of one."""
    chance = random.Random(seed)
    names = [*plain.residents, None]
    asked_of = (
        (37, names),
        (13, chance.sample(names, 3)),
        (120, chance.sample(names, 3)),
        (5, chance.sample(names, 1)),
    )
    for count, choice in asked_of:
        tokens, asked = rows_of(count, seed), chance.choices(choice, k=count)
        for mine, wanted, name in zip(engine.outputs(tokens, asked), plain.outputs(tokens, asked), asked, strict=True):
            scale = plain.residents[name].plan.head.scale if name else 1.0
            np.testing.assert_allclose(mine, wanted, atol=tolerance * max(1.0, scale), rtol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("precision", "tolerance", "forms"), [("fp32", 1e-4, FORMS), ("bf16", 5e-2, FEW_FORMS)], ids=["fp32", "bf16"]
)
def test_captured_batches_give_what_eager_ones_give(precision, tolerance, forms, backbones, new_slot, replays):
    tasks = [*tasks_on(backbones["kernel"], new_slot, forms)]
    engine = engine_on(backbones["kernel"], tasks, precision=precision)
    plain = engine_on(backbones["kernel"], tasks, precision=precision, programs=False)
    engine.use_graphs()
    for seed in range(3):
        assert_same_outputs(engine, plain, seed, tolerance)
    assert (engine.ahead > 0, plain.ahead) == (True, 0)
    assert_same_outputs(engine, plain, 0, tolerance)
    captured, before = set(replays), len(replays)
    assert captured
    assert_same_outputs(engine, plain, 0, tolerance)
    assert len(replays) > before
    assert set(replays) == captured  # the same rows again replay the same graphs


def test_captured_batches_within_a_memory_budget_use_the_slots_loaded_last(backbones, new_slot, replays):
    tasks = [*tasks_on(backbones["composed"], new_slot, FEW_FORMS)]
    engine = engine_on(backbones["composed"], tasks, precision="fp32", budget=200_000)
    plain = engine_on(backbones["composed"], tasks, precision="fp32", programs=False)
    engine.use_graphs()
    for seed in range(3):
        assert_same_outputs(engine, plain, seed, 1e-4)
    assert replays
    assert engine.slots.evictions > len(plain.residents)


def test_launched_batches_are_computed_with_the_tasks_of_their_launch(backbones, new_slot, replays):
    few = {drawn[0]: drawn for drawn in itertools.islice(tasks_on(backbones["kernel"], new_slot), 2)}
    engine = engine_on(backbones["kernel"], few.values(), precision="fp32")
    plain = engine_on(backbones["kernel"], few.values(), precision="fp32", programs=False)
    engine.use_graphs()
    engine.warm()
    assert replays
    batches = [(rows_of(16, seed), random.Random(seed).choices([*few], k=16)) for seed in range(12)]
    wanted = [plain.outputs(*batch) for batch in batches]
    for _ in range(2):
        waits = [engine.launch(tokens, [engine.slots.find(name) for name in asked]) for tokens, asked in batches]
        for name, task, plan, tensors in few.values():
            engine.put(name, task, plan, {key: np.zeros_like(array) for key, array in tensors.items()}, 64)
        found = [wait() for wait in reversed(waits)][::-1]
        for mine, theirs in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=1e-4)
        for drawn in few.values():
            engine.put(*drawn, 64)


def test_an_engine_uses_graphs_from_the_call_on_that_is_worth_it(bert, monkeypatch, replays):
    monkeypatch.setattr(engines, "CALLS_WORTH_A_GRAPH", 3)
    engine, plain = (Engine(bert, device="cuda", precision="fp32", programs=programs) for programs in (True, False))
    for call in range(6):
        tokens = rows_of(4, seed=0)
        for mine, wanted in zip(*(each.outputs(tokens, [None] * 4) for each in (engine, plain)), strict=True):
            np.testing.assert_allclose(mine, wanted, atol=1e-4, rtol=1e-4)
        assert bool(replays) == (call >= 4)  # the first of its shape runs its kernels one by one


def test_an_engine_without_a_compiler_predicts_and_warns_once(backbones, new_slot, monkeypatch, replays):
    def fail(compilation):
        raise CompilerError("no compiler here")

    monkeypatch.setattr(Compilation, "wait", fail)
    tasks = [*tasks_on(backbones["kernel"], new_slot)]
    engine = engine_on(backbones["kernel"], tasks, precision="fp32")
    plain = engine_on(backbones["kernel"], tasks, precision="fp32", programs=False)
    engine.use_graphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_outputs(engine, plain, 0, 1e-4)
    assert sum(issubclass(one.category, SlowerWarning) for one in caught) == 1
    assert not replays
