"""Claims about fusions: the paper's attention over adapters, which are read where they are, whatever is beside them."""

from __future__ import annotations

import pytest
import torch

from adapterbank.draws import RandomStream
from adapterbank.encoder.batch import pack
from adapterbank.encoder.forward import forward
from adapterbank.inference.graph_runner import GraphRunner
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.runner import outputs, segments
from adapterbank.methods import Options
from adapterbank.slots import heads
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.additions.fusion import Fusion
from adapterbank.slots.additions.lora import Lora
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.slots.routing import Route
from adapterbank.slots.stack import Stacks
from adapterbank.training.optimizer import AdamSettings, StackedAdam
from plain_bert import bottleneck, plain_bert
from plain_kernels import PLAIN

TEXTS = ("the cat was good", "a big dog", "it is a small red house", "the lazy fox was bad and the film was good")
SIZES = (6, 3, 8)


def plan_of(method="adapter", outputs=2, layers_of=3, **options):
    return make_plan(Options(method, **options), depth=layers_of, head=Head("classification", outputs))


def fused_by_hand(backbone, row, members, own):
    """Return the outputs of a row by the paper's formula: keys and values of z = y + f, a value matrix of ones."""
    value = torch.eye(backbone.config.hidden)

    def adapted(y, site):
        if f"{site}.fusion.query" not in own:
            return y
        z = torch.stack([y + bottleneck(y, member, site) for member in members], 1)  # [tokens, tasks, d]
        query, keys = y @ own[f"{site}.fusion.query"].T, z @ own[f"{site}.fusion.key"].T
        weights = torch.einsum("tr,tkr->tk", query, keys).softmax(-1)
        return torch.einsum("tk,tkd->td", weights, z @ value)

    return plain_bert(backbone, row, adapted, {name: t for name, t in own.items() if ".norm." in name}, own)


def new_fusion(backbone, new_slot, plan, seed):
    """Return tensors of a fusion whose weights differ much from token to token."""
    tensors = new_slot(backbone, plan, seed=seed)
    return {name: 6 * tensor if ".fusion." in name else tensor for name, tensor in tensors.items()}


class Fused:
    """Members and a fusion of them, in stacks."""

    def __init__(self, backbone, new_slot, sizes=SIZES, frozen=False, **options):
        self.backbone, self.stacks = backbone, Stacks(backbone.tensors)
        depth = backbone.config.layers
        self.plans = [plan_of(size=size, outputs=2 + k, layers_of=depth) for k, size in enumerate(sizes)]
        self.members = [new_slot(backbone, plan, seed=10 + k) for k, plan in enumerate(self.plans)]
        pairs = zip(self.plans, self.members, strict=True)
        self.slots = [self.stacks.put(plan, tensors, frozen=frozen) for plan, tensors in pairs]
        self.plan = plan_of("fusion", layers_of=depth, **{"rank": 5, **options})
        self.own = new_fusion(backbone, new_slot, self.plan, 3)
        self.slot = self.stacks.put(self.plan, self.own, *self.slots)

    def outputs(self, rows, slot=None):
        return outputs(self.backbone.config, self.stacks, rows, [self.slot if slot is None else slot] * len(rows))


@pytest.mark.parametrize("options", [{}, {"train_norms": False}, {"layers": "1-2", "sites": "feedforward"}], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (4, 4)], ids=str)
def test_a_fusion_is_the_papers_attention_over_the_outputs_of_adapters(bert, new_slot, sizes, options):
    fused = Fused(bert, new_slot, sizes, **options)
    rows = bert.tokenize(TEXTS)
    for row, found in zip(rows, fused.outputs(rows), strict=True):
        expected = fused_by_hand(bert, row, fused.members, fused.own)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)
        for other in (fused.members[:-1], [*fused.members[1:], fused.members[1]]):
            assert (fused_by_hand(bert, row, other, fused.own) - expected).abs().max() > 1e-3  # each of them matters


def test_the_norms_and_heads_of_fused_tasks_are_not_read(bert, new_slot):
    fused = Fused(bert, new_slot, train_norms=False)
    places = fused.stacks.slot(fused.slot).places
    own = {name for name in places if name.startswith("head.") or ".fusion." in name}
    assert {*places} == own
    assert not [name for name in fused.own if ".norm." in name]


def test_a_new_fusion_is_the_mean_of_its_adapters(bert, new_slot):
    fused = Fused(bert, new_slot)
    draws = {name: torch.zeros(tensor.shape) for name, tensor in fused.own.items() if ".fusion." in name}
    for name, tensor in draws.items():
        fused.plan.additions[0].fill(name.rsplit(".", 1)[1], tensor, 0.01, RandomStream(0, name))
    assert all(bool(tensor.any()) == name.endswith("key") for name, tensor in draws.items())
    fused.stacks.write(fused.slot, draws)

    def mean(y, site):
        return y + torch.stack([bottleneck(y, member, site) for member in fused.members]).mean(0)

    (row,) = bert.tokenize(TEXTS[:1])
    norms = {name: tensor for name, tensor in fused.own.items() if ".norm." in name}
    expected = plain_bert(bert, row, mean, norms, fused.own)
    torch.testing.assert_close(torch.from_numpy(fused.outputs([row])[0]), expected, atol=1e-5, rtol=1e-5)


def test_a_gradient_is_that_of_plain_torch_and_members_have_none(bert, new_slot):
    fused = Fused(bert, new_slot, frozen=True)
    (row,) = bert.tokenize(TEXTS[3:])
    stacks, slot = fused.stacks, fused.slot
    before = [stacks.take(member) for member in fused.slots]
    adam = StackedAdam(stacks)
    adam.admit(slot, AdamSettings())
    batch, route = pack([row]), Route(stacks, segments([(slot, len(row))]))
    (out,) = heads.outputs(forward(bert.config, route, batch), batch, route)
    adam.zero_grad()
    adam.add_gradients(torch.autograd.grad(out.square().sum(), adam.leaves(), allow_unused=True))
    found = stacks.take(slot, adam.gradients)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in fused.own.items()}
    fused_by_hand(bert, row, fused.members, leaves).square().sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.any()
        torch.testing.assert_close(found[name], leaf.grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    adam.step({slot: 0.01})
    assert all(not torch.equal(tensor, fused.own[name]) for name, tensor in stacks.take(slot).items())
    for member, tensors in zip(fused.slots, before, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in stacks.take(member).items())


VARIANTS = [
    {"size": 4},
    {"size": 7, "activation": "relu"},
    {"size": "2,4/0,8", "layers": "all"},
    {"size": 4, "placement": "parallel"},
    {"size": 4, "combine": "multiply"},
    {"size": 4, "inner_norm": True},
    {"size": 4, "depth": 2},
]


@pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_fused_slots_are_beside_all_others_as_alone(tiny, new_slot, family, grad):
    backbone = tiny(family)
    depth, stacks = backbone.config.layers, Stacks(backbone.tensors)
    norms = {"train_norms": family != "albert"}
    plans = [plan_of(layers_of=depth, outputs=2 + k, **norms, **options) for k, options in enumerate(VARIANTS)]
    slots = [stacks.put(plan, new_slot(backbone, plan, seed=k)) for k, plan in enumerate(plans)]
    sites = {"layers": "0-2", "sites": "attention"}
    chosen = [slots[:2], slots[1:3], slots[2:5], slots[3:], slots[:2][::-1], slots[5:7], slots]
    fusions = [plan_of("fusion", layers_of=depth, rank=2 + k % 4, **norms, **sites) for k in range(len(chosen))]
    for k, (plan, members) in enumerate(zip(fusions, chosen, strict=True)):
        slots.append(stacks.put(plan, new_fusion(backbone, new_slot, plan, 50 + k), *members))
    lora = plan_of("lora", layers_of=depth, rank=2)
    slots += [stacks.put(lora, new_slot(backbone, lora, seed=90)), None]
    rows = backbone.tokenize(TEXTS)

    def run(pairs):
        route = Route(stacks, segments([(slot, len(row)) for slot, row in pairs]))
        batch = pack([row for _, row in pairs])
        with torch.set_grad_enabled(grad):
            found = heads.outputs(forward(backbone.config, route, batch), batch, route)
        return [row.detach() for part in found for row in part]

    mixed = run([(slot, row) for slot in slots for row in rows])
    for k, slot in enumerate(slots):
        for alone, beside in zip(run([(slot, row) for row in rows]), mixed[4 * k :], strict=False):
            torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-4, msg=str(k))


def test_fused_sites_read_the_memory_of_the_tasks_themselves(bert, new_slot):
    fused = Fused(bert, new_slot)

    def held():
        blocks = [block for block in fused.stacks.blocks if "layers.0.attention.adapter.up.weight" in block.views]
        return sum(block.tensor.numel() for block in blocks)

    before = held()
    slots = [fused.slot, *(fused.stacks.put(fused.plan, fused.own, *fused.slots) for _ in range(4))]
    assert held() == before > 0
    for slot in slots:
        places = fused.stacks.slot(slot).places
        for number, member in enumerate(fused.slots):
            own = fused.stacks.slot(member).places
            for part in ("down.weight", "up.bias"):
                assert (
                    places[f"layers.1.feedforward.fusion.{number}.{part}"]
                    == own[f"layers.1.feedforward.adapter.{part}"]
                )
    own = {name for block, _ in fused.stacks.slot(fused.slot).rows for name in block.layout.shapes}
    assert own == {*fused.own}


def test_a_fusion_follows_members_whose_blocks_move_or_change(bert, new_slot):
    fused = Fused(bert, new_slot)
    rows = bert.tokenize(TEXTS)
    before = fused.outputs(rows)
    for seed in range(9):  # blocks grow by doubling
        fused.stacks.put(fused.plans[0], new_slot(bert, fused.plans[0], seed=seed))
    assert all((one == other).all() for one, other in zip(fused.outputs(rows), before, strict=True))
    fused.stacks.write(fused.slots[0], fused.members[0] | {"layers.0.attention.adapter.up.bias": torch.ones(32)})
    assert all((one != other).any() for one, other in zip(fused.outputs(rows), before, strict=True))


def test_a_slot_stands_on_a_fusion_as_on_any_other(bert, new_slot):
    fused = Fused(bert, new_slot)
    above = plan_of(size=4, train_norms=False)
    own = new_slot(bert, above, seed=7)
    slot = fused.stacks.put(above, own, fused.slot)
    rows = bert.tokenize(TEXTS)

    def adapted(y, site):
        z = torch.stack([y + bottleneck(y, member, site) for member in fused.members], 1)
        query, keys = y @ fused.own[f"{site}.fusion.query"].T, z @ fused.own[f"{site}.fusion.key"].T
        y = torch.einsum("tk,tkd->td", torch.einsum("tr,tkr->tk", query, keys).softmax(-1), z)
        return y + bottleneck(y, own, site)

    norms = {name: tensor for name, tensor in fused.own.items() if ".norm." in name}
    for row, found in zip(rows, fused.outputs(rows, slot), strict=True):
        expected = plain_bert(bert, row, adapted, norms, own)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)


def test_a_gpu_runs_fused_rows_without_graphs_beside_others_with_them(bert, new_slot):
    fused = Fused(bert, new_slot)
    runner = GraphRunner(bert.config, fused.stacks, GraphCompiler(fused.stacks.device), PLAIN)
    assert [runner.covers(slot) for slot in (*fused.slots, fused.slot, None)] == [True, True, True, False, True]


def test_layers_are_removed_with_the_adapters_that_they_fuse(bert, new_slot):
    fused = Fused(bert, new_slot)
    rest = {name: tensor for name, tensor in fused.own.items() if not fused.plan.removes(name, (0, 2))}
    slot = fused.stacks.put(fused.plan.without((0, 2)), rest, *fused.slots)
    assert {site.split(".")[1] for site in fused.stacks.slot(slot).added} == {"1"}
    (row,) = bert.tokenize(TEXTS[:1])
    expected = fused_by_hand(bert, row, fused.members, rest)
    torch.testing.assert_close(torch.from_numpy(fused.outputs([row], slot)[0]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("additions", "message"),
    [
        ((), "adds something else than adapters, or nothing"),
        ((Lora(8, 16.0, (0, 1, 2)),), "adds something else than adapters"),
        ((Adapter(4, (0, 1, 2)), Adapter(4, (0, 1, 2))), "adds something else than adapters"),
        ((Adapter(4, (0, 1)),), "has no adapter at layers.2.attention; choose layers and sites"),
        ((Adapter(4, (0, 1, 2), ("attention",)),), "has no adapter at layers.0.feedforward"),
        ((Adapter(4, (0, 1, 2), widths=(4, 4, 4, 0, 4, 4)),), "has no adapter at layers.1.feedforward"),
        ((Adapter(4, (0, 1, 2)),), None),
    ],
)  # fmt: skip
def test_only_adapters_at_all_of_its_sites_are_fused(additions, message):
    found = Fusion(2, (0, 1, 2)).refuses(additions)
    assert (message is None) == (found is None)
    assert message is None or message in found


def test_a_stored_plan_names_no_members(bert):
    plan = plan_of("fusion")
    stored = plan.to_json()
    assert stored["fusion"] == {"rank": 8, "layers": (0, 1, 2), "sites": ("attention", "feedforward")}
    assert Plan.from_json(stored) == plan
    for members in ([{"size": 4}], [3]):
        with pytest.raises(ValueError, match="members"):
            Plan.from_json({**stored, "fusion": {**stored["fusion"], "members": members}})


@pytest.mark.minilm
@pytest.mark.parametrize(("rank", "share"), [(8, 0.004), (64, 0.0265)])
def test_a_fusion_on_minilm_trains_few_parameters(minilm, new_slot, rank, share):
    plan = plan_of("fusion", layers_of=6, rank=rank)
    count = sum(tensor.numel() for tensor in new_slot(minilm, plan).values())
    assert count == 12 * 2 * rank * 384 + 13 * 768 + 385 * 2
    assert count / minilm.parameters < share
