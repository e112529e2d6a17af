"""`slots.routing`: only a row's own slot affects it, whatever else is in the batch and in any order."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from adapterbank.encoder.batch import pack
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import forward
from adapterbank.inference.runner import outputs, segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from families import FAMILIES, TEXTS


def various_plans(backbone):
    """Return plans that differ in everything that a plan can differ in."""
    config = backbone.config
    pooler = "pooler" if backbone.has_pooler else "first"
    wanted = [
        (Options(size=3), Head("classification", 2, "mean")),
        (Options(size=4, activation="silu"), Head("classification", 7, "first")),
        (
            Options(size=8, activation="relu", placement="parallel", combine="multiply", depth=2, inner_norm=True),
            Head("classification", 5, pooler),
        ),
        (
            Options(size=33, activation="tanh", layers="1-2", sites="feedforward", train_norms=False),
            Head("regression", 1, "mean", shift=2.0, scale=1.5),
        ),
        (Options(size=1, sites="attention", activation="gelu"), Head("span", 2)),
        (Options(method="layernorm"), Head("multilabel", 4, "mean")),
        (Options(method="lora", rank=3), Head("classification", 2, "mean")),
        (Options(method="lora", rank=4, alpha=64 / 3), Head("classification", 5, "first")),
        (Options(method="lora", rank=5, targets="key,output,up,down", layers="1-2"), Head("span", 2)),
        (Options(method="bitfit"), Head("classification", 3, pooler)),
        (Options(method="bitfit"), Head("regression", 1, "mean")),
        (Options(method="feature"), Head("classification", 3, pooler, hidden=6)),
        (Options(method="feature"), Head("span", 2)),
        (Options(method="full"), Head("classification", 2, pooler)),
        (Options(method="full"), Head("regression", 1, "first")),
    ]
    if not config.shared_layers:
        wanted.append((Options(method="top", top=1), Head("classification", 3, pooler)))
        wanted.append((Options(method="layernorm", layers="2"), Head("classification", 2, "first")))
    return [
        make_plan(options, depth=config.layers, head=head, shared_layers=config.shared_layers)
        for options, head in wanted
    ]


def one_row_alone(backbone, plan, tensors, row):
    """Run one row through the pass, with its slot as the only one."""
    stacks = Stacks(backbone.tensors)
    slot = None if plan is None else stacks.put(plan, tensors)
    route, batch = Route(stacks, segments([(slot, len(row))])), pack([row])
    with torch.no_grad():
        (output,) = heads.outputs(forward(backbone.config, route, batch), batch, route)
    return output if plan is not None and plan.head.kind == "span" else output[0]


@pytest.fixture(scope="module")
def mixed_requests(tiny, new_slot):
    """Return a family's stacks with one slot for each plan, and rows of every slot with their outputs alone."""
    cache = {}

    def get(family):
        if family not in cache:
            backbone = tiny(family)
            stacks, requests = Stacks(backbone.tensors), []
            rows = backbone.tokenize(TEXTS)
            plans = [*various_plans(backbone), None]
            for seed, plan in enumerate(plans):
                tensors = None if plan is None else new_slot(backbone, plan, seed=seed)
                slot = None if plan is None else stacks.put(plan, tensors)
                for row in (rows[(seed + k) % len(rows)] for k in (0, 2, 5)):
                    requests.append((slot, row, one_row_alone(backbone, plan, tensors, row).numpy()))
            cache[family] = backbone, stacks, requests
        return cache[family]

    return get


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_outputs_in_a_mixed_batch_of_any_order_as_alone(family, seed, mixed_requests):
    backbone, stacks, requests = mixed_requests(family)
    mixed = requests * 2
    random.Random(seed).shuffle(mixed)
    tokens, slots = [row for _, row, _ in mixed], [slot for slot, _, _ in mixed]
    found = outputs(backbone.config, stacks, tokens, slots)
    for (slot, _, expected), output in zip(mixed, found, strict=True):
        np.testing.assert_allclose(output, expected, atol=1e-5, rtol=1e-5, err_msg=f"slot {slot}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_runs_slots_of_every_method_in_segments_of_any_order(family, seed, mixed_requests):
    backbone, stacks, requests = mixed_requests(family)
    mixed = list(requests)
    if family == "mpnet":  # rows with their own table of distances need a separate batch
        full = {slot for slot, _, _ in mixed if slot is not None and stacks.plan(slot).method == "full"}
        mixed = [request for request in mixed if request[0] not in full]
    random.Random(seed).shuffle(mixed)
    batch = pack([row for _, row, _ in mixed])
    route = Route(stacks, segments([(slot, len(row)) for slot, row, _ in mixed]))
    with torch.no_grad():
        results = heads.outputs(forward(backbone.config, route, batch), batch, route)
    waiting = iter(mixed)
    for segment, out in zip(route.segments, results, strict=True):
        rows = list(itertools.islice(waiting, segment.rows))
        expected = np.concatenate([np.atleast_2d(alone) for _, _, alone in rows])
        np.testing.assert_allclose(out.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_rows_with_different_tables_of_distances_cannot_share_a_pass(mixed_requests):
    backbone, stacks, requests = mixed_requests("mpnet")
    full = next(r for r in requests if r[0] is not None and stacks.plan(r[0]).method == "full")
    mixed = [requests[0], full]
    route = Route(stacks, segments([(slot, len(row)) for slot, row, _ in mixed]))
    with pytest.raises(ValueError, match=r"different tables .*relative"):
        forward(backbone.config, route, pack([row for _, row, _ in mixed]))


def test_adding_and_removing_other_slots_changes_no_bit_of_a_slots_outputs(bert, new_slot):
    plans = various_plans(bert)
    stacks, rows = Stacks(bert.tensors), bert.tokenize(TEXTS)
    slot = stacks.put(plans[0], new_slot(bert, plans[0], seed=1))

    def compute():
        return outputs(bert.config, stacks, rows, [slot] * len(rows))

    before = compute()
    others = [stacks.put(plan, new_slot(bert, plan, seed=k)) for k, plan in enumerate(plans)]
    during = compute()
    for other in others[::2]:
        stacks.remove(other)
    stacks.put(plans[1], new_slot(bert, plans[1], seed=77))
    after = compute()
    for a, b, c in zip(before, during, after, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def gradients_in(stacks):
    """Return the leaves' gradients in the layout of the slots; zero for a leaf without one."""
    found = {block: torch.zeros_like(block.tensor) for block in stacks.blocks}
    for block, rows in found.items():
        for name, view in block.layout.views(rows).items():
            if block.views[name].grad is not None:
                view.copy_(block.views[name].grad)
    return found


def training_gradients(backbone, jobs, rate=0.1):
    """Return each slot's gradient of its own mean loss, for jobs (seed, plan, tensors, rows) of one batch."""
    stacks = Stacks(backbone.tensors)
    slots = [stacks.put(plan, tensors) for _, plan, tensors, _ in jobs]
    stacks.require_gradients(torch.float32)
    rows = [(slot, row) for slot, (_, _, _, job_rows) in zip(slots, jobs, strict=True) for row in job_rows]
    batch, route = pack([row for _, row in rows]), Route(stacks, segments([(slot, len(row)) for slot, row in rows]))
    keys = torch.cat([row_keys(seed, 5, torch.arange(len(job_rows))) for seed, _, _, job_rows in jobs])
    drop = Dropout(keys, batch.rows, batch.positions, rate=rate, attention_rate=rate)
    found = heads.outputs(forward(backbone.config, route, batch, drop), batch, route, drop)
    torch.stack([0.1 * out.square().mean() for out in found]).sum().backward()
    gradients = gradients_in(stacks)
    return [stacks.take(slot, gradients) for slot in slots]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_has_the_same_gradient_beside_other_slots_as_alone(family, tiny, new_slot):
    backbone = tiny(family)
    rows = backbone.tokenize(TEXTS)
    plans = [plan for plan in various_plans(backbone) if plan.method in ("adapter", "layernorm", "feature")]
    plans.append(dataclasses.replace(plans[0], head=Head("classification", 6)))
    jobs = [
        (seed, plan, new_slot(backbone, plan, seed=seed), [rows[(seed + k) % len(rows)] for k in range(3)])
        for seed, plan in enumerate(plans)
    ]
    together = training_gradients(backbone, jobs)
    for job, shared in zip(jobs, together, strict=True):
        (alone,) = training_gradients(backbone, [job])
        assert any(gradient.abs().max() > 1e-3 for gradient in alone.values())
        for name in alone:
            close = {"atol": 1e-6, "rtol": 1e-5}
            torch.testing.assert_close(shared[name], alone[name], msg=lambda m, n=name: f"{n}: {m}", **close)


@pytest.mark.parametrize("method", ["full", "top"])
def test_a_slot_that_changes_whole_layers_also_has_the_same_gradient_beside_others(method, bert, new_slot):
    rows = bert.tokenize(TEXTS)
    options = [Options(method=method), Options(size=3), Options(method=method)]
    plans = [make_plan(option, depth=3, head=Head("classification", 2, "pooler")) for option in options]
    jobs = [(seed, plan, new_slot(bert, plan, seed=seed), rows[seed : seed + 3]) for seed, plan in enumerate(plans)]
    together = training_gradients(bert, jobs)
    for job, shared in zip(jobs, together, strict=True):
        (alone,) = training_gradients(bert, [job])
        for name in alone:
            close = {"atol": 1e-6, "rtol": 1e-5}
            torch.testing.assert_close(shared[name], alone[name], msg=lambda m, n=name: f"{n}: {m}", **close)


def test_a_slot_without_rows_in_the_batch_gets_no_gradient(bert, new_slot):
    plan = make_plan(Options(size=3), depth=3, head=Head("classification", 2))
    stacks = Stacks(bert.tensors)
    busy, idle = (stacks.put(plan, new_slot(bert, plan, seed=seed)) for seed in (0, 1))
    stacks.require_gradients(torch.float32)
    rows = bert.tokenize(TEXTS[:2])
    batch, route = pack(rows), Route(stacks, segments([(busy, len(row)) for row in rows]))
    heads.outputs(forward(bert.config, route, batch), batch, route)[0].square().sum().backward()
    gradients = gradients_in(stacks)
    assert all(gradient.any() for gradient in stacks.take(busy, gradients).values())
    assert not any(gradient.any() for gradient in stacks.take(idle, gradients).values())
