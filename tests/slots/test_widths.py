"""Promise: adapters whose width differs by layer and site work wherever adapters of one width do."""

from __future__ import annotations

import json

import pytest
import torch

from adapterbank import load_runs
from adapterbank.api.opened import open_bank
from adapterbank.config import parse, resolve
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, InputError
from adapterbank.inference.graph_runner import GraphRunner
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.rows import make_rows
from adapterbank.inference.runner import outputs, segments
from adapterbank.methods import Options, parse_size, size_text
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.sharing import step_form
from adapterbank.slots.stack import Stacks
from adapterbank.tasks.spec import Examples
from jobs import CPU, assert_close, assert_same_bits, job_on, moved, train_jobs
from plain_kernels import PLAIN
from small_data import FAST, reviews, write

HEAD = Head("classification", 2)
MIXED = "3/5,0/16,8"
WIDTHS = (3, 5, 0, 16, 8, 8)
TEXTS = ["the cat sat on the mat", "why", "a big red fox jumps over the lazy dog", "who was bad?", "in the house"]
ROWS = reviews()
BY_LAYER = {**FAST, "size": MIXED}


def plan_of(size, **options):
    return make_plan(Options(size=size, **options), depth=3, head=HEAD)


def tokens_of(bert):
    return make_rows(bert, Examples(TEXTS, None, None), kind="classification", max_length=32).tokens


def stacks_of(bert):
    return Stacks(place(bert, CPU, torch.float32).tensors)


def zero_padded(tensors, config, size):
    """Return the tensors of a slot whose adapters all have one size, with zeros for what the plan does not have."""
    wide = plan_of(size)
    made = {}
    for (site, part), shape in wide.additions[0].shapes(config).items():
        name = f"{site}.adapter.{part}"
        made[name] = torch.zeros(shape)
        if name in tensors:
            made[name][tuple(slice(n) for n in tensors[name].shape)] = tensors[name]
    return wide, {**tensors, **made}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


# --- what a size asks for


@pytest.mark.parametrize(
    ("size", "widths"),
    [
        (8, (8,) * 6),
        ("8", (8,) * 6),
        ("8,4,2", (8, 8, 4, 4, 2, 2)),
        ("8/1", (8, 1, 8, 1, 8, 1)),
        (MIXED, WIDTHS),
        (" 3/5, 0/16 ,8", WIDTHS),
        ("0,0/1,0", (0, 0, 0, 1, 0, 0)),
    ],
)
def test_a_size_is_a_width_for_each_site_of_each_layer(size, widths):
    assert parse_size(size).widths(3, 2) == widths
    assert parse_size(size_text(widths, 2)).widths(3, 2) == widths
    assert parse_size(size).widest == max(widths)


@pytest.mark.parametrize(
    ("size", "options", "problem"),
    [
        ("8,8", {}, "2 layers, but 3 have adapters; give one width, or 3"),
        ("8,8,8", {"layers": "0,2"}, "3 layers, but 2 have adapters; give one width, or 2"),
        ("8/4,8,8", {"sites": "attention"}, "2 sites in 8/4, but 1 have adapters; give each layer one width, or 1"),
        ("8/4/2", {}, "3 sites in 8/4/2, but 2 have adapters; give each layer one width, or 2"),
    ],
)
def test_a_size_that_does_not_fit_the_encoder_is_refused(size, options, problem):
    with pytest.raises(ConfigError) as caught:
        plan_of(size, **options)
    assert caught.value.mistakes == (f"size is {size!r}, which has {problem}.",)


def test_a_list_of_widths_is_a_size():
    assert parse({"size": [8, 4, 2]}).size == "8,4,2"
    assert parse({"size": "16"}).size == 16
    assert resolve(parse({"size": "8,256"}), 384).lr == resolve(parse({"size": 256}), 384).lr == 5e-4


# --- the plan


def test_one_width_everywhere_is_the_plan_of_that_size():
    assert plan_of("8,8,8") == plan_of(8)
    assert "widths" not in plan_of("8,8,8").to_json()["adapter"]


def test_layers_without_an_adapter_have_none_to_remove():
    assert plan_of("8,0,4").additions[0].layers == (0, 1, 2)
    assert plan_of("8,0,4").removable_layers == (0, 2)
    assert plan_of(MIXED).removable_layers == (0, 1, 2)


def test_a_plan_is_as_it_was_after_its_manifest():
    plan = plan_of(MIXED)
    stored = json.loads(json.dumps(plan.to_json()))
    assert (stored["adapter"]["size"], stored["adapter"]["widths"]) == (16, list(WIDTHS))
    assert Plan.from_json(stored) == plan
    assert hash(Plan.from_json(stored)) == hash(plan)


@pytest.mark.parametrize("widths", [[3, 5], [3, 5, 0, 16, 8, 9000], [3, 5, 0, 16, 8, -1], [3] * 6, [16.0] * 6, 16])
def test_a_manifest_with_impossible_widths_is_refused(widths):
    stored = plan_of(MIXED).to_json()
    stored["adapter"]["widths"] = widths
    with pytest.raises(ValueError, match="widths"):
        Plan.from_json(stored)


def test_every_site_has_tensors_of_its_own_width(bert):
    shapes = plan_of(MIXED).additions[0].shapes(bert.config)
    found = {site: shape[0] for (site, part), shape in shapes.items() if part == "down.weight"}
    sites = ["layers.0.attention", "layers.0.feedforward", "layers.1.feedforward"]
    assert found == dict(zip([*sites, "layers.2.attention", "layers.2.feedforward"], (3, 5, 16, 8, 8), strict=True))
    assert {shapes[site, "up.weight"] for site in found} == {(bert.config.hidden, width) for width in found.values()}


def test_a_plan_without_some_layers_keeps_the_widths_of_the_others():
    plan = plan_of(MIXED)
    assert plan.without([1]).additions[0].width_at == {
        name: width for name, width in plan.additions[0].width_at.items() if "layers.1." not in name
    }
    assert plan.without([0, 1]) == plan_of("0,0,8")
    assert plan.without([0, 1, 2]).additions[0].layers == ()


# --- the pass


@pytest.mark.parametrize("options", [{}, {"depth": 2, "inner_norm": True}, {"placement": "parallel"}])
def test_each_site_applies_its_own_tensors(options, bert, new_slot):
    plan = plan_of(MIXED, **options)
    tensors, stacks = new_slot(bert, plan), stacks_of(bert)
    route = Route(stacks, segments([(stacks.put(plan, tensors), 6)]))
    y, x = torch.randn(2, 6, bert.config.hidden)
    for layer in range(3):
        for site in (f"layers.{layer}.attention", f"layers.{layer}.feedforward"):
            own = {name.split(".adapter.")[1]: t for name, t in tensors.items() if name.startswith(f"{site}.adapter.")}
            expected = plan.additions[0].apply(y, x, [own]) if own else y
            torch.testing.assert_close(route.add(y, x, site), expected, atol=1e-6, rtol=1e-6)


def test_widths_by_layer_compute_what_one_width_filled_up_with_zeros_computes(bert, new_slot):
    plan = plan_of(MIXED)
    tensors, stacks = new_slot(bert, plan), stacks_of(bert)
    slots = stacks.put(plan, tensors), stacks.put(*zero_padded(tensors, bert.config, 16))
    tokens = tokens_of(bert)
    own, padded = (outputs(bert.config, stacks, tokens, [slot] * len(tokens)) for slot in slots)
    for mine, its in zip(own, padded, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(its), atol=1e-6, rtol=1e-6)


SLOTS = [MIXED, 8, "16,4/0,2", 3, "8/3,0/16,8"]


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_of_any_widths_in_one_batch_are_as_alone(kernels, bert, new_slot):
    """Also where the kernels of a GPU read slots in place; slots with adapters at the same sites share a graph."""
    stacks, tokens = stacks_of(bert), tokens_of(bert)
    plans = [plan_of(size) for size in SLOTS]
    slots = [stacks.put(plan, new_slot(bert, plan, seed=k)) for k, plan in enumerate(plans)]
    alone = [outputs(bert.config, stacks, [row], [slot])[0] for row, slot in zip(tokens, slots, strict=True)]
    runner = GraphRunner(bert.config, stacks, GraphCompiler(CPU), PLAIN) if kernels else None
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2], [0, 4], [1, 3], [4, 4, 0]):
        rows = [tokens[i] for i in order], [slots[i] for i in order]
        for i, found in zip(order, outputs(bert.config, stacks, *rows, graph_runner=runner), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(alone[i]), atol=1e-5, rtol=1e-5)
    families = [stacks.slot(slot).family for slot in slots]
    assert (families[0], families[1]) == (families[4], families[3])


def test_no_site_takes_more_memory_than_its_own_size_class(bert, new_slot):
    stacks = stacks_of(bert)
    plan = plan_of("4/8,0/16,32")
    sizes = [
        stacks.size(one, {n: tuple(t.shape) for n, t in new_slot(bert, one).items()}) for one in (plan, plan_of(32))
    ]
    slot = stacks.slot(stacks.put(plan, new_slot(bert, plan)))
    for name, (block, _) in slot.places.items():
        assert block.layout.shapes[name] == slot.shapes[name]  # powers of two are not padded
    assert sizes[0] < 0.7 * sizes[1]


def test_runs_share_a_training_graph_only_if_every_site_has_the_same_size_class():
    assert step_form(plan_of("3/5,0/16,8")) == step_form(plan_of("4/8,0/9,7"))
    assert step_form(plan_of("3/5,0/16,8")) != step_form(plan_of("3/5,0/16,9"))
    assert step_form(plan_of("5,6,8")) == step_form(plan_of(8))


# --- training


@pytest.mark.parametrize("dropout", [None, 0.4])
def test_graphs_train_widths_by_layer_like_the_eager_step(dropout, bert, new_slot, graph_training):
    jobs = [job_on(bert, new_slot, Options(size=size), seed=k) for k, size in enumerate((MIXED, "4/8,0/9,7", 8))]
    expected = train_jobs(bert, *jobs, dropout=dropout)
    for state, eager, job in zip(graph_training(bert, *jobs, dropout=dropout), expected, jobs, strict=True):
        assert moved(eager, job) > 1e-4
        assert_close(state, eager)


def test_a_run_beside_others_trains_as_alone(bert, new_slot):
    jobs = [job_on(bert, new_slot, Options(size=size), seed=k) for k, size in enumerate((MIXED, 8, "16,4/0,2"))]
    for together, job in zip(train_jobs(bert, *jobs), jobs, strict=True):
        assert_close(together, train_jobs(bert, job)[0])


def test_widths_of_one_number_train_to_the_bits_of_that_size(bert, new_slot):
    (by_layer,), (uniform,) = (train_jobs(bert, job_on(bert, new_slot, Options(size=size))) for size in ("8,8,8", 8))
    assert_same_bits(by_layer, uniform)


# --- a task of the bank


def test_a_task_is_trained_stored_audited_and_served(bank, tmp_path, bert):
    made = bank.train("s", ROWS, ROWS, **BY_LAYER).package.manifest
    bank.train("plain", ROWS, ROWS, **FAST)
    assert made.method["adapter"]["widths"] == list(WIDTHS)
    assert (
        made.params["trained"]
        < bank.train("wide", ROWS, ROWS, **{**FAST, "size": 16}).package.manifest.params["trained"]
    )
    again = open_bank(tmp_path / "bank", bert, device="cpu")
    assert all(finding.ok for finding in again.audit())
    texts = [text for text, _ in ROWS]
    alone = [answer.label for answer in again.predict("s", texts)]
    mixed = again.predict([name for _ in texts for name in ("s", "plain")], [text for text in texts for _ in "sp"])
    assert [answer.label for answer in mixed[::2]] == alone
    assert "adapter 0-16" in repr(again.tasks())


def test_a_run_can_be_resumed_to_the_bit(bank, tmp_path, bert):
    def stop(progress):
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.train("s", ROWS, ROWS, watch=stop, **BY_LAYER)
    resumed = bank.train("s", ROWS, ROWS, resume=True, **BY_LAYER)
    whole = open_bank(tmp_path / "other", bert, device="cpu").train("s", ROWS, ROWS, **BY_LAYER)
    assert resumed.package.manifest.weights_sha256 == whole.package.manifest.weights_sha256


def test_its_idle_layers_are_removed_and_its_spans_ablated(bank):
    bank.train("s", ROWS, ROWS, **BY_LAYER)
    assert bank.ablate("s", ROWS)["layers"] == [0, 1, 2]
    found, pruned = bank.prune("s", ROWS, tolerance=100)
    assert found["removed"] == [0, 1, 2]
    assert pruned.package.manifest.method["adapter"]["layers"] == []
    assert all(finding.ok for finding in bank.audit())


def test_a_run_starts_from_it_with_the_size_that_the_message_names(bank):
    bank.train("s", ROWS, ROWS, **{**BY_LAYER, "size": "3/5,0,8"})
    with pytest.raises(ConfigError, match=r"has size 3/5,0,8, and this run size 4; use --size 3/5,0,8\."):
        bank.train("t", ROWS, ROWS, start_from="s", **FAST)
    made = bank.train("t", ROWS, ROWS, start_from="s", **{**FAST, "size": "3/5,0,8"})
    assert made.record["start_from"]["package"] == "s@1"


def test_soups_are_of_one_shape(bank):
    for size in (MIXED, MIXED, 16):
        bank.train("s", ROWS, ROWS, **{**FAST, "size": size})
    assert bank.soup(["s@1", "s@2"]).method["adapter"]["widths"] == list(WIDTHS)
    with pytest.raises(InputError, match="different forms"):
        bank.soup(["s@1", "s@3"])


def test_a_study_compares_them_with_others(bank, tmp_path):
    study = {"task": "s", "train": str(write(tmp_path / "rows.csv", ROWS)), **FAST, "size": [4, MIXED], "seeds": 2}
    bank.sweep(study)
    runs = load_runs([str(bank.path)])
    assert sorted({row.label for row in runs.rows}) == ["adapter 3/5,0/16,8", "adapter 4"]
    assert [row.plain for row in sorted(runs.rows, key=lambda row: row.label)] == [False, False, True, True]
