"""Tests of `adapterbank.methods`: which tensors each method trains, written out for every family."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch

from adapterbank import methods
from adapterbank.config import Config
from adapterbank.encoder import blocks
from adapterbank.encoder.config_json import read_config
from adapterbank.errors import ConfigError, UnknownName
from adapterbank.methods import Options, parse_layers
from adapterbank.slots import plan as plans
from adapterbank.slots import tensors as slot_tensors
from adapterbank.slots.additions.adapter import Adapter
from adapterbank.slots.additions.lora import Lora
from adapterbank.slots.plan import Head, Plan, make_plan
from families import FAMILIES

DEPTH = 3
SLOTS = [name for name, row in methods.METHODS.items() if row.slot]
LINEAR = (
    *(f"attention.{part}" for part in ("query", "key", "value", "output")),
    *("feedforward.up", "feedforward.down"),
)
BOTH = ("weight", "bias")
HEAD = {"head.weight", "head.bias"}
POOLER = {"pooler.weight", "pooler.bias"}
EMBEDDING_NORM = {"embeddings.norm.weight", "embeddings.norm.bias"}
PROJECT = {"embeddings.project.weight", "embeddings.project.bias"}
TYPE = {"embeddings.type.weight"}
OUTSIDE = {  # what each family has outside its layers, beside words, positions and their LayerNorm
    "bert": TYPE | POOLER,
    "roberta": TYPE | POOLER,
    "xlm-roberta": TYPE | POOLER,
    "camembert": TYPE | POOLER,
    "distilbert": set(),
    "electra": TYPE | PROJECT,
    "mpnet": {"relative.weight"} | POOLER,
    "albert": TYPE | PROJECT | POOLER,
}


def weights_of(family, layers):
    """Return the numbers of the weights that these layers use: ALBERT has one set for all."""
    return [0] if family == "albert" else list(layers)


def norms(family, layers):
    found = EMBEDDING_NORM if 0 in layers else set()
    sites = ("attention", "feedforward")
    return found | {f"layers.{i}.{s}.norm.{leaf}" for i in weights_of(family, layers) for s in sites for leaf in BOTH}


def whole_layers(family, layers):
    parts = ("attention.query", "attention.key", "attention.value", "attention.output", "attention.norm")
    parts += ("feedforward.up", "feedforward.down", "feedforward.norm")
    return {f"layers.{i}.{part}.{leaf}" for i in weights_of(family, layers) for part in parts for leaf in BOTH}


def adapters(layers, sites=("attention", "feedforward"), parts=("down", "up")):
    return {f"layers.{i}.{s}.adapter.{part}.{leaf}" for i in layers for s in sites for part in parts for leaf in BOTH}


def low_rank(layers, modules=("attention.query", "attention.value")):
    return {f"layers.{i}.{module}.lora.{leaf}" for i in layers for module in modules for leaf in ("a", "b")}


def attentions(layers, sites=("attention", "feedforward")):
    return {f"layers.{i}.{site}.fusion.{part}" for i in layers for site in sites for part in ("query", "key")}


def biases(family, layers):
    """Return every bias of the linear layers and LayerNorms; those of the embeddings count as layer 0."""
    outside = EMBEDDING_NORM | (PROJECT & OUTSIDE[family]) if 0 in layers else set()
    return {name for name in outside | whole_layers(family, layers) if name.endswith(".bias")}


def whole_encoder(family):
    words = {"embeddings.word.weight", "embeddings.position.weight"}
    return words | EMBEDDING_NORM | OUTSIDE[family] | whole_layers(family, range(DEPTH))


# name -> options, expected names of a family without the head's, first layer that trains
CASES = {
    "adapter": (Options(), lambda f: adapters(range(3)) | norms(f, range(3)), 0),
    "adapter without norms": (Options(train_norms=False), lambda f: adapters(range(3)), 0),
    "adapter in layer 0": (Options(layers="0"), lambda f: adapters([0]) | norms(f, [0]), 0),
    "adapter in layers 1,2": (Options(layers="1-2"), lambda f: adapters([1, 2]) | norms(f, [1, 2]), 1),
    "adapter in layer 2, no norms": (Options(layers="2", train_norms=False), lambda f: adapters([2]), 2),
    "adapter after attention": (
        Options(sites="attention"),
        lambda f: adapters(range(3), ["attention"]) | norms(f, range(3)),
        0,
    ),
    "adapter after feedforward": (
        Options(sites="feedforward", train_norms=False, layers="1"),
        lambda f: adapters([1], ["feedforward"]),
        1,
    ),
    "adapter with all its parts": (
        Options(inner_norm=True, depth=3),
        lambda f: adapters(range(3), parts=("norm", "down", "middle.1", "middle.2", "up")) | norms(f, range(3)),
        0,
    ),
    "full": (Options(method="full"), lambda f: whole_encoder(f) - POOLER, 0),
    "top 1": (Options(method="top", top=1), lambda f: whole_layers(f, [2]), 2),
    "top 2": (Options(method="top", top=2), lambda f: whole_layers(f, [1, 2]), 1),
    "top 3": (Options(method="top", top=3), lambda f: whole_layers(f, [0, 1, 2]), 0),
    "layernorm": (Options(method="layernorm"), lambda f: norms(f, range(3)), 0),
    "layernorm upper": (Options(method="layernorm", layers="upper"), lambda f: norms(f, [1, 2]), 1),
    "lora": (Options(method="lora"), lambda f: low_rank(range(3)), 0),
    "lora in layers 1,2": (Options(method="lora", layers="1-2"), lambda f: low_rank([1, 2]), 1),
    "lora everywhere": (
        Options(method="lora", rank=3, targets="down,up,output,value,key,query"),
        lambda f: low_rank(range(3), LINEAR),
        0,
    ),
    "fusion": (Options(method="fusion"), lambda f: attentions(range(3)) | norms(f, range(3)), 0),
    "fusion in layers 1,2, after attention": (
        Options(method="fusion", layers="1-2", sites="attention", train_norms=False, rank=3),
        lambda f: attentions([1, 2], ["attention"]),
        1,
    ),
    "bitfit": (Options(method="bitfit"), lambda f: biases(f, range(3)), 0),
    "bitfit in layers 1,2": (Options(method="bitfit", layers="1-2"), lambda f: biases(f, [1, 2]), 1),
    "feature": (Options(method="feature"), lambda f: set(), 3),
}
ONE_SET_OF_WEIGHTS = (
    *("adapter in layer 0", "adapter in layers 1,2", "top 1", "top 2", "top 3", "layernorm upper"),
    "bitfit in layers 1,2",
)
"""Cases that ALBERT refuses, because its layers share their weights."""


def plan_for(backbone, options, *, pooling="mean"):
    head = Head("classification", 3, pooling)
    config = backbone.config
    return make_plan(options, depth=config.layers, head=head, shared_layers=config.shared_layers)


def all_names(backbone, plan):
    """Return the name of everything that could train: the whole encoder, the plan's additions and its head."""
    return [*backbone.tensors, *slot_tensors.initial(plan, backbone.config, 0.0, 0)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_exactly_the_tensors_listed_here(family, tiny):
    assert set(tiny(family).tensors) == whole_encoder(family)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_trains_exactly_these_tensors(family, case, tiny):
    options, expected, first = CASES[case]
    backbone = tiny(family)
    if family == "albert" and case in ONE_SET_OF_WEIGHTS:
        with pytest.raises(ConfigError, match="share one set of weights"):
            plan_for(backbone, options)
        return
    plan = plan_for(backbone, options)
    found = plans.trained(all_names(backbone, plan), plan)
    assert set(found) == expected(family) | HEAD
    assert len(found) == len(set(found))
    assert plans.first_trained_layer(found, DEPTH) == first


@pytest.mark.parametrize(
    ("family", "case"),
    [
        (family, case)
        for family in FAMILIES
        for case in CASES
        if OUTSIDE[family] >= POOLER and not (family == "albert" and case in ONE_SET_OF_WEIGHTS)
    ],
)
def test_the_pooler_trains_only_with_full_and_top_and_only_if_the_head_reads_it(family, case, tiny):
    options, expected, first = CASES[case]
    plan = plan_for(tiny(family), options, pooling="pooler")
    found = set(plans.trained(all_names(tiny(family), plan), plan))
    assert found == expected(family) | HEAD | (POOLER if options.method in ("full", "top") else set())
    assert plans.first_trained_layer(found, DEPTH) == first


@pytest.mark.parametrize("case", CASES)
def test_a_plan_read_back_from_json_is_equal(case, bert):
    options = CASES[case][0]
    for head in (Head("classification", 4, "first", hidden=7), Head("regression", 1, shift=2.5, scale=1.25)):
        plan = make_plan(options, depth=DEPTH, head=head)
        text = json.dumps(plan.to_json())
        back = Plan.from_json(json.loads(text))
        assert back == plan
        assert json.dumps(back.to_json()) == text
        assert hash(back) == hash(plan)


def test_the_hidden_layer_of_a_head_trains_with_it(bert):
    plan = make_plan(Options(method="feature"), depth=DEPTH, head=Head("classification", 2, hidden=5))
    found = set(plans.trained(all_names(bert, plan), plan))
    assert found == HEAD | {"head.hidden.weight", "head.hidden.bias"}


@pytest.mark.minilm
@pytest.mark.parametrize("classes", [2, 5])
def test_adapters_of_size_64_on_minilm_have_as_many_parameters_as_the_formula_gives(classes, minilm, new_slot):
    head = Head("classification", classes)
    plan = make_plan(Options(size=64), depth=minilm.config.layers, head=head)
    count = sum(tensor.numel() for tensor in new_slot(minilm, plan).values())
    assert count == 12 * (2 * 64 * 384 + 384 + 64) + 13 * 768 + 385 * classes


def bert_base():
    from transformers import BertConfig

    return read_config(BertConfig().to_dict(), "bert-base")


@pytest.mark.parametrize("size", [1, 8, 64])
def test_adapters_on_bert_base_have_the_papers_number_of_parameters(size):
    config = bert_base()
    plan = make_plan(Options(size=size), depth=config.layers, head=Head("classification", 2))
    shapes = slot_tensors.added_shapes(plan, config)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert count == 24 * (2 * size * 768 + 768 + size)
    if size == 64:
        assert count == 24 * 99_136 == 2_379_264


def test_the_layernorms_of_bert_base_have_the_papers_40k_parameters():
    config = bert_base()
    plan = make_plan(Options(method="layernorm"), depth=12, head=Head("classification", 2))
    shapes = config.shapes(pooler=True)
    count = sum(torch.Size(shapes[name]).numel() for name in plans.trained(shapes, plan))
    assert count == 25 * 2 * 768 == 38_400


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_belongs_to_exactly_one_part_of_the_model(family, tiny):
    plan = plan_for(tiny(family), Options(inner_norm=True, depth=2))
    for name in all_names(tiny(family), plan):
        found = methods.roles(name)
        alone = ("adapter", "lora", "embedding", "pooler", "head")
        parts = {role for role in found if role in alone or role[:6] == "layer:"}
        assert len(parts) == 1, name
        assert ("bias" in found) == name.endswith(".bias")
        assert ("layer_norm" in found) == (name in norms(family, range(DEPTH)))


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_applies_to_everything_but_layernorms_and_biases(family, tiny):
    plan = plan_for(tiny(family), Options(inner_norm=True, depth=2))
    names = all_names(tiny(family), plan)
    exempt = {name for name in names if not plans.decays(name)}
    assert exempt == {n for n in names if n.endswith(".bias")} | {n for n in names if n.endswith("norm.weight")}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", tuple(range(12))),
        ("upper", (6, 7, 8, 9, 10, 11)),
        ("0", (0,)),
        ("11", (11,)),
        ("6-11", (6, 7, 8, 9, 10, 11)),
        ("3-3", (3,)),
        ("0,2,6-8", (0, 2, 6, 7, 8)),
        ("5,1,1-2", (1, 2, 5)),
        (" 1 , 4-5 ", (1, 4, 5)),
    ],
)
def test_layers_are_parsed(text, layers):
    assert parse_layers(text, 12) == layers


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_upper_is_the_upper_half_and_never_empty(depth):
    assert parse_layers("upper", depth) == tuple(i for i in range(depth) if i >= depth // 2)
    assert parse_layers("upper", depth)


@pytest.mark.parametrize("text", ["", " ", ",", "0,", "a", "-1", "1-", "1--2", "1.5", "top", "ALL", "0;1", "1 2"])
def test_layers_that_cannot_be_parsed_are_refused_with_the_syntax(text):
    with pytest.raises(ConfigError, match="'all', 'upper', or numbers and ranges") as caught:
        parse_layers(text, 12)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["12", "0,12", "6-12", "99", "5-3"])
def test_a_missing_layer_is_refused_with_the_layers_there_are(text):
    with pytest.raises(ConfigError, match="layers 0 to 11") as caught:
        parse_layers(text, 12)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("top", [0, -1, 4])
def test_a_number_of_top_layers_out_of_range_is_refused(top):
    with pytest.raises(ConfigError, match="use 1 to 3"):
        make_plan(Options(method="top", top=top), depth=3, head=Head("classification", 2))


def test_layers_that_share_weights_may_have_adapters_in_some_layers_if_no_norms_train(tiny):
    plan = plan_for(tiny("albert"), Options(layers="2", train_norms=False))
    assert set(plans.trained(all_names(tiny("albert"), plan), plan)) == adapters([2]) | HEAD


def test_an_unknown_method_is_refused_with_the_nearest_one():
    with pytest.raises(UnknownName, match="Did you mean 'adapter'"):
        methods.find_method("adaptor")


def test_adapters_offer_the_activations_of_the_forward_pass():
    assert set(methods.ACTIVATIONS) == set(blocks.ACTIVATIONS)
    assert len(methods.ACTIVATIONS) == len(set(methods.ACTIVATIONS))


@pytest.mark.parametrize("name", SLOTS)
def test_every_method_has_defaults_each_with_a_reason(name):
    defaults = methods.METHODS[name].defaults
    assert set(defaults) == {"lr", "epochs", "epsilon", "weight_decay", "bias_correction", "pooling"}
    assert all(len(default.reason.split()) > 3 for default in defaults.values())
    assert 0 < defaults["lr"].value < 0.1
    assert isinstance(defaults["epochs"].value, int)
    assert defaults["epochs"].value > 0
    assert defaults["pooling"].value in methods.POOLINGS
    assert isinstance(defaults["bias_correction"].value, bool)


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_method_uses_only_options_that_exist(name):
    assert set(methods.METHODS[name].uses) <= {field.name for field in fields(Config)}
    assert methods.METHODS[name].summary


def test_only_methods_that_change_whole_layers_are_batched_alone():
    head = Head("classification", 2)
    plans = {name: make_plan(Options(method=name), depth=3, head=head) for name in SLOTS}
    assert {name for name, plan in plans.items() if plan.alone} == {"full", "top"}


def test_the_options_of_the_adapter_reach_the_plan():
    options = Options(
        size=5,
        layers="1",
        sites="feedforward",
        activation="tanh",
        placement="parallel",
        combine="multiply",
        inner_norm=True,
        depth=2,
    )
    adapter = make_plan(options, depth=3, head=Head("classification", 2)).additions[0]
    assert adapter == Adapter(5, (1,), ("feedforward",), "tanh", "parallel", "multiply", True, 2)


def test_the_options_of_lora_reach_the_plan_in_the_order_of_the_forward_pass():
    options = Options(method="lora", rank=5, alpha=2.0, targets="down,query", layers="1")
    found = make_plan(options, depth=3, head=Head("classification", 2)).additions[0]
    assert found == Lora(5, 2.0, (1,), ("query", "down"))
    assert found.scale == 0.4
    assert (found.resized(8).rank, found.resized(8).scale) == (8, 0.4)


def test_a_plan_written_before_lora_existed_is_read():
    plan = make_plan(Options(), depth=3, head=Head("classification", 2))
    old = {key: value for key, value in plan.to_json().items() if key != "lora"}
    assert Plan.from_json(old) == plan


def test_lora_on_bert_base_has_the_papers_0_3_million_parameters():
    plan = make_plan(Options(method="lora"), depth=12, head=Head("classification", 2))
    count = sum(torch.Size(shape).numel() for shape in slot_tensors.added_shapes(plan, bert_base()).values())
    assert count == 12 * 2 * 2 * 8 * 768 == 294_912
